"""The plan of one attention: everything decided, called with arrays, printed at start-up."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.attention.exchanges import ByXla, Exchange
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.keys import GlobalKeys
from maxdiffusion.attention.on_device import DeviceKernel
from maxdiffusion.attention.on_device.fast_path import count_fast_heads
from maxdiffusion.attention.problem import AttentionProblem
from maxdiffusion.kernels.heads import Columns, heads_of, join_heads, place_heads
from maxdiffusion.kernels.splash import pad_length


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """One attention, ready to run on global [B, S, N, H] arrays under `jax.set_mesh(mesh)`.

    `name` is what was asked for, `runs` what is run (another name where the plan had a reason,
    which `note` then gives). `fused`: norms and rotations of `of_columns` are done in one pass that
    also moves heads to where the exchange wants them.
    """

    name: str
    runs: str
    note: str
    geometry: Geometry
    mesh: Mesh
    exchange: Exchange | ByXla
    kernel: DeviceKernel
    fused: bool = False

    @property
    def problem(self) -> AttentionProblem:
        """The true sizes that this plan is for."""
        return self.geometry.problem

    @property
    def padded_q_len(self) -> int:
        """The query length with which a caller who pads once needs no more padding."""
        return self.geometry.padded_q_len

    @property
    def padded_kv_len(self) -> int:
        """The same for keys."""
        return self.geometry.padded_kv_len

    @property
    def fixed_m(self) -> bool:
        """Whether heads may use a fixed bound in place of their running maximum."""
        return self.kernel.softmax == "fixed-m"

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        kv_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B S N H"]:
        """softmax(q k^T / sqrt(H)) v over the keys that count; a row without keys is zero."""
        self._check(q, k, v, kv_mask)
        if AxisType.Explicit not in self.mesh.axis_types:
            return self._run(q, k, v, kv_mask)
        return jax.sharding.auto_axes(
            self._run, axes=self.mesh.axis_names, out_sharding=self._out_spec(q.shape[1])
        )(q, k, v, kv_mask)

    def of_columns(self, q: Columns, k: Columns, v: Columns) -> Float[Array, "B S D"]:
        """The attention of the heads that columns stand for, as columns."""
        padded = q.values.shape[1] == self.padded_q_len and k.values.shape[1] == self.padded_kv_len
        if not (self.fused and padded):
            width = self.problem.head_dim
            return as_columns(self(heads_of(q, width), heads_of(k, width), heads_of(v, width)))
        q_spec, kv_spec = self.geometry.q_spec, self.geometry.kv_spec
        return self._mapped(
            functools.partial(attend_columns, self),
            (placement(q, q_spec), placement(k, kv_spec), placement(v, kv_spec)),
        )(q, k, v)

    def fast_heads(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        kv_mask: Bool[Array, "B T"] | None = None,
    ) -> Int[Array, ""]:
        """How many (batch, head) pairs pass the gate of fixed-m softmax with all their queries.

        The rest, out of batch x heads, run online; without fixed-m no pair is fast.
        """
        self._check(q, k, v, kv_mask)
        count = functools.partial(count_fast_heads, self.kernel, self.problem.kv_len)
        if AxisType.Explicit in self.mesh.axis_types:
            everywhere = PartitionSpec()
            count = jax.sharding.auto_axes(
                count, axes=self.mesh.axis_names, out_sharding=everywhere
            )
        return count(q, k, v, kv_mask)

    def _run(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        kv_mask: Bool[Array, "B T"] | None,
    ) -> Float[Array, "B S N H"]:
        q_len, shared_by = q.shape[1], self.problem.heads_per_key_head
        if shared_by > 1:
            # Exchanges split and fold q, k and v alike, so that every query head brings its keys.
            k, v = (jnp.repeat(part, shared_by, axis=2) for part in (k, v))
        q = pad_length(q, 1, self.padded_q_len)
        k, v = (pad_length(part, 1, self.padded_kv_len) for part in (k, v))
        if kv_mask is not None:
            kv_mask = pad_length(kv_mask, 1, self.padded_kv_len)
        if isinstance(self.exchange, ByXla):
            out = self.exchange.run(q, k, v, kv_mask, self.geometry)
        else:
            out = self._on_devices(q, k, v, kv_mask)
        if kv_mask is not None:
            real = kv_mask[:, : self.problem.kv_len].any(axis=1)
            out = jnp.where(real[:, None, None, None], out, 0)
        return out[:, :q_len]

    def _on_devices(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        kv_mask: Bool[Array, "B T"] | None,
    ) -> Float[Array, "B S N H"]:
        assert not isinstance(self.exchange, ByXla)
        exchange, kernel, geometry = self.exchange, self.kernel, self.geometry
        width = geometry.problem.head_dim

        def local(q: Array, k: Array, v: Array, mask: Array | None) -> Array:
            keys = GlobalKeys(
                true_length=geometry.problem.kv_len,
                padded_length=geometry.padded_kv_len,
                mask=mask,
            )
            q, k, v = (as_heads(part, width) for part in (q, k, v))
            return as_columns(exchange(q, k, v, keys, kernel))

        # Heads cross the border as columns: [S, N*H] is how projections write and read them, and a
        # [N, H] tile of few heads would be padded.
        specs = [columns_spec(spec) for spec in (geometry.q_spec, geometry.kv_spec)]
        run = self._mapped(local, (specs[0], specs[1], specs[1], geometry.mask_spec))
        out = run(as_columns(q), as_columns(k), as_columns(v), kv_mask)
        return as_heads(out, width)

    def _mapped(self, local: Callable[..., Array], specs: tuple[Any, ...]) -> Callable[..., Array]:
        """`local` on the columns of every device.

        Pallas calls carry no replication types, so shard_map cannot check them.
        """
        inside_set_mesh = not jax.sharding.get_abstract_mesh().empty
        return jax.shard_map(
            local,
            mesh=None if inside_set_mesh else self.mesh,
            in_specs=specs,
            out_specs=columns_spec(self.geometry.q_spec),
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
        spec = self.geometry.q_spec
        if q_len == self.padded_q_len:
            return spec
        return PartitionSpec(spec[0], None, *spec[2:])

    def describe(self) -> str:
        """What runs, and what it costs, in a few lines."""
        from maxdiffusion.attention.description import describe_plan

        return describe_plan(self)


def attend_columns(plan: AttentionPlan, q: Columns, k: Columns, v: Columns) -> Array:
    """The attention of one device's columns, in a few passes over them."""
    assert not isinstance(plan.exchange, ByXla)
    exchange, kernel, width = plan.exchange, plan.kernel, plan.problem.head_dim
    batch, _, columns = q.values.shape
    places = exchange.places(batch, columns // width)
    settings: dict[str, Any] = {"head_dim": width, "interpret": kernel.site.interpret}
    keys = GlobalKeys(true_length=plan.problem.kv_len, padded_length=plan.padded_kv_len)
    with jax.named_scope("rope"):
        queries = place_heads(q, places.queries, order=places.order, **settings)
        placed = [place_heads(part, places.keys, **settings) for part in (k, v)]
    out = exchange.of_placed(queries, placed[0], placed[1], keys, kernel)
    with jax.named_scope("exchange"):
        return join_heads(out, places.queries, order=places.order, **settings)


def placement(columns: Columns, spec: PartitionSpec) -> Columns:
    """Where every part of `columns` lies, given where their heads do."""
    turn = None if columns.cosines is None else PartitionSpec(spec[1], None)
    specs: dict[str, Any] = {
        "values": columns_spec(spec),
        "gain": None if columns.gain is None else PartitionSpec(),
        "cosines": turn,
        "sines": turn,
    }
    return replace(columns, **specs)


def as_columns(x: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
    """Heads side by side in one row per token."""
    return x.reshape(*x.shape[:2], -1)


def as_heads(x: Float[Array, "B S D"], width: int) -> Float[Array, "B S N H"]:
    """The inverse of `as_columns`."""
    return x.reshape(*x.shape[:2], -1, width)


def columns_spec(spec: PartitionSpec) -> PartitionSpec:
    """Where columns lie whose heads lie as `spec` says."""
    return PartitionSpec(*spec[:3])
