"""Exponentials in the type that P.V takes them in, for scores that float8 has blurred already.

Two of them fit into the place of a float32, so that everything after the subtraction is half as
much work, and the MXUs need not wait for it. A score x below the reference is off by 2**-9 |x|.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from maxdiffusion.kernels.flash.fp8 import inverse
from maxdiffusion.kernels.flash.step import NO_SCORE, SUBLANES, Step, Weights, fold

ROWS = 2 * SUBLANES
"""Rows of a whole register of bfloat16."""
ADDENDS = 8
"""Exponentials that are added up before their sum is widened: three roundings of 2**-9 at most."""


def coarse(step: Step, products: Array, head: int, columns: Any) -> Weights:
    """Returns exponentials in the type of the values; scales are powers of two, and cost nothing.

    The subtraction is in float32: products may be large, and what counts is near the reference.
    """
    dtype, reference = step.plan.dtype, step.refs.state.top[head, :, columns]
    scale = step.refs.q_scale[head, :, columns]
    level = jnp.maximum(reference * inverse(scale), NO_SCORE)
    x = (products - level).astype(dtype) * scale.astype(dtype)
    p = step.power(x)
    largest = jnp.max(x.reshape(-1, ROWS, x.shape[1]), axis=0).astype(jnp.float32)
    return Weights(p=p, total=_total(p), largest=fold(largest, jnp.max) + reference)


def _total(p: Array) -> Array:
    addends = p.reshape(-1, ADDENDS, ROWS, p.shape[1])
    parts = [addends[:, index] for index in range(ADDENDS)]
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return fold(parts[0].astype(jnp.float32).reshape(-1, p.shape[1]), jnp.sum)
