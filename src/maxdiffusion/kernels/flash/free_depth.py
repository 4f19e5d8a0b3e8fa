"""Adds a value per query to K Q^T in the depth of the MXU that a head leaves free: at no cost.

A head of 128 features fills half of an MXU's depth of 256. The other half multiplies zeros, unless
it is given something to multiply:

    [ K  1 1 1 0 ... ] [ Q^T       ]
                       [ hi        ]  =  K Q^T + (hi + mid + lo)  =  K Q^T + x
                       [ mid       ]
                       [ lo        ]
                       [ 0 ...     ]

x is float32, one value per query: minus the shift of its exponentials. Its 24 bits are exactly
three terms of 8 bits, which bfloat16 holds, and the MXU adds up in float32. The right half of the
keys is the same constant register for all of them, so nothing is loaded.

Without the subtraction a score takes 3.5 VALU operations instead of 4.5 (exponential, sum, maximum,
half a rounding to bfloat16), and a VPU has 4 slots a cycle. Weights can then be rounded as soon as
they are made, at the rate of the MXUs, and are stored as bfloat16. With the subtraction they are
spilled as float32, and rounded when P.V reads them.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from maxdiffusion.kernels.tpu import BF16_SUBLANES, LANES

TERMS = 3
"""Terms of bfloat16 that hold a float32."""
_HIGH_BITS = -(2**16)
"""Sign, exponent and the first 8 bits of a float32, those of a bfloat16."""


def bf16_terms(x: Array) -> Sequence[Array]:
    """Returns float32 terms that bfloat16 holds exactly and that add up to x, largest first."""
    terms = []
    for _ in range(TERMS - 1):
        # No rounding to bfloat16 and back, which compilers may take for the identity.
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_HIGH_BITS)
        terms.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - terms[-1]
    return [*terms, x]


def with_terms(columns: Array, x: Array) -> Array:
    """Returns [H + 128, S]: columns [H, S] with the terms of x [1, S] below, and zeros."""
    shape = (BF16_SUBLANES, columns.shape[1])
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    below = jnp.zeros(shape, jnp.float32)
    for index, term in enumerate(bf16_terms(x)):
        below = jnp.where(row == index, jnp.broadcast_to(term, shape), below)
    zeros = jnp.zeros((LANES - BF16_SUBLANES, shape[1]), columns.dtype)
    return jnp.concatenate([columns, below.astype(columns.dtype), zeros], axis=0)


def with_ones(rows: Array) -> Array:
    """Returns [T, H + 128]: rows [T, H], whose products take up the terms of `with_terms`."""
    lane = lax.broadcasted_iota(jnp.int32, (BF16_SUBLANES, LANES), 1)
    ones = jnp.where(lane < TERMS, 1.0, 0.0).astype(rows.dtype)
    return jnp.concatenate([rows, jnp.concatenate([ones] * (len(rows) // BF16_SUBLANES))], axis=1)
