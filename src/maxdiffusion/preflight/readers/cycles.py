"""Sums the compiler's cycle estimates outside of attention kernels, by purpose."""

import enum
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from maxdiffusion.costs.chips import Chip
from maxdiffusion.costs.step_time import COPIES, HEAD_LAYOUT
from maxdiffusion.preflight.readers.hlo import Instruction, ScheduledProgram, Source


class Purpose(enum.Enum):
    """Purpose of an operation outside of attention kernels; its value is a key in JSON reports."""

    PROJECTIONS = "projections"
    NORMS = "norms and modulation"
    ROUNDING = "rounding to 8 bits"
    ROPE = "RoPE"
    TEXT_ATTENTION = "attention by XLA"
    LAYOUT = "layout copies"
    COPIES = COPIES
    HEAD_LAYOUT = HEAD_LAYOUT
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
# (file, function, purpose): the innermost source line that matches decides.
SOURCES: tuple[tuple[str, str, Purpose], ...] = (
    ("models/wan/layers.py", "rotation_tables", Purpose.ROPE),
    ("models/wan/layers.py", "_by_token", Purpose.ROPE),
    ("models/wan/layers.py", "affine", Purpose.PROJECTIONS),
    ("models/wan/layers.py", "", Purpose.NORMS),
    ("models/wan/block.py", "gated_sum", Purpose.NORMS),
    ("models/wan/eight_bit.py", "", Purpose.ROUNDING),
    ("kernels/reference.py", "normalise", Purpose.COPIES),
    ("kernels/reference.py", "", Purpose.TEXT_ATTENTION),
    ("kernels/qk_prep/", "rotate", Purpose.ROPE),
    ("kernels/qk_prep/", "rms_norm", Purpose.NORMS),
    ("kernels/layer_norm.py", "", Purpose.NORMS),
    ("kernels/", "", Purpose.COPIES),
    ("attention/", "", Purpose.COPIES),
)

# Operations of the vector units in a cycle: four, each on a register of float32.
VECTOR_OPERATIONS = 4 * 8 * 128


@dataclass(frozen=True, kw_only=True)
class Visit:
    """An instruction and how often it runs.

    `loop_trips` are those of the innermost loop around it; 1 outside of loops.
    """

    instruction: Instruction
    times: int
    loop_trips: int


def visits(program: ScheduledProgram) -> Iterator[Visit]:
    """Yields every instruction that runs; of a conditional only the costlier branch."""
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
    """Estimated cycles outside of attention kernels by purpose, of a program and of one layer."""

    total: dict[Purpose, int]
    per_layer: dict[Purpose, int]

    @property
    def all(self) -> int:
        """Returns all cycles of one run of the program."""
        return sum(self.total.values())

    def by_key(self) -> dict[str, int]:
        """Returns all cycles of the program by the keys of JSON reports."""
        return {purpose.value: count for purpose, count in self.total.items()}

    @property
    def layer(self) -> int:
        """Returns all cycles of one layer."""
        return sum(self.per_layer.values())


