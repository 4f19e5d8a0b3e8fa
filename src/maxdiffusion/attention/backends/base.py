"""Attention backends: one device, [B, S, N, H] arrays, masks of the local keys.

A backend is a value: the local problem, the user's options, and how softmax and products are
computed. Concrete backends are final.

Backends that attend shard by shard merge partials in float32. With scores s, a partial over a set
of keys is o = sum_j b**(s_j - m) v_j and l = sum_j b**(s_j - m). Two of them merge at the larger
shift: w_i = b**(m_i - max(m_1, m_2)), o = w_1 o_1 + w_2 o_2 and l = w_1 l_1 + w_2 l_2. If both used
one shift the weights are 1, and addition is enough.
"""

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, final

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import LocalKVMask, LocalProblem
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.reference import Partials, normalise
from maxdiffusion.kernels.tpu import BlockSizes

Power = Callable[[Array], Array]


def merge(first: Partials, second: Partials, power: Power) -> Partials:
    """Returns the partial over the keys of both, exact for any shifts."""
    m = jnp.maximum(first.m, second.m)
    w1, w2 = power(first.m - m), power(second.m - m)
    return Partials(
        o=w1[..., None] * first.o + w2[..., None] * second.o,
        m=m,
        l=w1 * first.l + w2 * second.l,
    )


def add(first: Partials, second: Partials) -> Partials:
    """Returns the partial over the keys of both if every row has the same shift in both."""
    return Partials(o=first.o + second.o, m=first.m, l=first.l + second.l)


@jax.named_scope("merge")
def merge_partials(
    first: Partials, second: Partials, power: Power, same_shift: Bool[Array, ""] | None
) -> Partials:
    """Returns `add` of both if `same_shift` is True, `merge` of both otherwise."""
    if same_shift is None:
        return merge(first, second, power)
    merged: Partials = jax.lax.cond(same_shift, add, lambda a, b: merge(a, b, power), first, second)
    return merged


@jax.named_scope("merge")
def output(partial: Partials, dtype: DTypeLike) -> Float[Array, "B S N H"]:
    """Returns the attention of a partial over all keys."""
    return normalise(partial.o, partial.l).astype(dtype)


Queries = Float[Array, "B S N H"]
Keys = Float[Array, "B T N H"]
LogSum = Float[Array, "B S N"]
Delta = Float[Array, "B S N"]
PreparedKeys = Shaped[Array, "B _ N _"]
"""Keys as `preprocess_kv` returns them; a lossy product may pack them."""
Stats = TypeVar("Stats")
ATTENTION_OUT, ATTENTION_LOG_SUM = "attention_out", "attention_log_sum"
"""Names under which a rematerialisation policy finds the results of the kernels.

A backward pass that keeps both runs no forward kernel and none of its collectives again.
"""


class Softmax(enum.Enum):
    """Keeps exponentials finite: by a running maximum, or by a bound per head."""

    ONLINE = "online"
    FIXED_M = "fixed-m"


