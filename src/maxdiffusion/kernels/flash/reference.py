"""The same attention as dense float32 arithmetic: what the kernel is compared with."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from maxdiffusion.kernels.flash.inputs import attended_keys
from maxdiffusion.kernels.flash.options import Exponent
from maxdiffusion.kernels.flash.partials import Partials
from maxdiffusion.kernels.flash.step import NO_SCORE


def reference_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    kv_len: Int[Array, "B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q k^T / sqrt(H)) v in q's dtype, zeros for queries without keys."""
    o, _, l = reference_partials(q, k, v, kv_len=kv_len, kv_mask=kv_mask)  # noqa: E741
    return (o * jnp.where(l > 0, 1.0 / l, 0.0)[..., None]).astype(q.dtype)


def reference_partials(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    exponent: Exponent = Exponent.BASE_2,
    kv_len: Int[Array, "B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
) -> Partials:
    """Returns the unnormalised output, the largest score of every query and the sum of powers."""
    group, exact = q.shape[2] // k.shape[2], lax.Precision.HIGHEST
    k, v = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (k, v))
    scaled = q.astype(jnp.float32) * (exponent.per_nat * q.shape[3] ** -0.5)
    scores = jnp.einsum("BSNH,BTNH->BSNT", scaled, k, precision=exact)
    attended = attended_keys(kv_len, kv_mask, k.shape[1])
    if attended is not None:
        scores = jnp.where(attended[:, None, None], scores, -jnp.inf)
        v = jnp.where(attended[:, :, None, None], v, 0.0)
    m = jnp.maximum(jnp.max(scores, axis=3), NO_SCORE)
    p = exponent.power(scores - m[..., None])
    return Partials(
        o=jnp.einsum("BSNT,BTNH->BSNH", p, v, precision=exact), m=m, l=jnp.sum(p, axis=3)
    )
