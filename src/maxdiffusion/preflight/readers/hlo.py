"""Parses the scheduled HLO that the compiler prints: instructions, loops and source lines.

FileNames / FunctionNames / FileLocations / StackFrames    source lines of operations
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
# XLA writes this for an unknown count.
_UNKNOWN_CYCLES = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Source:
    """File and function of a source line; a stack lists them innermost first."""

    file: str
    function: str


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction of a scheduled computation; `text` is its whole line."""

    name: str
    shape: str
    opcode: str
    text: str = field(repr=False)

    @property
    def estimated_cycles(self) -> int:
        """Returns the compiler's cycle estimate; 0 if it has none."""
        found = _CYCLES.search(self.text)
        cycles = int(found[1]) if found else 0
        return 0 if cycles >= _UNKNOWN_CYCLES else cycles

    @property
    def is_kernel(self) -> bool:
        """Returns whether this calls a Pallas kernel."""
        return self.opcode == "custom-call" and "tpu_custom_call" in self.text

    @property
    def stated_cost(self) -> tuple[int, int]:
        """Returns (vector operations, bytes) of a kernel whose cost estimate has no exponentials.

        Attention kernels have exponentials and are timed from their machine code instead.
        """
        found = _COST.search(self.text) if self.is_kernel else None
        if found is None or int(found[2]):
            return 0, 0
        return int(found[1]), int(found[3])

    @property
    def vmem_bytes(self) -> int:
        """Returns the VMEM that the instruction uses."""
        found = _VMEM.search(self.text)
        return int(found[1]) if found else 0

    @property
    def operation(self) -> str:
        """Returns the path of named scopes and the primitive, such as jit(step)/ffn/dot_general."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def frame(self) -> int:
        """Returns the number of its stack frame; 0 if it has none."""
        return int(self.attribute(r"stack_frame_id=(\d+)") or 0)

    def attribute(self, pattern: str) -> str:
        """Returns the match of a pattern's first group in the line, or an empty string."""
        found = re.search(pattern, self.text)
        return found[1] if found else ""

    @property
    def operands(self) -> list[str]:
        """Returns the names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.attribute(rf" {self.opcode}\(([^)]*)\)"))

    def called(self, *names: str) -> list[str]:
        """Returns the computations that the attributes `names` refer to."""
        words = "|".join(names)
        return re.findall(rf"\b(?:{words})=%?([\w.\-]+)", self.text)

    @property
    def branches(self) -> list[str]:
        """Returns the branch computations of a conditional."""
        listed = self.attribute(r"branch_computations=\{([^}]*)\}")
        names = [name.strip().lstrip("%") for name in listed.split(",") if name.strip()]
        return names or self.called("true_computation", "false_computation")

    @property
    def bytes(self) -> int:
        """Returns the bytes of the result, summed over the parts of a tuple."""
        return sum(self.parts)

    @property
    def parts(self) -> list[int]:
        """Returns the bytes of every array of the result."""
        return [_array_bytes(dtype, sizes) for dtype, sizes in _SHAPE.findall(self.shape)]


def _array_bytes(dtype: str, sizes: str) -> int:
    count = 1
    for size in filter(None, sizes.split(",")):
        count *= int(size)
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return count * bits // 8


@dataclass(frozen=True, kw_only=True)
class ScheduledProgram:
    """A compiled program: its computations in schedule order, and its source lines."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]] = field(repr=False)
    stacks: dict[int, tuple[Source, ...]] = field(repr=False)

    def stack(self, instruction: Instruction) -> tuple[Source, ...]:
        """Returns the source lines of an instruction, innermost first."""
        return self.stacks.get(instruction.frame, ())

    def trips(self, loop: Instruction) -> int:
        """Returns the trip count of a `while`: as stated, or the limit in its condition."""
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
        """Returns the computations with a matrix product, their own or in one they call."""
        found: set[str] = set()
        for _ in range(3):  # fusions are nested at most this deep
            for name, body in self.computations.items():
                direct = any(inner.opcode in ("convolution", "dot") for inner in body)
                if direct or any(found & {*inner.called("calls")} for inner in body):
                    found.add(name)
        return frozenset(found)

    def multiplies(self, instruction: Instruction) -> bool:
        """Returns whether an instruction is a matrix product, or a fusion around one."""
        if instruction.opcode in ("convolution", "dot"):
            return True
        return bool(self._products & {*instruction.called("calls")})

    def fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instructions inside a fusion."""
        for name in instruction.called("calls"):
            yield from self.computations.get(name, ())


def read_program(text: str) -> ScheduledProgram:
    """Parses `compiled.as_text()`; raises ValueError for a text without an entry."""
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
        raise ValueError("no computation of this text is marked ENTRY")
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
    """Yields frames, innermost first; XLA numbers parents from 1, the root is its own parent."""
    seen: set[int] = set()
    while number in frames and number not in seen:
        seen.add(number)
        location, parent = frames[number]
        yield locations[location]
        number = parent - 1


def _numbered(lines: list[str]) -> dict[int, str]:
    return {int(found[1]): found[2] for line in lines if (found := _FILE.match(line))}
