"""Seconds of a collective, from the links that its bytes cross on the grid of chips.

Bytes between chips travel along the first side of the grid, then the second, then the third, each
the shorter way round where a side has a wraparound link. The busiest link sets the time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from maxdiffusion.costs.chips import Topology
from maxdiffusion.mesh.mesh import snake_order

COLLECTIVE_KINDS = (
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Work that the schedule runs between the start of a collective and its end."""

    cycles: int
    kernels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """The place of a collective in the schedule of one computation of a program.

    `start` and `done` are positions in that computation, the same one for a synchronous collective.
    `before` is the work of the computation up to the start.
    """

    computation: str
    start: int
    done: int
    before: Overlap


@dataclass(frozen=True, kw_only=True)
class DeviceCollective:
    """A collective between devices, which are numbered as in the mesh.

    `bytes` are those of the array on one device. A collective-permute has `pairs` of (source,
    target), the other kinds have `groups`. `times` counts its runs in one run of the program.
    `overlap` is None for a synchronous collective. `scheduled` is None for one that is timed alone,
    not next to others. `name` and `operation` are the compiler's.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    times: int = 1
    axes: tuple[str, ...] = ()
    overlap: Overlap | None = None
    scheduled: Scheduled | None = None
    name: str = ""
    operation: str = ""

    @property
    def group_size(self) -> int:
        """Returns the number of devices that communicate with each other."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def asynchronous(self) -> bool:
        """Returns whether other work may run between its start and its end."""
        return self.overlap is not None

    @property
    def sent(self) -> int:
        """Returns the bytes that one device sends each time."""
        size = self.group_size
        others = (size - 1) / size
        share = {
            "all-to-all": others,
            "all-gather": others,
            "all-reduce": 2 * others,
            "reduce-scatter": size - 1,
            "collective-permute": 1.0,
        }[self.kind]
        return round(self.bytes * share)

    def transfers(self) -> Iterator[tuple[int, int, float]]:
        """Yields (source, target, bytes) for every pair of devices that communicates."""
        if self.kind == "collective-permute":
            for source, target in self.pairs:
                yield source, target, self.bytes
            return
        for group in self.groups:
            if self.kind == "all-to-all":
                for source, target in product(group, group):
                    if source != target:
                        yield source, target, self.bytes / len(group)
            else:  # gathers and reductions run round a ring, half of the bytes each way
                for here, there in zip(group, (*group[1:], group[0]), strict=True):
                    if here != there:
                        yield here, there, self.sent / 2
                        yield there, here, self.sent / 2


def bytes_by_axes(collectives: Sequence[DeviceCollective]) -> dict[str, int]:
    """Returns the bytes that a device sends over each set of axes in one run of the program."""
    totals: dict[str, int] = {}
    for collective in collectives:
        axes = " x ".join(collective.axes) or "none"
        totals[axes] = totals.get(axes, 0) + collective.sent * collective.times
    return totals


Coordinates = tuple[int, ...]
Link = tuple[Coordinates, Coordinates]


@dataclass(frozen=True, kw_only=True)
class DevicePosition:
    """The chip of a device in the grid, and the number of the device on the chip."""

    chip: Coordinates
    core: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a topology between the devices of a mesh, in the mesh's order."""

    topology: Topology
    positions: tuple[DevicePosition, ...]

    def seconds(self, collective: DeviceCollective) -> float:
        """Returns the time of one collective if nothing else uses the links."""
        return max(self.busy(collective).values(), default=0.0)

    def busy(self, collective: DeviceCollective) -> dict[Link | DevicePosition, float]:
        """Returns the seconds for which a collective occupies each link.

        The link between the devices of a chip is named by the device that sends.
        """
        loads: defaultdict[Link, float] = defaultdict(float)
        within: defaultdict[DevicePosition, float] = defaultdict(float)
        for source, target, size in collective.transfers():
            start, end = self.positions[source], self.positions[target]
            if start.chip == end.chip:
                within[start] += size
            for link in self.route(start.chip, end.chip):
                loads[link] += size
        chip = self.topology.chip
        between = {link: size / chip.link_bandwidth for link, size in loads.items()}
        return between | {core: size / chip.core_bandwidth for core, size in within.items()}

    def route(self, start: Coordinates, end: Coordinates) -> Iterator[Link]:
        """Yields the links from one chip to another."""
        sides = (*self.topology.sides, *[1] * (len(start) - len(self.topology.sides)))
        here = list(start)
        for axis, side in enumerate(sides):
            while here[axis] != end[axis]:
                before = tuple(here)
                here[axis] = self._next(here[axis], end[axis], side)
                yield before, tuple(here)

    def _next(self, here: int, end: int, side: int) -> int:
        forward = (end - here) % side
        wraps = side >= self.topology.chip.wrap_from
        up = forward <= side - forward if wraps else end > here
        return (here + (1 if up else -1)) % side


def grid_network(topology: Topology) -> Network:
    """Returns the network of a mesh in hardware order, from the grid alone."""
    sides = (*topology.sides, *[1] * (3 - len(topology.sides)))
    chips = sorted(product(*(range(side) for side in sides)), key=snake_order)
    cores = range(topology.chip.devices_per_chip)
    positions = tuple(DevicePosition(chip=chip, core=core) for chip in chips for core in cores)
    return Network(topology=topology, positions=positions)


def network(topology: Topology, devices: Sequence[object]) -> Network:
    """Returns the network of devices of a topology, given in the order of the mesh."""
    positions = tuple(
        DevicePosition(chip=tuple(device.coords), core=device.core_on_chip)  # type: ignore[attr-defined]
        for device in devices
    )
    return Network(topology=topology, positions=positions)
