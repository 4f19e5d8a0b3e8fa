"""jax's and tokamax's splash kernels on a device."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.kernel import DeviceKernel, GradientKernel, Tokens
from maxdiffusion.attention.on_device.limits import pallas_problems, splash_block_problems
from maxdiffusion.attention.on_device.site import KernelSite
from maxdiffusion.attention.tuned_blocks import splash_blocks
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.kernels.splash import SplashBlocks, splash_attention
from maxdiffusion.kernels.tokamax_splash import (
    TokamaxOptions,
    tokamax_attention,
    tokamax_gradients,
    tokamax_partials,
)
from maxdiffusion.runtime.problems import Problem


def tiles_in_words(blocks: SplashBlocks, site: KernelSite) -> str:
    """The tiles of a splash kernel, and roughly its VMEM: it is the library's to lay out."""
    vmem = blocks.vmem_bytes(site.head_dim, site.dtype.itemsize) / 2**20
    tiles = f"q {blocks.block_q}, kv {blocks.block_kv}/{blocks.block_kv_compute}"
    return f"blocks: {tiles}; VMEM about {vmem:.1f} MiB"


class JaxSplashKernel(DeviceKernel):
    """Blockwise softmax attention by jax's splash kernel."""

    title = "jax splash"
    differentiable = True

    @property
    def blocks(self) -> SplashBlocks:
        """The tile sizes: the user's, completed from the tuned table."""
        return splash_blocks(self.site, self.title)

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site."""
        return [*pallas_problems(self.title, self.site), *splash_block_problems(self.site)]

    def details(self) -> Sequence[str]:
        """The tile sizes and what they take of VMEM."""
        return (tiles_in_words(self.blocks, self.site),)

    def attend(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Tokens:
        """Attention over all keys."""
        return splash_attention(
            q,
            k,
            v,
            blocks=self.blocks,
            scale=self.site.scale,
            valid=keys.valid(k.shape[0], k.shape[1]),
            interpret=self.site.interpret,
        )


class TokamaxKernel(GradientKernel):
    """Blockwise softmax attention by the tokamax package's splash kernel."""

    title = "tokamax splash"
    differentiable = True

    @property
    def settings(self) -> TokamaxOptions:
        """Tiles, scale and exponent of every call."""
        options = self.site.options
        return TokamaxOptions(
            blocks=splash_blocks(self.site, self.title),
            scale=self.site.scale,
            use_base2_exp=options.use_base2_exp,
            use_experimental_scheduler=options.use_experimental_scheduler,
            interpret=self.site.interpret,
        )

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site."""
        return [*pallas_problems(self.title, self.site), *splash_block_problems(self.site)]

    def details(self) -> Sequence[str]:
        """The tile sizes, what they take of VMEM, and the exponent."""
        base = "2" if self.settings.use_base2_exp else "e"
        return (f"{tiles_in_words(self.settings.blocks, self.site)}; exponent base {base}",)

    def attend(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Tokens:
        """Attention over all keys."""
        return tokamax_attention(q, k, v, keys.valid(k.shape[0], k.shape[1]), self.settings)

    def partials(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Partials:
        """Attention over some of the keys, already divided: m is its log-sum and l is 1."""
        return tokamax_partials(q, k, v, keys.valid(k.shape[0], k.shape[1]), self.settings)

    def gradients(
        self,
        q: Tokens,
        k: Tokens,
        v: Tokens,
        keys: KeyShard,
        out: Tokens,
        log_sum: Float[Array, "B S N"],
        d_out: Tokens,
    ) -> tuple[Tokens, Tokens, Tokens]:
        """What these keys contribute to the gradient of q, and the gradients of k and v."""
        valid = keys.valid(k.shape[0], k.shape[1])
        return tokamax_gradients((q, k, v), valid, (out, log_sum, d_out), self.settings)
