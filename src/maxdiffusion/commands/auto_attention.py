"""`attention: auto`: the attention and the split of the context that the devices run quickest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax

from maxdiffusion.attention import AttentionProblem
from maxdiffusion.attention.tuned_blocks import CHIP_NAMES
from maxdiffusion.commands.pipeline_settings import attention_options, precision, program_shape
from maxdiffusion.config.config import Config
from maxdiffusion.config.features import AUTO
from maxdiffusion.config.schema import Frozen
from maxdiffusion.config.validation import batch_size, resolve_mesh
from maxdiffusion.mesh.axes import MeshShape
from maxdiffusion.mesh.devices import slice_index
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.preflight.chips import CHIPS
from maxdiffusion.preflight.flops import forward_flops
from maxdiffusion.preflight.planner import Choice, Task, choices, explain
from maxdiffusion.preflight.topology import topology_under
from maxdiffusion.runtime.problems import ProblemsFound

# What runs on any device and mesh; also what a config with other mistakes is checked with.
ANYWHERE = "dot_product"


def settle_attention(
    config: Config, spec: WanSpec, devices: Sequence[jax.Device]
) -> tuple[Config, tuple[str, ...]]:
    """The config with an attention in place of `auto`, and a paragraph on why this one.

    Sizes that a config states for ring and ulysses are kept.
    """
    if config.attention != AUTO:
        return config, ()
    if not _plannable(devices):
        reason = f"attention auto: {ANYWHERE}, since only one slice of known TPUs is planned for"
        return with_attention(config, {"attention": ANYWHERE}), (reason,)
    try:
        found = possible(config, spec, devices)
    except ProblemsFound:  # whatever is wrong is reported by the checks that follow
        found = []
    if not found:
        return with_attention(config, {"attention": ANYWHERE}), ()
    best = found[0]
    chosen = {"attention": best.name, "ulysses_shards": best.shape.ulysses}
    return with_attention(config, chosen), (explain(found),)


def _plannable(devices: Sequence[jax.Device]) -> bool:
    known = all(device.device_kind.lower() in CHIP_NAMES for device in devices)
    return known and len({*map(slice_index, devices)}) == 1


def possible(config: Config, spec: WanSpec, devices: Sequence[jax.Device]) -> list[Choice]:
    """What can run on the mesh that a config asks for, the quickest first."""
    transformer = spec.transformer
    shape = program_shape(config, spec, batch_size(config, len(devices)))
    mesh = resolve_mesh(config, len(devices), 1, transformer.heads).shape
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
            text_length=shape.text_length,
            batch=shape.model_batch,
        ),
        layers=transformer.layers,
        topology=topology_under(CHIPS[CHIP_NAMES[devices[0].device_kind.lower()]], devices),
        devices=devices,
        options=attention_options(config),
        text_length=shape.text_length,
    )
    found = choices(task, data=mesh.data, context=mesh.context, fsdp=mesh.fsdp, tensor=mesh.tensor)
    return [choice for choice in found if _agrees(config, choice.shape, mesh)]


def _agrees(config: Config, shape: MeshShape, stated: MeshShape) -> bool:
    """Whether a split is the one that the config states, if it states one."""
    names = ("ici_ring_parallelism", "ici_ulysses_parallelism")
    open_split = config.ulysses_shards == -1 and all(config.values[n] is None for n in names)
    return open_split or shape.ulysses == stated.ulysses


def with_attention(config: Config, chosen: Mapping[str, object]) -> Config:
    """The config with what was chosen in place of what it says."""
    return replace(
        config,
        values=Frozen({**config.values, **chosen}),
        sources=Frozen({**config.sources, **dict.fromkeys(chosen, "chosen for these devices")}),
    )
