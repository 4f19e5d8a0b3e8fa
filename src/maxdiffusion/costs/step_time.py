"""Seconds of a denoise step and of a whole video, from cycles, kernel times and collectives.

    step  = attention kernels + everything else on the core + exposed collectives
    video = every program that makes it, as often as it runs

Kernel times follow from `KernelCalls`, the grid and how often it runs, and `KernelFigures`, the
bundles of each part of the code, which the readers of `preflight` fill in.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.attention.backends.base import Tile
from maxdiffusion.costs.chips import Chip
from maxdiffusion.costs.links import DeviceCollective, Network, Overlap, Scheduled

# Measured on tpu7x by the public maxdiffusion (kernels/internal_ring_attention.py of an unmerged
# branch): a kernel with more bundles than this ran 2.1 times slower, 91.2 instead of 43.4 ms a
# layer, and no schedule shows it. Figures for other chips are not known; the same one is used.
INSTRUCTION_BUNDLES = 41_000
# Warnings begin at this share: the limit is known to about two digits.
NEAR_INSTRUCTION_MEMORY = 0.9


@dataclass(frozen=True, kw_only=True)
class KernelFigures:
    """Sizes of the machine code of one kernel on one chip.

    A bundle takes a cycle. `ragged_cycles` are those of a main-loop pass over keys that are masked
    or cut off, `step_bundles` run once a grid step, `q_block_bundles` once a block of queries.
    `short_tile_bundles` are those of a pass over a shorter tile at the end of a block of queries.
    `code_bundles` is the whole code; 0 if it was not counted.
    """

    name: str
    purpose: str
    main_loop_bundles: int
    mxu_bound_bundles: int
    ragged_cycles: int
    step_bundles: int
    q_block_bundles: int
    spill_stores: int
    spill_loads: int
    vmem_bytes: int
    vmem_limit_bytes: int
    code_bundles: int = 0
    short_tile_bundles: int = 0

    @property
    def instruction_memory(self) -> float:
        """Returns the size of the code as a share of what instruction memory holds."""
        return self.code_bundles / INSTRUCTION_BUNDLES

    @property
    def main_loop_cycles(self) -> int:
        """Returns the cycles of one pass of the main loop."""
        return max(self.main_loop_bundles, self.mxu_bound_bundles)

    @property
    def mxu_share(self) -> float:
        """Returns the share of MXU peak that the main loop reaches."""
        return self.mxu_bound_bundles / self.main_loop_cycles

    def as_json(self) -> dict[str, Any]:
        """Returns all figures by name."""
        return {**dataclasses.asdict(self), "mxu_share": self.mxu_share}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "KernelFigures":
        """Returns the figures that `as_json` wrote."""
        names = [part.name for part in dataclasses.fields(cls)]
        return cls(**{name: values[name] for name in names})


@dataclass(frozen=True, kw_only=True)
class KernelCalls:
    """The kernel calls of one attention on one device.

    `pairs` counts the (batch, head) pairs of all calls over the same keys, in `groups` calls.
    `calls` counts the shards of keys.
    """

    pairs: int
    calls: int
    q_len: int
    kv_len: int
    tile: Tile
    groups: int = 1

    @property
    def q_blocks(self) -> int:
        """Returns the number of query blocks of a pair."""
        return -(-self.q_len // self.tile.block_q)

    @property
    def passes(self) -> float:
        """Returns the number of query tiles of a pair; a last block runs only those it needs."""
        whole, rest = divmod(self.q_len, self.tile.block_q)
        per_block = self.tile.block_q / self.tile.q_tile
        return whole * per_block + min(per_block, -(-rest // self.tile.q_tile))

    @property
    def short_tile(self) -> float:
        """Returns the length of the last tile of a block of queries, if shorter, in whole tiles."""
        return self.tile.block_q % self.tile.q_tile / self.tile.q_tile

    @property
    def short_tiles(self) -> int:
        """Returns the blocks of queries of a pair that end with a shorter tile."""
        if not self.short_tile:
            return 0
        whole, rest = divmod(self.q_len, self.tile.block_q)
        tiles = self.tile.block_q // self.tile.q_tile
        return whole + (rest > tiles * self.tile.q_tile)

    def cycles(self, code: KernelFigures) -> float:
        """Returns the cycles of one attention."""
        whole, rest = divmod(self.kv_len, self.tile.block_kv)
        ragged = -(-rest // self.tile.kv_step) * self.tile.kv_step / self.tile.block_kv
        if ragged == 1.0:
            # The keys end in the last step of a block, which the main loop takes like any other.
            whole, ragged = whole + 1, 0.0
        every_pass = whole * code.main_loop_cycles + ragged * code.ragged_cycles
        steps = -(-self.kv_len // self.tile.block_kv)
        every_block = steps * code.step_bundles + code.q_block_bundles
        passes = self.passes
        if code.short_tile_bundles:
            short = code.short_tile_bundles / code.main_loop_cycles
            passes += self.short_tiles * (short - self.short_tile)
        return self.calls * self.pairs * (passes * every_pass + self.q_blocks * every_block)


def kernel_plans(attention: BlockAttention) -> dict[str, AttentionPlan]:
    """Returns the plans of a block that run a Pallas kernel, by purpose."""
    plans = {
        "self-attention": attention.self_attention,
        "cross-attention": attention.cross_attention,
    }
    return {
        name: plan
        for name, plan in plans.items()
        if isinstance(plan, AttentionPlan) and plan.backend.tile is not None
    }


def kernel_calls(plan: AttentionPlan) -> KernelCalls:
    """Returns the kernel calls of a plan that runs a Pallas kernel."""
    sizes, tile = plan.local, plan.backend.tile
    assert tile is not None, plan.backend.title
    return KernelCalls(
        pairs=sizes.batch * sum(sizes.heads),
        groups=len(sizes.heads),
        calls=plan.padded_kv_len // sizes.kv_len,
        q_len=sizes.q_len,
        kv_len=sizes.kv_len,
        tile=tile,
    )


# Rounding of times, in seconds.
_INSTANT = 1e-12
_SUFFIXES = re.compile(r"(_partials|_carried|\.\d+)+$")


def format_seconds(seconds: float) -> str:
    """Returns a time with its unit and about four digits."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.4g} ms"


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Seconds of one kernel: of a single call, and of all calls of a step."""

    call: float
    step: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a step in seconds; they do not overlap."""

    kernels: Mapping[str, float]
    outside: Mapping[str, float]
    exposed_collectives: float

    @property
    def total(self) -> float:
        """Returns the seconds of the whole step."""
        return sum(self.kernels.values()) + sum(self.outside.values()) + self.exposed_collectives

    def parts(self) -> dict[str, float]:
        """Returns all parts by their keys in JSON reports, kernels first."""
        kernels = {f"kernel: {name}": seconds for name, seconds in self.kernels.items()}
        return {**kernels, **self.outside, EXPOSED: self.exposed_collectives}


