"""Backends that run the splash kernels of jax and of tokamax."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from maxdiffusion.attention.backends.base import (
    ATTENTION_OUT,
    AnyBackend,
    Delta,
    Keys,
    LogSum,
    Precision,
    Queries,
    StatelessBackend,
    check_pallas,
)
from maxdiffusion.attention.options import SPLASH_FORWARD, splash_blocks
from maxdiffusion.attention.problem import LocalKVMask
from maxdiffusion.errors import Collector
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.kernels.splash import (
    TokamaxOptions,
    splash_attention,
    splash_vmem_bytes,
    tokamax_attention,
    tokamax_gradients,
    tokamax_partials,
)
from maxdiffusion.kernels.tpu import MIB, BlockSizes


def check_splash(backend: AnyBackend) -> None:
    """Raises `ProblemsFound` if a splash kernel cannot run with this device and these blocks."""
    problems = Collector()
    with problems:
        check_pallas(backend)
    with problems:
        backend.options.block_sizes.check_splash()
    problems.raise_if_any()


NO_SEPARATE_BACKWARD = (
    "flash_block_sizes.use_fused_bwd_kernel=false has no effect: tokamax has only the fused "
    "backward kernel"
)


def describe_blocks(blocks: BlockSizes, backend: AnyBackend) -> str:
    """Returns the block sizes and a rough VMEM figure: the library lays VMEM out."""
    sizes = {"head_dim": backend.problem.head_dim, "itemsize": backend.problem.dtype.itemsize}
    vmem = splash_vmem_bytes(blocks, **sizes)
    tiles = f"q {blocks.block_q}, kv {blocks.block_kv}/{blocks.block_kv_compute}"
    return f"blocks: {tiles}; VMEM about {vmem / MIB:.1f} MiB"


@final
@dataclass(frozen=True, kw_only=True)
class JaxSplashBackend(StatelessBackend):
    """Blockwise softmax attention by jax's splash kernel."""

    title = "jax splash"
    gradient_precisions = (Precision.NATIVE,)

    @property
    def names_residuals(self) -> bool:
        """Returns True: the kernel has one name for its output and its log-sums."""
        return True

    @property
    def searched_sizes(self) -> tuple[str, ...]:
        """Block sizes that a tile search sets."""
        return SPLASH_FORWARD

    @property
    def blocks(self) -> BlockSizes:
        """Block sizes: the user's, completed from the tuned table."""
        return splash_blocks(self.problem, self.options, self.search_name)

    def check(self) -> None:
        """Raises `ProblemsFound` if this kernel cannot run its problem."""
        check_splash(self)

    def details(self) -> Sequence[str]:
        """Returns block sizes and VMEM."""
        return (describe_blocks(self.blocks, self),)

    def attend(self, q: Queries, k: Keys, v: Keys, kv_mask: LocalKVMask, stats: None) -> Queries:
        """Returns attention over all keys."""
        return splash_attention(
            q,
            k,
            v,
            blocks=self.blocks,
            scale=self.problem.scale,
            valid=kv_mask.valid(k.shape[0], k.shape[1]),
            interpret=self.interpret,
            saved_as=ATTENTION_OUT,
        )


@final
@dataclass(frozen=True, kw_only=True)
class TokamaxSplashBackend(StatelessBackend):
    """Blockwise softmax attention by the tokamax package's splash kernel."""

    title = "tokamax splash"
    gradient_precisions = (Precision.NATIVE,)

    @property
    def searched_sizes(self) -> tuple[str, ...]:
        """Block sizes that a tile search sets."""
        return SPLASH_FORWARD

    @property
    def blocks(self) -> BlockSizes:
        """Block sizes: the user's, completed from the tuned table."""
        return splash_blocks(self.problem, self.options, self.search_name)

    @property
    def has_shard_gradients(self) -> bool:
        """Returns True: tokamax's backward pass takes the log-sum of all keys."""
        return True

    @property
    def settings(self) -> TokamaxOptions:
        """Block sizes, scale and exponent of every call."""
        return TokamaxOptions(
            blocks=self.blocks,
            scale=self.problem.scale,
            use_base2_exp=self.options.use_base2_exp,
            use_experimental_scheduler=self.options.use_experimental_scheduler,
            interpret=self.interpret,
        )

    def check(self) -> None:
        """Raises `ProblemsFound` if this kernel cannot run its problem."""
        check_splash(self)

    def details(self) -> Sequence[str]:
        """Returns block sizes, VMEM and exponent, and a note on a size that has no effect."""
        base = "2" if self.options.use_base2_exp else "e"
        sizes = f"{describe_blocks(self.blocks, self)}; exponent base {base}"
        return (sizes, NO_SEPARATE_BACKWARD) if self._asks_for_separate_backward else (sizes,)

    @property
    def _asks_for_separate_backward(self) -> bool:
        return self.options.block_sizes.use_fused_bwd_kernel is False

    def attend(self, q: Queries, k: Keys, v: Keys, kv_mask: LocalKVMask, stats: None) -> Queries:
        """Returns attention over all keys."""
        return tokamax_attention(q, k, v, kv_mask.valid(k.shape[0], k.shape[1]), self.settings)

    def partials(self, q: Queries, k: Keys, v: Keys, kv_mask: LocalKVMask, stats: None) -> Partials:
        """Returns normalised attention over some of the keys: m is its log-sum and l is 1."""
        return tokamax_partials(q, k, v, kv_mask.valid(k.shape[0], k.shape[1]), self.settings)

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
        """Returns what these keys add to the gradient of q, and what q adds to those of k and v."""
        valid = kv_mask.valid(k.shape[0], k.shape[1])
        return tokamax_gradients((q, k, v), valid, (log_sum, delta, d_out), self.settings)
