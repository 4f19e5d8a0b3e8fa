"""The engine of every WAN pipeline, and the text-to-video one, with diffusers' arguments.

folder --load--> parameters of all components on the mesh
request --condition--> experts --denoise--> latents --decode--> frames

A pipeline adds the arguments of its task: `WanPipeline` here, `image_to_video.py`, ...
"""

import copy
import logging
import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, TypeVar, final

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from maxdiffusion.attention import BlockAttention
from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.checkpoints.load import Progress
from maxdiffusion.diffusion.denoise import Expert, Experts, LoopState, denoise, initial_noise
from maxdiffusion.diffusion.guidance import Action, PlannedStep
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.models.wan import TextKeysValues
from maxdiffusion.pipelines.programs import (
    FixedMEligibleHeads,
    FrameFormat,
    ProgramBuilder,
    ProgramShape,
    as_bytes,
    as_floats,
)
from maxdiffusion.pipelines.request import Request, latent_shape, request_from_arguments
from maxdiffusion.pipelines.settings import PipelineSettings, Precision
from maxdiffusion.pipelines.spec import TransformerFiles, WanSpec, open_wan_folder
from maxdiffusion.pipelines.tasks.base import Conditions, Encoders
from maxdiffusion.pipelines.text import PromptEncoder, PromptTokenizer, RowCache, TextPrograms
from maxdiffusion.pipelines.weights import (
    LoraAdapters,
    LoraMethods,
    WanParameters,
    component_sources,
    lay_out_parameters,
    load_wan_parameters,
)
from maxdiffusion.runtime.timing import StepTime

logger = logging.getLogger(__name__)
Pipeline = TypeVar("Pipeline", bound="VideoPipeline")
# XLA compiles one program on about this many cores at times.
CORES_OF_A_COMPILE = 4


OutputType = Literal["np", "latent", "uint8"]
_USED: ContextVar[set[Hashable] | None] = ContextVar("keys of used programs", default=None)
EXPERT_NAMES = {"transformer": "high-noise expert", "transformer_2": "low-noise expert"}


@dataclass(frozen=True, kw_only=True)
class WanOutput:
    """The result of a generation.

    `frames` are [B, F, H, W, 3]: floats from 0 to 1 ("np") or bytes ("uint8"); or the final latents
    [B, C, F, H, W] ("latent").
    """

    frames: np.ndarray


@contextmanager
def noting_programs(keys: set[Hashable]) -> Iterator[None]:
    """Adds the keys of all programs that this thread uses, for `VideoPipeline.drop_programs`."""
    before = _USED.set(keys)
    try:
        yield
    finally:
        _USED.reset(before)


# `Self` would read better; beartype knows it only where it decorates the class, which jaxtyping's
# hook of the test run does not do.