# Parts of a step have stable keys in JSON reports; texts and charts show these labels.
EXPOSED = "exposed exchange"
COPIES = "exchange copies"
HEAD_LAYOUT = "norm, RoPE and places of heads"
LABELS = {
    EXPOSED: "exposed collectives",
    COPIES: "copies around collectives",
    HEAD_LAYOUT: "fused qk-norm + RoPE + head layout",
}


def label(part: str) -> str:
    """Returns the words for a part of a step in texts and charts."""
    return LABELS.get(part, part)


def step_time(
    *,
    chip: Chip,
    kernels: Mapping[str, KernelTime],
    cycles: Mapping[str, int],
    collectives: Sequence[DeviceCollective],
    network: Network,
) -> StepTime:
    """Returns the step with these kernels, `cycles` outside of them by purpose, and collectives."""
    return StepTime(
        kernels={name: time.step for name, time in kernels.items()},
        outside={purpose: chip.seconds(count) for purpose, count in cycles.items() if count},
        exposed_collectives=sum(
            seconds * collective.times
            for seconds, collective in zip(
                exposed_seconds(collectives, kernels, network), collectives, strict=True
            )
        ),
    )


def exposed_seconds(
    collectives: Sequence[DeviceCollective],
    kernels: Mapping[str, KernelTime],
    network: Network,
) -> list[float]:
    """Returns the seconds that the core waits for each collective.

    Those of one computation are timed together: in flight at the same time they share the links
    that they cross evenly, and while the core waits for one the others go on.
    """
    calls = {_family(name): time.call for name, time in kernels.items()}

    def hidden(work: Overlap) -> float:
        in_kernels = sum(calls.get(_family(name), 0.0) for name in work.kernels)
        return network.topology.chip.seconds(work.cycles) + in_kernels

    waits = [0.0] * len(collectives)
    for together in _computations(collectives):
        of_group = _waits([collectives[index] for index in together], hidden, network)
        for index, wait in zip(together, of_group, strict=True):
            waits[index] = wait
    return waits


