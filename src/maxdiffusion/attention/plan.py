"""Plan of one attention: resolved once, called with arrays, printed at start-up.

`plan_attention` turns a name into a plan, or refuses it with every reason at once.
"""

import difflib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.attention.backends import AnyBackend, Precision, Softmax
from maxdiffusion.attention.backends.base import count_fixed_m_eligible_heads
from maxdiffusion.attention.context_parallel import Collective, ContextParallel, Partitioning
from maxdiffusion.attention.context_parallel.base import ScatteredHeads
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import (
    AttentionProblem,
    KVMask,
    LocalProblem,
    UnsupportedAttention,
)
from maxdiffusion.attention.registry import (
    ATTENTION_OPS,
    DOT_PRODUCT,
    AttentionOp,
    differentiable_names,
)
from maxdiffusion.errors import Collector, Problem
from maxdiffusion.kernels.qk_prep import (
    HeadLayout,
    ProjectedHeads,
    QKVLayout,
    gather_heads,
    qk_norm_rope_scatter,
)
from maxdiffusion.kernels.reference import pad_length
from maxdiffusion.kernels.tpu import LANES
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE

Q_NAME, K_NAME, V_NAME, OUT_NAME = "query_proj", "key_proj", "value_proj", "attn_output"
"""Names under which a rematerialisation policy finds the inputs and the output of a plan."""


class Attention(ABC):
    """Interface that a transformer block calls."""

    fused: bool = False
    """Whether `attend_projected` runs qk-norm, RoPE and the head layout in one pass."""

    @abstractmethod
    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        kv_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B S N H"]:
        """Returns softmax(q k^T / sqrt(H)) v over the keys where `kv_mask` is True."""

    def scatter_keys(self, part: ProjectedHeads) -> ScatteredHeads:
        """Returns projected keys with norm and RoPE, in the layout of `send_keys`."""
        raise NotImplementedError("only a fused attention takes projections")

    def scatter_values(self, part: ProjectedHeads) -> ScatteredHeads:
        """Returns projected values in the layout of `send_keys`."""
        raise NotImplementedError("only a fused attention takes projections")

    def send_keys(self, scattered: ScatteredHeads) -> ScatteredHeads:
        """Returns scattered keys or values on the devices that attend to them."""
        raise NotImplementedError("only a fused attention takes projections")

    def attend_projected(
        self, q: ProjectedHeads, k: ScatteredHeads, v: ScatteredHeads
    ) -> Float[Array, "B S D"]:
        """Returns the attention of queries with norm and RoPE pending to keys that were sent."""
        raise NotImplementedError("only a fused attention takes projections")

    @abstractmethod
    def describe(self) -> str:
        """Returns the lines of the start-up report."""


