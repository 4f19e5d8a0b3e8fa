"""The dense jnp attention as a kernel on a device."""

from typing import Any

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.kernel import DeviceKernel, Tokens
from maxdiffusion.kernels.reference import Partials, chunked_attention, reference_partials


class DenseKernel(DeviceKernel):
    """Scores, float32 softmax and output as XLA einsums, a chunk of queries at a time."""

    title = "dense einsum"
    softmax = "float32"
    differentiable = True

    def attend(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Tokens:
        """Attention over all keys."""
        valid = keys.valid(k.shape[0], k.shape[1])
        return chunked_attention(q, k, v, scale=self.site.scale, valid=valid)

    def partials(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Partials:
        """Unnormalised attention over some of the keys."""
        valid = keys.valid(k.shape[0], k.shape[1])
        return reference_partials(q, k, v, scale=self.site.scale, valid=valid)
