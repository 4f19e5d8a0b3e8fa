"""Ulysses: an all-to-all trades heads for tokens, kernels see whole sequences, and it trades back.

Heads are columns of [S, N*H] throughout: the all-to-all splits heads and joins tokens, nothing is
transposed. How the queries travel is a value of the scheme, a `QueryCollectives`.
"""

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.backends import AnyBackend
from maxdiffusion.attention.backends.base import Keys, Queries
from maxdiffusion.attention.context_parallel.base import (
    Collective,
    ContextParallel,
    LocalKV,
    ScatteredHeads,
)
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import (
    AttentionProblem,
    KVMask,
    LocalProblem,
    axes_size,
    fold_batch,
    fold_mask,
    head_groups,
    heads_to_rows,
    rows_to_heads,
    unfold_batch,
)
from maxdiffusion.kernels.qk_prep import HeadLayout, QKVLayout
from maxdiffusion.kernels.qk_prep.layout import HeadPosition
from maxdiffusion.kernels.reference import pad_length
from maxdiffusion.mesh import CONTEXT_AXES
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE


class QueryCollectives(abc.ABC):
    """Moves the queries of one group of heads to the devices of those heads, and outputs back."""

    title: ClassVar[str] = ""
    calls_per_group: ClassVar[int] = 1
    """Kernel calls, of equal shares of the queries, for each group of heads and shard of keys."""

    @abc.abstractmethod
    def for_ulysses(
        self, axes: tuple[str, ...], degree: int, traded: LocalProblem
    ) -> "QueryCollectives":
        """Returns the collectives over `axes`; `traded` are the sizes after the all-to-all."""

    @abc.abstractmethod
    def split(self, x: Float[Array, "1 S N H"]) -> ScatteredHeads:
        """Returns the arrays in which the queries of a group of heads are sent."""

    @abc.abstractmethod
    def send(self, scattered: ScatteredHeads) -> ScatteredHeads:
        """Returns the queries of this device's heads, an array for each kernel call."""

    @abc.abstractmethod
    def send_back(self, outs: ScatteredHeads) -> ScatteredHeads:
        """Returns the outputs of this device's queries, in the arrays of `split`."""

    @abc.abstractmethod
    def join(self, scattered: ScatteredHeads) -> Float[Array, "1 S D"]:
        """Returns the inverse of `split`."""

    @abc.abstractmethod
    def layout(self, blocks: HeadLayout, groups: Sequence[tuple[int, int]]) -> QKVLayout:
        """Returns the head layout of `split`, given that of keys and the groups of heads."""

    @abc.abstractmethod
    def collectives(
        self, axes: tuple[str, ...], degree: int, traded: LocalProblem
    ) -> tuple[Collective, ...]:
        """Returns the collectives of q, k, v and the output of all groups.

        They are those of the gradients too, in the other direction: the one of the output goes the
        way of the queries, and those of q, k and v return.
        """


