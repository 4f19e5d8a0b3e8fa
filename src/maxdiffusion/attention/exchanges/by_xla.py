"""The exchange that is left to the compiler: dense attention under sharding constraints."""

from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.exchanges.base import Gather, Stay
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device import KernelSizes
from maxdiffusion.kernels.reference import chunked_attention
from maxdiffusion.mesh import CONTEXT_AXES


@dataclass(frozen=True)
class ByXla:
    """Queries stay split, keys are asked for whole, and XLA finds the collectives."""

    def run(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        kv_mask: Bool[Array, "B T"] | None,
        geometry: Geometry,
    ) -> Float[Array, "B S N H"]:
        """Dense attention on global arrays."""
        q = self._placed(q, geometry.q_spec, geometry)
        k, v = (self._placed(part, geometry.gathered_spec, geometry) for part in (k, v))
        true_length = geometry.problem.kv_len
        padded = true_length < k.shape[1]
        keys = KeyShard(length=true_length if padded else None, mask=kv_mask)
        here = geometry.local_batch * geometry.local_heads
        with jax.named_scope("kernel"):
            out = chunked_attention(
                q,
                k,
                v,
                scale=geometry.problem.scale,
                valid=keys.valid(k.shape[0], k.shape[1]),
                sequence_shards=geometry.shape.context,
                pair_shards=q.shape[0] * q.shape[2] // here,
            )
        return self._placed(out, geometry.q_spec, geometry)

    def _placed(self, array: Array, spec: PartitionSpec, geometry: Geometry) -> Array:
        if geometry.shape.devices == 1:
            return array
        return jax.lax.with_sharding_constraint(array, spec)

    def kernel_sizes(self, geometry: Geometry) -> KernelSizes:
        """Local queries, all keys."""
        return Stay().kernel_sizes(geometry)

    def bytes_sent(self, geometry: Geometry) -> int:
        """What gathering k and v takes."""
        if geometry.shared_keys or geometry.shape.context == 1:
            return 0
        return Gather(axes=CONTEXT_AXES, degree=geometry.shape.context).bytes_sent(geometry)

    def title(self) -> str:
        """What moves, in a few words."""
        return "left to XLA"

    def waste(self, geometry: Geometry) -> str:
        """Nothing."""
        return ""
