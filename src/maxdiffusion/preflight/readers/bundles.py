"""Reads the machine code of Pallas kernels that libtpu writes while it compiles.

A TPU core issues one bundle of instructions a cycle. Code is cut at its branches into regions; the
region that does most of the matrix products is the kernel's main loop:

    0x96   : > { ... sbr.rel ... }      a branch ends a region; `>` is the depth in loops
    0x247  : > { ... vmatmul.mubr.bf16 ... }

A second file lists the slots that every bundle uses (MXU, VALU, loads, spills, ...).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from maxdiffusion.costs.chips import Chip

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*(>*)")
_MATMUL = re.compile(r"\bvmatmul\.[\w.]*")
_BRANCH = "sbr.rel"
_CODE = re.compile(r"^\d+-(?P<name>.+?)(?:\.\d+)?-\d+-final_bundles\.txt$")
_SLOTS = ("mxu", "xlu", "valu", "vpop", "eup", "load", "fill", "store", "spill", "scalar")
# The grid loop is the outermost loop.
GRID_DEPTH = 1
# One instruction multiplies 16 rows of bfloat16, or 8 in the variant for small MXUs that ends in
# `16`. Checked against the known FLOPs of tiles compiled for tpu7x, v6e and v5e.
_HALF = re.compile(r"\.16\b")


@dataclass(frozen=True, kw_only=True)
class Region:
    """A sequence of bundles without a branch inside: its size, loop depth, and slots used."""

    start: int
    bundles: int
    depth: int
    matmuls: int
    matmul_rows: int
    vector_operations: int
    memory_operations: int
    scalar_operations: int
    spill_stores: int
    spill_loads: int

    @property
    def is_bookkeeping(self) -> bool:
        """Returns whether it mostly does scalar work: counters and window addresses."""
        return self.scalar_operations > self.vector_operations + self.memory_operations

    def mxu_bound(self, chip: Chip) -> int:
        """Returns the bundles that the matrix products alone take."""
        return -(-self.matmul_rows * 2 * chip.mxu_depth**2 // chip.flops_per_cycle)

    def cycles(self, chip: Chip) -> int:
        """Returns the cycles of one pass: the larger of its bundles and its MXU bound."""
        return max(self.bundles, self.mxu_bound(chip))


@dataclass(frozen=True, kw_only=True)
class KernelCode:
    """The machine code of one kernel, by region."""

    name: str
    bundles: int
    regions: tuple[Region, ...]

    @property
    def main_loop(self) -> Region:
        """Returns the region with the most matrix products; of equals the shortest."""
        most = max(region.matmuls for region in self.regions)
        return min(
            (region for region in self.regions if region.matmuls == most),
            key=lambda region: region.bundles,
        )

    @property
    def every_step(self) -> int:
        """Returns the bundles around the main loop that every grid step runs."""
        return sum(
            region.bundles
            for region in self.regions
            if region.is_bookkeeping and not region.matmuls and region.depth <= GRID_DEPTH
        )

    @property
    def every_q_block(self) -> int:
        """Returns the bundles that run once per block of queries: loading q, storing results."""
        most, tiles = self.main_loop.matmuls, self._short_tiles()
        return sum(
            region.bundles
            for region in self.regions
            if region.vector_operations
            and region.matmuls < most
            and region.depth <= GRID_DEPTH
            and region not in tiles
        )

    @property
    def short_tile(self) -> int:
        """Returns the bundles of a shorter tile at the end of a block of queries; 0 without one."""
        return max((region.bundles for region in self._short_tiles()), default=0)

    def _short_tiles(self) -> list[Region]:
        """Returns the regions with 1/2 or 1/4 of the products of a loop, which are in no loop."""
        loops = {region.matmuls for region in self.regions if region.depth > GRID_DEPTH}
        return [
            region
            for region in self.regions
            if region.depth <= GRID_DEPTH
            and region.matmuls
            and {2 * region.matmuls, 4 * region.matmuls} & loops
        ]

    def ragged_cycles(self, chip: Chip) -> int:
        """Returns the cycles of a ragged last block, per main-loop pass worth of products.

        A kernel processes its last keys in a second, usually shorter, loop at the depth of the main
        loop, in a deeper loop, or in the main loop itself.
        """
        main = self.main_loop
        others = [
            region
            for region in self.regions
            if region.depth == main.depth > GRID_DEPTH and region.matmuls and region is not main
        ]
        shorter = [region for region in others if region.matmuls < main.matmuls] or others
        deeper = [region for region in self.regions if region.depth > main.depth and region.matmuls]
        loops = shorter or deeper or [main]
        loop = min(loops, key=lambda region: (-region.matmuls, region.bundles))
        return round(loop.cycles(chip) * main.matmuls / loop.matmuls)


def read_kernels(folder: Path) -> Iterator[KernelCode]:
    """Yields the code of every kernel with matrix products in a dump folder, by name."""
    for path in sorted(folder.glob("*-final_bundles.txt")):
        found = _CODE.match(path.name)
        if found is None or "schedule-analysis" in path.name:
            continue
        with path.open() as lines:
            code = read_code(found["name"], lines, _slot_rows(path))
        if any(region.matmuls for region in code.regions):
            yield code


def read_code(name: str, lines: Iterable[str], slots: Sequence[Sequence[int]] = ()) -> KernelCode:
    """Returns the code of one kernel from the lines of its bundles and its slot table."""
    matmuls: dict[int, list[int]] = {}
    depths: dict[int, int] = {}
    branches: list[int] = []
    for line in lines:
        found = _BUNDLE.match(line)
        if found is None:
            continue
        address = int(found[1], 16)
        matmuls[address] = [8 if _HALF.search(name) else 16 for name in _MATMUL.findall(line)]
        depths[address] = len(found[2])
        if _BRANCH in line:
            branches.append(address)
    if not matmuls:
        raise ValueError(f"kernel {name}: the dump contains no bundles")
    total = max(matmuls) + 1
    edges = sorted({0, *branches, total})
    regions = tuple(
        _region((start, stop), matmuls, depths, slots) for start, stop in pairwise(edges)
    )
    return KernelCode(name=name, bundles=total, regions=regions)


def _region(
    span: tuple[int, int],
    matmuls: dict[int, list[int]],
    depths: dict[int, int],
    slots: Sequence[Sequence[int]],
) -> Region:
    start, stop = span
    used = {slot: sum(row[index] for row in slots[start:stop]) for index, slot in enumerate(_SLOTS)}
    rows = [count for at in range(start, stop) for count in matmuls.get(at, ())]
    # A branch belongs to the loop that it closes: take the depth of the bundles after it.
    inside = [depths[at] for at in range(start + 1, stop) if at in depths] or [depths[start]]
    return Region(
        start=start,
        bundles=stop - start,
        depth=max(set(inside), key=inside.count),
        matmuls=len(rows),
        matmul_rows=sum(rows),
        vector_operations=used["valu"],
        memory_operations=used["load"] + used["store"],
        scalar_operations=used["scalar"],
        spill_stores=used["spill"],
        spill_loads=used["fill"],
    )


def _slot_rows(code: Path) -> list[list[int]]:
    """Returns the slots of every bundle, from the table next to the code."""
    number = re.sub(r"-\d+-final_bundles\.txt$", "", code.name)
    for path in sorted(code.parent.iterdir()):
        if path.name.startswith(f"{number}-") and "per-bundle-utilization" in path.name:
            return read_slots(path.read_text().splitlines())
    return []


def read_slots(lines: Iterable[str]) -> list[list[int]]:
    """Returns the rows of numbers after the heading UTILIZATION."""
    rows: list[list[int]] = []
    seen = False
    for line in lines:
        if seen:
            rows.append([int(count) for count in line.split()])
        seen = seen or "UTILIZATION" in line
    return [row for row in rows if len(row) == len(_SLOTS)]
