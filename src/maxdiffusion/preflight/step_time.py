"""Seconds of a denoise step: kernels, everything else on the core, and exposed exchange."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from maxdiffusion.preflight.chips import Chip
from maxdiffusion.preflight.collectives import Collective
from maxdiffusion.preflight.cycles import Cycles
from maxdiffusion.preflight.links import Network

_ENDS = re.compile(r"(_partials|_carried|\.\d+)+$")


def in_words(seconds: float) -> str:
    """A time with its unit, in four figures or so however short it is."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.4g} ms"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a step, in seconds; they do not overlap."""

    kernels: Mapping[str, float]
    outside: Mapping[str, float]
    exposed_exchange: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(self.kernels.values()) + sum(self.outside.values()) + self.exposed_exchange

    def parts(self) -> dict[str, float]:
        """All parts by name, the kernels first."""
        kernels = {f"kernel: {name}": seconds for name, seconds in self.kernels.items()}
        return {**kernels, **self.outside, "exposed exchange": self.exposed_exchange}


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Seconds of one kernel: of a single call, and of all calls of a step."""

    call: float
    step: float


def step_time(
    *,
    chip: Chip,
    kernels: Mapping[str, KernelTime],
    cycles: Cycles,
    collectives: Sequence[Collective],
    network: Network,
) -> StepTime:
    """The step that is made of these kernels, cycles and exchanges."""
    return StepTime(
        kernels={name: time.step for name, time in kernels.items()},
        outside={
            purpose.value: chip.seconds(count) for purpose, count in cycles.total.items() if count
        },
        exposed_exchange=sum(
            exposed_seconds(collective, chip, kernels, network) * collective.times
            for collective in collectives
        ),
    )


def exposed_seconds(
    collective: Collective, chip: Chip, kernels: Mapping[str, KernelTime], network: Network
) -> float:
    """Seconds of one exchange that nothing hides: all of it, or what its meanwhile is short of."""
    seconds = network.seconds(collective)
    meanwhile = collective.meanwhile
    if meanwhile is None:
        return seconds
    calls = {_family(name): time.call for name, time in kernels.items()}
    hidden = sum(calls.get(_family(name), 0.0) for name in meanwhile.kernels)
    return max(0.0, seconds - chip.seconds(meanwhile.cycles) - hidden)


def _family(name: str) -> str:
    """A kernel's name without its number and its ends: first and last calls take as long."""
    return _ENDS.sub("", name)
