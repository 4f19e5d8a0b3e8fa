"""Seconds of a whole video: every program that makes it, as often as it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.preflight.chips import Chip
from maxdiffusion.preflight.collectives import find_collectives
from maxdiffusion.preflight.cycles import count_cycles
from maxdiffusion.preflight.hlo import read_program
from maxdiffusion.preflight.links import Network
from maxdiffusion.preflight.programs import DENOISE_STEP, CompiledProgram
from maxdiffusion.preflight.step_time import in_words, step_time


@dataclass(frozen=True, kw_only=True)
class Runs:
    """How long one run of a program takes, and how often it runs for one batch of videos."""

    seconds: float
    times: int

    @property
    def total(self) -> float:
        """Seconds of all runs."""
        return self.seconds * self.times


@dataclass(frozen=True, kw_only=True)
class VideoTime:
    """The programs of a generation by name; the host and the reading of weights are not in it."""

    programs: Mapping[str, Runs]

    @property
    def total(self) -> float:
        """Seconds on the devices."""
        return sum(runs.total for runs in self.programs.values())

    def lines(self) -> list[str]:
        """For people: the programs, the longest first."""
        parts = sorted(self.programs.items(), key=lambda item: -item[1].total)
        rows = [
            f"  {in_words(runs.total):>10} {runs.total / self.total:6.1%}  {name}, "
            f"{runs.times} x {in_words(runs.seconds)}"
            for name, runs in parts
        ]
        return [f"a whole video, on the devices: {in_words(self.total)}", *rows]

    def as_json(self) -> dict[str, dict[str, Any]]:
        """By program."""
        return {
            name: {"seconds_per_run": runs.seconds, "runs": runs.times, "seconds": runs.total}
            for name, runs in self.programs.items()
        }


def video_time(
    programs: Sequence[CompiledProgram],
    times: Mapping[str, int],
    step_seconds: float,
    *,
    chip: Chip,
    network: Network,
) -> VideoTime:
    """The time of programs that run so many `times`; a denoise step's is known from its report."""
    return VideoTime(
        programs={
            program.name: Runs(
                seconds=step_seconds
                if program.name == DENOISE_STEP
                else program_seconds(program.text, chip, network),
                times=times[program.name],
            )
            for program in programs
            if program.name in times
        }
    )


def program_seconds(text: str, chip: Chip, network: Network) -> float:
    """Seconds of a program without attention kernels: its cycles and its exposed exchange."""
    schedule = read_program(text)
    everything = step_time(
        chip=chip,
        kernels={},
        cycles=count_cycles(schedule, 1, chip),
        collectives=find_collectives(schedule, {"device": len(network.places)}),
        network=network,
    )
    return everything.total
