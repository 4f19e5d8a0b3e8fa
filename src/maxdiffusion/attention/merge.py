"""Attention over all keys from attentions over some of them, in float32.

With scores s, a partial over a set of keys is o = sum_j b**(s_j - m) v_j and l = sum_j b**(s_j -
m). Two of them become one by moving both to the larger reference: w_i = b**(m_i - max(m_1, m_2)), o
= w_1 o_1 + w_2 o_2 and l = w_1 l_1 + w_2 l_2. Where both used one reference the weights are 1, and
adding is all there is.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.kernels.reference import Partials, normalise

Power = Callable[[Array], Array]


def merge(first: Partials, second: Partials, power: Power) -> Partials:
    """The partial over the keys of both, exact for any references."""
    m = jnp.maximum(first.m, second.m)
    w1, w2 = power(first.m - m), power(second.m - m)
    return Partials(
        o=w1[..., None] * first.o + w2[..., None] * second.o,
        m=m,
        l=w1 * first.l + w2 * second.l,
    )


def add(first: Partials, second: Partials) -> Partials:
    """The partial over the keys of both where every row has one reference in both."""
    return Partials(o=first.o + second.o, m=first.m, l=first.l + second.l)


@jax.named_scope("merge")
def merge_knowing(
    first: Partials, second: Partials, power: Power, one_reference: Bool[Array, ""] | None
) -> Partials:
    """`add` where `one_reference` says that it is enough, `merge` otherwise."""
    if one_reference is None:
        return merge(first, second, power)
    return jax.lax.cond(one_reference, add, lambda a, b: merge(a, b, power), first, second)


@jax.named_scope("merge")
def output(partial: Partials, dtype: jnp.dtype) -> Float[Array, "B S N H"]:
    """The attention that a partial over all keys stands for."""
    return normalise(partial.o, partial.l).astype(dtype)