class VideoPipeline(LoraMethods):
    """A loaded WAN model on a mesh; a subclass takes the arguments of one task.

    `folder` is the source of the weights; a pipeline without one takes no LoRA adapters.
    """

    def __init__(
        self,
        *,
        builder: ProgramBuilder,
        parameters: WanParameters,
        tokenizer: PromptTokenizer,
        prompt_cache: RowCache | None = None,
        attention: Mapping[ProgramShape, BlockAttention] | None = None,
        folder: ModelFolder | None = None,
    ):
        lay_out_parameters(parameters, builder)
        self.builder = builder
        self.parameters = parameters
        self._folder = folder
        self._lora: LoraAdapters | None = None
        self._prompts = PromptEncoder(
            tokenizer=tokenizer,
            programs=TextPrograms(builder.models.text_encoder.graph, builder.mesh, builder.compile),
            weights=parameters.text_encoder,
            kept=prompt_cache,
        )
        # Plans of a resolved job by shape; the pipeline plans other shapes when it meets them.
        self._attention = {**(attention or {})}
        self._programs: dict[Hashable, Future[Callable[..., Any]]] = {}
        self._programs_lock = threading.Lock()

    @classmethod
    def from_pretrained(
        cls: type[Pipeline],
        folder: str | Path,
        dtype: str | None = None,
        mesh: Mesh | None = None,
        *,
        settings: PipelineSettings | None = None,
        transformers: TransformerFiles | None = None,
        progress: Progress | None = None,
    ) -> Pipeline:
        """Loads a diffusers folder, a hub id, or a model of the package (`embedded`).

        `dtype` is that of the transformer and the text encoder, float32 by default; the VAE stays
        in float32. `settings` holds everything else, and then the dtypes too. `transformers` names
        other files for the transformers, such as single files with Wan-AI's own tensor names.
        """
        if settings is None:
            settings = PipelineSettings(precision=Precision.of(dtype or "float32"))
        elif dtype is not None:
            raise ValueError(
                f"dtype={dtype!r}: settings.precision holds the dtypes. Give one of the two."
            )
        opened, spec = open_wan_folder(folder, transformers)
        builder = ProgramBuilder(
            spec=spec.with_scan(settings.scan_layers).with_adapter_rank(settings.lora_rank),
            settings=settings,
            mesh=mesh or single_device_mesh(),
        )
        tokenizer = PromptTokenizer.load(opened.root / "tokenizer")
        loaded = load_wan_parameters(opened, builder, progress=progress)
        return cls(
            builder=builder, parameters=loaded.parameters, tokenizer=tokenizer, folder=opened
        )

    @classmethod
    def from_config(cls: type[Pipeline], config: object, **overrides: object) -> Pipeline:
        """Loads the pipeline of a config, as `generate_wan` would build it.

        `config` is the path of a YAML or Python file, a mapping or an `ml_collections.ConfigDict`;
        `overrides` replace its fields.
        """
        # Jobs are resolved by a room above this one, which is loaded only here.
        from maxdiffusion.generation.generate import pipeline_from_config

        return pipeline_from_config(cls, config, overrides)

    def with_parameters(self: Pipeline, parameters: WanParameters) -> Pipeline:
        """Returns a pipeline with other weights of the same sizes; compiled programs are shared."""
        lay_out_parameters(parameters, self.builder)
        other = copy.copy(self)
        other.parameters = parameters
        other._folder = other._lora = None  # these weights are not those of the files
        other._prompts = self._prompts.with_weights(parameters.text_encoder)
        return other

    @property
    def lora(self) -> LoraAdapters:
        if self._lora is None:
            if self._folder is None:
                raise ValueError(
                    "this pipeline has no files to read its transformers from, so that it takes no "
                    "LoRA. Make it with from_pretrained or from_config."
                )
            sources = component_sources(self._folder, self.builder)
            experts = {name: sources[name] for name in self.builder.spec.experts}
            abstract = self.builder.models.transformer.parameters
            self._lora = LoraAdapters(experts, abstract, self.builder.mesh)
        return self._lora

    def apply_adapters(self) -> None:
        """Brings the transformers in line with adapters that changed."""
        if self._lora is None:
            return
        held = {**self.parameters.transformers}
        # This is the last reference: old weights are freed before new ones are read.
        self.parameters = replace(self.parameters, transformers={})
        try:
            self._lora.refresh(held)
        finally:
            ordered = {name: held[name] for name in self.builder.spec.experts if name in held}
            self.parameters = replace(self.parameters, transformers=ordered)
        lay_out_parameters(self.parameters, self.builder)

    def place(self, parameters: WanParameters) -> None:
        """Takes the weights of a pipeline that was made with their shapes, and may be compiled."""
        lay_out_parameters(parameters, self.builder)
        self.parameters = parameters
        self._prompts.place(parameters.text_encoder)

    @abstractmethod
    def __call__(self, *arguments: Any, **options: Any) -> WanOutput:
        """Generates the videos of one call."""

    def generate(self, request: Request, output_type: OutputType) -> WanOutput:
        """Returns the videos of a request."""
        latents = self.final_latents(request)
        if output_type == "latent":
            return WanOutput(frames=np.moveaxis(latents, -1, 1))
        frame_format = as_floats if output_type == "np" else as_bytes
        videos = [np.asarray(self.decode(request, video, frame_format)) for video in latents]
        return WanOutput(frames=np.stack(videos))

    def final_latents(self, request: Request) -> Float[np.ndarray, "B F Y X C"]:
        """Returns the latents of a request after its last step, on the host."""
        *_, (last, _) = self.denoise(request, self.condition(request))
        return np.asarray(last)

    def check_output(self, output_type: str, max_sequence_length: int | None) -> None:
        """Raises for an output or a text length that this pipeline was not made for."""
        allowed = ("np", "latent", "uint8")
        if output_type not in allowed:
            raise ValueError(f"output_type={output_type!r}: must be one of {', '.join(allowed)}.")
        length = self.builder.settings.text_length
        if max_sequence_length not in (None, length):
            raise ValueError(
                f"max_sequence_length={max_sequence_length}: this pipeline was made for {length}. "
                "Set PipelineSettings(text_length=...) when you make it."
            )

    def shape(self, request: Request) -> ProgramShape:
        """Returns the sizes that a request is compiled for."""
        spec = self.builder.spec
        return ProgramShape(
            videos=len(request.prompts),
            latent=latent_shape(request.video, spec.vae, spec.transformer, request.task),
            guidance=request.plan.guidance,
            text_length=self.builder.settings.text_length,
            task=request.task,
        )

    def compile(
        self,
        request: Request,
        frame_format: FrameFormat = as_floats,
        *,
        other_prompts: Sequence[str] = (),
    ) -> None:
        """Compiles everything that the request runs, and the encoders of the other prompts.

        Programs are compiled at the same time where the host has the cores for it.
        """
        shape = self.shape(request)
        texts = [*texts_of(request), *other_prompts]
        jobs: list[Callable[[], object]] = [
            partial(self._step, shape.with_guidance(guidance), request, action)
            for guidance, action in request.plan.programs
        ]
        jobs.append(partial(self._decode, shape, frame_format))
        jobs += [
            partial(self._encode, shape, frames)
            for frames in shape.task.encoded_frames(shape.latent, self.builder.spec.vae)
        ]
        if shape.task.image_tokens:
            jobs.append(partial(self._encode_image, shape.task.images))
        jobs.append(partial(self._compile_text_encoders, texts, shape.text_length))
        jobs += [
            partial(self._read_text, shape.with_guidance(guidance))
            for guidance, _ in request.plan.programs
        ]
        jobs.append(partial(self._start, shape, request))
        initial_noise([0], shape.latent.dims)  # its program is compiled by its first use
        run_all(jobs, threads=max(1, (os.cpu_count() or 1) // CORES_OF_A_COMPILE))

    def _compile_text_encoders(self, texts: Sequence[str], length: int) -> None:
        with self._precision():
            self._prompts.compile(texts, length)

    def condition(self, request: Request) -> Experts:
        """Returns the experts with everything that they are conditioned on, once it is computed."""
        self.apply_adapters()
        shape = self.shape(request)
        with self._precision():
            rows = self._prompts.encode(texts_of(request), shape.text_length)
        conditions = self.visual_conditions(request)
        states = [*self.parameters.transformers.items()]
        text_of = partial(self._text_of, rows=rows, conditions=conditions)
        high_noise, low_noise = (
            Expert(
                name=EXPERT_NAMES[name],
                weights=weights,
                texts={
                    guidance: text_of(shape.with_guidance(guidance), weights)
                    for guidance in request.plan.guidances_of(high_noise=first)
                },
            )
            for (name, weights), first in ((states[0], True), (states[-1], False))
        )
        jax.block_until_ready([[*one.texts.values()] for one in (high_noise, low_noise)])
        return Experts(
            high_noise=high_noise,
            low_noise=low_noise,
            conditioning=jax.tree.map(self._everywhere, conditions.conditioning),
            source=conditions.source,
        )

    def _text_of(
        self,
        shape: ProgramShape,
        weights: nnx.State,
        *,
        rows: Float[Array, "B T E"],
        conditions: Conditions,
    ) -> TextKeysValues:
        """Returns the text keys and values of one expert; the prompts are the first of `rows`."""
        dtype, copies = self.builder.settings.precision.activations, shape.guidance.copies
        image, faces = (
            None if part is None else self._everywhere(part.astype(dtype))
            for part in (conditions.rows_of_images(copies), conditions.rows_of_faces(copies))
        )
        texts = self._everywhere(rows[: shape.model_batch].astype(dtype))
        return self._read_text(shape)(weights, texts, image, faces)

    def visual_conditions(self, request: Request) -> Conditions:
        """Returns the conditioning of images and videos, on the host."""
        shape = self.shape(request)

        def encode(pixels: Float[np.ndarray, "F Y X C"]) -> np.ndarray:
            program = self._encode(shape, len(pixels))
            return np.asarray(program(self.parameters.vae, self._everywhere(pixels[None])))[0]

        def encode_image(pixels: Float[np.ndarray, "B Y X C"]) -> np.ndarray:
            program = self._encode_image(len(pixels))
            return np.asarray(program(self.parameters.image_encoder, self._everywhere(pixels)))

        encoders = Encoders(
            video=encode, image=encode_image, latent=shape.latent, vae=self.builder.spec.vae
        )
        return request.task.condition(request.inputs, encoders)

    def denoise(
        self, request: Request, experts: Experts
    ) -> Iterator[tuple[Float[Array, "B F Y X C"], StepTime]]:
        """Yields the latents after every step, valid until the next one, and the step's time."""
        for state, time in self.states(request, experts):
            yield state.sample, time

    def states(self, request: Request, experts: Experts) -> Iterator[tuple[LoopState, StepTime]]:
        """Yields the state after every step, valid until the next one, and the step's time."""
        shape = self.shape(request)
        seeds = self._everywhere(np.asarray(request.seeds, np.uint32))
        first = self._start(shape, request)(self.first_latents(request, experts.source), seeds)

        def program_of(step: PlannedStep) -> Callable[..., Any]:
            return self._step(shape.with_guidance(step.guidance), request, step.action)

        return denoise(
            program_of,
            first,
            sampler=request.sampler,
            plan=request.plan,
            experts=experts,
            cache=request.step_cache,
        )

    def first_latents(
        self, request: Request, source: Float[np.ndarray, "B F Y X C"] | None = None
    ) -> Float[Array, "B F Y X C"]:
        """Returns the latents before the first step.

        They are those of the request, or the noise of its seeds, mixed into the `source` if there
        is one.
        """
        latents = request.latents
        if latents is None:
            latents = request.noise
        if latents is None:
            latents = initial_noise(request.seeds, self.shape(request).latent.dims)
        if source is not None and request.latents is None:
            sigma = np.float32(request.sampler.sigmas[0])
            latents = (np.float32(1) - sigma) * source + sigma * latents
        return self._everywhere(latents)

    def fixed_m_eligible_heads(
        self, request: Request, experts: Experts, latents: Float[Array, "B F Y X C"], step: int
    ) -> FixedMEligibleHeads:
        """Counts the heads that fixed-m softmax serves in the step that starts from `latents`.

        This is one more forward, in its own program: the step itself counts nothing.
        """
        planned = request.plan.steps[step]
        shape = self.shape(request).with_guidance(planned.guidance)
        expert, now = experts.of(planned), self._everywhere(np.float32(planned.timestep))
        text = expert.texts[planned.guidance]
        count = self._fixed_m_eligible_heads(shape)
        counts = np.asarray(count(expert.weights, text, latents, now, experts.conditioning))
        return FixedMEligibleHeads(
            step=step,
            expert=expert.name,
            pairs=shape.model_batch * self.builder.spec.transformer.heads,
            of_layers=tuple(counts.tolist()),
        )

    def compile_fixed_m_eligible_heads(self, request: Request) -> None:
        """Compiles `fixed_m_eligible_heads`, of which the first and the last step are counted."""
        plan = request.plan
        for guidance in dict.fromkeys([plan.steps[0].guidance, plan.steps[-1].guidance]):
            self._fixed_m_eligible_heads(self.shape(request).with_guidance(guidance))

    def _fixed_m_eligible_heads(self, shape: ProgramShape) -> Callable[..., Any]:
        builder, plan = self.builder.folded_for(shape), self._plan(shape)
        return self._program(
            ("fast_heads", shape), lambda: builder.lower_fixed_m_eligible_heads(shape, plan)
        )

    def decode(
        self,
        request: Request,
        latents: Float[np.ndarray, "F Y X C"],
        frame_format: FrameFormat = as_floats,
    ) -> Array:
        """Returns the frames [F, H, W, 3] of one video, on the devices."""
        program = self._decode(self.shape(request), frame_format)
        decoded = np.asarray(latents, np.float32)[request.task.extra_frames :]
        batch = self._everywhere(decoded[None])
        return jax.block_until_ready(program(self.parameters.vae, batch))[0]

    def _plan(self, shape: ProgramShape) -> BlockAttention:
        if shape not in self._attention:
            self._attention[shape] = self.builder.folded_for(shape).attention(shape)
        return self._attention[shape]

    def _read_text(self, shape: ProgramShape) -> Callable[..., Any]:
        task = shape.task
        faces = (task.face_batch, shape.latent.frames) if task.face_batch else ()
        key = ("read_text", shape.model_batch, shape.text_length, task.image_tokens, *faces)
        return self._program(key, lambda: self.builder.folded_for(shape).lower_read_text(shape))

    def _encode(self, shape: ProgramShape, frames: int) -> Callable[..., Any]:
        key = ("encode", shape.latent.rows, shape.latent.columns, frames)
        return self._program(key, lambda: self.builder.lower_encode(shape, frames))

    def _encode_image(self, images: int) -> Callable[..., Any]:
        key = ("encode_image", images)
        return self._program(key, lambda: self.builder.lower_encode_image(images))

    def _start(self, shape: ProgramShape, request: Request) -> Callable[..., Any]:
        sampler, cache = request.sampler, request.step_cache
        # Without a cache the state has no tokens, and is the same for every task and guidance.
        of_cache = cache and (cache.program_key, shape)
        key = ("start", shape.videos, shape.latent, type(sampler), of_cache)
        return self._program(
            key,
            lambda: self.builder.lower_start(shape, sampler, self._plan(shape), cache=cache),
        )

    def _step(self, shape: ProgramShape, request: Request, action: Action) -> Callable[..., Any]:
        sampler, cache = request.sampler, request.step_cache
        key = ("denoise_step", shape, type(sampler), cache and cache.program_key, action)
        return self._program(
            key,
            lambda: self.builder.folded_for(shape).lower_denoise_step(
                shape, sampler, self._plan(shape), cache=cache, action=action
            ),
        )

    def _decode(self, shape: ProgramShape, frame_format: FrameFormat) -> Callable[..., Any]:
        key = ("decode", shape.decoded, frame_format)
        return self._program(key, lambda: self.builder.lower_decode(shape, frame_format))

    def _program(
        self, key: tuple[str, *tuple[Hashable, ...]], lower: Callable[[], jax.stages.Lowered]
    ) -> Callable[..., Any]:
        used = _USED.get()
        if used is not None:
            used.add(key)
        with self._programs_lock:
            known = self._programs.get(key)
            made = known or self._programs.setdefault(key, Future())
        if known is None:
            started = perf_counter()
            try:
                made.set_result(self.builder.compile(key[0], lower()))
            except BaseException as error:
                del self._programs[key]  # another call may try again
                made.set_exception(error)
            else:
                logger.info("program %s: ready in %.1f s", key[0], perf_counter() - started)
        return made.result()

    def drop_programs(self, keys: Iterable[Hashable]) -> None:
        """Frees compiled programs; one that is needed again is compiled again."""
        for key in keys:
            self._programs.pop(key, None)

    def _everywhere(self, array: Any) -> Array:
        return jax.device_put(array, self.builder.everywhere)

    def _precision(self) -> Any:
        return jax.default_matmul_precision(self.builder.settings.precision.matmul)


def run_all(jobs: Sequence[Callable[[], object]], *, threads: int) -> None:
    """Runs jobs on this many threads, those given first first; raises the first error."""
    if threads == 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        futures = [pool.submit(copy_context().run, job) for job in jobs]  # they see _USED too
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def texts_of(request: Request) -> list[str]:
    """Returns the texts to encode; the negative ones only with guidance."""
    guided = request.plan.guidance.copies == 2
    return [*request.prompts, *(request.negative_prompts if guided else ())]


@final
class WanPipeline(VideoPipeline):
    """A loaded WAN text-to-video model on a mesh."""

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
        flow_shift, boundary_ratio, boundary_step_index, guidance_end_step, sigmas.
        """
        self.check_output(output_type, max_sequence_length)
        check_text_only(self.builder.spec)
        request = request_from_arguments(
            self.builder.spec, prompt=prompt, negative_prompt=negative_prompt, **arguments
        )
        return self.generate(request, output_type)


def check_text_only(spec: WanSpec) -> None:
    """Raises for a model that cannot run from a text alone."""
    kinds = {
        "a character, poses and faces: use WanAnimatePipeline": spec.animates,
        "an image: use WanImageToVideoPipeline": spec.image_channels,
        "a control video: use WanVACEPipeline": bool(spec.transformer.control_layers),
    }
    needed = [need for need, is_needed in kinds.items() if is_needed]
    if needed:
        problem = Problem(
            name="WanPipeline",
            value=f"{spec.transformer.in_channels} input channels",
            rule=f"this checkpoint needs {needed[0]}",
        )
        raise ProblemsFound([problem])
