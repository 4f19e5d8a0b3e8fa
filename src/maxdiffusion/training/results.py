"""Results of a training: sample videos on the way, and the model as a diffusers folder."""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.checkpoints.export import ExportOptions, export_component, help_export
from maxdiffusion.checkpoints.load import load_parameters
from maxdiffusion.config import Config
from maxdiffusion.config.validate import VideoRequestLine
from maxdiffusion.distributed.coordination import barrier
from maxdiffusion.generation.settings import (
    LineTasks,
    guidance_scales,
    pipeline_settings,
    sampler,
    step_options,
    video_shape,
)
from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.models.abstract import Values
from maxdiffusion.models.checkpoint_map import CheckpointMap
from maxdiffusion.models.umt5.checkpoint import umt5_map
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.pipelines.programs import ProgramBuilder
from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.tasks.base import Task, VisualInputs
from maxdiffusion.pipelines.text import PromptTokenizer
from maxdiffusion.pipelines.wan import WanPipeline
from maxdiffusion.pipelines.weights import WanParameters, component_sources
from maxdiffusion.runtime.files import FilePath, as_path, new_folder, writing
from maxdiffusion.runtime.video import write_video
from maxdiffusion.training.lora.base import with_all_rooms
from maxdiffusion.training.loss import HIGH_NOISE, LOW_NOISE, TrainedExperts
from maxdiffusion.training.metrics import Sample
from maxdiffusion.training.step import NOT_FROZEN, TrainState, joined
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.wan import WanTraining

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class NewPart:
    """A component to export: new weights, their checkpoint map, and its config.json."""

    state: nnx.State
    table: CheckpointMap
    config: Mapping[str, Any] = field(repr=False)


def export_model(
    template: Path,
    folder: FilePath,
    parts: Mapping[str, NewPart],
    *,
    dtype: np.dtype | None = None,
) -> None:
    """Writes a new `folder` with the components `parts`, and copies the rest of `template`.

    The first process writes, and all must call it.
    """
    if jax.process_index() != 0:
        for part in parts.values():
            help_export(part.state, part.table)
        barrier("export")
        return
    with new_folder(folder) as unfinished:
        for source in sorted(template.iterdir()):
            if source.name in parts:
                continue
            if source.is_dir():
                shutil.copytree(source, unfinished / source.name)
            else:
                shutil.copy2(source, unfinished / source.name)
        for name, part in parts.items():
            stem = "model" if name == TEXT_ENCODER else "diffusion_pytorch_model"
            config = dict(part.config)
            if name == TEXT_ENCODER and dtype is not None:
                config["dtype"] = str(dtype)  # transformers loads in this dtype
            export_component(
                part.state,
                part.table,
                unfinished / name,
                config=config,
                options=ExportOptions(dtype=dtype, stem=stem),
            )
    barrier("export")