def count_cycles(program: ScheduledProgram, layers: int, chip: Chip) -> Cycles:
    """Returns the cycles of a program whose loop of `layers` trips is its stack of layers.

    Without such a loop the layers are unrolled, and a layer is 1/layers of the program. The fused
    qk-norm + RoPE + head layout kernels count; attention kernels do not.
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


# The first argument of a program is the weights; the compiler keeps the names of arguments.
_WEIGHT = re.compile(r"(?:inputs\[0\]|weights)(\W.*)?")
# Smaller ones, such as norms and tables, are moved in microseconds.
_LEAST_COPY = 2**24


def weight_copies(program: ScheduledProgram) -> dict[str, int]:
    """Returns the bytes of weights that a program copies whole, by name, each time it runs.

    The compiler does so with weights in other tiles than its products read, often on the
    SparseCore and then without an estimate of cycles. Prefetches into VMEM do not count.
    """
    entry = program.computations[program.entry]
    weights = {
        one.name: one
        for one in entry
        if one.opcode == "parameter"
        and one.bytes >= _LEAST_COPY
        and _WEIGHT.fullmatch(one.operation)
    }
    copied = {
        name
        for one in entry
        if one.opcode in ("copy", "transpose")
        or "data-format" in one.name
        or (one.opcode == "fusion" and _only_moves(program, one))
        for name in one.operands
        if name in weights and one.bytes >= weights[name].bytes
    }
    return {
        weights[name].operation.replace("\\", ""): weights[name].bytes for name in sorted(copied)
    }


# Operations that take no time of their own, or that are counted elsewhere: the bodies of loops,
# collectives by their bytes, kernels by their machine code. Prefetches run next to other work.
_COUNTED = frozenset(
    [
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "while",
        "conditional",
        "call",
        "async-start",
        "async-update",
        "copy-start",
        "custom-call",
        "after-all",
        "partition-id",
        "replica-id",
    ]
)
_COLLECTIVE = re.compile(r"(all|collective|reduce-scatter|send|recv|ragged)\b.*")
# Smaller results are moved in less than 0.1 microseconds.
_LEAST_UNKNOWN = 2**16


@dataclass(frozen=True, kw_only=True)
class Unestimated:
    """Operations that the compiler has no estimate for, so that sums of cycles leave them out.

    `kinds` counts them in the program; `bytes` is the least that they move in one run of it.
    """

    kinds: Mapping[str, int]
    bytes: int

    @property
    def operations(self) -> int:
        """Returns the number of operations in the program."""
        return sum(self.kinds.values())

    def seconds(self, chip: Chip) -> float:
        """Returns the time that HBM takes for their bytes, the least that they can take."""
        return self.bytes / chip.hbm_bandwidth

    def describe(self) -> str:
        """Returns the kinds with their numbers, the most frequent first."""
        ordered = sorted(self.kinds.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count} {kind}" for kind, count in ordered)


def find_unestimated(program: ScheduledProgram) -> Unestimated:
    """Returns the operations of a program without an estimate: stated as unknown, or missing."""
    kinds: Counter[str] = Counter()
    moved = 0
    for visit in visits(program):
        one = visit.instruction
        if one.estimated_cycles or one.bytes < _LEAST_UNKNOWN or _is_counted(one):
            continue
        kinds[_kind(program, one)] += 1
        # An asynchronous call lists operands and results; other moves read what they write.
        twice = one.opcode != "call-start" and _only_moves(program, one)
        moved += one.bytes * visit.times * (2 if twice else 1)
    return Unestimated(kinds=dict(kinds), bytes=moved)


def _is_counted(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    return opcode in _COUNTED or opcode.endswith("-done") or bool(_COLLECTIVE.fullmatch(opcode))


def _kind(program: ScheduledProgram, instruction: Instruction) -> str:
    if program.multiplies(instruction):
        return "convolution or product"
    return "SparseCore call" if "sparsecore" in instruction.text else instruction.opcode


def cycles_of(instruction: Instruction, chip: Chip) -> int:
    """Returns the compiler's estimate, or the larger of a kernel's stated costs."""
    operations, moved = instruction.stated_cost
    if not moved:
        return instruction.estimated_cycles
    by_memory = moved / chip.hbm_bandwidth * chip.clock_hz
    return round(max(by_memory, operations / VECTOR_OPERATIONS))


def purpose_of(program: ScheduledProgram, instruction: Instruction) -> Purpose:
    """Returns the purpose of an operation, from its kind and then its source line."""
    source = _source_purpose(program, instruction)
    if instruction.stated_cost != (0, 0):
        return Purpose.NORMS if source is Purpose.NORMS else Purpose.HEAD_LAYOUT
    if program.multiplies(instruction):
        return Purpose.TEXT_ATTENTION if source is Purpose.TEXT_ATTENTION else Purpose.PROJECTIONS
    if source is Purpose.COPIES:
        return Purpose.COPIES
    if _only_moves(program, instruction):
        return Purpose.ROPE if source is Purpose.ROPE else Purpose.LAYOUT
    return source or Purpose.OTHER


def _only_moves(program: ScheduledProgram, instruction: Instruction) -> bool:
    if instruction.opcode in _MOVES:
        return True
    inside = [inner.opcode for inner in program.fused(instruction)]
    return bool(inside) and all(opcode in _MOVES or opcode == "fusion" for opcode in inside)


def _source_purpose(program: ScheduledProgram, instruction: Instruction) -> Purpose | None:
    """Returns the purpose by the source of an operation, or of the operations fused into it."""
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
        for file, function, purpose in SOURCES:
            if f"maxdiffusion/{file}" in source.file and function in source.function:
                return purpose
    return None
