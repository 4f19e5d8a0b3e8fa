"""The sizes of an attention: of the whole arrays on a mesh, and of the kernel calls of one device.

`AttentionProblem` has the true sizes of q, k and v and the mesh that they are split over. `shard`
is the part of it that one device holds. A context-parallel scheme turns that shard into the
problem of its kernel calls.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.tpu import CHIP_NAMES, LANES, SUBLANES
from maxdiffusion.mesh import AXES, CONTEXT_AXES
from maxdiffusion.mesh.mesh import MeshShape

SUPPORTED_DTYPES = ("float32", "bfloat16")
BATCH_AXES = ("data", "fsdp")
MAX_PADDING = 0.01
_SIZES = ("batch", "q_len", "kv_len", "heads", "head_dim")


class UnsupportedAttention(ProblemsFound):
    """An attention that this mesh, these sizes or these devices cannot run; see `reasons`."""

    def __init__(self, name: str, problems: Sequence[Problem]):
        super().__init__(problems)
        self.name = name
        self.reasons: tuple[str, ...] = tuple(str(problem) for problem in self.problems)
        listed = "\n".join(f"  - {reason}" for reason in self.reasons)
        self.args = (f"attention={name!r} cannot run:\n{listed}",)


@dataclass(frozen=True, kw_only=True)
class LocalProblem:
    """Sizes of the attention of one device; `heads` has one entry per group of heads.

    Each group has its own collectives and kernel calls. All keys are in `num_kv_shards` shards of
    `kv_len`.
    """

    batch: int
    heads: tuple[int, ...]
    q_len: int
    kv_len: int
    head_dim: int
    dtype: np.dtype
    num_kv_shards: int
    platform: str
    device_kind: str

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def pairs(self) -> int:
        """(batch, head) pairs of all groups."""
        return self.batch * sum(self.heads)

    @property
    def q_bytes(self) -> int:
        """Bytes of q, or of the output."""
        return self.pairs * self.q_len * self.head_dim * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one shard of k, or of v."""
        return self.pairs * self.kv_len * self.head_dim * self.dtype.itemsize

    @property
    def chip(self) -> str:
        """Short name of the chip, or the device kind of an unknown one."""
        return CHIP_NAMES.get(self.device_kind.lower(), self.device_kind)

    def tuning_key(self) -> "LocalProblem":
        """Returns the problem of the largest call on this kind of chip: block sizes hold for it."""
        return replace(self, heads=(max(self.heads),), platform="", device_kind=self.chip)


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """True sizes of q [batch, q_len, heads, head_dim] and k, v [batch, kv_len, kv_heads, head_dim].

    `kv_heads` None means `heads`; a smaller number shares each key head among a run of query heads.
    `mesh` has the axes that the arrays are split over, `platform` and `device_kind` are those of
    its devices. With `replicated_kv` every device of a context has all keys and values.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    head_dim: int
    dtype: np.dtype
    kv_heads: int | None = None
    mesh: MeshShape = field(default_factory=MeshShape)
    replicated_kv: bool = False
    platform: str = "cpu"
    device_kind: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(dtypes.canonicalize_dtype(self.dtype)))
        sizes = {name: vars(self)[name] for name in _SIZES}
        if self.kv_heads is not None:
            sizes["kv_heads"] = self.kv_heads
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r}: sizes are whole numbers from 1")
        if self.dtype.name not in SUPPORTED_DTYPES:
            raise ValueError(f"dtype={self.dtype.name}: attention runs in {SUPPORTED_DTYPES}")

    def on_mesh(self, mesh: Mesh, *, replicated_kv: bool = False) -> "AttentionProblem":
        """Returns the same problem, split over the devices of `mesh`."""
        device = mesh.devices.flat[0]
        return replace(
            self,
            mesh=mesh_shape(mesh),
            replicated_kv=replicated_kv,
            platform=device.platform,
            device_kind=device.device_kind,
        )

    @property
    def key_heads(self) -> int:
        """Heads of k and v."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def heads_per_key_head(self) -> int:
        """Query heads that share a head of k and v."""
        return self.heads // self.key_heads

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes the batch is split over; fsdp only where it divides the share of a data shard."""
        if self.batch % (self.mesh.data * self.mesh.fsdp) == 0:
            return BATCH_AXES
        return ("data",)

    @property
    def local_batch(self) -> int:
        """Batch elements on one device."""
        return math.ceil(self.batch / axes_size(self.mesh, self.batch_axes))

    @property
    def local_heads(self) -> int:
        """Heads of one tensor shard."""
        return math.ceil(self.heads / self.mesh.tensor)

    @property
    def padded_q_len(self) -> int:
        """Query length that every context device gets an equal share of."""
        return even_length(self.q_len, self.mesh.context)

    @property
    def padded_kv_len(self) -> int:
        """Key length that every context device gets an equal share of, or all of if replicated."""
        if self.replicated_kv:
            return self.kv_len
        return even_length(self.kv_len, self.mesh.context)

    @property
    def shard(self) -> LocalProblem:
        """Sizes of what one device holds before any collective."""
        kv_shards = 1 if self.replicated_kv else self.mesh.context
        return LocalProblem(
            batch=self.local_batch,
            heads=(self.local_heads,),
            q_len=self.padded_q_len // self.mesh.context,
            kv_len=self.padded_kv_len // kv_shards,
            head_dim=self.head_dim,
            dtype=self.dtype,
            num_kv_shards=kv_shards,
            platform=self.platform,
            device_kind=self.device_kind,
        )

    @property
    def q_spec(self) -> PartitionSpec:
        """Sharding of queries and of the output."""
        return PartitionSpec(self.batch_axes, CONTEXT_AXES, "tensor", None)

    @property
    def kv_spec(self) -> PartitionSpec:
        """Sharding of keys and values."""
        return self.gathered_spec if self.replicated_kv else self.q_spec

    @property
    def gathered_spec(self) -> PartitionSpec:
        """Sharding of keys and values of which every context device has all."""
        return PartitionSpec(self.batch_axes, None, "tensor", None)

    @property
    def mask_spec(self) -> PartitionSpec:
        """Sharding of a key mask: rows with the batch, all keys on every device."""
        return PartitionSpec(self.batch_axes, None)

    def check(self) -> None:
        """Raises `ProblemsFound` if this problem cannot be split over its mesh."""
        found = []
        if self.batch % self.mesh.data:
            found.append(
                Problem(
                    name="batch",
                    value=self.batch,
                    rule=f"the data axis ({self.mesh.data}) must divide it",
                    remedy=f"Use a data axis of one of {divisors(self.batch)}, "
                    "or a batch that it divides",
                )
            )
        if self.heads % self.mesh.tensor:
            found.append(
                Problem(
                    name="heads",
                    value=self.heads,
                    rule=f"the tensor axis ({self.mesh.tensor}) must divide them",
                    remedy=f"Use a tensor axis of one of {divisors(self.heads)}",
                )
            )
        if self.heads % self.key_heads:
            found.append(
                Problem(
                    name="kv_heads",
                    value=self.key_heads,
                    rule=f"must divide heads={self.heads}",
                    remedy=f"Use one of {divisors(self.heads)}",
                )
            )
        if found:
            raise ProblemsFound(found)


def mesh_shape(mesh: Mesh) -> MeshShape:
    """Returns the sizes of the five axes of `mesh`, which must have exactly those."""
    if tuple(sorted(mesh.axis_names)) != tuple(sorted(AXES)):
        raise ValueError(f"mesh axes {mesh.axis_names}: attention needs the axes {AXES}")
    return MeshShape(**dict(mesh.shape))


def axes_size(mesh: MeshShape, axes: Sequence[str]) -> int:
    """Returns the number of devices along `axes`."""
    return math.prod(vars(mesh)[axis] for axis in axes)


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number` in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def even_length(length: int, devices: int) -> int:
    """Returns the shortest length >= `length` that splits evenly and, if cheap, in whole tiles.

    Tokens are rows of a TPU's tiles. Where a device's share is whole tiles, shares are joined and
    split without a copy. An odd number of tiles is best: of an even number XLA puts some arrays in
    tiles of twice the rows, and copies between the two. For 75,600 tokens on 8 devices, 14 more
    tokens each save all layout copies of a layer, 7 % of its cycles outside kernels. Shares that
    fill score tiles of the kernels are left as they are.
    """
    if devices == 1:
        return length
    share = math.ceil(length / devices)
    tiled = math.ceil(share / SUBLANES) * SUBLANES
    even = tiled % (2 * SUBLANES) == 0 and tiled % LANES != 0
    for padded in (tiled + SUBLANES * even, tiled):
        if padded - share <= share * MAX_PADDING:
            return padded * devices
    return share * devices


@dataclass(frozen=True, kw_only=True)
class LocalKVMask:
    """Mask of the keys of one kernel call: the first `length` of them, where `mask` allows.

    `length` is a Python int if tracing knows it (all keys are local) and a traced scalar if it
    depends on the device (a ring shard); None means that no key is padding.
    """

    length: int | Int[Array, ""] | None = None
    mask: Bool[Array, "B T"] | None = None

    def valid(self, batch: int, size: int) -> Bool[Array, "B T"] | None:
        """Returns one mask for both rules, or None if every key is attended."""
        if self.length is None:
            return self.mask
        within = jnp.broadcast_to(jnp.arange(size) < self.length, (batch, size))
        return within if self.mask is None else within & self.mask


@dataclass(frozen=True, kw_only=True)
class KVMask:
    """Mask of all keys of a sequence: positions from `true_length` on are padding.

    The mask has a row for each batch element (after a fold, for each folded head) and is
    replicated, so that no shard of it is sent with the keys.
    """

    true_length: int
    padded_length: int
    mask: Bool[Array, "B T"] | None = None

    def whole(self) -> LocalKVMask:
        """Returns the mask of the whole sequence."""
        padded = self.true_length < self.padded_length
        return LocalKVMask(length=self.true_length if padded else None, mask=self.mask)

    def shard(self, index: Int[Array, ""], shards: int) -> LocalKVMask:
        """Returns the mask of one of `shards` equal runs of the sequence."""
        size = self.padded_length // shards
        start = index * size
        length = None
        if self.true_length < self.padded_length:
            length = jnp.clip(self.true_length - start, 0, size)
        mask = None
        if self.mask is not None:
            mask = jax.lax.dynamic_slice_in_dim(self.mask, start, size, axis=1)
        return LocalKVMask(length=length, mask=mask)

    @property
    def by_row(self) -> bool:
        """Returns whether rows have different masks, so that folded heads need one each."""
        return self.mask is not None and self.mask.shape[0] > 1

    def with_mask(self, mask: Bool[Array, "B T"] | None) -> "KVMask":
        """Returns the same keys under another mask."""
        return KVMask(true_length=self.true_length, padded_length=self.padded_length, mask=mask)


def fold_batch(x: Float[Array, "B S N H"]) -> Float[Array, "1 S K H"]:
    """Returns [B, S, N, H] as [1, S, B*N, H], the heads of the first batch element first."""
    batch, tokens, heads, width = x.shape
    # Columns of [S, N*H] are tiled by a TPU without padding; a transpose would be padded.
    columns = jnp.concatenate([*x.reshape(batch, tokens, heads * width)], axis=1)
    return columns.reshape(1, tokens, batch * heads, width)


def unfold_batch(x: Float[Array, "1 S K H"], batch: int) -> Float[Array, "B S N H"]:
    """Returns the inverse of `fold_batch`."""
    _, tokens, rows, width = x.shape
    columns = jnp.split(x.reshape(tokens, rows * width), batch, axis=1)
    return jnp.stack(columns).reshape(batch, tokens, rows // batch, width)


def fold_mask(mask: Bool[Array, "B T"], heads: int) -> Bool[Array, "K T"]:
    """Returns the mask of each folded head: row b*N + n is row b of the batch's mask."""
    return jnp.repeat(mask, heads, axis=0)


def heads_to_rows(x: Float[Array, "1 S K H"]) -> Float[Array, "K S 1 H"]:
    """Returns every folded head as a batch row with one head, so that it has its own mask."""
    return x.transpose(2, 1, 0, 3)


def rows_to_heads(x: Float[Array, "K S 1 H"]) -> Float[Array, "1 S K H"]:
    """Returns the inverse of `heads_to_rows`."""
    return x.transpose(2, 1, 0, 3)


def head_groups(heads: int, degree: int, chunks: int) -> list[tuple[int, int]]:
    """Returns starts and stops of up to `chunks` runs of heads, equal but for a longer last one.

    `degree` divides every run: 40 heads over 8 devices in 2 chunks are (0, 16) and (16, 40).
    """
    assert heads % degree == 0, (heads, degree)
    units = heads // degree
    count = min(chunks, units)
    size = units // count * degree
    starts = [index * size for index in range(count)]
    return [*zip(starts, [*starts[1:], heads], strict=True)]
