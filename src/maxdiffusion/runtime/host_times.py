"""The times of every process of a job, and which of them was the slowest."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from maxdiffusion.runtime.coordination import exchange, this_member
from maxdiffusion.runtime.timing import Stage, Timings

# Stages that do not hold each other; together they are the whole run.
WHOLE = (Stage.LOAD, Stage.COMPILE, Stage.INFERENCE)


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Seconds of every stage, by its name in JSON, on one process."""

    process: int
    host: str
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds[stage.key] for stage in WHOLE)


def gather_hosts(timings: Timings) -> tuple[HostTimes, ...]:
    """The times of every process, in their order; all must call it."""
    member = this_member()
    mine = HostTimes(
        process=member.index,
        host=member.host,
        seconds={stage.key: timings.seconds(stage) for stage in Stage},
    )
    return tuple(
        HostTimes(**json.loads(said)) for said in exchange("timings", json.dumps(asdict(mine)))
    )


def slowest(hosts: Sequence[HostTimes]) -> HostTimes:
    """The process that took longest; the first of them where several did."""
    return max(hosts, key=lambda host: host.total)


def describe_hosts(hosts: Sequence[HostTimes]) -> str:
    """The slowest process, and in which stage it lost most against the quickest in that stage.

    Devices wait for each other in every step, so a slow host mostly shows where hosts work alone.
    """
    last = slowest(hosts)
    line = f"  Slowest host: {last.process} ({last.host}), {last.total:.1f}s"
    if len(hosts) == 1:
        return line
    behind = {stage: last.seconds[stage.key] - _least(hosts, stage) for stage in WHOLE}
    worst = max(behind, key=lambda stage: behind[stage])
    quickest = min(host.total for host in hosts)
    return (
        f"{line} (quickest of {len(hosts)}: {quickest:.1f}s; "
        f"{behind[worst]:.1f}s behind in {worst.label})"
    )


def _least(hosts: Sequence[HostTimes], stage: Stage) -> float:
    return min(host.seconds[stage.key] for host in hosts)
