"""Our flash kernel on a device, with online or fixed-m softmax."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.kernel import DeviceKernel, Tokens
from maxdiffusion.attention.on_device.limits import pallas_problems
from maxdiffusion.attention.on_device.no_gradient import forward_only
from maxdiffusion.attention.on_device.site import Shards
from maxdiffusion.attention.options import LANES
from maxdiffusion.attention.tuned_blocks import chip_of, flash_blocks
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.runtime.problems import Problem

if TYPE_CHECKING:
    from maxdiffusion.kernels.flash import (
        FixedMBounds,
        FlashBlocks,
        FlashOptions,
        KernelPlan,
        KeyNorms,
    )
    from maxdiffusion.kernels.flash.options import Softmax


class FlashKernel(DeviceKernel):
    """Our Pallas kernel with the running maximum; forward only."""

    title = "our flash kernel"
    search_name = "flash online"

    def softmax_option(self) -> "Softmax":
        """How the kernel stabilises its softmax."""
        from maxdiffusion.kernels.flash import Online

        return Online()

    @property
    def flash_options(self) -> "FlashOptions":
        """The kernel's form of the user's options."""
        from maxdiffusion.kernels.flash import Exponent, FlashOptions, Scheduler

        options = self.site.options
        lp_scheduler = options.use_experimental_scheduler
        return FlashOptions(
            softmax=self.softmax_option(),
            exponent=Exponent.BASE_2 if options.use_base2_exp else Exponent.NATURAL,
            scheduler=Scheduler.LINEAR_PROGRAM if lp_scheduler else Scheduler.DEFAULT,
            interpret=self.site.interpret,
            chip=chip_of(self.site.device_kind),
        )

    @property
    def blocks(self) -> "FlashBlocks":
        """The tile sizes: the user's, completed from the tuned table."""
        return _largest_that_fits(self)

    def wished_blocks(self) -> "FlashBlocks":
        """The same, whether or not they fit the chip."""
        return flash_blocks(self.site, self.search_name)

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site."""
        return [*pallas_problems(self.title, self.site), *self._kernel_problems()]

    def _kernel_problems(self) -> Sequence[Problem]:
        from maxdiffusion.kernels.flash import UnsupportedFlash

        try:
            self.kernel_plans(self.blocks)
        except UnsupportedFlash as refusal:
            return refusal.problems
        return ()

    def kernel_plans(self, blocks: "FlashBlocks") -> list["KernelPlan"]:
        """The plan of each kernel call; a call that cannot run raises with its reasons."""
        from maxdiffusion.kernels.flash import FlashShape, plan_kernel

        sizes = self.site.sizes
        shapes = [
            FlashShape(
                batch=sizes.batch,
                q_len=sizes.q_len,
                kv_len=sizes.kv_len,
                heads=heads,
                kv_heads=heads,
                head_dim=self.site.head_dim,
                dtype=self.site.dtype.name,
            )
            for heads in sorted(set(sizes.heads))
        ]
        return [
            plan_kernel(shape, blocks, self.flash_options, masked=True, **kind)
            for shape in shapes
            for kind in self._kinds()
        ]

    def _kinds(self) -> Sequence[dict[str, bool]]:
        """The calls of one attention: alone, or the first, those between and the last of a ring."""
        if self.site.ring == 1:
            return ({},)
        between = [{"partials": True, "carried": True}] if self.site.ring > 2 else []
        return ({"partials": True}, *between, {"carried": True})

    def details(self) -> Sequence[str]:
        """Tile sizes, exponent, scheduler and VMEM."""
        from maxdiffusion.kernels.flash.vmem import vmem_bytes

        blocks, options = self.blocks, self.flash_options
        need = max(vmem_bytes(plan) for plan in self.kernel_plans(blocks))
        memory = f"VMEM {need / 2**20:.1f} MiB"
        return (
            f"blocks: q {blocks.block_q}, kv {blocks.block_kv}/{blocks.block_kv_compute}/"
            f"{blocks.block_kv_compute_in}, {blocks.heads_per_tile} heads a tile",
            f"exponent {options.exponent.value}, {options.scheduler.value} scheduler, {memory}",
        )

    def power(self, x: Array) -> Array:
        """The base of this kernel's partials to the power of x."""
        return self.flash_options.exponent.power(x)

    def attend(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Tokens:
        """Attention over all keys."""
        from maxdiffusion.kernels.flash import flash_attention

        return forward_only(flash_attention, q, k, v, **self._call(q, k, keys, shared))

    def partials(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Partials:
        """Unnormalised attention over some of the keys."""
        from maxdiffusion.kernels.flash import flash_attention_partials

        part = forward_only(flash_attention_partials, q, k, v, **self._call(q, k, keys, shared))
        return Partials(o=part.o, m=part.m, l=part.l)

    def carry_on(
        self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any, before: Partials | None
    ) -> Partials:
        """Unnormalised attention that starts from `before`: the kernel merges as it goes."""
        from maxdiffusion.kernels.flash import flash_attention_partials

        part = self._from(flash_attention_partials, before, q, k, v, keys, shared)
        return Partials(o=part.o, m=part.m, l=part.l)

    def finish(
        self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any, before: Partials | None
    ) -> Tokens:
        """Attention that starts from `before`: the kernel merges and normalises as it goes."""
        from maxdiffusion.kernels.flash import flash_attention

        return self._from(flash_attention, before, q, k, v, keys, shared)

    def _from(
        self,
        function: Callable[..., Any],
        before: Partials | None,
        q: Tokens,
        k: Tokens,
        v: Tokens,
        keys: KeyShard,
        shared: Any,
    ) -> Any:
        from maxdiffusion.kernels import flash

        settings = self._call(q, k, keys, shared)
        if before is None:
            return forward_only(function, q, k, v, **settings)

        def going_on(q: Tokens, k: Tokens, v: Tokens, sums: flash.Partials) -> Any:
            return function(q, k, v, before=sums, **settings)

        return forward_only(going_on, q, k, v, flash.Partials(*before))

    def _call(self, q: Tokens, k: Tokens, keys: KeyShard, shared: Any) -> dict[str, Any]:
        batch = k.shape[0]
        length = keys.length
        # Heads that became batch rows (to have a mask each) come one at a time.
        per_tile = math.gcd(self.blocks.heads_per_tile, q.shape[2])
        return {
            "blocks": replace(self.blocks, heads_per_tile=per_tile),
            "options": self.flash_options,
            "kv_len": None if length is None else jnp.full((batch,), length, jnp.int32),
            "kv_mask": keys.mask,
            "bounds": shared,
        }


@functools.lru_cache(maxsize=256)
def _largest_that_fits(kernel: FlashKernel) -> "FlashBlocks":
    """The tuned tiles, with block_q halved until the call fits the chip; the user's as they are."""
    from maxdiffusion.kernels.flash import UnsupportedFlash

    blocks = kernel.wished_blocks()
    if kernel.site.options.block_sizes.block_q is not None:
        return blocks
    while blocks.block_q > LANES:
        try:
            kernel.kernel_plans(blocks)
        except UnsupportedFlash:
            block_q = max(LANES, blocks.block_q // 2 // LANES * LANES)
            blocks = replace(blocks, block_q=block_q)
        else:
            break
    return blocks


class FixedMFlashKernel(FlashKernel):
    """Our Pallas kernel with a bound in place of the running maximum, where a head allows it."""

    softmax = "fixed-m"
    search_name = "flash fixed-m"

    def softmax_option(self) -> "Softmax":
        """How the kernel stabilises its softmax."""
        from maxdiffusion.kernels.flash import FixedM, Gate

        return FixedM(gate=Gate(self.site.options.fixed_m_gate))

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site; the sum over a whole ring must stay finite."""
        from maxdiffusion.kernels.flash.fixed_m import KEYS_BITS

        found = [*super().limits()]
        keys = self.site.sizes.kv_len * self.site.ring
        if keys > 2**KEYS_BITS:
            # One reason in the words of who writes a name, in place of that of a single call.
            found = [problem for problem in found if problem.name != "kv_len"]
            found.append(
                Problem(
                    name="kv_len",
                    value=keys,
                    rule=f"fixed-m softmax sums up to {2**KEYS_BITS} keys",
                    remedy="Use a name without fixed_m",
                )
            )
        return found

    def prepare_keys(
        self, k: Tokens, v: Tokens, keys: KeyShard, others: Shards
    ) -> tuple[Tokens, "KeyNorms"]:
        """Keys without the mean of all devices' keys, and norms that hold for all of them."""
        from maxdiffusion.kernels import flash

        attended = keys.valid(k.shape[0], k.shape[1])
        here = flash.key_total(k, attended)
        everywhere = flash.KeyTotal(*others.total(*here))
        k = flash.smooth_keys(k, attended, mean=everywhere.mean())
        return k, flash.KeyNorms(*others.largest(*flash.key_norms(k, v, attended)))

    def prepare_queries(self, q: Tokens, known: "KeyNorms") -> "FixedMBounds":
        """Bounds that hold for these queries and all keys; queries need no word from elsewhere."""
        from maxdiffusion.kernels import flash

        options = self.flash_options
        assert isinstance(options.softmax, flash.FixedM)
        return flash.gate_heads(
            flash.query_norm(q, exponent=options.exponent),
            known,
            dtype=self.site.dtype.name,
            keys=flash.Keys.SMOOTHED,
            gate=options.softmax.gate,
            exponent=options.exponent,
        )

    def details(self) -> Sequence[str]:
        """What every call of our kernel says, and whether the gate is open to all heads."""
        forced = self.site.options.fixed_m_gate == "forced"
        return (*super().details(), *(["fixed-m for every head: the gate is forced"] * forced))

    def fast_heads(self, shared: "FixedMBounds") -> Bool[Array, "B N"]:
        """The heads that passed the gate: their m is the bound, in every call."""
        return shared.fixed