@final
@dataclass(frozen=True, kw_only=True)
class AllToAllQueries(QueryCollectives):
    """Sends queries and outputs by the same all-to-all as keys and values."""

    axes: tuple[str, ...] = ()
    degree: int = 1

    def for_ulysses(
        self, axes: tuple[str, ...], degree: int, traded: LocalProblem
    ) -> QueryCollectives:
        """Returns these collectives over `axes`."""
        return AllToAllQueries(axes=axes, degree=degree)

    def split(self, x: Float[Array, "1 S N H"]) -> ScatteredHeads:
        """Returns one array with a block for each device."""
        return [head_blocks(x, self.degree)]

    def send(self, scattered: ScatteredHeads) -> ScatteredHeads:
        """Returns the queries of all devices for this device's heads."""
        return [trade_blocks(scattered[0], self.axes)]

    def send_back(self, outs: ScatteredHeads) -> ScatteredHeads:
        """Returns the outputs of this device's queries."""
        return [trade_blocks(outs[0].reshape(self.degree, -1, outs[0].shape[2]), self.axes)]

    def join(self, scattered: ScatteredHeads) -> Float[Array, "1 S D"]:
        """Returns the inverse of `split`."""
        return jnp.concatenate([*scattered[0]], axis=1)[None]

    def layout(self, blocks: HeadLayout, groups: Sequence[tuple[int, int]]) -> QKVLayout:
        """Returns the same layout for queries as for keys."""
        return QKVLayout.alike(blocks)

    def collectives(
        self, axes: tuple[str, ...], degree: int, traded: LocalProblem
    ) -> tuple[Collective, ...]:
        """Returns four all-to-alls per group of heads.

        XLA keeps one all-to-all in flight: half of them find a product or a kernel to run under,
        for any number of groups (2 of 4, 4 of 8, 8 of 16 in compiled layers).
        """
        sent = 2 * (traded.q_bytes + traded.kv_bytes)
        return (
            Collective(
                kind="all-to-all",
                axes=axes,
                count=4 * len(traded.heads),
                bytes=sent * (degree - 1) // degree,
                rounds=4,
                round_bytes=sent // 4,
                hidden=0.5,
            ),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Ulysses(ContextParallel):
    """All-to-all over `axes` around `inner`, one group of heads at a time.

    Groups are independent of each other, so the collectives of one can run under the kernel of
    another. Heads that `degree` does not divide are padded with zero heads, whose output is
    dropped.
    """

    num_relayouts: ClassVar[int] = 4

    axes: tuple[str, ...] = CONTEXT_AXES
    degree: int = 1
    num_groups: int = 1
    inner: ContextParallel = field(default_factory=LocalKV)
    queries: QueryCollectives = field(default_factory=AllToAllQueries)

    def for_mesh(self, problem: AttentionProblem, options: AttentionOptions) -> ContextParallel:
        """Returns this scheme with its degree, or the inner one for a degree of 1."""
        inner = self.inner.for_mesh(problem, options)
        degree = axes_size(problem.mesh, self.axes)
        if degree == 1:
            return inner
        groups = options.ulysses_attention_chunks
        resolved = replace(self, degree=degree, num_groups=groups, inner=inner)
        traded = resolved.traded(problem.shard)
        queries = self.queries.for_ulysses(self.axes, degree, inner.local_problem(traded))
        return replace(resolved, queries=queries)

    def attend(
        self, q: Queries, k: Keys, v: Keys, *, kv_mask: KVMask, backend: AnyBackend
    ) -> Queries:
        """Returns the attention of this device's queries over all keys."""
        batch, _, heads, head_dim = q.shape
        mask = kv_mask.mask
        if batch > 1:
            # A batch of 2 would be in the sublanes of every tile around the all-to-all.
            q, k, v = (fold_batch(part) for part in (q, k, v))
            mask = None if mask is None else self._padded_rows(fold_mask(mask, heads))
        q, k, v = (pad_length(part, 2, self.degree) for part in (q, k, v))
        outs = []
        for start, stop in self.groups(batch * heads):
            q_group, k_group, v_group = (part[:, :, start:stop] for part in (q, k, v))
            rows = kv_mask.with_mask(mask if mask is None or batch == 1 else mask[start:stop])
            with jax.named_scope(COLLECTIVE_SCOPE):
                q_blocks = self.queries.split(q_group)
                blocks = [head_blocks(part, self.degree) for part in (k_group, v_group)]
            queries, local = self._send(q_blocks, rows, head_dim)
            k_all, v_all = self._received(self.send_keys(blocks), rows, head_dim)
            results = self.inner.attend_groups(
                queries, k_all, v_all, kv_mask=local, backend=backend
            )
            returned = self._send_back(results, rows)
            with jax.named_scope(COLLECTIVE_SCOPE):
                outs.append(by_heads(self.queries.join(returned), head_dim))
        out = jnp.concatenate(outs, axis=2)[:, :, : batch * heads]
        return unfold_batch(out, batch) if batch > 1 else out

    def attend_scattered(
        self,
        q: ScatteredHeads,
        k: ScatteredHeads,
        v: ScatteredHeads,
        *,
        kv_mask: KVMask,
        backend: AnyBackend,
    ) -> ScatteredHeads:
        """Returns the attention of heads in a block for each device, one group at a time.

        The blocks of k and v are those that arrived.
        """
        per_group = len(q) // len(k)
        head_dim = backend.problem.head_dim
        outs: list[Array] = []
        for group, (k_group, v_group) in enumerate(zip(k, v, strict=True)):
            q_group = q[group * per_group : (group + 1) * per_group]
            queries, local = self._send(q_group, kv_mask, head_dim)
            k_all, v_all = self._received([k_group, v_group], kv_mask, head_dim)
            results = self.inner.attend_groups(
                queries, k_all, v_all, kv_mask=local, backend=backend
            )
            outs += self._send_back(results, kv_mask)
        return outs

    def layout(self, batch: int, heads: int) -> QKVLayout:
        """Returns an array for each group of heads, with a block for each device."""
        groups = self.groups(batch * heads)
        positions = [
            (group, *divmod(index, (stop - start) // self.degree))
            for group, (start, stop) in enumerate(groups)
            for index in range(stop - start)
        ]
        blocks = HeadLayout(
            arrays=tuple((self.degree, (stop - start) // self.degree) for start, stop in groups),
            heads=by_batch_row(positions, batch, heads),
        )
        return self.queries.layout(blocks, groups)

    def groups(self, heads: int) -> list[tuple[int, int]]:
        """Returns starts and stops of the groups of `heads` heads, after padding."""
        return head_groups(self._padded(heads), self.degree, self.num_groups)

    def _padded(self, heads: int) -> int:
        return math.ceil(heads / self.degree) * self.degree

    def send_keys(self, scattered: ScatteredHeads) -> ScatteredHeads:
        """Returns the blocks of all devices for this device's heads, of every group."""
        with jax.named_scope(COLLECTIVE_SCOPE):
            return [trade_blocks(part, self.axes) for part in scattered]

    def _send(
        self, q: ScatteredHeads, kv_mask: KVMask, head_dim: int
    ) -> tuple[list[Array], KVMask]:
        """Returns queries of this device's heads, of all tokens, and their mask."""
        with jax.named_scope(COLLECTIVE_SCOPE):
            queries = [by_heads(part, head_dim) for part in self.queries.send(q)]
        if not kv_mask.by_row:
            return queries, kv_mask
        local = kv_mask.with_mask(self._local_rows(kv_mask.mask, queries[0].shape[2]))
        return [heads_to_rows(part) for part in queries], local

    def _received(
        self, blocks: Sequence[Float[Array, "U T D"]], kv_mask: KVMask, head_dim: int
    ) -> list[Array]:
        """Returns keys and values of this device's heads, of all tokens."""
        heads = [by_heads(part, head_dim) for part in blocks]
        return [heads_to_rows(part) for part in heads] if kv_mask.by_row else heads

    def _send_back(self, outs: Sequence[Array], kv_mask: KVMask) -> ScatteredHeads:
        """Returns the outputs of this device's queries, of all heads of the group."""
        if kv_mask.by_row:
            outs = [rows_to_heads(part) for part in outs]
        with jax.named_scope(COLLECTIVE_SCOPE):
            return self.queries.send_back([part.reshape(*part.shape[:2], -1) for part in outs])

    def _padded_rows(self, mask: Bool[Array, "G T"]) -> Bool[Array, "_ T"]:
        """Returns the mask with rows for the zero heads; those attend to every key."""
        missing = -mask.shape[0] % self.degree
        return jnp.pad(mask, ((0, missing), (0, 0)), constant_values=True)

    def _local_rows(self, mask: Bool[Array, "G T"] | None, heads: int) -> Bool[Array, "_ T"]:
        """Returns the mask rows of this device's heads."""
        assert mask is not None
        start = jax.lax.axis_index(self.axes) * heads
        return jax.lax.dynamic_slice_in_dim(mask, start, heads, axis=0)

    def traded(self, shard: LocalProblem) -> LocalProblem:
        """Returns the sizes after the all-to-all: all tokens of fewer heads, batch folded."""
        groups = self.groups(shard.pairs)
        return replace(
            shard,
            batch=1,
            heads=tuple((stop - start) // self.degree for start, stop in groups),
            q_len=shard.q_len * self.degree,
            kv_len=shard.kv_len * self.degree,
            num_kv_shards=shard.num_kv_shards // self.degree,
        )

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        """Returns the inner problem of every group of heads."""
        return self._by_call(self.inner.local_problem(self.traded(shard)))

    def _by_call(self, traded: LocalProblem) -> LocalProblem:
        """Returns the sizes with an entry of `heads` for each share of the queries."""
        calls = self.queries.calls_per_group
        return replace(
            traded,
            heads=tuple(heads for heads in traded.heads for _ in range(calls)),
            q_len=traded.q_len // calls,
        )

    def collectives(
        self, shard: LocalProblem, reductions: Sequence[int] = ()
    ) -> tuple[Collective, ...]:
        """Returns those of q, k, v and the output, and those of the inner scheme."""
        traded = self.traded(shard)
        own = self.queries.collectives(self.axes, self.degree, traded)
        return (*own, *self.inner.collectives(traded, reductions))

    def backward_collectives(self, shard: LocalProblem) -> tuple[Collective, ...]:
        """Returns those of the gradients of q, k, v and the output, and the inner scheme's."""
        traded = self.traded(shard)
        own = self.queries.collectives(self.axes, self.degree, traded)
        return (*own, *self.inner.backward_collectives(self._by_call(traded)))

    def padding(self, shard: LocalProblem) -> str:
        """Returns how many heads are zeros."""
        padded = self._padded(shard.pairs)
        if padded == shard.pairs:
            return ""
        share = (padded - shard.pairs) / padded
        return f"heads: {padded} for {shard.pairs} ({share:.1%} padding)"

    def title(self) -> str:
        """Returns what is sent, in a few words."""
        ways = f"all-to-all of heads and tokens over {'x'.join(self.axes)}={self.degree}"
        groups = f" in {self.num_groups} head groups" if self.num_groups > 1 else ""
        return f"{ways}{groups}; inside: {self.inner.title()}{self.queries.title}"


def head_blocks(x: Float[Array, "1 S N H"], degree: int) -> Float[Array, "U S D"]:
    """Returns the heads of each device as one block of columns.

    That is how projections write and kernels read them, and the all-to-all trades whole blocks.
    """
    columns = x.reshape(x.shape[1], -1)
    return jnp.stack(jnp.split(columns, degree, axis=1))


def trade_blocks(blocks: Float[Array, "U S D"], axes: tuple[str, ...]) -> Float[Array, "U S D"]:
    """Returns block i of every device on device i, ordered by the sending device."""
    traded: Array = jax.lax.all_to_all(blocks, axes, split_axis=0, concat_axis=0, tiled=True)
    return traded


def by_heads(blocks: Float[Array, "U S D"], head_dim: int) -> Float[Array, "1 _ N H"]:
    """Returns blocks of tokens, one after the other, by heads."""
    devices, tokens, columns = blocks.shape
    return blocks.reshape(1, devices * tokens, columns // head_dim, head_dim)


def by_batch_row(
    positions: Sequence[HeadPosition], batch: int, heads: int
) -> tuple[tuple[HeadPosition, ...], ...]:
    """Returns the positions of folded heads by batch row."""
    return tuple(tuple(positions[row * heads : (row + 1) * heads]) for row in range(batch))