class Precision(enum.Enum):
    """Precision of Q.K^T: that of the inputs, or (lossy) float8."""

    NATIVE = "native"
    FP8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Queries and keys of one grid step, and the queries of one pass of its main loop.

    Keys of a last, ragged block are processed in steps of `kv_step`.
    """

    block_q: int
    block_kv: int
    q_tile: int
    kv_step: int = 1


class Reducer(abc.ABC):
    """Reduces key statistics over the devices that hold the other keys of the same problem."""

    @abc.abstractmethod
    def psum(self, *values: Array) -> tuple[Array, ...]:
        """Returns the sum of each value over these devices, in one reduction."""

    @abc.abstractmethod
    def pmax(self, *values: Array) -> tuple[Array, ...]:
        """Returns the maximum of each value over these devices, in one reduction."""


@final
@dataclass(frozen=True)
class LocalReducer(Reducer):
    """Reduces nothing: this device has all keys."""

    def psum(self, *values: Array) -> tuple[Array, ...]:
        """Returns the values."""
        return values

    def pmax(self, *values: Array) -> tuple[Array, ...]:
        """Returns the values."""
        return values


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(abc.ABC, Generic[Stats]):
    """Attention on one device over [B, S, N, H] arrays, for calls of the sizes of `problem`.

    An attention is one `preprocess_kv` and, for every group of queries, one `preprocess_q`, then
    either one `attend` over all keys, or an `accumulate` for each shard of keys but the last and a
    `finalize` for that one. `Stats` is what the calls know beforehand.
    """

    title: ClassVar[str]
    gradient_precisions: ClassVar[tuple[Precision, ...]] = ()
    """Precisions in which this backend has a gradient."""
    fuses_projections: ClassVar[bool] = False
    """Whether one pass does qk-norm, RoPE and the head layout before this backend."""
    softmaxes: ClassVar[tuple[Softmax, ...]] = (Softmax.ONLINE,)
    precisions: ClassVar[tuple[Precision, ...]] = (Precision.NATIVE,)

    problem: LocalProblem
    options: AttentionOptions
    softmax: Softmax = Softmax.ONLINE
    precision: Precision = Precision.NATIVE

    @property
    def differentiable(self) -> bool:
        """Returns whether `attend` has a gradient."""
        return self.precision in self.gradient_precisions

    @property
    def has_shard_gradients(self) -> bool:
        """Returns whether `gradients` over some of the keys exist."""
        return False

    @property
    def names_residuals(self) -> bool:
        """Returns whether a rematerialisation policy finds output and log-sums by their names."""
        return self.has_shard_gradients

    def __post_init__(self) -> None:
        if self.softmax not in self.softmaxes or self.precision not in self.precisions:
            raise ValueError(
                f"{self.title} has no {self.softmax.value} softmax in {self.precision.value}"
            )

    @abc.abstractmethod
    def attend(
        self, q: Queries, k: PreparedKeys, v: Keys, kv_mask: LocalKVMask, stats: Stats
    ) -> Queries:
        """Returns attention over all keys; a row without keys may be anything finite."""

    @abc.abstractmethod
    def preprocess_kv(
        self, k: Keys, v: Keys, kv_mask: LocalKVMask, reducer: Reducer
    ) -> tuple[PreparedKeys, Stats]:
        """Returns the keys of every call of one attention, and statistics of all keys."""

    def preprocess_q(self, q: Queries, stats: Stats) -> Stats:
        """Returns the statistics with those of these queries."""
        return stats

    def partials(
        self, q: Queries, k: PreparedKeys, v: Keys, kv_mask: LocalKVMask, stats: Stats
    ) -> Partials:
        """Returns unnormalised attention over some of the keys."""
        raise NotImplementedError(f"{self.title} attends to all keys at once; rings need others")

    def accumulate(
        self,
        q: Queries,
        k: PreparedKeys,
        v: Keys,
        kv_mask: LocalKVMask,
        stats: Stats,
        carry: Partials | None,
    ) -> Partials:
        """Returns unnormalised attention over these keys and those of `carry`."""
        part = self.partials(q, k, v, kv_mask, stats)
        if carry is None:
            return part
        return merge_partials(carry, part, self.power, self.same_shift(stats))

    def finalize(
        self,
        q: Queries,
        k: PreparedKeys,
        v: Keys,
        kv_mask: LocalKVMask,
        stats: Stats,
        carry: Partials | None,
    ) -> Queries:
        """Returns attention over these keys, the last ones, and those of `carry`."""
        return output(self.accumulate(q, k, v, kv_mask, stats, carry), q.dtype)

    def finalize_with_log_sum(
        self,
        q: Queries,
        k: PreparedKeys,
        v: Keys,
        kv_mask: LocalKVMask,
        stats: Stats,
        carry: Partials | None,
    ) -> tuple[Queries, LogSum]:
        """Returns what `finalize` does, and the natural log of the sum of all exponentials.

        `gradients` takes both. The log-sum of a row without keys is -inf.
        """
        total = self.accumulate(q, k, v, kv_mask, stats, carry)
        return output(total, q.dtype), self.log_sum(total)

    def log_sum(self, partial: Partials) -> LogSum:
        """Returns the natural log of the sum of exponentials of a partial."""
        return partial.m + jnp.log(partial.l)

    def gradients(
        self,
        q: Queries,
        k: PreparedKeys,
        v: Keys,
        kv_mask: LocalKVMask,
        log_sum: LogSum,
        delta: Delta,
        d_out: Queries,
    ) -> tuple[Queries, Keys, Keys]:
        """Returns what these keys add to the gradient of q, and what q adds to those of k and v.

        `k` are keys as `preprocess_kv` returned them. Where they were smoothed the gradient is also
        that of the keys before: the mean of all keys adds the same to every score of a query, which
        softmax does not see. `log_sum` is natural and over all keys; `delta` is sum(out * d_out)
        over head features. With p = exp(s - log_sum) and ds = p * (d_out . v - delta), these are
        scale * ds k, scale * ds^T q and p^T d_out.
        """
        raise NotImplementedError(f"{self.title} has no gradient over some of the keys")

    def fixed_m_eligible_heads(self, stats: Stats) -> Bool[Array, "B N"] | None:
        """Returns the heads whose m is known before the first call; None if no head's is."""
        return None

    def same_shift(self, stats: Stats) -> Bool[Array, ""] | None:
        """Returns whether all partials of this attention have the same m; None if they never do."""
        eligible = self.fixed_m_eligible_heads(stats)
        return None if eligible is None else jnp.all(eligible)

    def power(self, x: Array) -> Array:
        """Returns the base of this kernel's partials to the power of x."""
        return jnp.exp(x)

    @property
    def interpret(self) -> bool:
        """Returns whether Pallas kernels are interpreted: as the options say, or on CPU devices."""
        return self.options.interprets(self.problem.platform)

    @property
    def kv_reductions(self) -> tuple[int, ...]:
        """All-reduces of key statistics where keys are split, in bytes per (batch, head) pair."""
        return ()

    @property
    def softmax_title(self) -> str:
        """The softmax in the start-up report."""
        return self.softmax.value

    @property
    def searched_sizes(self) -> tuple[str, ...]:
        """Block sizes that a tile search sets; none for a backend that has none to choose."""
        return ()

    @property
    def search_name(self) -> str:
        """The name under which a search keeps its best block sizes."""
        return self.title

    @property
    def blocks(self) -> BlockSizes | None:
        """Block sizes of a Pallas kernel; None for other backends."""
        return None

    @property
    def tile(self) -> Tile | None:
        """The tile of a grid step; None for a backend without a Pallas kernel."""
        blocks = self.blocks
        if blocks is None:
            return None
        return Tile(block_q=blocks.block_q, block_kv=blocks.block_kv, q_tile=blocks.block_q)

    def check(self) -> None:
        """Raises `ProblemsFound` if this backend cannot run its problem."""
        return

    def check_gradient(self) -> None:
        """Raises `ProblemsFound` if the gradient of this backend cannot run its problem."""
        return

    def details(self) -> Sequence[str]:
        """Returns block sizes, memory and settings for the start-up report."""
        return ()


