"""Finds the collectives of a scheduled program: bytes, mesh axes and overlapping work."""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from maxdiffusion.costs.chips import Chip
from maxdiffusion.costs.links import COLLECTIVE_KINDS, DeviceCollective, Overlap, Scheduled
from maxdiffusion.preflight.readers.cycles import cycles_of, visits
from maxdiffusion.preflight.readers.hlo import Instruction, ScheduledProgram

_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
CALL_START = "call-start"


def find_collectives(
    program: ScheduledProgram, mesh_shape: Mapping[str, int], chip: Chip
) -> tuple[DeviceCollective, ...]:
    """Returns the collectives of a program on a mesh of that shape, in schedule order."""
    positions = {
        instruction.name: (name, index)
        for name, body in program.computations.items()
        for index, instruction in enumerate(body)
    }
    found = []
    for visit in visits(program):
        instruction = _collective_in(program, visit.instruction)
        kind = None if instruction is None else _kind(instruction)
        if kind is None or instruction is None:
            continue
        # A SparseCore runs a collective of its own computation next to the TensorCore.
        start = instruction if _starts(instruction) else visit.instruction
        groups = _groups(instruction)
        scheduled, overlap = _schedule(program, start, positions, chip)
        found.append(
            DeviceCollective(
                name=instruction.name,
                kind=kind,
                bytes=_bytes(instruction, kind, _starts(instruction)),
                groups=tuple(tuple(group) for group in groups),
                axes=_axes(groups, mesh_shape),
                pairs=_pairs(instruction),
                times=visit.times,
                overlap=overlap if _starts(start) else None,
                scheduled=scheduled,
                operation=instruction.operation,
            )
        )
    return tuple(found)


def _collective_in(program: ScheduledProgram, instruction: Instruction) -> Instruction | None:
    """Returns an operation that is a collective, or the one inside a fusion or started call."""
    if instruction.opcode == CALL_START:
        bodies = (program.computations.get(name, ()) for name in instruction.called("to_apply"))
        own = [inner for body in bodies for inner in body if _kind(inner) is not None]
        return own[0] if own else None
    if instruction.opcode != "fusion":
        return instruction
    inside = [inner for inner in program.fused(instruction) if _kind(inner) is not None]
    return inside[0] if inside else None


def _starts(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("-start")


def _kind(instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    return opcode if opcode in COLLECTIVE_KINDS else None


def _bytes(instruction: Instruction, kind: str, started: bool) -> int:
    if not started:
        return sum(instruction.parts)
    parts = [
        size for size in instruction.parts if size > 8
    ]  # without the flags of an asynchronous start
    if kind == "all-gather":
        return max(parts, default=0)
    return sum(parts) // 2  # operands and results


def _schedule(
    program: ScheduledProgram,
    start: Instruction,
    positions: Mapping[str, tuple[str, int]],
    chip: Chip,
) -> tuple[Scheduled, Overlap]:
    """Returns the place of a collective, and the work between its start and its done."""
    name, first = positions[start.name]
    body, last = program.computations[name], first
    if _starts(start):
        done = re.compile(rf"-done\(.*%{re.escape(start.name)}(?![\w.\-])")
        after = range(first + 1, len(body))
        last = next((at for at in after if done.search(body[at].text)), len(body))
    before = _work(body[:first], chip)
    place = Scheduled(computation=name, start=first, done=last, before=before)
    return place, _work(body[first + 1 : last], chip)


def _work(instructions: Sequence[Instruction], chip: Chip) -> Overlap:
    """Returns cycles and kernels; those of a kernel that states its costs are among the cycles."""
    return Overlap(
        cycles=sum(cycles_of(one, chip) for one in instructions),
        kernels=tuple(one.name for one in instructions if one.is_kernel),
    )


def _pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    found = _PAIRS.search(instruction.text)
    if found is None:
        return ()
    return tuple((group[0], group[1]) for group in _listed(found[1]))


def _groups(instruction: Instruction) -> list[list[int]]:
    """Returns the devices that communicate with each other, by their number in the mesh."""
    pairs = _pairs(instruction)
    if pairs:
        return _chains(pairs)
    iota = _IOTA.search(instruction.text)
    if iota:
        return _numbers(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])).tolist()
    mesh = _MESH.search(instruction.text)
    if mesh:
        return _mesh_groups(mesh[1], mesh[4], ids=_numbers(mesh[2], mesh[3]) if mesh[2] else None)
    listed = _LISTED.search(instruction.text)
    return _listed(listed[1]) if listed else []


def _numbers(sides: str, order: str | None) -> np.ndarray:
    """Returns the numbers from 0 in an array of these sides, its dimensions in this order."""
    shape = [int(side) for side in sides.split(",")]
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers.transpose([int(axis) for axis in order.split(",")]) if order else numbers


def _mesh_groups(sizes: str, axes: str, *, ids: np.ndarray | None) -> list[list[int]]:
    """Returns devices that differ along `axes` only, of a mesh written as 'a'=2,'b'=4.

    `ids` are the numbers of its devices, where they are not in order.
    """
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    along = [index for index, name in enumerate(shape) if f"'{name}'" in axes]
    across = [index for index in range(len(shape)) if index not in along]
    numbers = np.arange(math.prod(shape.values())) if ids is None else ids
    numbers = numbers.reshape(tuple(shape.values()))
    size = math.prod(numbers.shape[index] for index in along)
    return numbers.transpose([*across, *along]).reshape(-1, size).tolist()


def _listed(text: str) -> list[list[int]]:
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]


def _chains(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Returns the devices that a permutation connects, directly or through others."""
    groups: list[set[int]] = []
    for pair in pairs:
        connected = {*pair}
        separate = []
        for group in groups:
            if group & connected:
                connected |= group
            else:
                separate.append(group)
        groups = [*separate, connected]
    return [sorted(group) for group in groups]


def _axes(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ."""
    sizes = tuple(mesh_shape.values())
    if not groups or max(max(group) for group in groups) >= math.prod(sizes):
        return ()
    positions = np.array(np.unravel_index(np.asarray(groups[0]), sizes))
    varies = [len({*row.tolist()}) > 1 for row in positions]
    return tuple(axis for axis, moves in zip(mesh_shape, varies, strict=True) if moves)
