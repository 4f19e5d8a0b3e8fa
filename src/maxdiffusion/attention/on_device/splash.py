"""jax's splash kernel on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Array, Float

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.limits import pallas_problems, splash_block_problems
from maxdiffusion.attention.on_device.site import KernelSite, UnpreparedKernel
from maxdiffusion.attention.tuned_blocks import splash_blocks
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.kernels.splash import SplashBlocks, splash_attention
from maxdiffusion.runtime.problems import Problem


@dataclass(frozen=True)
class JaxSplashKernel(UnpreparedKernel):
    """Blockwise softmax attention by jax's splash kernel; differentiable."""

    site: KernelSite

    @property
    def title(self) -> str:
        """The kernel's name in a plan."""
        return "jax splash"

    @property
    def blocks(self) -> SplashBlocks:
        """The tile sizes: the user's, completed from the tuned table."""
        return splash_blocks(self.site)

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site."""
        return [*pallas_problems(self.title, self.site), *splash_block_problems(self.site)]

    def details(self) -> Sequence[str]:
        """The tile sizes."""
        blocks = self.blocks
        return (f"blocks q {blocks.block_q}, kv {blocks.block_kv}/{blocks.block_kv_compute}",)

    def attend(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: KeyShard,
        shared: None = None,
    ) -> Float[Array, "B S N H"]:
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

    def partials(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: KeyShard,
        shared: None = None,
    ) -> Partials:
        """Not offered: no mode rotates keys under this kernel."""
        raise NotImplementedError("jax splash runs over all keys at once; rings use other kernels")
