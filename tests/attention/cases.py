"""Attention problems on virtual devices, and the error that their dtype allows."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxdiffusion.attention import AttentionOptions, AttentionPlan, AttentionProblem
from maxdiffusion.kernels.reference import dense_attention
from maxdiffusion.mesh import AXES

# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-9}
# Interpreted kernels are large programs; without LLVM's optimisations they compile twice as fast.
QUICK = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem on one mesh; `padded` hands over arrays that the caller has padded already."""

    label: str
    mesh: tuple[int, int, int, int, int]
    batch: int = 1
    length: int = 48
    heads: int = 6
    head_dim: int = 32
    dtype: str = "float32"
    masked: bool = False
    padded: bool = True
    options: AttentionOptions = field(default_factory=AttentionOptions)

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            batch=self.batch,
            q_len=self.length,
            kv_len=self.length,
            heads=self.heads,
            head_dim=self.head_dim,
            dtype=np.dtype(self.dtype),
        )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """True arrays of a case, on the host."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None

    def expected(self, scale: float) -> np.ndarray:
        """Dense attention in float32 over the same (already rounded) numbers."""
        q, k, v = (jnp.asarray(x, jnp.float32) for x in (self.q, self.k, self.v))
        mask = None if self.mask is None else jnp.asarray(self.mask)
        return np.asarray(dense_attention(q, k, v, scale=scale, valid=mask))


def mesh_of(shape: tuple[int, ...], *, explicit: bool = False) -> Mesh:
    count = math.prod(shape)
    if explicit:
        return jax.make_mesh(shape, AXES, devices=jax.devices()[:count])
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), AXES)


def inputs_of(case: Case, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    shape = (case.batch, case.length, case.heads, case.head_dim)
    q, k, v = (rng.standard_normal(shape).astype(jnp.dtype(case.dtype)) for _ in range(3))
    mask = rng.random((case.batch, case.length)) < 0.7 if case.masked else None
    if mask is not None:
        mask[:, 0] = True
    return Inputs(q=q, k=k, v=v, mask=mask)


def placed(plan: AttentionPlan, inputs: Inputs, *, padded: bool) -> list[jax.Array | None]:
    """The arrays as a model would hand them over: padded once and split over the mesh."""
    mask = None if inputs.mask is None else jnp.asarray(inputs.mask)
    if not padded:
        return [*(jnp.asarray(x) for x in (inputs.q, inputs.k, inputs.v)), mask]

    def pad(x: np.ndarray, length: int) -> np.ndarray:
        # Padding that is loud: if it is ever read as a key, the result is far off.
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, length - x.shape[1])
        return np.pad(x, widths, constant_values=7)

    arrays = [
        jax.device_put(pad(x, length), NamedSharding(plan.mesh, spec))
        for x, length, spec in (
            (inputs.q, plan.padded_q_len, plan.problem.q_spec),
            (inputs.k, plan.padded_kv_len, plan.problem.kv_spec),
            (inputs.v, plan.padded_kv_len, plan.problem.kv_spec),
        )
    ]
    if mask is None:
        return [*arrays, None]
    full = np.ones((mask.shape[0], plan.padded_kv_len), bool)
    full[:, : mask.shape[1]] = mask
    return [*arrays, jax.device_put(full, NamedSharding(plan.mesh, plan.problem.mask_spec))]


def compiled(plan: AttentionPlan, arrays: list) -> jax.stages.Compiled:
    with jax.set_mesh(plan.mesh):
        return jax.jit(plan).lower(*arrays).compile(compiler_options=QUICK)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    difference = np.asarray(got, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def allowed_error(case: Case, inputs: Inputs, *, fixed_m: bool) -> float:
    """Relative L2 error that the roundings of an exact algorithm explain.

    float32 everywhere: a score is a sum of H products and an output a sum of T, whose roundings
    add up like random walks; an exponent x carries an error of |x| roundoffs, and |x| reaches the
    largest score (in bits), plus the fixed reference's 88 under fixed-m.
    bfloat16 besides: q is scaled (or k smoothed) and rounded, p is rounded, the output is rounded:
    four roundings of numbers whose errors pass to the output undiminished for scores of unit
    variance.
    """
    norms = [np.linalg.norm(x.astype(np.float32), axis=-1).max() for x in (inputs.q, inputs.k)]
    exponent = norms[0] * norms[1] * case.problem.scale * math.log2(math.e)
    exponent += 88 if fixed_m else 0
    steps = math.sqrt(case.head_dim) + math.sqrt(case.length) + exponent + 4
    bound = ROUNDOFF["float32"] * steps
    return bound + 4 * ROUNDOFF["bfloat16"] if case.dtype == "bfloat16" else bound


def fp8_error(inputs: Inputs) -> float:
    """Relative L2 error that queries of float8 explain, for scores of about unit variance.

    A query's element is off by at most 2**-4 of itself, evenly spread, so by 2**-4 / sqrt(3) in the
    root mean square at most; the error of a score, in nats, is that times the root mean square of
    q k / sqrt(H), and passes on to the probabilities, whose outputs differ by it relatively.
    """
    sizes = [np.sqrt(np.mean(np.square(x.astype(np.float64)))) for x in (inputs.q, inputs.k)]
    return 2.0**-4 / math.sqrt(3) * sizes[0] * sizes[1]