@final
@dataclass(frozen=True, kw_only=True)
class AttentionPlan(Attention):
    """One attention, ready to run on global [B, S, N, H] arrays under `jax.set_mesh(mesh)`.

    `name` is the requested mode and `runs` the one that runs; `note` says why they differ.
    """

    name: str
    runs: str
    note: str
    problem: AttentionProblem
    mesh: Mesh
    scheme: ContextParallel
    backend: AnyBackend
    fused: bool = False

    @property
    def padded_q_len(self) -> int:
        """Query length that needs no padding here; callers pad once, before the first block."""
        return self.problem.padded_q_len

    @property
    def padded_kv_len(self) -> int:
        """Key length that needs no padding here."""
        return self.problem.padded_kv_len

    @property
    def local(self) -> LocalProblem:
        """Sizes of the kernel calls of one device."""
        return self.backend.problem

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of one forward pass."""
        return self.scheme.collectives(self.problem.shard, self.backend.kv_reductions)

    @property
    def backward_collectives(self) -> tuple[Collective, ...]:
        """Collectives that one backward pass adds to those of the forward pass."""
        return self.scheme.backward_collectives(self.problem.shard)

    @property
    def fixed_m(self) -> bool:
        """Returns whether heads may use a fixed bound in place of their running maximum."""
        return self.backend.softmax is Softmax.FIXED_M

    @property
    def lossy(self) -> bool:
        """Returns whether products are rounded below the precision of the inputs."""
        return self.backend.precision is Precision.FP8

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        kv_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B S N H"]:
        """Returns softmax(q k^T / sqrt(H)) v over the attended keys; a row without keys is zero."""
        self._check(q, k, v, kv_mask)
        if AxisType.Explicit in self.mesh.axis_types:
            out_spec = self._out_spec(q.shape[1])
            plan = replace(self, mesh=Mesh(self.mesh.devices, self.mesh.axis_names))
            return self._auto_axes(plan, out_spec)(q, k, v, kv_mask)
        problem, scheme, q_len = self.problem, self.scheme, q.shape[1]
        q, k, v = checkpoint_name(q, Q_NAME), checkpoint_name(k, K_NAME), checkpoint_name(v, V_NAME)
        if problem.heads_per_key_head > 1:
            # Collectives split and fold q, k and v alike, so every query head brings its keys.
            k, v = (jnp.repeat(part, problem.heads_per_key_head, axis=2) for part in (k, v))
        q = pad_length(q, 1, self.padded_q_len)
        k, v = (pad_length(part, 1, self.padded_kv_len) for part in (k, v))
        if kv_mask is not None:
            kv_mask = pad_length(kv_mask, 1, self.padded_kv_len)
        if scheme.partitioning is Partitioning.AUTO:
            out = scheme.attend(q, k, v, kv_mask=self._kv_mask(kv_mask), backend=self.backend)
        else:
            # Heads enter shard_map as columns: [S, N*H] is how projections write and read them,
            # and a [N, H] tile of few heads would be padded.
            q, k, v = (merge_heads(part) for part in (q, k, v))
            specs = [columns_spec(spec) for spec in (problem.q_spec, problem.kv_spec)]
            run = self._shard_map(
                self._attend_shard, (specs[0], specs[1], specs[1], problem.mask_spec)
            )
            out = split_heads(run(q, k, v, kv_mask), problem.head_dim)
        if kv_mask is not None:
            attended = kv_mask[:, : problem.kv_len].any(axis=1)
            out = jnp.where(attended[:, None, None, None], out, 0)
        named: Array = checkpoint_name(out[:, :q_len], OUT_NAME)
        return named

    def _attend_shard(
        self,
        q: Float[Array, "B S _"],
        k: Float[Array, "B T _"],
        v: Float[Array, "B T _"],
        mask: Bool[Array, "B _"] | None,
    ) -> Float[Array, "B S _"]:
        """Returns the attention of the shards of one device."""
        q, k, v = (split_heads(part, self.problem.head_dim) for part in (q, k, v))
        kv_mask = self._kv_mask(mask)
        return merge_heads(self.scheme.attend(q, k, v, kv_mask=kv_mask, backend=self.backend))

    def scatter_keys(self, part: ProjectedHeads) -> ScatteredHeads:
        """Returns projected keys with norm and RoPE, in the layout of `send_keys`."""
        return self._scatter_named(part, K_NAME)

    def scatter_values(self, part: ProjectedHeads) -> ScatteredHeads:
        """Returns projected values in the layout of `send_keys`."""
        return self._scatter_named(part, V_NAME)

    def _scatter_named(self, part: ProjectedHeads, name: str) -> ScatteredHeads:
        part = replace(part, values=checkpoint_name(part.values, name))
        arrays, tree = jax.tree.flatten(part)
        spec = self.problem.kv_spec
        local = functools.partial(self._scatter_keys_shard, tree)
        specs = tuple(pending_specs(part, spec))
        scattered: ScatteredHeads = self._shard_map(local, specs, columns_spec(spec))(*arrays)
        return scattered

    def _scatter_keys_shard(self, tree: jax.tree_util.PyTreeDef, *arrays: Array) -> ScatteredHeads:
        part = jax.tree.unflatten(tree, arrays)
        return [*self._scattered(part, self._layout(part).keys)]

    def send_keys(self, scattered: ScatteredHeads) -> ScatteredHeads:
        """Returns scattered keys or values on the devices that attend to them."""
        spec = columns_spec(self.problem.kv_spec)
        sent: ScatteredHeads = self._shard_map(self.scheme.send_keys, (spec,), spec)(scattered)
        return sent

    def attend_projected(
        self, q: ProjectedHeads, k: ScatteredHeads, v: ScatteredHeads
    ) -> Float[Array, "B S D"]:
        """Returns the attention of queries with norm and RoPE pending to keys that were sent."""
        q = replace(q, values=checkpoint_name(q.values, Q_NAME))
        arrays, tree = jax.tree.flatten(q)
        keys = columns_spec(self.problem.kv_spec)
        specs = (keys, keys, *pending_specs(q, self.problem.q_spec))
        local = functools.partial(self._attend_projected_shard, tree)
        named: Array = checkpoint_name(self._shard_map(local, specs)(k, v, *arrays), OUT_NAME)
        return named

    def _attend_projected_shard(
        self, tree: jax.tree_util.PyTreeDef, k: ScatteredHeads, v: ScatteredHeads, *arrays: Array
    ) -> Float[Array, "B S _"]:
        """Returns the attention of the projections of one device, in a few passes over them."""
        q = jax.tree.unflatten(tree, arrays)
        layout = self._layout(q)
        queries = self._scattered(q, layout.queries, order=layout.order)
        # Values travel under the product of the queries: without this their collective starts
        # after it.
        queries, v = jax.lax.optimization_barrier((queries, v))
        out = self.scheme.attend_scattered(
            queries, k, v, kv_mask=self._kv_mask(), backend=self.backend
        )
        with jax.named_scope(COLLECTIVE_SCOPE):
            return gather_heads(
                out,
                layout.queries,
                head_dim=self.problem.head_dim,
                order=layout.order,
                interpret=self.backend.interpret,
            )

    def _layout(self, part: ProjectedHeads) -> QKVLayout:
        batch, _, width = part.values.shape
        return self.scheme.layout(batch, width // self.problem.head_dim)

    @jax.named_scope("rope")
    def _scattered(
        self, part: ProjectedHeads, layout: HeadLayout, order: Int[Array, " J"] | None = None
    ) -> Sequence[Float[Array, "_U S _D"]]:
        return qk_norm_rope_scatter(
            part,
            layout,
            head_dim=self.problem.head_dim,
            order=order,
            interpret=self.backend.interpret,
        )

    def fixed_m_eligible_heads(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        kv_mask: Bool[Array, "B T"] | None = None,
    ) -> Int[Array, ""]:
        """Returns how many (batch, head) pairs pass the gate of fixed-m softmax.

        The others, out of batch x heads, run online; without fixed-m no pair passes.
        """
        self._check(q, k, v, kv_mask)
        count = functools.partial(count_fixed_m_eligible_heads, self.backend, self.problem.kv_len)
        if AxisType.Explicit in self.mesh.axis_types:
            return self._auto_axes(count, PartitionSpec())(q, k, v, kv_mask)
        return count(q, k, v, kv_mask)

    def _kv_mask(self, mask: Bool[Array, "B T"] | None = None) -> KVMask:
        return KVMask(true_length=self.problem.kv_len, padded_length=self.padded_kv_len, mask=mask)

    def _auto_axes(
        self, function: Callable[..., Array], out_spec: PartitionSpec
    ) -> Callable[..., Array]:
        """Returns `function` with the axes of an explicit mesh left to the compiler."""
        axes = self.mesh.axis_names
        run: Callable[..., Array] = jax.sharding.auto_axes(
            function, axes=axes, out_sharding=out_spec
        )
        return run

    def _shard_map(
        self,
        local: Callable[..., Any],
        in_specs: tuple[Any, ...],
        out_specs: PartitionSpec | None = None,
    ) -> Callable[..., Any]:
        """Returns `local` on the shards of every device.

        Pallas calls carry no replication types, so shard_map cannot check them.
        """
        inside_set_mesh = not jax.sharding.get_abstract_mesh().empty
        return jax.shard_map(
            local,
            mesh=None if inside_set_mesh else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs or columns_spec(self.problem.q_spec),
            check_vma=False,
        )

    def _check(self, q: Array, k: Array, v: Array, kv_mask: Array | None) -> None:
        problem = self.problem
        queries = (problem.q_len, self.padded_q_len), problem.heads
        keys = (problem.kv_len, self.padded_kv_len), problem.key_heads
        for name, array, (lengths, heads) in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
            allowed = [(problem.batch, length, heads, problem.head_dim) for length in lengths]
            if array.shape not in allowed:
                raise ValueError(
                    f"{name} has shape {array.shape}: this plan is for {allowed[0]}, "
                    f"or {allowed[1]} if padded once. Plan again for other sizes."
                )
            if array.dtype != problem.dtype:
                raise ValueError(
                    f"{name} has dtype {array.dtype}: this plan is for {problem.dtype}. "
                    "Cast it, or plan again."
                )
        if kv_mask is not None and kv_mask.shape != k.shape[:2]:
            raise ValueError(
                f"kv_mask has shape {kv_mask.shape}: it needs one row per batch element and one "
                f"column per key, {k.shape[:2]}."
            )

    def _out_spec(self, q_len: int) -> PartitionSpec:
        spec = self.problem.q_spec
        if q_len == self.padded_q_len:
            return spec
        return PartitionSpec(spec[0], None, *spec[2:])

    def describe(self) -> str:
        """Returns the lines of the start-up report: what runs, and what it costs."""
        problem, local, backend = self.problem, self.local, self.backend
        pairs = " + ".join(str(local.batch * heads) for heads in local.heads)
        sent = sum(collective.bytes for collective in self.collectives)
        lines = [
            f"attention {self.name}{self._reason()}",
            f"context parallel: {self.scheme.title()}; {sent / 2**20:.2f} MiB sent per device",
            f"kernel: {backend.title}, {backend.softmax_title} softmax; {pairs} (batch, head) "
            f"pairs x {local.q_len} queries x {local.kv_len} keys a call",
            *backend.details(),
            "fused qk-norm + RoPE + head layout" if self.fused else "",
            f"queries: {describe_padding(self.padded_q_len, problem.q_len)}; "
            f"keys: {describe_padding(self.padded_kv_len, problem.kv_len)}",
            self.scheme.padding(problem.shard),
            self._repeated_heads(),
            "" if backend.differentiable else "forward only: no gradient",
        ]
        return "\n  ".join(line for line in lines if line)

    def _reason(self) -> str:
        """Returns which mode runs and why, where `flash_min_seq_length` matters."""
        if not self.note:
            return ""
        return f" runs as {self.runs}: {self.note}" if self.runs != self.name else f": {self.note}"

    def _repeated_heads(self) -> str:
        repeats = self.problem.heads_per_key_head
        if repeats == 1:
            return ""
        return (
            f"key heads: {self.problem.key_heads}, each repeated for {repeats} query heads "
            "before any collective"
        )


def pending_specs(pending: ProjectedHeads, spec: PartitionSpec) -> list[PartitionSpec]:
    """Returns the specs of the arrays of a projection, in its order, given that of its heads."""
    specs = [columns_spec(spec)]
    if pending.gain is not None:
        specs.append(PartitionSpec())
    if pending.cosines is not None:
        specs += [PartitionSpec(spec[1], None)] * 2
    return specs


def merge_heads(x: Float[Array, "B S N H"]) -> Float[Array, "B S _"]:
    """Returns the heads of a token side by side."""
    return x.reshape(*x.shape[:2], -1)


def split_heads(x: Float[Array, "B S _"], head_dim: int) -> Float[Array, "B S N H"]:
    """Returns the inverse of `merge_heads`."""
    return x.reshape(*x.shape[:2], -1, head_dim)


def columns_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of merged heads, given that of heads."""
    return PartitionSpec(*spec[:3])


