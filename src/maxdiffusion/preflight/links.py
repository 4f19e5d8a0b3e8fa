"""Seconds of an exchange from the links that its bytes cross on the grid of chips.

Bytes between chips go along the first side of the grid, then the second, then the third, each the
shorter way round where the ends of a side are joined. The busiest link sets the time.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from maxdiffusion.mesh.devices import snake_order
from maxdiffusion.preflight.collectives import Collective
from maxdiffusion.preflight.topology import Topology

Coordinates = tuple[int, ...]
Link = tuple[Coordinates, Coordinates]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a device is: its chip in the grid, and its number on the chip."""

    chip: Coordinates
    core: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a topology under the devices of a mesh, in the mesh's order."""

    topology: Topology
    places: tuple[Place, ...]

    def seconds(self, collective: Collective) -> float:
        """The time of one exchange if nothing else uses the links."""
        loads: defaultdict[Link, float] = defaultdict(float)
        within: defaultdict[Place, float] = defaultdict(float)
        for source, target, size in transfers(collective):
            start, end = self.places[source], self.places[target]
            if start.chip == end.chip:
                within[start] += size
            for link in self.route(start.chip, end.chip):
                loads[link] += size
        chip = self.topology.chip
        between = max(loads.values(), default=0) / chip.link_bandwidth
        inside = max(within.values(), default=0) / chip.core_bandwidth
        return max(between, inside)

    def route(self, start: Coordinates, end: Coordinates) -> Iterator[Link]:
        """The links from one chip to another."""
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


def transfers(collective: Collective) -> Iterator[tuple[int, int, float]]:
    """Who sends how many bytes to whom: (source, target, bytes) by number in the mesh."""
    if collective.kind == "collective-permute":
        for source, target in collective.pairs:
            yield source, target, collective.bytes
        return
    for group in collective.groups:
        size = len(group)
        if collective.kind == "all-to-all":
            for source in group:
                for target in group:
                    if source != target:
                        yield source, target, collective.bytes / size
        else:  # gathers and reductions pass pieces round a ring, both ways at once
            for here, there in zip(group, (*group[1:], group[0]), strict=True):
                if here != there:
                    yield here, there, collective.sent / 2
                    yield there, here, collective.sent / 2


def grid_network(topology: Topology) -> Network:
    """The network under a mesh in hardware order, from the grid alone."""
    sides = (*topology.sides, *[1] * (3 - len(topology.sides)))
    chips = sorted(product(*(range(side) for side in sides)), key=snake_order)
    cores = range(topology.chip.devices_per_chip)
    places = tuple(Place(chip=chip, core=core) for chip in chips for core in cores)
    return Network(topology=topology, places=places)


def network(topology: Topology, devices: Sequence[object]) -> Network:
    """The network under devices of a topology, given in the order of the mesh."""
    places = tuple(
        Place(chip=tuple(device.coords), core=device.core_on_chip)  # type: ignore[attr-defined]
        for device in devices
    )
    return Network(topology=topology, places=places)
