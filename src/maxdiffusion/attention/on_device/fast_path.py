"""How many heads a fixed-m softmax serves without its fallback."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.kernel import DeviceKernel, Tokens
from maxdiffusion.attention.on_device.site import Alone


def count_fast_heads(
    kernel: DeviceKernel,
    true_length: int,
    q: Tokens,
    k: Tokens,
    v: Tokens,
    mask: Bool[Array, "B T"] | None,
) -> Int[Array, ""]:
    """The (batch, head) pairs of global arrays that pass the kernel's gate."""
    length = true_length if true_length < k.shape[1] else None
    _, known = kernel.prepare_keys(k, v, KeyShard(length=length, mask=mask), Alone())
    fast = kernel.fast_heads(kernel.prepare_queries(q, known))
    return jnp.zeros((), jnp.int32) if fast is None else jnp.sum(fast, dtype=jnp.int32)
