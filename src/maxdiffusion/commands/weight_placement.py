"""`weight_placement: auto`: weights whole on every device where they fit, spread where not."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from flax import nnx

from maxdiffusion.attention.tuned_blocks import CHIP_NAMES
from maxdiffusion.commands.pipeline_settings import precision, program_shape
from maxdiffusion.config.config import Config
from maxdiffusion.config.schema import Frozen
from maxdiffusion.config.validation import batch_size, resolve_mesh
from maxdiffusion.mesh.axes import MeshShape
from maxdiffusion.mesh.devices import slice_index
from maxdiffusion.pipelines.modules import wan_models
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.preflight.chips import CHIPS, GIB
from maxdiffusion.runtime.problems import ProblemsFound

AUTO, WHOLE, SPREAD = "auto", "replicate", "shard"
ACTIVATIONS = 20
"""Arrays of tokens by model width that a step keeps at once: 3.2 GiB of 18,904 tokens of A14B."""
USABLE = 0.94
"""The share of HBM that a program may fill; the rest is the runtime's."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes of one device: the blocks of all experts, other weights, and a step beside them."""

    blocks: int
    rest: int
    step: int
    room: int

    def total(self, devices: int) -> int:
        """All bytes with the blocks spread over so many devices."""
        return self.blocks // devices + self.rest + self.step


def settle_weights(
    config: Config, spec: WanSpec, devices: Sequence[jax.Device]
) -> tuple[Config, tuple[str, ...]]:
    """The config with a placement in place of `auto`, and a line on why this one."""
    if config.weight_placement != AUTO:
        return config, ()
    if devices[0].device_kind.lower() not in CHIP_NAMES:
        return with_placement(config, WHOLE), ()
    try:
        slices = len({*map(slice_index, devices)})
        shape = resolve_mesh(config, len(devices), slices, spec.transformer.heads).shape
        need = needed(config, spec, shape, devices)
    except ProblemsFound:  # whatever is wrong is reported by the checks that follow
        return with_placement(config, WHOLE), ()
    chosen = WHOLE if need.total(1) <= need.room else SPREAD
    return with_placement(config, chosen), (explain(need, chosen, shape.context),)


def needed(config: Config, spec: WanSpec, shape: MeshShape, devices: Sequence[jax.Device]) -> Need:
    """What a device has to hold, by arithmetic."""
    models = wan_models(spec, precision(config))
    transformer = nnx.to_flat_state(models.transformer.parameters)
    blocks = sum(size_of(one) for path, one in transformer if path[0] == "blocks")
    outer = sum(size_of(one) for path, one in transformer if path[0] != "blocks")
    vae, text = (
        sum(size_of(one) for _, one in nnx.to_flat_state(model.parameters))
        for model in (models.vae, models.text_encoder)
    )
    video = program_shape(config, spec, batch_size(config, len(devices)))
    rows = -(-video.model_batch // shape.data) * video.latent.tokens // shape.context
    width = spec.transformer.model_dim * precision(config).activations.itemsize
    experts = len(spec.experts)
    return Need(
        blocks=experts * blocks // (shape.fsdp * shape.tensor),
        rest=experts * outer + vae + text // shape.devices,
        step=ACTIVATIONS * rows * width,
        room=round(CHIPS[CHIP_NAMES[devices[0].device_kind.lower()]].hbm_bytes * USABLE),
    )


def size_of(variable: nnx.Variable) -> int:
    """Bytes of a whole parameter."""
    return math.prod(variable.shape) * variable.dtype.itemsize


def explain(need: Need, chosen: str, context: int) -> str:
    """Why the weights lie as they do."""
    total, room = need.total(1) / GIB, need.room / GIB
    start = f"weight_placement auto: {chosen}, since whole weights and a step take {total:.1f} GiB"
    if chosen == WHOLE:
        return f"{start} of {room:.1f}"
    spread = need.total(context) / GIB
    return f"{start}, more than {room:.1f}; spread over {context} devices {spread:.1f}"


def with_placement(config: Config, placement: str) -> Config:
    """The config with that placement."""
    changed = {"weight_placement": placement}
    return replace(
        config,
        values=Frozen({**config.values, **changed}),
        sources=Frozen({**config.sources, **dict.fromkeys(changed, "chosen for these devices")}),
    )