AnyBackend = AttentionBackend[Any]


class StatelessBackend(AttentionBackend[None]):
    """Base of backends that know nothing of the keys before their calls."""

    def preprocess_kv(
        self, k: Keys, v: Keys, kv_mask: LocalKVMask, reducer: Reducer
    ) -> tuple[Keys, None]:
        """Returns the keys as they are."""
        return k, None


def count_fixed_m_eligible_heads(
    backend: AttentionBackend[Stats],
    true_length: int,
    q: Queries,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    kv_mask: Bool[Array, "B T"] | None,
) -> Int[Array, ""]:
    """Returns the number of (batch, head) pairs of global arrays that pass the backend's gate."""
    length = true_length if true_length < k.shape[1] else None
    mask = LocalKVMask(length=length, mask=kv_mask)
    _, stats = backend.preprocess_kv(k, v, mask, LocalReducer())
    eligible = backend.fixed_m_eligible_heads(backend.preprocess_q(q, stats))
    return jnp.zeros((), jnp.int32) if eligible is None else jnp.sum(eligible, dtype=jnp.int32)


def check_pallas(backend: AnyBackend) -> None:
    """Raises `ProblemsFound` if a Pallas TPU kernel cannot run on these devices."""
    platform = backend.problem.platform
    if platform == "tpu" or backend.interpret:
        return
    raise ProblemsFound(
        [
            Problem(
                name="device",
                value=platform,
                rule=f"{backend.title} is compiled for TPUs only",
                remedy="Interpret it (interpret=True), or use dot_product or, on a GPU, "
                "cudnn_flash_te",
            )
        ]
    )
