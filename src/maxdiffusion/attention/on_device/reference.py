"""The dense jnp attention as a kernel on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Array, Float

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.site import KernelSite, UnpreparedKernel
from maxdiffusion.kernels.reference import Partials, chunked_attention, reference_partials
from maxdiffusion.runtime.problems import Problem


@dataclass(frozen=True)
class DenseKernel(UnpreparedKernel):
    """Scores, float32 softmax and output as XLA einsums, a chunk of queries at a time."""

    site: KernelSite

    @property
    def title(self) -> str:
        """The kernel's name in a plan."""
        return "dense einsum, float32 softmax"

    def limits(self) -> Sequence[Problem]:
        """Nothing: any size runs anywhere."""
        return ()

    def details(self) -> Sequence[str]:
        """Nothing beyond the title."""
        return ()

    def attend(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: KeyShard,
        shared: None = None,
    ) -> Float[Array, "B S N H"]:
        """Attention over all keys."""
        valid = keys.valid(k.shape[0], k.shape[1])
        return chunked_attention(q, k, v, scale=self.site.scale, valid=valid)

    def partials(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: KeyShard,
        shared: None = None,
    ) -> Partials:
        """Unnormalised attention over some of the keys."""
        valid = keys.valid(k.shape[0], k.shape[1])
        return reference_partials(q, k, v, scale=self.site.scale, valid=valid)
