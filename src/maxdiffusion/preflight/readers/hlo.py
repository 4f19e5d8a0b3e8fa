"""Reads the scheduled program that the compiler prints: instructions, loops, and source lines.

FileNames / FunctionNames / FileLocations / StackFrames    where an operation was written
%body (...) -> ... {                                       a computation
  %fusion.3 = bf16[...] fusion(...), calls=%fused.3, metadata={... stack_frame_id=12},
      backend_config={... "estimated_cycles":"4711" ...}
ENTRY %main (...) -> ... {
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_VMEM = re.compile(
    r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)
_COST = re.compile(
    r'"cost_estimate":\{"flops":"(\d+)","transcendentals":"(\d+)","bytes_accessed":"(\d+)"'
)
_SHAPE = re.compile(r"\b(pred|bf16|[sfuc]\d+\w*)\[([\d,]*)\]")
# XLA writes this where it does not know.
_UNKNOWN_CYCLES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Source:
    """A line of the program's source: its file and function, innermost first in a stack."""

    file: str
    function: str


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One operation of a scheduled computation; `text` is its whole line."""

    name: str
    shape: str
    opcode: str
    text: str = field(repr=False)

    @property
    def estimated_cycles(self) -> int:
        """The compiler's own estimate; 0 where it has none."""
        found = _CYCLES.search(self.text)
        cycles = int(found[1]) if found else 0
        return 0 if cycles >= _UNKNOWN_CYCLES else cycles

    @property
    def is_kernel(self) -> bool:
        """Whether this calls a Pallas kernel."""
        return self.opcode == "custom-call" and "tpu_custom_call" in self.text

    @property
    def stated_cost(self) -> tuple[int, int]:
        """Vector operations and bytes of a kernel that says so itself and has no exponentials.

        Attention kernels, which have them, are timed from their machine code instead.
        """
        found = _COST.search(self.text) if self.is_kernel else None
        if found is None or int(found[2]):
            return 0, 0
        return int(found[1]), int(found[3])

    @property
    def vmem_bytes(self) -> int:
        """VMEM that the operation uses."""
        found = _VMEM.search(self.text)
        return int(found[1]) if found else 0

    @property
    def operation(self) -> str:
        """The path of named scopes and the primitive, such as jit(step)/ffn/dot_general."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def frame(self) -> int:
        """Number of its stack frame; 0 if it has none."""
        return int(self.attribute(r"stack_frame_id=(\d+)") or 0)

    def attribute(self, pattern: str) -> str:
        """What the first group of a pattern finds in the line; empty if nothing."""
        found = re.search(pattern, self.text)
        return found[1] if found else ""

    def called(self, *names: str) -> list[str]:
        """The computations that the attributes `names` name."""
        words = "|".join(names)
        return re.findall(rf"\b(?:{words})=%?([\w.\-]+)", self.text)

    @property
    def branches(self) -> list[str]:
        """The computations that a conditional chooses from."""
        listed = self.attribute(r"branch_computations=\{([^}]*)\}")
        names = [name.strip().lstrip("%") for name in listed.split(",") if name.strip()]
        return names or self.called("true_computation", "false_computation")

    @property
    def bytes(self) -> int:
        """Bytes of the result; of all parts if it has several."""
        return sum(self.parts)

    @property
    def parts(self) -> list[int]:
        """Bytes of every array of the result."""
        return [_array_bytes(dtype, sizes) for dtype, sizes in _SHAPE.findall(self.shape)]


def _array_bytes(dtype: str, sizes: str) -> int:
    count = 1
    for size in filter(None, sizes.split(",")):
        count *= int(size)
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return count * bits // 8


@dataclass(frozen=True, kw_only=True)
class ScheduledProgram:
    """A compiled program: its computations in the order of their schedule, and source lines."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]] = field(repr=False)
    stacks: dict[int, tuple[Source, ...]] = field(repr=False)

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """Where an operation was written, innermost first."""
        return self.stacks.get(instruction.frame, ())

    def trips(self, loop: Instruction) -> int:
        """How often the body of a `while` runs: as stated, or the limit of its condition."""
        stated = loop.attribute(r'known_trip_count":\{"n":"(\d+)"')
        if stated:
            return int(stated)
        (condition,) = loop.called("condition")
        limits = [
            int(limit)
            for instruction in self.computations.get(condition, ())
            for limit in re.findall(r"[su]32\[\]\S* constant\((\d+)\)", instruction.text)
        ]
        return max(limits, default=1)

    @cached_property
    def _products(self) -> frozenset[str]:
        """Computations that hold a matrix product, their own or of one they call."""
        found: set[str] = set()
        for _ in range(3):  # fusions are nested at most this deep
            for name, body in self.computations.items():
                direct = any(inner.opcode in ("convolution", "dot") for inner in body)
                if direct or any(found & {*inner.called("calls")} for inner in body):
                    found.add(name)
        return frozenset(found)

    def multiplies(self, instruction: Instruction) -> bool:
        """Whether an operation is a matrix product, or a fusion around one."""
        if instruction.opcode in ("convolution", "dot"):
            return True
        return bool(self._products & {*instruction.called("calls")})

    def fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """The operations inside a fusion."""
        for name in instruction.called("calls"):
            yield from self.computations.get(name, ())


def read_program(text: str) -> ScheduledProgram:
    """The program of `compiled.as_text()`; a text without an entry is refused."""
    tables: dict[str, list[str]] = {}
    computations: dict[str, list[Instruction]] = {}
    entry, current, table = "", "", ""
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
            continue
        head = _HEAD.match(line)
        if head:
            current, table = head[2], ""
            computations[current] = []
            entry = current if head[1] else entry
        elif table and line:
            tables.setdefault(table, []).append(line)
        elif current and (found := _INSTRUCTION.match(line)):
            computations[current].append(
                Instruction(name=found[1], shape=found[2], opcode=found[3], text=line)
            )
    if not entry:
        raise ValueError("a scheduled program has a computation marked ENTRY, and this text none")
    frozen = {name: tuple(body) for name, body in computations.items()}
    return ScheduledProgram(entry=entry, computations=frozen, stacks=_stacks(tables))


def _stacks(tables: dict[str, list[str]]) -> dict[int, tuple[Source, ...]]:
    files = _numbered(tables.get("FileNames", []))
    functions = _numbered(tables.get("FunctionNames", []))
    locations = {
        int(found[1]): Source(file=files[int(found[2])], function=functions[int(found[3])])
        for line in tables.get("FileLocations", [])
        if (found := _LOCATION.match(line))
    }
    frames = {
        int(found[1]): (int(found[2]), int(found[3] or 0))
        for line in tables.get("StackFrames", [])
        if (found := _FRAME.match(line))
    }
    return {number: tuple(_walk(number, frames, locations)) for number in frames}


def _walk(
    number: int, frames: dict[int, tuple[int, int]], locations: dict[int, Source]
) -> Iterator[Source]:
    """Frames from the innermost out; XLA counts parents from 1 with the root as its own parent."""
    seen: set[int] = set()
    while number in frames and number not in seen:
        seen.add(number)
        location, parent = frames[number]
        yield locations[location]
        number = parent - 1


def _numbered(lines: list[str]) -> dict[int, str]:
    return {int(found[1]): found[2] for line in lines if (found := _FILE.match(line))}
