"""Linear maps whose weights are stored in 8 bits, with one scale for each output feature.

    stored       kernel ~ q * scale            q in int8 or float8_e4m3fn, scale in float32
    NATIVE       (x @ q) * scale               in the dtype of the model, which holds q exactly
    PER_TOKEN    (x_q @ q) * x_scale * scale   both operands in 8 bits, one scale for each token,
                                               for chips whose MXUs multiply them faster

Weights are rounded to the nearest of 255 steps (int8) or to 3 bits behind the leading one (float8):
lossy, and off unless a config names a format. Imported only then.
"""

import math
from dataclasses import dataclass
from enum import Enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Num

from maxdiffusion.models.wan.layers import product

INT8, FLOAT8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)
LARGEST = {INT8: 127.0, FLOAT8: 448.0}
"""The largest value of each format; int8 leaves out -128, so that it is symmetric."""


_BINADES = 100  # float32 and bfloat16 hold more on either side of 1
_NOTHING = 2.0**-_BINADES  # what is no larger becomes zero: its scale would not be a normal number


class Activations(Enum):
    """Names the dtypes in which activations enter a product with 8-bit weights."""

    NATIVE = "activations not quantized"
    PER_TOKEN = "activations quantized per token"


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """An 8-bit format of weights, and of the activations that they are multiplied with."""

    dtype: jnp.dtype
    activations: Activations = Activations.NATIVE

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST:
            known = ", ".join(map(str, LARGEST))
            raise ValueError(f"dtype={self.dtype}: 8-bit weights are one of {known}.")

    @property
    def largest(self) -> float:
        """The largest value of the format."""
        return LARGEST[self.dtype]

    @property
    def rounds_activations(self) -> bool:
        """True if products round their activations to 8 bits."""
        return self.activations is Activations.PER_TOKEN

    def describe(self) -> str:
        """Returns a few words for plans and reports."""
        return f"{self.dtype} weights of blocks, {self.activations.value}"

    def quantized(
        self, kernel: Float[Array, "*L I O"]
    ) -> tuple[Num[Array, "*L I O"], Float[Array, "*L O"]]:
        """Returns the 8-bit values of a kernel, and the scale of every output feature.

        The largest weight of a feature becomes the largest value of the format. In int8 a weight is
        at most half a step, scale / 2, from what is stored.
        """
        wide = kernel.astype(jnp.float32)
        most = jnp.max(jnp.abs(wide), axis=-2, keepdims=True)
        scale = jnp.where(most > _NOTHING, most / self.largest, 1.0)
        return self._rounded(wide / scale), scale[..., 0, :]

    def product(
        self,
        x: Float[Array, "*dims I"],
        values: Num[Array, "I O"],
        scale: Float[Array, " O"],
        *,
        dtype: jnp.dtype,
    ) -> Float[Array, "*dims O"]:
        """Returns x @ (values * scale), summed in float32."""
        if self.rounds_activations:
            total = self._eight_bit_product(x, values)
        else:
            total = product(x, values.astype(dtype), dtype=dtype)
        return total * jnp.broadcast_to(scale, total.shape)

    def _eight_bit_product(
        self, x: Float[Array, "*dims I"], values: Num[Array, "I O"]
    ) -> Float[Array, "*dims O"]:
        """Returns x @ values, with every row of x rounded to 8 bits."""
        rows, scale = self._rows(x)
        # int32 holds the sum of 133,000 products of int8.
        summed = jnp.int32 if self.dtype == INT8 else jnp.float32
        contracted = (((rows.ndim - 1,), (0,)), ((), ()))
        total = jax.lax.dot_general(rows, values, contracted, preferred_element_type=summed)
        return total.astype(jnp.float32) * scale

    def _rows(
        self, x: Float[Array, "*dims I"]
    ) -> tuple[Num[Array, "*dims I"], Float[Array, "*dims 1"]]:
        """Returns the 8-bit values of activations, and the scale of every token."""
        most = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32)
        if self.dtype == INT8:
            inverse = jnp.where(most > _NOTHING, self.largest / most, 0.0)
            return self._rounded(x.astype(jnp.float32) * inverse), most / self.largest
        # A power of two scales bfloat16 without rounding; a float8 is as precise in every binade.
        exponent = _binades_below(most, self.largest)
        inverse = jnp.ldexp(jnp.ones_like(most), exponent)
        rows = self._rounded(x * inverse.astype(x.dtype))
        return rows, jnp.ldexp(jnp.ones_like(most), -exponent)

    def _rounded(self, values: Float[Array, "*dims"]) -> Num[Array, "*dims"]:
        """Returns values in 8 bits; they exceed `largest` by a rounding error at most."""
        return (jnp.rint(values) if self.dtype == INT8 else values).astype(self.dtype)


def _binades_below(values: Float[Array, "*dims"], largest: float) -> Int32[Array, "*dims"]:
    """Returns the exponent of the power of two that brings each value closest below `largest`."""
    fraction, exponent = jnp.frexp(values)
    fraction_of_largest, exponent_of_largest = math.frexp(largest)
    binades = exponent_of_largest - exponent - (fraction > fraction_of_largest).astype(jnp.int32)
    return jnp.clip(binades, -_BINADES, _BINADES)