def describe_padding(padded: int, real: int) -> str:
    """Returns a padded size, the real one and the share of padding."""
    return f"{padded} for {real} ({(padded - real) / padded:.1%} padding)"


@dataclass(frozen=True, kw_only=True)
class BlockAttention:
    """The attentions of a transformer block: over its own tokens, a text, and image tokens."""

    self_attention: AttentionPlan
    cross_attention: Attention
    image_attention: Attention | None = None

    @property
    def plans(self) -> dict[str, Attention]:
        """The attentions that the block has, by name."""
        plans = {
            "self-attention": self.self_attention,
            "cross-attention": self.cross_attention,
            "image-attention": self.image_attention,
        }
        return {name: plan for name, plan in plans.items() if plan is not None}

    def describe(self) -> str:
        """Returns the start-up report of all."""
        return "\n".join(f"{name}: {plan.describe()}" for name, plan in self.plans.items())


def plan_attention(
    name: str, problem: AttentionProblem, mesh: Mesh, options: AttentionOptions | None = None
) -> AttentionPlan:
    """Returns the plan of `name` for tokens that attend to tokens of the same split sequence."""
    return _plan(name, problem.on_mesh(mesh), mesh, options or AttentionOptions())


def plan_cross_attention(
    name: str, problem: AttentionProblem, mesh: Mesh, options: AttentionOptions | None = None
) -> AttentionPlan:
    """Returns the plan of `name` for split tokens that attend to a replicated text."""
    replicated = problem.on_mesh(mesh, replicated_kv=True)
    return _plan(name, replicated, mesh, options or AttentionOptions())


