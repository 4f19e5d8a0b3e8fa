"""Adds up the compiler's cycle estimates outside kernels, by what the cycles are spent on."""

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from maxdiffusion.preflight.chips import Chip
from maxdiffusion.preflight.hlo import Instruction, ScheduledProgram, Source


class Purpose(enum.Enum):
    """What an operation outside of kernels is for."""

    PROJECTIONS = "projections"
    NORMS = "norms and modulation"
    ROPE = "RoPE"
    TEXT_ATTENTION = "attention by XLA"
    LAYOUT = "layout copies"
    EXCHANGE = "exchange copies"
    HEADS = "norm, RoPE and places of heads"
    OTHER = "other"


_MOVES = frozenset(
    [
        "copy",
        "transpose",
        "reshape",
        "bitcast",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
        "pad",
        "broadcast",
        "gather",
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "convert",
        "iota",
    ]
)
# Where in the package an operation was written -> what it is for; the innermost that fits wins.
_PLACES: tuple[tuple[str, str, Purpose], ...] = (
    ("models/wan/rope.py", "", Purpose.ROPE),
    ("models/wan/layers.py", "affine", Purpose.PROJECTIONS),
    ("models/wan/layers.py", "", Purpose.NORMS),
    ("models/wan/block.py", "gated_sum", Purpose.NORMS),
    ("kernels/reference.py", "normalise", Purpose.EXCHANGE),
    ("kernels/reference.py", "", Purpose.TEXT_ATTENTION),
    ("kernels/heads/", "rotate", Purpose.ROPE),
    ("kernels/heads/reference.py", "rms_norm", Purpose.NORMS),
    ("kernels/", "", Purpose.EXCHANGE),
    ("attention/", "", Purpose.EXCHANGE),
)

VECTOR_OPERATIONS = 4 * 8 * 128
"""Operations of the vector units in a cycle: four of a register of float32."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """An instruction of the running program and how often it runs."""

    instruction: Instruction
    times: int
    loop_trips: int
    """Trips of the innermost loop around it; 1 outside of loops."""


def visits(program: ScheduledProgram) -> Iterator[Visit]:
    """Every instruction that runs, loops with their trips; of a choice, the costlier branch."""
    yield from _visit(program, program.entry, 1, 1)


def _visit(program: ScheduledProgram, name: str, times: int, trips: int) -> Iterator[Visit]:
    for instruction in program.computations.get(name, ()):
        if instruction.opcode == "while":
            count = program.trips(instruction)
            for body in instruction.called("body"):
                yield from _visit(program, body, times * count, count)
        elif instruction.opcode == "conditional":
            branches = [
                list(_visit(program, branch, times, trips)) for branch in instruction.branches
            ]
            yield from max(branches, key=_cost, default=[])
        elif instruction.opcode in ("call", "async-start"):
            for called in instruction.called("to_apply", "calls"):
                yield from _visit(program, called, times, trips)
            yield Visit(instruction=instruction, times=times, loop_trips=trips)
        else:
            yield Visit(instruction=instruction, times=times, loop_trips=trips)


def _cost(branch: list[Visit]) -> tuple[int, int]:
    kernels = sum(visit.instruction.is_kernel for visit in branch)
    return kernels, sum(visit.instruction.estimated_cycles * visit.times for visit in branch)


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Estimated cycles of a program outside kernels, by purpose, and those of one layer."""

    total: dict[Purpose, int]
    per_layer: dict[Purpose, int]

    @property
    def all(self) -> int:
        """All cycles of one run of the program."""
        return sum(self.total.values())

    @property
    def layer(self) -> int:
        """All cycles of one layer."""
        return sum(self.per_layer.values())


def count_cycles(program: ScheduledProgram, layers: int, chip: Chip) -> Cycles:
    """The cycles of a program whose loop of `layers` trips is its stack of layers.

    Where no loop has so many trips, the layers are written out, and a layer is its share of all.
    Kernels count that are no attention: those that bring heads to their places.
    """
    total: Counter[Purpose] = Counter()
    looped: Counter[Purpose] = Counter()
    for visit in visits(program):
        cycles = cycles_of(visit.instruction, chip) * visit.times
        if not cycles:
            continue
        purpose = purpose_of(program, visit.instruction)
        total[purpose] += cycles
        if visit.times % layers == 0 and visit.loop_trips > 1:
            looped[purpose] += cycles
    chosen = looped or total
    return Cycles(
        total=dict(total),
        per_layer={purpose: round(cycles / layers) for purpose, cycles in chosen.items()},
    )


def cycles_of(instruction: Instruction, chip: Chip) -> int:
    """The compiler's estimate, or the longer of what a kernel states: its bytes, its operations."""
    operations, moved = instruction.stated_cost
    if not moved:
        return instruction.estimated_cycles
    by_memory = moved / chip.hbm_bandwidth * chip.clock_hz
    return round(max(by_memory, operations / VECTOR_OPERATIONS))


def purpose_of(program: ScheduledProgram, instruction: Instruction) -> Purpose:
    """What an operation is for: by its kind, then by where it was written."""
    if instruction.stated_cost != (0, 0):
        return Purpose.HEADS
    place = _place(program, instruction)
    if program.multiplies(instruction):
        return Purpose.TEXT_ATTENTION if place is Purpose.TEXT_ATTENTION else Purpose.PROJECTIONS
    if place is Purpose.EXCHANGE:
        return Purpose.EXCHANGE
    if _only_moves(program, instruction):
        return Purpose.ROPE if place is Purpose.ROPE else Purpose.LAYOUT
    return place or Purpose.OTHER


def _only_moves(program: ScheduledProgram, instruction: Instruction) -> bool:
    if instruction.opcode in _MOVES:
        return True
    inside = [inner.opcode for inner in program.fused(instruction)]
    return bool(inside) and all(opcode in _MOVES or opcode == "fusion" for opcode in inside)


def _place(program: ScheduledProgram, instruction: Instruction) -> Purpose | None:
    """The purpose of the source lines of an operation, or of what is fused into it."""
    own = _purpose_of_stack(program.stack(instruction))
    if own is not None:
        return own
    inside = Counter(
        purpose
        for inner in program.fused(instruction)
        if (purpose := _purpose_of_stack(program.stack(inner))) is not None
    )
    return inside.most_common(1)[0][0] if inside else None


def _purpose_of_stack(stack: tuple[Source, ...]) -> Purpose | None:
    for source in stack:
        for file, function, purpose in _PLACES:
            if f"maxdiffusion/{file}" in source.file and function in source.function:
                return purpose
    return None