def _computations(collectives: Sequence[DeviceCollective]) -> list[list[int]]:
    """Returns the collectives by runs of computations; a computation may be called twice."""
    runs: dict[object, list[int]] = {}
    seen: Counter[object] = Counter()
    for index, one in enumerate(collectives):
        place = one.scheduled
        at = index if place is None else (place.computation, place.start)
        seen[at] += 1
        run = index if place is None else (place.computation, seen[at])
        runs.setdefault(run, []).append(index)
    return [*runs.values()]


def _waits(
    collectives: Sequence[DeviceCollective], hidden: Callable[[Overlap], float], network: Network
) -> list[float]:
    """Returns the waits for collectives of one computation, by going through its schedule."""
    nothing = Overlap(cycles=0, kernels=())
    events: list[tuple[int, int, float, int]] = []  # position, 0 or 1 = done, work before, index
    for index, one in enumerate(collectives):
        place = one.scheduled or Scheduled(computation="", start=0, done=1, before=nothing)
        begin = hidden(place.before)
        end = begin if one.overlap is None else begin + hidden(one.overlap)
        events += [(place.start, 0, begin, index), (place.done, 1, end, index)]
    flights, waits, now = _Flights(network=network), [0.0] * len(collectives), 0.0
    for _, is_done, work, index in sorted(events):
        flights.run(work - now)
        now = work
        if is_done:
            waits[index] = flights.run_until_done(index)
        else:
            flights.start(index, collectives[index])
    return waits


@dataclass(kw_only=True)
class _Flights:
    """Collectives in flight: the seconds that each would need alone, and the links it crosses."""

    network: Network
    left: dict[int, float] = field(default_factory=dict)
    links: dict[int, frozenset[object]] = field(default_factory=dict)

    def start(self, index: int, collective: DeviceCollective) -> None:
        """Adds a collective."""
        busy = self.network.busy(collective)
        if busy:
            self.left[index] = max(busy.values())
            self.links[index] = frozenset(busy)

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        while seconds > 0.0 and self.left:
            seconds -= self._next(seconds)

    def run_until_done(self, index: int) -> float:
        """Lets time pass until a collective has ended; returns the seconds."""
        waited = 0.0
        while index in self.left:
            waited += self._next(math.inf)
        return waited

    def _next(self, most: float) -> float:
        """Lets time pass until a collective ends, or at most `most` seconds; returns them."""
        users = Counter(link for index in self.left for link in self.links[index])
        slowed = {index: max(users[link] for link in self.links[index]) for index in self.left}
        passed = min(most, *(left * slowed[index] for index, left in self.left.items()))
        rest = {index: left - passed / slowed[index] for index, left in self.left.items()}
        self.left = {index: left for index, left in rest.items() if left > _INSTANT}
        return passed


def _family(name: str) -> str:
    """Returns a kernel's name without number and suffixes: first and last calls take as long."""
    return _SUFFIXES.sub("", name)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Seconds of one run of a program, and its runs for one batch of videos."""

    seconds: float
    times: int

    @property
    def total(self) -> float:
        """Returns the seconds of all runs."""
        return self.seconds * self.times


@dataclass(frozen=True, kw_only=True)
class VideoTime:
    """The programs of a generation by name, without host work and weight loading."""

    programs: Mapping[str, Runs]

    @property
    def total(self) -> float:
        """Returns the seconds on the devices."""
        return sum(runs.total for runs in self.programs.values())

    def lines(self) -> list[str]:
        """Returns the programs for a text report, the longest first."""
        parts = sorted(self.programs.items(), key=lambda item: -item[1].total)
        rows = [
            f"  {format_seconds(runs.total):>10} {runs.total / self.total:6.1%}  {name}, "
            f"{runs.times} x {format_seconds(runs.seconds)}"
            for name, runs in parts
        ]
        return [f"a whole video, on the devices: {format_seconds(self.total)}", *rows]

    def as_json(self) -> dict[str, dict[str, Any]]:
        """Returns the seconds of every program by name."""
        return {
            name: {"seconds_per_run": runs.seconds, "runs": runs.times, "seconds": runs.total}
            for name, runs in self.programs.items()
        }
