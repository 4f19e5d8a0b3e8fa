"""Who ends a job and why, by what its processes have said of themselves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maxdiffusion.runtime.coordination import Member
from maxdiffusion.runtime.joining import Patience
from maxdiffusion.runtime.marks import Mark

# An error that all processes share is told by each of them, if they are given the time.
GRACE_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Word:
    """What was last heard of a process, and when it came."""

    text: str
    arrived: float

    @property
    def mark(self) -> Mark:
        """How far it had come."""
        return Mark(**{name: value for name, value in json.loads(self.text).items() if name != "n"})


def find_culprit(
    members: Sequence[Member],
    beats: Mapping[int, Word],
    failures: Mapping[int, Word],
    *,
    now: float,
    patience: Patience,
) -> str | None:
    """Who ends the job and why, in words; None while all is well."""
    for index, failure in sorted(failures.items()):
        if now - failure.arrived > GRACE_SECONDS:
            return f"{members[index]} failed: {failure.text}"
    for index, beat in sorted(beats.items()):
        if now - beat.arrived > patience.dead:
            return (
                f"{members[index]} gave no sign for {now - beat.arrived:.0f} s (limit "
                f"{patience.dead:g} s): it died, or its host is cut off. Last seen at: "
                f"{beat.mark.stage}"
            )
    return _standing_still(members, beats, patience.hang) if len(beats) == len(members) else None


def _standing_still(
    members: Sequence[Member], beats: Mapping[int, Word], limit: float
) -> str | None:
    """The processes that are furthest behind, if they have not moved for too long."""
    marks = {index: beat.mark for index, beat in beats.items()}
    lowest = min(mark.number for mark in marks.values())
    behind = [index for index, mark in marks.items() if mark.number == lowest]
    quiet = min(marks[index].quiet for index in behind)
    if quiet <= limit:
        return None
    stage = marks[behind[0]].stage
    if len(behind) == len(members):
        return (
            f"all processes stand at {stage!r} for {quiet:.0f} s (hang_timeout_seconds={limit:g})"
        )
    names = ", ".join(str(members[index]) for index in behind)
    further = max(marks.values(), key=lambda mark: mark.number).stage
    return (
        f"{names} hangs at {stage!r} for {quiet:.0f} s (hang_timeout_seconds={limit:g}), while "
        f"others wait at {further!r}"
    )
