"""How the flash kernel stabilises its softmax, which exponential it uses and how it is run."""

import enum
import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu


class Exponent(enum.Enum):
    """The base of the exponential; scores, maxima and bounds are in its units."""

    BASE_2 = "base 2"
    NATURAL = "natural"

    @property
    def per_nat(self) -> float:
        """Units of this exponent in one natural unit: b ** (x * per_nat) == e ** x."""
        return math.log2(math.e) if self is Exponent.BASE_2 else 1.0

    @property
    def per_bit(self) -> float:
        """Units of this exponent in one power of two: b ** (x * per_bit) == 2 ** x."""
        return 1.0 if self is Exponent.BASE_2 else math.log(2.0)

    def power(self, x: Array) -> Array:
        """Returns base ** x."""
        return jnp.exp2(x) if self is Exponent.BASE_2 else jnp.exp(x)


class Scheduler(enum.Enum):
    """The bundle scheduler of the TPU compiler: its usual one, or the linear-programming one."""

    DEFAULT = "default"
    LINEAR_PROGRAM = "linear program"


class Gate(enum.Enum):
    """Which heads take the fixed-m path: those whose norms allow it, or (for tests) all."""

    MEASURED = "measured"
    FORCED = "forced"


class Product(enum.Enum):
    """What Q.K^T multiplies: q and k as they are, or (lossy) as float8, see `fp8`."""

    NATIVE = "as given"
    FP8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class Online:
    """Softmax against the running maximum: exact for every head."""


@dataclass(frozen=True, kw_only=True)
class FixedM:
    """Softmax against a bound (see `fixed_m`); heads outside the gate run online."""

    gate: Gate = Gate.MEASURED


Softmax = Online | FixedM


@dataclass(frozen=True, kw_only=True)
class FlashOptions:
    """Everything about a kernel call that is neither an array nor a size.

    `interpret` is handed to Pallas: False compiles for the TPU, True runs anywhere as plain XLA,
    `pltpu.InterpretParams(...)` simulates the TPU's memories (and can look for races).
    `chip` names the row of `vmem.CHIPS` that the call must fit.
    """

    softmax: Softmax = Online()
    exponent: Exponent = Exponent.BASE_2
    scheduler: Scheduler = Scheduler.DEFAULT
    product: Product = Product.NATIVE
    interpret: bool | pltpu.InterpretParams = False
    chip: str = "tpu7x"
