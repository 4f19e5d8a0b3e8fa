"""What comes out of a training: the model as a diffusers folder, and sample videos on the way."""

from dataclasses import dataclass
from functools import cached_property
from math import lcm

import jax
import numpy as np
from flax import nnx

from maxdiffusion.commands.generate import say
from maxdiffusion.commands.pipeline_settings import pipeline_settings, sampler, video_shape
from maxdiffusion.config.config import Config
from maxdiffusion.config.validation import guidance_scales
from maxdiffusion.mesh import parameter_sharding
from maxdiffusion.pipelines.loading import WanParameters, component_sources
from maxdiffusion.pipelines.programs import Workshop
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.wan import WanPipeline
from maxdiffusion.runtime.disk import writing
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.video import write_video
from maxdiffusion.training.experts import HIGH_NOISE, LOW_NOISE, TrainedExperts
from maxdiffusion.training.export import NewPart, export_model
from maxdiffusion.training.state import TrainState
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.wan_training import WanTraining
from maxdiffusion.weights.folder import ModelFolder
from maxdiffusion.weights.loading import load_parameters
from maxdiffusion.weights.transformer_map import transformer_map
from maxdiffusion.weights.umt5_map import umt5_map


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that is trained: its config, folder and spec, and the training."""

    config: Config
    folder: ModelFolder
    spec: WanSpec
    training: WanTraining

    def states(self, state: TrainState) -> dict[str, nnx.State]:
        """The running means as models; a network for all noise levels stands for both experts."""
        training = self.training
        states = {name: part.state(state.ema[name]) for name, part in training.parts.items()}
        if training.experts.trained is TrainedExperts.SHARED:
            states |= dict.fromkeys(self.spec.experts, states[HIGH_NOISE])
        return states


def export(model: Model, state: TrainState) -> None:
    """Writes the trained model as a diffusers folder; what was not trained is copied."""
    config, spec = model.config, model.spec
    tables = dict.fromkeys((HIGH_NOISE, LOW_NOISE), transformer_map(spec.transformer))
    tables[TEXT_ENCODER] = umt5_map(spec.text_encoder)
    parts = {
        name: NewPart(state=part, table=tables[name], config=model.folder.configs[name])
        for name, part in model.states(state).items()
    }
    folder = place(config.export_dir)
    with writing("the trained model", folder):
        export_model(model.folder.root, folder, parts, dtype=np.dtype(config.weights_dtype))
    say(f"wrote {config.export_dir}")


@dataclass(frozen=True, kw_only=True)
class SampleVideos:
    """Writes a video of the config's prompt with the running means, whenever it is called."""

    model: Model

    def __call__(self, state: TrainState) -> None:
        states = self.model.states(state)
        if any(name not in states for name in self.model.spec.experts):
            say("no sample: it needs both experts")
            return
        config = self.model.config
        pipeline = self._pipeline.with_parameters(self._parameters(states))
        request = self._request
        *_, (latents, _) = pipeline.denoise(request, pipeline.condition(request))
        frames = np.asarray(pipeline.decode(request, np.asarray(latents)[0]))
        path = place(config.output_dir) / f"step_{int(state.step):06d}.mp4"
        if jax.process_index() == 0:
            write_video(path, frames, fps=config.fps)
            say(f"wrote {path}")

    @cached_property
    def _workshop(self) -> Workshop:
        model = self.model
        return Workshop(
            spec=model.spec.with_scan(model.config.scan_layers),
            settings=pipeline_settings(model.config),
            mesh=model.training.mesh,
        )

    @cached_property
    def _pipeline(self) -> WanPipeline:
        """The pipeline whose programs are compiled by the first sample, and serve all."""
        tokenizer = PromptTokenizer.load(self.model.folder.root / "tokenizer")
        models = self._workshop.models
        empty = WanParameters(
            transformers={},
            vae=models.vae.parameters,
            text_encoder=models.text_encoder.parameters,
        )
        return WanPipeline(workshop=self._workshop, parameters=empty, tokenizer=tokenizer)

    @cached_property
    def _vae(self) -> nnx.State:
        return self._read("vae")

    @cached_property
    def _request(self) -> Request:
        """One video, repeated until the data axis divides the rows of a batch."""
        config, mesh = self.model.config, self.model.training.mesh
        scales = guidance_scales(config)
        copies = 2 if scales.active else 1
        videos = lcm(copies, mesh.shape["data"]) // copies
        prompt = config.prompt if isinstance(config.prompt, str) else config.prompt[0]
        return Request(
            prompts=(prompt,) * videos,
            negative_prompts=(config.negative_prompt,) * videos,
            video=video_shape(config),
            sampler=sampler(config, self.model.spec),
            scales=scales,
            boundary_ratio=None if len(self.model.spec.experts) == 1 else config.boundary_ratio,
            seeds=(config.seed,) * videos,
        )

    def _parameters(self, states: dict[str, nnx.State]) -> WanParameters:
        """The weights of a sample: those of the run, and from the folder what is not trained."""
        models, mesh = self._workshop.models, self._workshop.mesh
        text = states.get(TEXT_ENCODER)
        like = models.transformer.parameters
        return WanParameters(
            transformers={
                name: placed(states[name], like, mesh) for name in self.model.spec.experts
            },
            vae=self._vae,
            text_encoder=self._read(TEXT_ENCODER)
            if text is None
            else placed(text, models.text_encoder.parameters, mesh),
        )

    def _read(self, name: str) -> nnx.State:
        source = component_sources(self.model.folder, self._workshop)[name]
        return load_parameters(source, mesh=self._workshop.mesh)[0]


def placed(state: nnx.State, like: nnx.State, mesh: jax.sharding.Mesh) -> nnx.State:
    """The parameters in the dtypes and places that the programs of a pipeline want."""
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
