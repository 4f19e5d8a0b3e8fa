"""The gradient of a ring: a second trip of the keys, on which their gradients travel along."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.keys import GlobalKeys
from maxdiffusion.attention.merge import output
from maxdiffusion.attention.on_device import GradientKernel

if TYPE_CHECKING:
    from maxdiffusion.attention.exchanges.ring import Ring

Tokens = Float[Array, "B S N H"]
Mask = Bool[Array, "B T"]
Saved = tuple[Tokens, Tokens, Tokens, Mask | None, Tokens, Float[Array, "B S N"]]


def differentiable_ring(
    ring: "Ring", kernel: GradientKernel, keys: GlobalKeys
) -> Callable[[Tokens, Tokens, Tokens, Mask | None], Tokens]:
    """The ring's attention with its own gradient, which keeps only the output and its log-sum."""

    def forward(q: Tokens, k: Tokens, v: Tokens, mask: Mask | None) -> tuple[Tokens, Saved]:
        total = ring.partials(q, k, v, keys.with_mask(mask), kernel)
        out = output(total, q.dtype)
        log_sum = total.m + jnp.log(total.l)
        return out, (q, k, v, mask, out, log_sum)

    def backward(saved: Saved, d_out: Tokens) -> tuple[Tokens, Tokens, Tokens, None]:
        q, k, v, mask, out, log_sum = saved
        masked = keys.with_mask(mask)
        d_q = jnp.zeros(q.shape, jnp.float32)
        d_k, d_v = (jnp.zeros(part.shape, jnp.float32) for part in (k, v))
        for hop in range(ring.degree):
            following = ring.passed_on(k, v) if hop < ring.degree - 1 else (k, v)
            arrived = masked.shard(ring.source(hop), ring.degree)
            with jax.named_scope("kernel"):
                more = kernel.gradients(q, k, v, arrived, out, log_sum, d_out)
            d_q, d_k, d_v = (
                total + part.astype(jnp.float32)
                for total, part in zip((d_q, d_k, d_v), more, strict=True)
            )
            # The gradients go one hop further than the keys: after `degree` hops they are at home.
            d_k, d_v = ring.passed_on(d_k, d_v)
            k, v = following
        return d_q.astype(q.dtype), d_k.astype(q.dtype), d_v.astype(q.dtype), None

    @jax.custom_vjp
    def attend(q: Tokens, k: Tokens, v: Tokens, mask: Mask | None) -> Tokens:
        return forward(q, k, v, mask)[0]

    attend.defvjp(forward, backward)
    return attend