def config_of(template: Path, component: str, **changes: Any) -> dict[str, Any]:
    """Returns the config.json of a component with some values changed; lists for tuples."""
    held = json.loads((template / component / "config.json").read_text())
    plain = {
        key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()
    }
    return held | plain


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that is trained: config, folder, spec and training.

    `frozen` are the weights that adapters are trained on.
    """

    config: Config
    folder: ModelFolder
    spec: WanSpec
    training: WanTraining
    frozen: Mapping[str, Values] = field(default_factory=lambda: NOT_FROZEN, repr=False)

    def states(self, state: TrainState) -> dict[str, nnx.State]:
        """Returns the running means as states; a shared transformer becomes both experts."""
        training = self.training
        values = joined(self.frozen, training.on_device(state.ema))
        if training.lora is not None:
            values |= {name: training.lora.scaled(values[name]) for name in training.experts.names}
        states = {name: part.state(values[name]) for name, part in training.models.items()}
        if training.experts.trained is TrainedExperts.SHARED:
            states |= dict.fromkeys(self.spec.experts, states[HIGH_NOISE])
        return states


def export(model: Model, state: TrainState) -> None:
    """Writes the trained model as a diffusers folder; copies components that were not trained."""
    config, spec = model.config, model.spec
    tables = dict.fromkeys((HIGH_NOISE, LOW_NOISE), transformer_map(spec.transformer))
    tables[TEXT_ENCODER] = umt5_map(spec.text_encoder)
    parts = {
        name: NewPart(state=part, table=tables[name], config=model.folder.configs[name])
        for name, part in model.states(state).items()
    }
    folder = as_path(config.export_dir)
    with writing("the trained model", folder):
        export_model(model.folder.root, folder, parts, dtype=np.dtype(config.weights_dtype))
    logger.info(f"wrote {config.export_dir}")


def sample_inputs(config: Config, spec: WanSpec) -> tuple[Task, tuple[VisualInputs, ...]]:
    """Returns task and image of the sample videos; raises if the model needs another image."""
    tasks, line = LineTasks(config=config, spec=spec), VideoRequestLine(prompt="")
    inputs = tasks.inputs(line)
    return tasks.task(line), () if inputs is None else (inputs,)


@dataclass(frozen=True, kw_only=True)
class SampleVideos:
    """Writes a video of the config's prompt with the running means of a state.

    It starts from the image of `image_url`, for models that take one.
    """

    model: Model

    def __call__(self, state: TrainState) -> Sample | None:
        """Returns the video; None where an expert is missing."""
        states = self.model.states(state)
        if any(name not in states for name in self.model.spec.experts):
            logger.info("no sample: it needs both experts")
            return None
        config = self.model.config
        pipeline = self._pipeline.with_parameters(self._parameters(states))
        request = self._request
        *_, (latents, _) = pipeline.denoise(request, pipeline.condition(request))
        frames = np.asarray(pipeline.decode(request, np.asarray(latents)[0]))
        step = int(state.step)
        path = as_path(config.output_dir) / f"step_{step:06d}.mp4"
        if jax.process_index() == 0:
            write_video(path, frames, fps=config.fps)
            logger.info(f"wrote {path}")
        return Sample(step=step, file=str(path), frames=frames, fps=config.fps)

    @cached_property
    def _builder(self) -> ProgramBuilder:
        model, lora = self.model, self.model.training.lora
        return ProgramBuilder(
            spec=model.spec.with_scan(model.config.scan_layers).with_adapter_rank(
                0 if lora is None else lora.rank
            ),
            settings=pipeline_settings(model.config, model.config.attention),
            mesh=model.training.mesh,
        )

    @cached_property
    def _pipeline(self) -> WanPipeline:
        """The pipeline; the first sample compiles its programs, and the later ones reuse them."""
        tokenizer = PromptTokenizer.load(self.model.folder.root / "tokenizer")
        models = self._builder.models
        image = models.image_encoder
        empty = WanParameters(
            transformers={},
            vae=models.vae.parameters,
            text_encoder=models.text_encoder.parameters,
            image_encoder=None if image is None else image.parameters,
        )
        return WanPipeline(builder=self._builder, parameters=empty, tokenizer=tokenizer)

    @cached_property
    def _vae(self) -> nnx.State:
        return self._read("vae")

    @cached_property
    def _image_encoder(self) -> nnx.State | None:
        return None if self.model.spec.image_encoder is None else self._read("image_encoder")

    @cached_property
    def _request(self) -> Request:
        """The request for one video, repeated until the data axis divides the batch."""
        config, mesh = self.model.config, self.model.training.mesh
        scales = guidance_scales(config)
        copies = 2 if scales.active else 1
        videos = lcm(copies, mesh.shape["data"]) // copies
        prompt = config.prompt if isinstance(config.prompt, str) else config.prompt[0]
        task, inputs = sample_inputs(config, self.model.spec)
        return Request(
            prompts=(prompt,) * videos,
            negative_prompts=(config.negative_prompt,) * videos,
            video=video_shape(config),
            sampler=sampler(config, self.model.spec),
            scales=scales,
            **step_options(config, self.model.spec),
            seeds=(config.seed,) * videos,
            task=task,
            inputs=inputs * videos,
        )

    def _parameters(self, states: dict[str, nnx.State]) -> WanParameters:
        """Returns the weights of a sample: those of the run, and frozen ones from the folder."""
        models, mesh = self._builder.models, self._builder.mesh
        text = states.get(TEXT_ENCODER)
        like = models.transformer.parameters
        if self.model.training.lora is not None:
            states = {
                name: with_all_rooms(states[name], like, mesh) for name in self.model.spec.experts
            }
        return WanParameters(
            transformers={
                name: placed(states[name], like, mesh) for name in self.model.spec.experts
            },
            vae=self._vae,
            image_encoder=self._image_encoder,
            text_encoder=self._read(TEXT_ENCODER)
            if text is None
            else placed(text, models.text_encoder.parameters, mesh),
        )

    def _read(self, name: str) -> nnx.State:
        source = component_sources(self.model.folder, self._builder)[name]
        return load_parameters(source, mesh=self._builder.mesh)[0]


def placed(state: nnx.State, like: nnx.State, mesh: jax.sharding.Mesh) -> nnx.State:
    """Returns the parameters in the dtypes and shardings of a pipeline's programs."""
    held = dict(nnx.to_flat_state(state))
    return nnx.from_flat_state(
        [
            (path, wanted.replace(_put(held[path].get_value(), wanted, mesh)))
            for path, wanted in nnx.to_flat_state(like)
        ]
    )


def _put(value: jax.Array, wanted: nnx.Variable, mesh: jax.sharding.Mesh) -> jax.Array:
    sharding = parameter_sharding(mesh, wanted.dims, wanted.shape)
    return jax.device_put(value.astype(wanted.dtype), sharding)
