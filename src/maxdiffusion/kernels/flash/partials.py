"""What attention over some of the keys leaves behind, to go on from or to merge."""

from typing import NamedTuple

from jax import Array
from jaxtyping import Float


class Partials(NamedTuple):
    """Unnormalised attention over some of the keys, to be merged with that over others.

    o = sum_j b**(s_j - m) v_j and l = sum_j b**(s_j - m), with scores s and reference m in units
    of the options' exponent b. m need not be the largest score, but o and l share it, so two
    partials merge as m' = max(m1, m2), w_i = b**(m_i - m'), o' = w1 o1 + w2 o2, l' = w1 l1 + w2 l2.
    Heads with a fixed bound have m = that bound on every call that got the same `bounds`: their
    weights are 1, and plain addition does. Without attended keys l = 0, o = 0 and m is finite.
    """

    o: Float[Array, "B S N H"]
    m: Float[Array, "B S N"]
    l: Float[Array, "B S N"]  # noqa: E741
