"""Plans a training for a topology without data and weights, and lowers its step.

config -> spec, batch, mesh -> WanTraining -> abstract state, batch, frozen weights -> Lowered

Captions count as long as `max_sequence_length` allows; of several sizes of clips the one with the
most tokens is compiled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxdiffusion.checkpoints.lora_update import without_rooms
from maxdiffusion.config import Config
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.costs.chips import Topology, read_topology
from maxdiffusion.errors import Collector
from maxdiffusion.mesh import MeshDevice
from maxdiffusion.models.abstract import AbstractModel, dotted
from maxdiffusion.pipelines.request import VideoShape, latent_shape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.preflight.command import find_spec
from maxdiffusion.preflight.devices import describe_devices
from maxdiffusion.training.lora.adapters import check_experts, check_lora
from maxdiffusion.training.loss import ClipBatch
from maxdiffusion.training.settings import batch_shape, wan_training
from maxdiffusion.training.step import TrainState, abstract_state
from maxdiffusion.training.text import TEXT_ENCODER, Captions, EncodedBefore
from maxdiffusion.training.train import check_not_quantized, check_turns, check_whole_clips
from maxdiffusion.training.wan import StoredText, Tokens, WanTraining, jitted

AbstractValues = dict[str, jax.ShapeDtypeStruct]


@dataclass(frozen=True, kw_only=True)
class TopologyTraining:
    """A planned training on the described devices of a topology."""

    topology: Topology
    config: Config
    spec: WanSpec
    training: WanTraining

    @property
    def expert(self) -> str:
        """The transformer whose step is compiled; all experts have the same program."""
        return self.training.experts.names[0]

    @property
    def idle_experts(self) -> int:
        """Experts of the run that a step does not train."""
        return len(self.training.experts.names) - 1


def plan_training(
    parsed: ParsedConfig, devices: Sequence[MeshDevice] | None = None
) -> TopologyTraining:
    """Returns the checked training of a config on its topology; raises every problem at once.

    `devices` stand for those of the topology; None describes them.
    """
    config = parsed.config
    problems = Collector(parsed.problems)
    for check in (check_whole_clips, check_lora, check_not_quantized, check_turns):
        with problems:
            check(config)
    with problems:
        topology = read_topology(config.topology)
    with problems:
        spec = find_spec(config.pretrained_model_name_or_path)
        check_experts(config, spec)
    problems.raise_if_any()
    held = describe_devices(topology) if devices is None else devices
    batch = batch_shape(config, largest_latent(config, spec), _caption_tokens(config), len(held))
    training = wan_training(config, spec, batch, _text(config, spec), held)
    training.block_attention  # noqa: B018 - plans it, or raises
    return TopologyTraining(topology=topology, config=config, spec=spec, training=training)


def largest_latent(config: Config, spec: WanSpec) -> tuple[int, int, int]:
    """Returns frames, rows and columns of the latents of the largest clips."""
    sizes = config.video_buckets or ((config.num_frames, config.height, config.width),)
    latents = []
    for frames, height, width in sizes:
        video = VideoShape(height=height, width=width, num_frames=frames)
        latents.append(latent_shape(video, spec.vae, spec.transformer).dims[:3])
    return max(latents, key=spec.transformer.tokens)


def _caption_tokens(config: Config) -> int:
    return config.max_sequence_length - 1


def _text(config: Config, spec: WanSpec) -> StoredText | Tokens:
    if config.train_text_encoder or not config.cache_latents_text_encoder_outputs:
        return Tokens(empty=(1,))
    return StoredText(empty=np.zeros((_caption_tokens(config), spec.text_encoder.width), "float32"))


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The abstract inputs of a training step, each with its sharding."""

    state: TrainState
    batch: ClipBatch
    frozen: Mapping[str, AbstractValues]


def step_inputs(job: TopologyTraining) -> StepInputs:
    """Returns the inputs of the step of one expert."""
    training = job.training
    models = {n: m for n, m in training.models.items() if n in (job.expert, TEXT_ENCODER)}
    if training.lora is None:
        values = {name: _abstract(model, training, jnp.float32) for name, model in models.items()}
        frozen: dict[str, AbstractValues] = {}
    else:
        adapters = training.lora.parameters(models[job.expert])
        values = {job.expert: _placed(adapters, models[job.expert], training)}
        frozen = {
            name: _placed(without_rooms(model.parameters), model, training)
            for name, model in models.items()
        }
    state = abstract_state(
        values, training.optimiser, mesh=training.mesh, placement=training.placement
    )
    return StepInputs(state=state, batch=abstract_batch(job), frozen=frozen)


def _abstract(model: AbstractModel[Any], training: WanTraining, dtype: Any) -> AbstractValues:
    held = _placed(model.parameters, model, training)
    return {
        path: jax.ShapeDtypeStruct(one.shape, dtype, sharding=one.sharding)
        for path, one in held.items()
    }


def _placed(
    parameters: nnx.State, model: AbstractModel[Any], training: WanTraining
) -> AbstractValues:
    shardings = model.shardings(training.mesh)
    return {
        dotted(path): jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=shardings[dotted(path)])
        for path, one in nnx.to_flat_state(parameters)
    }


def abstract_batch(job: TopologyTraining) -> ClipBatch:
    """Returns the batch of a step: shapes, dtypes and shardings."""
    training, spec, batch = job.training, job.spec, job.training.batch
    latents = (batch.clips, *batch.latent, spec.transformer.out_channels)
    clip_tokens = training.image.attended_tokens

    def zeros() -> ClipBatch:
        rows = jnp.zeros((batch.clips, batch.caption_tokens, spec.text_encoder.width))
        ids = jnp.zeros((batch.clips, batch.caption_tokens), jnp.int32)
        stored = isinstance(training.text, StoredText)
        lengths = jnp.zeros((batch.clips,), jnp.int32)
        width = spec.image_encoder.width if spec.image_encoder is not None else 0
        return ClipBatch(
            latents=jnp.zeros(latents),
            captions=EncodedBefore(rows=rows) if stored else Captions(ids=ids, lengths=lengths),
            image=jnp.zeros(latents) if training.image.stores_image else None,
            image_tokens=jnp.zeros((batch.clips, clip_tokens, width)) if clip_tokens else None,
        )

    def placed(rows: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dims = ("batch", *("rest",) * (len(rows.shape) - 1))
        sharding = training.layout.sharding(dims, rows.shape)
        return jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=sharding)

    found: ClipBatch = jax.tree.map(placed, jax.eval_shape(zeros))
    return found


def lower_step(job: TopologyTraining, inputs: StepInputs) -> jax.stages.Lowered:
    """Returns the training step of one expert, lowered for the topology."""
    training = job.training
    shardings = jax.tree.map(lambda leaf: leaf.sharding, inputs.state)
    program = jitted(training.step_function(job.expert), shardings)
    with jax.set_mesh(training.mesh):
        lowered: jax.stages.Lowered = program.lower(inputs.state, inputs.batch, dict(inputs.frozen))
    return lowered
