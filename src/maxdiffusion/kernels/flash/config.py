"""Options and array sizes of a flash attention call, and the rules about them."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.tpu import LANES

NO_SCORE = -0.5 * float(np.finfo(np.float32).max)
"""Shift of a query that has seen no key: finite, so that masked (-inf) minus it is never NaN."""


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
    """Selects the heads of the fixed-m path: those whose norms allow it, or (for tests) all."""

    MEASURED = "measured"
    FORCED = "forced"


class Product(enum.Enum):
    """Operands of Q.K^T: q and k as they are, or (lossy) as float8, see `fp8`."""

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
    `chip` names the row of `tpu.VMEM_BYTES` that the call must fit.
    """

    softmax: Softmax = Online()
    exponent: Exponent = Exponent.BASE_2
    scheduler: Scheduler = Scheduler.DEFAULT
    product: Product = Product.NATIVE
    interpret: bool | pltpu.InterpretParams = False
    chip: str = "tpu7x"


DTYPES = ("bfloat16", "float32")
MOST_RESIDENT_KEYS = 1024
"""Keys that stay in VMEM for all queries (see `resident`); more are read block by block."""
HEAD_DIM_MULTIPLE = 16
"""Head features are in sublanes, which come in 16s for bfloat16."""


@dataclass(frozen=True, kw_only=True)
class FlashShape:
    """Static sizes of q [B, S, N, H] against k, v [B, T, K, H]."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @classmethod
    def of(cls, q: Array, k: Array, v: Array) -> "FlashShape":
        """Returns the sizes of these arrays, or refuses arrays that do not go together."""
        problems = list(_array_problems(q, k, v))
        if problems:
            raise ProblemsFound(problems)
        batch, q_len, heads, head_dim = q.shape
        return cls(
            batch=batch,
            q_len=q_len,
            kv_len=k.shape[1],
            heads=heads,
            kv_heads=k.shape[2],
            head_dim=head_dim,
            dtype=dtype_name(q.dtype),
        )

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def keys_stay(self) -> bool:
        """True if all keys can stay in VMEM: few, in bfloat16, heads of whole lanes."""
        few = self.kv_len <= MOST_RESIDENT_KEYS
        return few and self.dtype == "bfloat16" and self.head_dim % LANES == 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element of q, k or v."""
        return jnp.dtype(self.dtype).itemsize


def dtype_name(dtype: DTypeLike) -> str:
    """Returns the plain name of a dtype."""
    return jnp.dtype(dtype).name


def shape_problems(shape: FlashShape, heads_per_tile: int) -> Sequence[Problem]:
    """Returns every rule that these sizes break with this number of heads per tile."""
    problems = []
    if shape.dtype not in DTYPES:
        problems.append(
            Problem(
                name="dtype",
                value=shape.dtype,
                rule=f"must be one of {', '.join(DTYPES)}",
                remedy="Cast q, k and v",
            )
        )
    for name in ("batch", "q_len", "kv_len", "heads", "kv_heads"):
        if vars(shape)[name] < 1:
            problems.append(
                Problem(
                    name=name,
                    value=vars(shape)[name],
                    rule="must be at least 1",
                )
            )
    if shape.head_dim < 1 or shape.head_dim % HEAD_DIM_MULTIPLE:
        problems.append(
            Problem(
                name="head_dim",
                value=shape.head_dim,
                rule=f"must be a positive multiple of {HEAD_DIM_MULTIPLE}",
                remedy="Pad the head features of q, k and v with zeros",
            )
        )
    return problems or _head_problems(shape, heads_per_tile)


def _head_problems(shape: FlashShape, per_tile: int) -> list[Problem]:
    if shape.heads % shape.kv_heads:
        return [
            Problem(
                name="heads",
                value=shape.heads,
                rule=f"must be a multiple of kv_heads={shape.kv_heads}",
                remedy="Repeat or drop key heads",
            )
        ]
    problems = []
    if shape.heads % per_tile:
        divisors = [d for d in range(1, shape.heads + 1) if shape.heads % d == 0]
        problems.append(
            Problem(
                name="heads_per_tile",
                value=per_tile,
                rule=f"must divide heads={shape.heads}",
                remedy=f"Use one of {divisors}",
            )
        )
    if per_tile % shape.group and shape.group % per_tile:
        problems.append(
            Problem(
                name="heads_per_tile",
                value=per_tile,
                rule=f"must divide, or be a multiple of, the {shape.group} heads per key head",
                remedy=f"Use 1 or {shape.group}",
            )
        )
    return problems


def _array_problems(q: Array, k: Array, v: Array) -> list[Problem]:
    if q.ndim != 4 or k.ndim != 4 or v.shape != k.shape:
        return [
            Problem(
                name="q, k, v",
                value=(q.shape, k.shape, v.shape),
                rule="must be [B, S, N, H], [B, T, K, H], [B, T, K, H]",
                remedy="Pass heads as the third dimension of all three",
            )
        ]
    problems = []
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        problems.append(
            Problem(
                name="q, k",
                value=(q.shape, k.shape),
                rule="must share the batch and the head features",
                remedy="Broadcast the batch or check the projections",
            )
        )
    if not q.dtype == k.dtype == v.dtype:
        problems.append(
            Problem(
                name="q, k, v",
                value=tuple(dtype_name(x.dtype) for x in (q, k, v)),
                rule="must have one dtype",
                remedy="Cast them to the compute dtype",
            )
        )
    return problems
