"""Backend of our Pallas flash kernel.

Its gradient is a kernel too, from the saved output and log-sum; float8 products have none.

Two options change what a call needs to know of all keys, its `FlashStats`:

    softmax=FIXED_M  a bound per head in place of the running maximum, where the norms allow it
    precision=FP8    Q.K^T over float8 parts of q and of smoothed k (lossy); P.V stays as it is
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.backends.base import (
    AttentionBackend,
    Delta,
    Keys,
    LogSum,
    Precision,
    PreparedKeys,
    Queries,
    Reducer,
    Softmax,
    Tile,
    check_pallas,
)
from maxdiffusion.attention.options import flash_backward_blocks, flash_blocks
from maxdiffusion.attention.problem import LocalKVMask
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.kernels import flash
from maxdiffusion.kernels.flash.fixed_m import KEYS_BITS
from maxdiffusion.kernels.flash.vmem import vmem_bytes
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.kernels.tpu import LANES, MIB, SEARCHED, BlockSizes, chip_of

if TYPE_CHECKING:
    from maxdiffusion.kernels.flash.resident import ResidentPlan

Arrays = TypeVar("Arrays")
FP8_QUERIES_AT_ONCE = 256
"""Queries of a score tile in float8: more would not leave their scores in registers."""


@dataclass(frozen=True, kw_only=True)
class FlashStats:
    """Statistics of all keys: norms and then bounds for fixed-m, the scale of keys for fp8."""

    key_norms: flash.KeyNorms | None = None
    bounds: flash.FixedMBounds | None = None
    key_scale: Float[Array, "B N"] | None = None


@jax.custom_jvp
def forward_only(arrays: Arrays) -> Arrays:
    """Returns `arrays`; a gradient through them raises with the modes that have one."""
    return arrays


@forward_only.defjvp
def _refuse_gradient(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "our flash kernel has no gradient here: float8 products have none, and partials only "
        "inside a scheme that has; train with ulysses_ring_custom or ulysses_custom"
    )


@final
@dataclass(frozen=True, kw_only=True)
class FlashBackend(AttentionBackend[FlashStats]):
    """Our Pallas kernel, with its softmax and its precision as options."""

    title = "our flash kernel"
    softmaxes = (Softmax.ONLINE, Softmax.FIXED_M)
    precisions = (Precision.NATIVE, Precision.FP8)
    gradient_precisions = (Precision.NATIVE,)
    fuses_projections = True

    @property
    def has_shard_gradients(self) -> bool:
        """Returns whether products are native: float8 has no gradient."""
        return self.differentiable

    def attend(
        self, q: Queries, k: PreparedKeys, v: Keys, kv_mask: LocalKVMask, stats: FlashStats
    ) -> Queries:
        """Returns attention over all keys."""
        q, k, v = forward_only((q, k, v))
        resident = self._resident_keys(k, kv_mask)
        if resident is not None:
            from maxdiffusion.kernels.flash.resident import resident_attention

            return resident_attention(q, k, v, kv_len=resident, options=self.kernel_options)
        return flash.flash_attention(q, k, v, **self._call(q, k, kv_mask, stats))

    def partials(
        self, q: Queries, k: PreparedKeys, v: Keys, kv_mask: LocalKVMask, stats: FlashStats
    ) -> Partials:
        """Returns unnormalised attention over some of the keys."""
        q, k, v = forward_only((q, k, v))
        return flash.flash_attention_partials(q, k, v, **self._call(q, k, kv_mask, stats))

    def accumulate(
        self,
        q: Queries,
        k: PreparedKeys,
        v: Keys,
        kv_mask: LocalKVMask,
        stats: FlashStats,
        carry: Partials | None,
    ) -> Partials:
        """Returns unnormalised attention that continues `carry`: the kernel merges as it runs."""
        q, k, v, carry = forward_only((q, k, v, carry))
        call = self._call(q, k, kv_mask, stats)
        return flash.flash_attention_partials(q, k, v, before=carry, **call)

    def finalize(
        self,
        q: Queries,
        k: PreparedKeys,
        v: Keys,
        kv_mask: LocalKVMask,
        stats: FlashStats,
        carry: Partials | None,
    ) -> Queries:
        """Returns attention that continues `carry`: the kernel merges and normalises as it runs."""
        q, k, v, carry = forward_only((q, k, v, carry))
        call = self._call(q, k, kv_mask, stats)
        return flash.flash_attention(q, k, v, before=carry, **call)

    def finalize_with_log_sum(
        self,
        q: Queries,
        k: PreparedKeys,
        v: Keys,
        kv_mask: LocalKVMask,
        stats: FlashStats,
        carry: Partials | None,
    ) -> tuple[Queries, LogSum]:
        """Returns what `finalize` does, and the log-sum that the kernel writes with it."""
        q, k, v, carry = forward_only((q, k, v, carry))
        call = self._call(q, k, kv_mask, stats)
        del call["key_scale"]
        return flash.flash_attention_with_log_sum(q, k, v, before=carry, **call)

    def gradients(
        self,
        q: Queries,
        k: Keys,
        v: Keys,
        kv_mask: LocalKVMask,
        log_sum: LogSum,
        delta: Delta,
        d_out: Queries,
    ) -> tuple[Queries, Keys, Keys]:
        """Returns what these keys add to the gradient of q, and those of k and v, in float32."""
        from maxdiffusion.kernels.flash.backward import shard_gradients

        known = self._known(k, kv_mask, FlashStats())
        grads = shard_gradients(
            (q, k, v),
            (log_sum, delta, d_out),
            blocks=flash_backward_blocks(self.problem, self.options),
            options=self.kernel_options,
            kv_len=known["kv_len"],
            kv_mask=known["kv_mask"],
        )
        return grads.d_q, grads.d_k, grads.d_v

    def log_sum(self, partial: Partials) -> LogSum:
        """Returns the natural log of the sum of exponentials; m is in units of the exponent."""
        return partial.m / self.kernel_options.exponent.per_nat + jnp.log(partial.l)

    def _call(
        self, q: Queries, k: PreparedKeys, kv_mask: LocalKVMask, stats: FlashStats
    ) -> dict[str, Any]:
        return {**self.settings(q.shape[2]), **self._known(k, kv_mask, stats)}

    def settings(self, heads: int) -> dict[str, Any]:
        """Returns the block sizes and the options of a call with this number of heads."""
        # Heads that became batch rows (to have a mask each) come one at a time.
        per_tile = math.gcd(self.blocks.heads_per_tile, heads)
        blocks = replace(self.blocks, heads_per_tile=per_tile)
        return {"blocks": blocks, "options": self.kernel_options}

    def _known(self, k: PreparedKeys, kv_mask: LocalKVMask, stats: FlashStats) -> dict[str, Any]:
        length = kv_mask.length
        return {
            "kv_len": None if length is None else jnp.full((k.shape[0],), length, jnp.int32),
            "kv_mask": kv_mask.mask,
            "bounds": stats.bounds,
            "key_scale": stats.key_scale,
        }

    def preprocess_kv(
        self, k: Keys, v: Keys, kv_mask: LocalKVMask, reducer: Reducer
    ) -> tuple[PreparedKeys, FlashStats]:
        """Returns the keys of every call, smoothed by the mean of all keys unless all is plain."""
        if self.softmax is Softmax.ONLINE and self.precision is Precision.NATIVE:
            return k, FlashStats()
        k, v = forward_only((k, v))
        attended = kv_mask.valid(k.shape[0], k.shape[1])
        mean = flash.KeyTotal(*reducer.psum(*flash.key_total(k, attended))).mean()
        if self.precision is Precision.FP8:
            reach = flash.KeyRange(*reducer.pmax(*flash.key_range(k, attended)))
            split = flash.split_keys(k, mean, reach.scale(mean), interpret=self.interpret)
            return split.packed, FlashStats(key_scale=split.scale)
        k = flash.smooth_keys(k, attended, mean=mean)
        norms = flash.KeyNorms(*reducer.pmax(*flash.key_norms(k, v, attended)))
        return k, FlashStats(key_norms=norms)

    def preprocess_q(self, q: Queries, stats: FlashStats) -> FlashStats:
        """Returns the bounds of these queries and all keys, for fixed-m softmax."""
        if stats.key_norms is None:
            return stats
        exponent = self.kernel_options.exponent
        bounds = flash.gate_heads(
            flash.query_norm(q, exponent=exponent),
            stats.key_norms,
            dtype=self.problem.dtype.name,
            keys=flash.Keys.SMOOTHED,
            gate=flash.Gate(self.options.fixed_m_gate),
            exponent=exponent,
        )
        return replace(stats, bounds=bounds)

    def fixed_m_eligible_heads(self, stats: FlashStats) -> Bool[Array, "B N"] | None:
        """Returns the heads that passed the gate: their m is the bound, in every call."""
        return None if stats.bounds is None else stats.bounds.fixed

    def power(self, x: Array) -> Array:
        """Returns the base of this kernel's partials to the power of x."""
        return self.kernel_options.exponent.power(x)

    @property
    def kernel_options(self) -> flash.FlashOptions:
        """The options of a kernel call."""
        options, fixed_m = self.options, self.softmax is Softmax.FIXED_M
        lp_scheduler = options.use_experimental_scheduler
        gate = flash.Gate(options.fixed_m_gate)
        return flash.FlashOptions(
            softmax=flash.FixedM(gate=gate) if fixed_m else flash.Online(),
            exponent=flash.Exponent.BASE_2 if options.use_base2_exp else flash.Exponent.NATURAL,
            scheduler=flash.Scheduler.LINEAR_PROGRAM if lp_scheduler else flash.Scheduler.DEFAULT,
            product=flash.Product.FP8 if self.precision is Precision.FP8 else flash.Product.NATIVE,
            interpret=self.interpret,
            chip=chip_of(self.problem.device_kind),
        )

    @property
    def kv_reductions(self) -> tuple[int, ...]:
        """Sum of keys with their count; then the range of keys, or two norms."""
        mean = 4 * self.problem.head_dim + 4
        if self.precision is Precision.FP8:
            return (mean, 8 * self.problem.head_dim)
        return (mean, 8) if self.softmax is Softmax.FIXED_M else ()

    @property
    def searched_sizes(self) -> tuple[str, ...]:
        """Block sizes that a tile search sets; keys that stay in VMEM need none."""
        return () if self.keeps_keys else SEARCHED

    @property
    def search_name(self) -> str:
        """The name under which a search keeps its best block sizes."""
        if self.precision is Precision.FP8:
            return "flash fp8"
        return f"flash {self.softmax.value}"

    @property
    def keeps_keys(self) -> bool:
        """True if a call without a mask keeps all keys in VMEM (`kernels/flash/resident`).

        A `block_kv` that is given and smaller asks for several blocks of keys.
        """
        plain = self.softmax is Softmax.ONLINE and self.precision is Precision.NATIVE
        sizes, given = self.problem, self.options.block_sizes.block_kv
        one_block = sizes.num_kv_shards == 1 and (not given or given >= sizes.kv_len)
        return plain and one_block and self._shapes()[0].keys_stay

    def _resident_keys(self, k: PreparedKeys, kv_mask: LocalKVMask) -> int | None:
        """Returns the number of keys of a call if they all stay in VMEM."""
        if not self.keeps_keys or kv_mask.mask is not None:
            return None
        if kv_mask.length is None:
            return k.shape[1]
        return kv_mask.length if isinstance(kv_mask.length, int) else None

    def _resident_plan(self) -> "ResidentPlan":
        from maxdiffusion.kernels.flash.resident import ResidentPlan

        shape = self._shapes()[0]
        return ResidentPlan(shape=shape, kv_len=shape.kv_len, options=self.kernel_options)

    @property
    def blocks(self) -> BlockSizes:
        """Block sizes: the user's, completed from the tuned table and cut to the chip."""
        return _fitting_blocks(self)

    @property
    def tile(self) -> Tile:
        """The tile of a grid step, whose queries may be split further."""
        if self.keeps_keys:
            block_q = self._resident_plan().block_q
            return Tile(block_q=block_q, block_kv=self.problem.kv_len, q_tile=block_q)
        blocks = self.blocks
        return Tile(
            block_q=blocks.block_q,
            block_kv=blocks.block_kv,
            q_tile=blocks.q_tile,
            kv_step=LANES,
        )

    def tuned_blocks(self) -> BlockSizes:
        """Returns the block sizes before they are cut to the chip."""
        fp8 = self.precision is Precision.FP8
        blocks = flash_blocks(self.problem, self.options, self.search_name)
        if not fp8 or blocks.block_q_compute:
            return blocks
        return replace(blocks, block_q_compute=FP8_QUERIES_AT_ONCE)

    def kernel_plans(self, blocks: BlockSizes) -> list[flash.KernelPlan]:
        """Returns the plan of each kernel call; raises `ProblemsFound` if one cannot run."""
        return [
            flash.plan_kernel(shape, blocks, self.kernel_options, masked=True, **kind)
            for shape in self._shapes()
            for kind in self._call_kinds()
        ]

    def _shapes(self) -> list[flash.FlashShape]:
        problem = self.problem
        return [
            flash.FlashShape(
                batch=problem.batch,
                q_len=problem.q_len,
                kv_len=problem.kv_len,
                heads=heads,
                kv_heads=heads,
                head_dim=problem.head_dim,
                dtype=problem.dtype.name,
            )
            for heads in sorted(set(problem.heads))
        ]

    def _call_kinds(self) -> Sequence[dict[str, bool]]:
        """Returns the calls of one attention: a single one, or first, middle and last of a ring."""
        if self.problem.num_kv_shards == 1:
            return ({},)
        middle = [{"partials": True, "carried": True}] if self.problem.num_kv_shards > 2 else []
        return ({"partials": True}, *middle, {"carried": True})

    def check(self) -> None:
        """Raises `ProblemsFound` if the kernel cannot run; a fixed-m sum must stay finite."""
        problems = Collector()
        with problems:
            check_pallas(self)
        keys = self.problem.kv_len * self.problem.num_kv_shards
        too_many = self.softmax is Softmax.FIXED_M and keys > 2**KEYS_BITS
        calls = Collector()
        with calls:
            self.kernel_plans(self.blocks)
        # Too many keys are one reason about the whole ring, not one more about a single call.
        problems.problems += [
            problem for problem in calls.problems if not (too_many and problem.name == "kv_len")
        ]
        if too_many:
            problems.problems.append(
                Problem(
                    name="kv_len",
                    value=keys,
                    rule=f"fixed-m softmax sums up to {2**KEYS_BITS} keys",
                    remedy="Use a name without fixed_m",
                )
            )
        problems.raise_if_any()

    def check_gradient(self) -> None:
        """Raises `ProblemsFound` if the backward kernel does not fit the chip."""
        from maxdiffusion.kernels.flash.backward_plan import plan_backward

        blocks = flash_backward_blocks(self.problem, self.options)
        for shape in self._shapes():
            plan_backward(shape, blocks, self.kernel_options, masked=True)

    def details(self) -> Sequence[str]:
        """Returns block sizes, exponent, scheduler, VMEM, and what is lossy or forced."""
        blocks, options = self.blocks, self.kernel_options
        if self.keeps_keys:
            plan = self._resident_plan()
            return [
                f"all keys in VMEM, blocks of {plan.block_q} queries (its own; a mask needs "
                f"q {blocks.block_q}, kv {blocks.block_kv}); exponent {options.exponent.value}, "
                f"VMEM {plan.vmem_bytes / MIB:.1f} MiB"
            ]
        need = max(vmem_bytes(plan) for plan in self.kernel_plans(blocks))
        lines = [
            f"blocks: q {blocks.block_q}, kv {blocks.block_kv}/{blocks.block_kv_compute}/"
            f"{blocks.block_kv_compute_in}, {blocks.heads_per_tile} heads a tile",
            f"exponent {options.exponent.value}, {options.scheduler.value} scheduler, "
            f"VMEM {need / MIB:.1f} MiB",
        ]
        if self.softmax is Softmax.FIXED_M and self.options.fixed_m_gate == "forced":
            lines.append("fixed-m for every head: the gate is forced")
        if self.precision is Precision.FP8:
            lines.append("lossy: Q.K^T in fp8")
        return lines


@functools.lru_cache(maxsize=256)
def _fitting_blocks(backend: FlashBackend) -> BlockSizes:
    """Returns the tuned blocks with block_q halved until a call fits; the user's unchanged."""
    blocks = backend.tuned_blocks()
    if backend.options.block_sizes.block_q:
        return blocks
    while blocks.block_q > LANES:
        try:
            backend.kernel_plans(blocks)
        except ProblemsFound:
            block_q = max(LANES, blocks.block_q // 2 // LANES * LANES)
            blocks = replace(blocks, block_q=block_q)
        else:
            break
    return blocks
