"""WAN text-to-video: prompts in, frames out.

prompts --condition--> experts --denoise--> latents --decode--> frames
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.pipelines.denoise import Expert, Experts, denoise
from maxdiffusion.pipelines.fast_heads import FastHeads
from maxdiffusion.pipelines.kept_prompts import KeptPrompts
from maxdiffusion.pipelines.loading import WanParameters, load_wan_parameters
from maxdiffusion.pipelines.noise import initial_noise
from maxdiffusion.pipelines.programs import (
    FrameFormat,
    ProgramShape,
    Workshop,
    as_bytes,
    as_floats,
)
from maxdiffusion.pipelines.prompts import PromptEncoder, PromptTokenizer, TextPrograms
from maxdiffusion.pipelines.request import Request
from maxdiffusion.pipelines.settings import PipelineSettings, Precision
from maxdiffusion.pipelines.shapes import latent_shape
from maxdiffusion.pipelines.spec import TRAIN_TIMESTEPS, open_wan_folder
from maxdiffusion.pipelines.user_request import request_from_arguments
from maxdiffusion.runtime.timing import StepTime
from maxdiffusion.weights.loading import Progress

OutputType = Literal["np", "latent", "uint8"]
EXPERT_NAMES = {"transformer": "high-noise expert", "transformer_2": "low-noise expert"}


@dataclass(frozen=True, kw_only=True)
class WanOutput:
    """The result of a generation.

    `frames` are [B, F, H, W, 3]: floats from 0 to 1 ("np") or bytes ("uint8"); or the final latents
    [B, C, F, H, W] ("latent").
    """

    frames: np.ndarray


class WanPipeline:
    """A WAN text-to-video model on a mesh, ready to generate."""

    def __init__(
        self,
        *,
        workshop: Workshop,
        parameters: WanParameters,
        tokenizer: PromptTokenizer,
        kept_prompts: KeptPrompts | None = None,
    ):
        self.workshop = workshop
        self.parameters = parameters
        self._prompts = PromptEncoder(
            tokenizer=tokenizer,
            programs=TextPrograms(
                workshop.models.text_encoder.graph, workshop.mesh, workshop.compile
            ),
            weights=parameters.text_encoder,
            kept=kept_prompts,
        )
        self._programs: dict[Hashable, Callable[..., Any]] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: str | None = None,
        mesh: Mesh | None = None,
        *,
        settings: PipelineSettings | None = None,
        progress: Progress | None = None,
    ) -> "WanPipeline":
        """The pipeline of a diffusers folder, a hub id, or `embedded` (the model in the package).

        `dtype` is that of the transformer and the text encoder ("float32" unless given; the VAE
        stays in float32); `settings` says everything else, and then the dtypes too.
        """
        if settings is None:
            settings = PipelineSettings(precision=Precision.of(dtype or "float32"))
        elif dtype is not None:
            raise ValueError(
                f"dtype={dtype!r}: settings.precision holds the dtypes. Give one of the two."
            )
        opened, spec = open_wan_folder(folder)
        workshop = Workshop(
            spec=spec.with_scan(settings.scan_layers),
            settings=settings,
            mesh=mesh or single_device_mesh(),
        )
        tokenizer = PromptTokenizer.load(opened.root / "tokenizer")
        loaded = load_wan_parameters(opened, workshop, progress=progress)
        return cls(workshop=workshop, parameters=loaded.parameters, tokenizer=tokenizer)

    def with_parameters(self, parameters: WanParameters) -> "WanPipeline":
        """The same with other weights of the same kind; compiled programs are shared."""
        other = copy.copy(self)
        other.parameters = parameters
        other._prompts = self._prompts.with_weights(parameters.text_encoder)
        return other

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        *,
        output_type: OutputType = "np",
        max_sequence_length: int | None = None,
        **arguments: Any,
    ) -> WanOutput:
        """Generates one video for each prompt (times `num_videos_per_prompt`).

        The other arguments are those of `request_from_arguments`: height, width, num_frames,
        num_inference_steps, guidance_scale, guidance_scale_2, num_videos_per_prompt, seed, latents,
        flow_shift, boundary_ratio.
        """
        _check_output_type(output_type)
        length = self.workshop.settings.text_length
        if max_sequence_length not in (None, length):
            raise ValueError(
                f"max_sequence_length={max_sequence_length}: this pipeline was made for {length}. "
                "Set PipelineSettings(text_length=...) when you make it."
            )
        request = request_from_arguments(
            self.workshop.spec, prompt=prompt, negative_prompt=negative_prompt, **arguments
        )
        experts = self.condition(request)
        *_, (last, _) = self.denoise(request, experts)
        latents = np.asarray(last)
        if output_type == "latent":
            return WanOutput(frames=np.moveaxis(latents, -1, 1))
        frame_format = as_floats if output_type == "np" else as_bytes
        videos = [np.asarray(self.decode(request, video, frame_format)) for video in latents]
        return WanOutput(frames=np.stack(videos))

    def shape(self, request: Request) -> ProgramShape:
        """What a request is compiled for."""
        spec = self.workshop.spec
        return ProgramShape(
            videos=len(request.prompts),
            latent=latent_shape(request.video, spec.vae, spec.transformer),
            guidance=request.guidance,
            text_length=self.workshop.settings.text_length,
        )

    def compile(
        self,
        request: Request,
        frame_format: FrameFormat = as_floats,
        *,
        other_prompts: Sequence[str] = (),
    ) -> None:
        """Compiles everything that the request, also with the other prompts, will run."""
        shape = self.shape(request)
        with self._precision():
            self._prompts.compile([*texts_of(request), *other_prompts], shape.text_length)
        self._read_text(shape)
        initial_noise([0], shape.latent)  # its program is compiled by its first use
        self._start(shape, request)
        self._step(shape, request)
        self._decode(shape, frame_format)

    def condition(self, request: Request) -> Experts:
        """The experts, each with its view of the prompts; waits until they are ready."""
        shape = self.shape(request)
        with self._precision():
            rows = self._prompts.encode(texts_of(request), shape.text_length)
        rows = self._everywhere(rows.astype(self.workshop.settings.precision.activations))
        read_text = self._read_text(shape)
        scales = (request.scales.high_noise, request.scales.low_noise)
        experts = [
            Expert(
                name=EXPERT_NAMES[name],
                weights=weights,
                text=read_text(weights, rows),
                guidance_scale=scale,
            )
            for (name, weights), scale in zip(
                self.parameters.transformers.items(), scales, strict=False
            )
        ]
        jax.block_until_ready([expert.text for expert in experts])
        ratio = request.boundary_ratio
        return Experts(
            high_noise=experts[0],
            low_noise=experts[-1],
            boundary=0.0 if ratio is None else ratio * TRAIN_TIMESTEPS,
        )

    def denoise(
        self, request: Request, experts: Experts
    ) -> Iterator[tuple[Float[Array, "B F Y X C"], StepTime]]:
        """Yields the latents after every step, which live until the next one, and its time."""
        shape = self.shape(request)
        first = self._start(shape, request)(self.first_latents(request))
        step = self._step(shape, request)
        for state, time in denoise(step, first, sampler=request.sampler, experts=experts):
            yield state.sample, time

    def first_latents(self, request: Request) -> Float[Array, "B F Y X C"]:
        """What denoising starts from: the latents of the request, or the noise of its seeds."""
        latents = request.latents
        if latents is None:
            latents = initial_noise(request.seeds, self.shape(request).latent)
        return self._everywhere(latents)

    def fast_heads(
        self, request: Request, experts: Experts, latents: Float[Array, "B F Y X C"], step: int
    ) -> FastHeads:
        """How many heads fixed-m softmax serves in the step that starts from `latents`.

        A forward of its own, in a program of its own: the step itself counts nothing.
        """
        shape = self.shape(request)
        timestep = float(request.sampler.timesteps[step])
        expert = experts.at(timestep)
        count = self.compile_fast_heads(request)
        now = self._everywhere(np.float32(timestep))
        counts = np.asarray(count(expert.weights, expert.text, latents, now))
        return FastHeads(
            step=step,
            expert=expert.name,
            pairs=shape.model_batch * self.workshop.spec.transformer.heads,
            of_layers=tuple(counts.tolist()),
        )

    def compile_fast_heads(self, request: Request) -> Callable[..., Any]:
        """The program of `fast_heads`, compiled if it was not yet."""
        shape = self.shape(request)
        return self._program(("fast_heads", shape), lambda: self.workshop.lower_fast_heads(shape))

    def decode(
        self,
        request: Request,
        latents: Float[np.ndarray, "F Y X C"],
        frame_format: FrameFormat = as_floats,
    ) -> Array:
        """The frames [F, H, W, 3] of one video, still on the devices."""
        program = self._decode(self.shape(request), frame_format)
        batch = self._everywhere(np.asarray(latents, np.float32)[None])
        return jax.block_until_ready(program(self.parameters.vae, batch))[0]

    def _read_text(self, shape: ProgramShape) -> Callable[..., Any]:
        key = ("read_text", shape.model_batch, shape.text_length)
        return self._program(key, lambda: self.workshop.lower_read_text(shape))

    def _start(self, shape: ProgramShape, request: Request) -> Callable[..., Any]:
        sampler = request.sampler
        key = ("start", shape.videos, shape.latent, type(sampler))
        return self._program(key, lambda: self.workshop.lower_start(shape, sampler))

    def _step(self, shape: ProgramShape, request: Request) -> Callable[..., Any]:
        sampler = request.sampler
        key = ("denoise_step", shape, type(sampler))
        return self._program(key, lambda: self.workshop.lower_denoise_step(shape, sampler))

    def _decode(self, shape: ProgramShape, frame_format: FrameFormat) -> Callable[..., Any]:
        key = ("decode", shape.latent, frame_format)
        return self._program(key, lambda: self.workshop.lower_decode(shape, frame_format))

    def _program(
        self, key: tuple[str, *tuple[Hashable, ...]], lower: Callable[[], jax.stages.Lowered]
    ) -> Callable[..., Any]:
        if key not in self._programs:
            self._programs[key] = self.workshop.compile(key[0], lower())
        return self._programs[key]

    def _everywhere(self, array: Any) -> Array:
        return jax.device_put(array, self.workshop.everywhere)

    def _precision(self) -> Any:
        return jax.default_matmul_precision(self.workshop.settings.precision.matmul)


def texts_of(request: Request) -> list[str]:
    """The texts that the model reads; the negative ones only if it is guided by them."""
    guided = request.guidance.copies == 2
    return [*request.prompts, *(request.negative_prompts if guided else ())]


def _check_output_type(output_type: str) -> None:
    allowed = ("np", "latent", "uint8")
    if output_type not in allowed:
        raise ValueError(f"output_type={output_type!r}: must be one of {', '.join(allowed)}.")
