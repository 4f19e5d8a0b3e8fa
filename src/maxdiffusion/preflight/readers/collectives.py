"""Every exchange between devices in a program: bytes, mesh axes, and what runs meanwhile."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxdiffusion.preflight.cycles import visits
from maxdiffusion.preflight.hlo import Instruction, ScheduledProgram

KINDS = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")


@dataclass(frozen=True, kw_only=True)
class Meanwhile:
    """What the schedule runs between the start of an exchange and the wait for it."""

    cycles: int
    kernels: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One exchange: `bytes` are those of the array on a device, `sent` what leaves the device."""

    name: str
    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    axes: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    times: int
    meanwhile: Meanwhile | None
    operation: str

    @property
    def group(self) -> int:
        """How many devices exchange with each other."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def asynchronous(self) -> bool:
        """Whether it is started before it is waited for."""
        return self.meanwhile is not None

    @property
    def sent(self) -> int:
        """Bytes that one device sends each time."""
        others = (self.group - 1) / self.group
        share = {
            "all-to-all": others,
            "all-gather": others,
            "all-reduce": 2 * others,
            "reduce-scatter": self.group - 1,
            "collective-permute": 1.0,
        }[self.kind]
        return round(self.bytes * share)


def find_collectives(
    program: ScheduledProgram, mesh_shape: Mapping[str, int]
) -> tuple[Collective, ...]:
    """The exchanges of a program on a mesh of that shape, in the order of the schedule."""
    positions = {
        instruction.name: (name, index)
        for name, body in program.computations.items()
        for index, instruction in enumerate(body)
    }
    found = []
    for visit in visits(program):
        instruction = _exchange_in(program, visit.instruction)
        kind = None if instruction is None else _kind(instruction)
        if kind is None or instruction is None:
            continue
        started = instruction.opcode.endswith("-start")
        groups = _groups(instruction)
        found.append(
            Collective(
                name=instruction.name,
                kind=kind,
                bytes=_bytes(instruction, kind, started),
                groups=tuple(tuple(group) for group in groups),
                axes=_axes(groups, mesh_shape),
                pairs=_pairs(instruction),
                times=visit.times,
                meanwhile=_meanwhile(program, instruction, positions) if started else None,
                operation=instruction.operation,
            )
        )
    return tuple(found)


def _exchange_in(program: ScheduledProgram, instruction: Instruction) -> Instruction | None:
    """The exchange that an operation is, or that a fusion was made around."""
    if instruction.opcode != "fusion":
        return instruction
    inside = [inner for inner in program.fused(instruction) if _kind(inner) is not None]
    return inside[0] if inside else None


def _kind(instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in KINDS else None


def _bytes(instruction: Instruction, kind: str, started: bool) -> int:
    if not started:
        return sum(instruction.parts)
    parts = [size for size in instruction.parts if size > 8]  # not the flags of a start
    if kind == "all-gather":
        return max(parts, default=0)
    return sum(parts) // 2  # what goes in and what comes out


def _meanwhile(
    program: ScheduledProgram,
    start: Instruction,
    positions: Mapping[str, tuple[str, int]],
) -> Meanwhile:
    computation, first = positions[start.name]
    waits = re.compile(rf"-done\(.*%{re.escape(start.name)}(?![\w.\-])")
    cycles, kernels = 0, []
    for instruction in program.computations[computation][first + 1 :]:
        if waits.search(instruction.text):
            break
        cycles += instruction.estimated_cycles
        kernels += [instruction.name] if instruction.is_kernel else []
    return Meanwhile(cycles=cycles, kernels=tuple(kernels))


def _pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    found = _PAIRS.search(instruction.text)
    if found is None:
        return ()
    return tuple((group[0], group[1]) for group in _listed(found[1]))


def _groups(instruction: Instruction) -> list[list[int]]:
    """Devices that exchange with each other, by their number in the mesh."""
    pairs = _pairs(instruction)
    if pairs:
        return _chains(pairs)
    iota = _IOTA.search(instruction.text)
    if iota:
        count, size = int(iota[1]), int(iota[2])
        numbers = np.arange(count * size).reshape([int(side) for side in iota[3].split(",")])
        if iota[4]:
            numbers = numbers.transpose([int(axis) for axis in iota[4].split(",")])
        return numbers.reshape(count, size).tolist()
    mesh = _MESH.search(instruction.text)
    if mesh:
        return _mesh_groups(mesh[1], mesh[2])
    listed = _LISTED.search(instruction.text)
    return _listed(listed[1]) if listed else []


def _mesh_groups(sizes: str, axes: str) -> list[list[int]]:
    """Devices that differ along `axes` only, of a mesh written as 'a'=2,'b'=4."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    together = [index for index, name in enumerate(shape) if f"'{name}'" in axes]
    apart = [index for index in range(len(shape)) if index not in together]
    numbers = np.arange(math.prod(shape.values())).reshape(tuple(shape.values()))
    size = math.prod(numbers.shape[index] for index in together)
    return numbers.transpose([*apart, *together]).reshape(-1, size).tolist()


def _listed(text: str) -> list[list[int]]:
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]


def _chains(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Devices that a permutation joins, directly or through others."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = {*pair}
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return [sorted(group) for group in groups]


def _axes(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    sizes = tuple(mesh_shape.values())
    if not groups or max(max(group) for group in groups) >= math.prod(sizes):
        return ()
    places = np.array(np.unravel_index(np.asarray(groups[0]), sizes))
    varies = [len({*row.tolist()}) > 1 for row in places]
    return tuple(axis for axis, moves in zip(mesh_shape, varies, strict=True) if moves)


def bytes_by_axes(collectives: Sequence[Collective]) -> Iterator[tuple[str, int]]:
    """Bytes that a device sends over each set of axes in one run of the program."""
    totals: dict[str, int] = {}
    for collective in collectives:
        key = " x ".join(collective.axes) or "none"
        totals[key] = totals.get(key, 0) + collective.sent * collective.times
    yield from totals.items()
