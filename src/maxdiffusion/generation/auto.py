"""Chooses what `auto` stands for: the attention with its split, and the sharding of weights.

`attention: auto` takes the quickest attention and ulysses x ring split by the cost model, on one
slice of known TPUs; elsewhere `dot_product`. `weight_placement: auto` replicates weights where
they fit into HBM with a step, and shards them where not. The config itself does not change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flax import nnx

from maxdiffusion.attention import AttentionProblem
from maxdiffusion.attention.registry import DOT_PRODUCT
from maxdiffusion.config import Config
from maxdiffusion.generation.settings import attention_options, precision
from maxdiffusion.kernels.tpu import CHIP_NAMES
from maxdiffusion.mesh.mesh import MeshDevice, MeshShape, slice_index
from maxdiffusion.mesh.resolve import MeshSplit
from maxdiffusion.pipelines.programs import ProgramShape
from maxdiffusion.pipelines.spec import WanSpec, wan_models

ANYWHERE = DOT_PRODUCT
"""Runs on any device and mesh."""
REPLICATE, SHARD = "replicate", "shard"
ACTIVATIONS = 20
"""Arrays of tokens by model width that a step keeps at once: 3.2 GiB of 18,904 tokens of A14B."""
USABLE = 0.94
"""Share of HBM that a program may fill; the rest is the runtime's."""
GIB = 2**30


def choose_attention(
    config: Config,
    spec: WanSpec,
    devices: Sequence[MeshDevice],
    *,
    mesh: MeshSplit,
    shape: ProgramShape,
) -> tuple[str, MeshSplit, tuple[str, ...]]:
    """Returns the quickest attention, the mesh with its split of the context, and the reason.

    Sizes that a config states for ring and ulysses are kept.
    """
    if not _plannable(devices):
        reason = f"attention auto: {ANYWHERE}, since only one slice of known TPUs is planned for"
        return ANYWHERE, mesh, (reason,)
    # The cost model is loaded for `auto` alone.
    from maxdiffusion.costs.chips import CHIPS, topology_under
    from maxdiffusion.costs.flops import forward_flops
    from maxdiffusion.costs.planner import Task, choices, explain

    transformer, stated = spec.transformer, mesh.shape
    task = Task(
        problem=AttentionProblem(
            batch=shape.model_batch,
            q_len=shape.latent.tokens,
            kv_len=shape.latent.tokens,
            heads=transformer.heads,
            head_dim=transformer.head_dim,
            dtype=precision(config).activations,
        ),
        flops=forward_flops(
            transformer,
            tokens=shape.latent.tokens,
            text_length=shape.text_length + shape.task.image_tokens,
            batch=shape.model_batch,
        ),
        layers=transformer.block_count,
        topology=topology_under(CHIPS[CHIP_NAMES[devices[0].device_kind.lower()]], devices),
        devices=devices,
        options=attention_options(config),
        text_length=shape.text_length,
    )
    possible = choices(
        task, data=stated.data, context=stated.context, fsdp=stated.fsdp, tensor=stated.tensor
    )
    found = [choice for choice in possible if _agrees(config, choice.shape, stated)]
    if not found:
        return ANYWHERE, mesh, ()
    best = found[0]
    # One slice: the shape within it is the shape of the mesh.
    return best.name, replace(mesh, ici=best.shape), (explain(found),)


def _plannable(devices: Sequence[MeshDevice]) -> bool:
    known = all(device.device_kind.lower() in CHIP_NAMES for device in devices)
    return known and len({*map(slice_index, devices)}) == 1


def _agrees(config: Config, shape: MeshShape, stated: MeshShape) -> bool:
    """Returns whether a split is the one that the config states, if it states one."""
    split = (config.ici_ring_parallelism, config.ici_ulysses_parallelism)
    is_open = config.ulysses_shards == -1 and split == (None, None)
    return is_open or shape.ulysses == stated.ulysses


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on one device: the blocks of all experts, other weights, one step, and what fits."""

    blocks: int
    rest: int
    step: int
    room: int

    def total(self, devices: int) -> int:
        """Returns all bytes with the blocks sharded over `devices`."""
        return self.blocks // devices + self.rest + self.step


def choose_weight_sharding(
    config: Config,
    spec: WanSpec,
    devices: Sequence[MeshDevice],
    *,
    mesh: MeshSplit,
    shape: ProgramShape,
) -> tuple[str, tuple[str, ...]]:
    """Returns `replicate` or `shard`, and the reason; unknown devices replicate."""
    chip = CHIP_NAMES.get(devices[0].device_kind.lower())
    if chip is None:
        return REPLICATE, ()
    from maxdiffusion.costs.chips import CHIPS  # for `auto` alone

    room = round(CHIPS[chip].hbm_bytes * USABLE)
    need = bytes_needed(config, spec, mesh=mesh.shape, shape=shape, room=room)
    chosen = REPLICATE if need.total(1) <= need.room else SHARD
    return chosen, (explain_sharding(need, chosen, mesh.shape.context),)


def bytes_needed(
    config: Config, spec: WanSpec, *, mesh: MeshShape, shape: ProgramShape, room: int
) -> Need:
    """Returns what a device has to hold, by arithmetic."""
    models = wan_models(spec, precision(config))
    transformer = nnx.to_flat_state(models.transformer.parameters)
    blocks = sum(size_of(one) for path, one in transformer if path[0] == "blocks")
    outer = sum(size_of(one) for path, one in transformer if path[0] != "blocks")
    vae, text, clip = (
        0 if model is None else sum(size_of(one) for _, one in nnx.to_flat_state(model.parameters))
        for model in (models.vae, models.text_encoder, models.image_encoder)
    )
    tokens = -(-shape.model_batch // mesh.data) * shape.latent.tokens // mesh.context
    width = spec.transformer.model_dim * precision(config).activations.itemsize
    experts = len(spec.experts)
    return Need(
        blocks=experts * blocks // (mesh.fsdp * mesh.tensor),
        rest=experts * outer + vae + clip + text // mesh.devices,
        step=ACTIVATIONS * tokens * width,
        room=room,
    )


def size_of(variable: nnx.Variable) -> int:
    """Returns the bytes of an unsharded parameter."""
    return math.prod(variable.shape) * variable.dtype.itemsize


def explain_sharding(need: Need, chosen: str, context: int) -> str:
    """Returns the reason for a choice of weight sharding."""
    total, room = need.total(1) / GIB, need.room / GIB
    start = (
        f"weight_placement auto: {chosen}, since replicated weights and a step take {total:.1f} GiB"
    )
    if chosen == REPLICATE:
        return f"{start} of {room:.1f}"
    sharded = need.total(context) / GIB
    return f"{start}, more than {room:.1f}; sharded over {context} devices {sharded:.1f}"