def _plan(
    name: str, problem: AttentionProblem, mesh: Mesh, options: AttentionOptions
) -> AttentionPlan:
    runs, note = _runs_as(name, problem, options)
    scheme, backend = ATTENTION_OPS[runs].resolve(problem, options)
    return _checked(
        AttentionPlan(
            name=name,
            runs=runs,
            note=note,
            problem=problem,
            mesh=mesh,
            scheme=scheme,
            backend=backend,
            fused=_fuses(scheme, backend, problem, mesh),
        )
    )


def with_gradient(plan: AttentionPlan) -> AttentionPlan:
    """Returns the plan, if it can be trained through; raises with the names that can."""
    if plan.backend.differentiable:
        found = Collector()
        with found:
            plan.backend.check_gradient()
        if found.problems:
            raise UnsupportedAttention(plan.name, found.problems)
        return plan
    forward_only = Problem(
        name="attention",
        value=plan.name,
        rule=f"{plan.backend.title} has no gradient in {plan.backend.precision.value}",
        remedy=f"Train with one of {', '.join(differentiable_names())}",
    )
    raise UnsupportedAttention(plan.name, [forward_only])


def _op(name: str) -> AttentionOp:
    if name in ATTENTION_OPS:
        return ATTENTION_OPS[name]
    near = difflib.get_close_matches(name, ATTENTION_OPS, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    unknown = Problem(
        name="attention",
        value=name,
        rule="no attention has this name",
        remedy=f"{hint}The names are {', '.join(ATTENTION_OPS)}",
    )
    raise UnsupportedAttention(name, [unknown])


def _runs_as(name: str, problem: AttentionProblem, options: AttentionOptions) -> tuple[str, str]:
    """Returns the name that runs, and the role of `flash_min_seq_length` in that, if any."""
    op, limit = _op(name), options.flash_min_seq_length
    shortest = min(problem.q_len, problem.kv_len)
    if shortest >= limit or op is ATTENTION_OPS[DOT_PRODUCT]:
        return name, ""
    note = f"{shortest} tokens are fewer than flash_min_seq_length={limit}"
    if op.dense_below_min_seq_length:
        return DOT_PRODUCT, note
    return name, f"{note}, to which this name is not held"


def _checked(plan: AttentionPlan) -> AttentionPlan:
    found = Collector()
    with found:
        plan.problem.check()
    with found:
        plan.backend.check()
    if found.problems:
        raise UnsupportedAttention(plan.name, found.problems)
    return plan


def _fuses(
    scheme: ContextParallel, backend: AnyBackend, problem: AttentionProblem, mesh: Mesh
) -> bool:
    """Returns whether one kernel can do qk-norm, RoPE and the head layout.

    That kernel needs all heads of a token at once, as many of keys as of queries, and takes head
    widths of whole lanes.
    """
    return (
        problem.platform == "tpu"
        and scheme.partitioning is Partitioning.MANUAL
        and backend.fuses_projections
        and problem.mesh.tensor == 1
        and problem.heads_per_key_head == 1
        and problem.head_dim % LANES == 0
        and AxisType.Explicit not in mesh.axis_types
    )
