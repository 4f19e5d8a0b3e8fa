"""Returns the values that a pipeline and a run are built from, given a config.

model      precision, attention options, decoding, sampler, guidance, sizes
tasks      what each line of a job gives its model, and the shapes that follow
caches     `jax_cache_dir` (jax's own), `aot_cache_dir` (whole programs)
profile    steps to trace
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from maxdiffusion.attention import AttentionOptions, BlockSizes
from maxdiffusion.attention.options import TunedBlocks, read_tuned_blocks
from maxdiffusion.config import Config
from maxdiffusion.config.job_fields import STEP_CACHES, stated_inputs
from maxdiffusion.config.validate import VideoRequestLine, check_writable
from maxdiffusion.diffusion import Sampler, sampler_named
from maxdiffusion.diffusion.denoise import StepCache
from maxdiffusion.diffusion.guidance import GuidanceScales, RunPlan, plan_run
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.models.vae import Tiling
from maxdiffusion.pipelines.programs import ProgramBuilder, ProgramShape
from maxdiffusion.pipelines.request import (
    Request,
    VideoShape,
    check_video_shape,
    latent_shape,
)
from maxdiffusion.pipelines.settings import Decoding, MatmulPrecision, PipelineSettings, Precision
from maxdiffusion.pipelines.spec import TRAIN_TIMESTEPS, TransformerFiles, WanSpec
from maxdiffusion.pipelines.tasks.base import Task, TextToVideo, VisualInputs
from maxdiffusion.runtime.files import FilePath, as_path
from maxdiffusion.runtime.timing import ProfilePlan

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from maxdiffusion.models.wan.eight_bit import WeightFormat

WAN_2_1_GUIDANCE = 5.0
"""The guidance scale that WAN 2.1 is published with."""
PROFILE_FOLDER = "profile"
MATMUL_PRECISIONS: Mapping[str, MatmulPrecision] = {
    "DEFAULT": "default",
    "HIGH": "high",
    "HIGHEST": "highest",
}


def pipeline_settings(config: Config, attention: str, device_kind: str = "") -> PipelineSettings:
    """Returns precision, attention and decoding for a kind of device.

    `attention` is the name that `auto` stands for.
    """
    return PipelineSettings(
        precision=precision(config, device_kind),
        attention=attention,
        attention_options=attention_options(config),
        scan_layers=config.scan_layers,
        decoding=decoding(config),
        text_length=config.max_sequence_length,
        lora_rank=config.lora_rank,
    )


def precision(config: Config, device_kind: str = "") -> Precision:
    """Returns the dtypes of every part, on a kind of device."""
    return Precision(
        weights=jnp.dtype(config.weights_dtype),
        activations=jnp.dtype(config.activations_dtype),
        text_encoder=jnp.dtype(config.text_encoder_dtype),
        vae=jnp.dtype(config.vae_dtype),
        vae_weights=jnp.dtype(config.vae_weights_dtype),
        matmul=MATMUL_PRECISIONS[config.precision],
        weight_format=weight_format(config, device_kind),
    )


def weight_format(config: Config, device_kind: str) -> "WeightFormat | None":
    """Returns the 8-bit format of the blocks' weights, if the config asks for one."""
    if not (config.use_qwix_quantization and config.quantization):
        return None
    # Both for 8-bit weights alone.
    from maxdiffusion.costs.chips import multiplies_faster
    from maxdiffusion.models.wan.eight_bit import FLOAT8, INT8, Activations, WeightFormat

    dtype = INT8 if config.quantization == "int8" else FLOAT8
    per_token = (
        config.quantization == "fp8_full"
        or {
            "always": True,
            "never": False,
            "auto": multiplies_faster(device_kind, str(dtype)),
        }[config.quantize_activations]
    )
    return WeightFormat(
        dtype=dtype, activations=Activations.PER_TOKEN if per_token else Activations.NATIVE
    )


def attention_options(config: Config) -> AttentionOptions:
    """Returns everything about attention but its name."""
    return AttentionOptions(
        block_sizes=BlockSizes.from_mapping(config.flash_block_sizes),
        use_base2_exp=config.use_base2_exp,
        use_experimental_scheduler=config.use_experimental_scheduler,
        ulysses_attention_chunks=config.ulysses_attention_chunks,
        flash_min_seq_length=config.flash_min_seq_length,
        tuned_blocks=tuned_blocks(config),
    )


def tuned_blocks(config: Config) -> tuple[TunedBlocks, ...]:
    """Returns the block sizes that searches have found; none before the first wrote its file."""
    path = Path(config.tuned_blocks_file)
    if not config.tuned_blocks_file or (config.enable_tile_search and not path.exists()):
        return ()
    return read_tuned_blocks(path)


def decoding(config: Config) -> Decoding:
    """Returns how the VAE decodes."""
    tiling = Tiling(
        tile_height=config.vae_tile_height,
        tile_width=config.vae_tile_width,
        stride_height=config.vae_tile_stride_height,
        stride_width=config.vae_tile_stride_width,
    )
    return Decoding(
        chunk=config.vae_decode_chunk,
        tiling=tiling if config.vae_tiling else None,
        spatial_devices=config.vae_spatial,
    )


def transformer_files(config: Config) -> TransformerFiles:
    """Returns the files that replace the transformers of the folder."""
    return TransformerFiles(
        first=config.wan_transformer_pretrained_model_name_or_path,
        second=config.wan_transformer_2_pretrained_model_name_or_path,
    )


def video_shape(config: Config) -> VideoShape:
    """Returns the size of the videos."""
    return VideoShape(height=config.height, width=config.width, num_frames=config.num_frames)


def program_shape(
    config: Config,
    spec: WanSpec,
    videos: int,
    *,
    video: VideoShape | None = None,
    task: Task | None = None,
) -> ProgramShape:
    """Returns the sizes that programs are compiled for, with `videos` at once.

    `video` is the size of the config's videos unless it is given, `task` text-to-video.
    """
    task = task or TextToVideo()
    return ProgramShape(
        videos=videos,
        latent=latent_shape(video or video_shape(config), spec.vae, spec.transformer, task),
        guidance=run_plan(config, spec, task).guidance,
        text_length=config.max_sequence_length,
        task=task,
    )


def guidance_scales(config: Config, spec: WanSpec | None = None) -> GuidanceScales:
    """Returns the guidance scale of each expert; Animate has a field of its own."""
    if spec is not None and spec.animates:
        scale = config.animate_guidance_scale
        return GuidanceScales(high_noise=scale, low_noise=scale)
    if config.model_name == "wan2.2":
        return GuidanceScales(
            high_noise=config.guidance_scale_high, low_noise=config.guidance_scale_low
        )
    scale = WAN_2_1_GUIDANCE if config.guidance_scale is None else config.guidance_scale
    return GuidanceScales(high_noise=scale, low_noise=scale)


def sampler(config: Config, spec: WanSpec) -> Sampler:
    """Returns the sampler of the config, with the checkpoint's settings of the same sampler."""
    levels = config.sigmas or tuple(t / TRAIN_TIMESTEPS for t in config.denoising_step_list)
    return sampler_named(
        config.scheduler,
        spec.scheduler,
        steps=len(levels) or config.num_inference_steps,
        shift=config.flow_shift,
        sigmas=levels or None,
    )


def step_cache(config: Config, spec: WanSpec) -> StepCache | None:
    """Returns the step cache of the config, if it asks for one."""
    if not any(config.values[name] for name in STEP_CACHES):
        return None
    from maxdiffusion.generation.step_caches import step_cache_of  # for these keys alone

    return step_cache_of(config, spec)


def step_options(config: Config, spec: WanSpec) -> dict[str, Any]:
    """Returns the fields of a request about its steps: expert boundary, end of guidance, cache."""
    return {
        "boundary_ratio": config.boundary_ratio if len(spec.experts) == 2 else None,
        "boundary_step_index": config.boundary_step_index,
        "guidance_end_step": config.guidance_end_step,
        "step_cache": step_cache(config, spec),
    }


def run_plan(config: Config, spec: WanSpec, task: Task | None = None) -> RunPlan:
    """Returns expert, guidance, scale and use of a cache of every step that a task runs.

    Without a task, of all steps of the sampler.
    """
    options = step_options(config, spec)
    cache = options.pop("step_cache")
    steps = sampler(config, spec)
    steps = steps if task is None else task.sampler(steps)
    if cache is not None and steps.first_step:
        raise ProblemsFound([_cache_starts_late(config)])
    scales = guidance_scales(config, spec)
    if config.guidance_end_step is not None and not scales.active:
        raise ProblemsFound([_nothing_to_end(config)])
    plan = plan_run(steps, scales=scales, **options)
    return plan if cache is None else cache.planned_for(plan, steps)


def _cache_starts_late(config: Config) -> Problem:
    return Problem(
        name="strength",
        value=config.strength,
        rule="step caches need a whole run, and video to video starts in the middle",
        remedy="Leave out the video or the step cache",
    )


def _nothing_to_end(config: Config) -> Problem:
    return Problem(
        name="guidance_end_step",
        value=config.guidance_end_step,
        rule="guidance is off at every step: no scale is above 1",
        remedy="Leave it out, or set a guidance scale",
    )


def use_compilation_cache(config: Config) -> None:
    """Points jax's compilation cache to `jax_cache_dir`, if the config names one.

    It takes every program: a run has dozens that compile in less than jax's limit of a second.
    XLA for CPUs loses functions of a program that is loaded and stored again, so there it is not
    used together with `aot_cache_dir`.
    """
    if config.jax_cache_dir and config.aot_cache_dir and jax.default_backend() == "cpu":
        logger.warning(
            "jax_cache_dir is not used: on CPUs aot_cache_dir can keep no program that came from it"
        )
    elif config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(config.jax_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def use_aot_cache(builder: ProgramBuilder, config: Config) -> ProgramBuilder:
    """Returns the builder that loads programs from `aot_cache_dir` and stores what it compiles."""
    if not config.aot_cache_dir:
        return builder
    from maxdiffusion.pipelines.aot_cache import AotCache  # for `aot_cache_dir` alone

    return replace(builder, compile=AotCache.of(aot_cache_folder(config), builder))


def fill_aot_cache(builder: ProgramBuilder, config: Config) -> ProgramBuilder:
    """Returns the builder that compiles every program and stores it in `aot_cache_dir`."""
    if not config.aot_cache_dir:
        return builder
    from maxdiffusion.pipelines.aot_cache import AotCache  # for `aot_cache_dir` alone

    return replace(builder, compile=AotCache.of(aot_cache_folder(config), builder).fill)


def aot_cache_folder(config: Config) -> FilePath:
    """Returns the folder of compiled programs; raises if it cannot be written."""
    folder = as_path(config.aot_cache_dir)
    check_writable("aot_cache_dir", config.aot_cache_dir, folder)
    return folder


def profile_plan(config: Config) -> ProfilePlan | None:
    """Returns the steps to profile and where to write them; None without `enable_profiler`."""
    if not config.enable_profiler:
        return None
    return ProfilePlan(
        folder=os.path.join(os.path.expanduser(config.output_dir), PROFILE_FOLDER),
        skip=config.skip_first_n_steps_for_profiler,
        steps=config.profiler_steps,
    )


def profile_notes(config: Config) -> tuple[str, ...]:
    """Returns the lines of a start-up plan about the profile."""
    plan = profile_plan(config)
    return () if plan is None else (plan.describe(),)


if TYPE_CHECKING:
    from maxdiffusion.generation.inputs import InputLoader, InputRules
    from maxdiffusion.pipelines.preprocess.images import ImageFit

TEXT = TextToVideo()


@dataclass(frozen=True, kw_only=True)
class LineTasks:
    """Tasks and inputs of the lines of a job.

        checkpoint            takes                          task
        text-to-video         nothing, or a video            TextToVideo, VideoToVideo
        image-to-video        image, last_image              ImageToVideo
        TI2V-5B               nothing or image               TextToVideo, FirstFrame
        VACE                  video, mask, references        ControlToVideo
        Animate               image, pose and face video     Animate

    Inputs are opened and checked here, before weights are read. A plain text-to-video job loads
    nothing of what images and videos need. A `described` job opens no file, and inputs that its
    model needs count as given: preflight plans without them.
    """

    config: Config
    spec: WanSpec
    described: bool = False

    @property
    def takes_inputs(self) -> bool:
        """True if the model is conditioned on images or videos, in some of its tasks at least."""
        spec = self.spec
        return (
            spec.image_channels
            or spec.time_per_token
            or bool(spec.transformer.control_layers)
            or bool(self.config.video_path)
        )

    def check(self, lines: Sequence[VideoRequestLine]) -> tuple[str, ...]:
        """Opens the inputs of all lines and returns notes for the plan; raises every problem."""
        problems = Collector()
        notes: tuple[str, ...] = ()
        with problems:
            check_model_type(self.config, self.spec)
        if self.spec.animates:
            with problems:
                check_animate(self.config, lines)
        for video in {self.video(line): None for line in lines}:
            with problems:
                check_video_shape(video, self.spec.vae, self.spec.transformer)
        if self.takes_inputs or states_inputs(self.config, lines):
            with problems:
                notes = () if self.described else self._check_inputs(lines)
                for task in dict.fromkeys(map(self.task, lines)):
                    run_plan(self.config, self.spec, task)
        problems.raise_if_any()
        return notes

    def _check_inputs(self, lines: Sequence[VideoRequestLine]) -> tuple[str, ...]:
        """Opens the inputs of all lines; raises what the model does not take, and bad files."""
        problems = Collector()
        notes: tuple[str, ...] = ()
        for loader in dict.fromkeys(map(self._loader_of, lines)):
            with problems:
                taken = [line for line in lines if self._loader_of(line) is loader]
                notes = (*notes, *loader.check(taken))
        problems.raise_if_any()
        return notes

    def task(self, line: VideoRequestLine) -> Task:
        """Returns the task of a line; raises if the model cannot do it."""
        config, fit = self.config, cast("ImageFit", self.config.image_fit)
        if self.spec.animates:
            from maxdiffusion.pipelines.tasks.animate import animate_task

            return animate_task(
                self.spec,
                length=config.segment_frame_length,
                overlap=config.prev_segment_conditioning_frames,
                motion_batch=config.motion_encode_batch_size,
                fit=fit,
            )
        if self.spec.transformer.control_layers:
            from maxdiffusion.pipelines.tasks.vace import control_task

            references = line.reference_images or config.reference_images
            return control_task(
                self.spec, config.conditioning_scale, references=len(references), fit=fit
            )
        if self._changes_video(line):
            from maxdiffusion.pipelines.tasks.video_to_video import VideoToVideo

            return VideoToVideo(strength=config.strength, fit=fit)
        # The model for both takes an image if `model_type` says so.
        assumed = self.described and (self.spec.image_channels or config.model_type == "I2V")
        if not (line.image or config.image_url or assumed):
            return TEXT
        from maxdiffusion.pipelines.tasks.image_to_video import image_task

        both = self.described and self.spec.transformer.image_positions is not None
        last = bool(line.last_image or config.last_image_path)
        return image_task(self.spec, last=last or both, fit=fit)

    def shape(self, line: VideoRequestLine, videos: int) -> ProgramShape:
        """Returns the sizes that the programs of a line are compiled for."""
        task = self.task(line) if self._has_inputs(line) else TEXT
        return self.shape_for(task, line, videos)

    def shape_for(self, task: Task, line: VideoRequestLine, videos: int) -> ProgramShape:
        """Returns the sizes of a line's programs, with a task in place of its own."""
        return program_shape(self.config, self.spec, videos, video=self.video(line), task=task)

    def video(self, line: VideoRequestLine) -> VideoShape:
        """Returns the size of a line's video, of one segment if it is made in several.

        A line has precedence over the config.
        """
        frames = line.num_frames or self.config.num_frames
        return VideoShape(
            height=line.height or self.config.height,
            width=line.width or self.config.width,
            num_frames=self.config.segment_frame_length if self.spec.animates else frames,
        )

    def request(
        self,
        lines: Sequence[VideoRequestLine],
        *,
        negative_prompts: Sequence[str],
        seeds: Sequence[int],
        latents: Float[np.ndarray, "B F Y X C"] | None = None,
        inputs: Sequence[VisualInputs] | None = None,
    ) -> Request:
        """Returns the request of videos of one shape, one per line.

        Their images and videos are read, unless `inputs` has them.
        """
        first, config, spec = lines[0], self.config, self.spec
        task = self.task(first) if self._has_inputs(first) else TEXT
        loaded = [self.inputs(line) for line in lines] if inputs is None else inputs
        return Request(
            prompts=tuple(line.prompt for line in lines),
            negative_prompts=tuple(negative_prompts),
            video=self.video(first),
            sampler=task.sampler(sampler(config, spec)),
            scales=guidance_scales(config, spec),
            **step_options(config, spec),
            seeds=tuple(seeds),
            latents=latents,
            task=task,
            inputs=tuple(one for one in loaded if one is not None),
        )

    def inputs(self, line: VideoRequestLine) -> VisualInputs | None:
        """Returns the images and videos of a line; None if its task has none."""
        return self._loader_of(line).load(line) if self._has_inputs(line) else None

    def _has_inputs(self, line: VideoRequestLine) -> bool:
        return self.takes_inputs or self._changes_video(line)

    def _changes_video(self, line: VideoRequestLine) -> bool:
        """Returns whether a line is video to video: any model without other inputs does it."""
        own = self.spec.image_channels or bool(self.spec.transformer.control_layers)
        return not own and bool(line.video or self.config.video_path)

    def _loader_of(self, line: VideoRequestLine) -> "InputLoader":
        return self._video_loader if self._changes_video(line) else self._loader

    @cached_property
    def _video_loader(self) -> "InputLoader":
        from maxdiffusion.generation.inputs import VIDEO_TO_VIDEO, InputLoader

        return InputLoader(self.config, VIDEO_TO_VIDEO)

    @cached_property
    def _loader(self) -> "InputLoader":
        from maxdiffusion.generation.inputs import InputLoader

        return InputLoader(self.config, self._rules())

    def _rules(self) -> "InputRules":
        from maxdiffusion.generation import inputs

        if self.spec.animates:
            return inputs.ANIMATE
        if self.spec.transformer.control_layers:
            return inputs.VACE
        if self.spec.time_per_token:
            return inputs.TEXT_OR_IMAGE_TO_VIDEO
        if not self.spec.image_channels:
            return inputs.TEXT_TO_VIDEO
        if self.spec.image_encoder is None:
            return inputs.IMAGE_TO_VIDEO
        if self.spec.transformer.image_positions is None:
            return inputs.IMAGE_TO_VIDEO.without("last_image")
        return inputs.IMAGE_TO_VIDEO.requiring("last_image")


def check_animate(config: Config, lines: Sequence[VideoRequestLine]) -> None:
    """Raises for settings that have no effect on Animate; a file may have them for other models."""
    length = ("a video has as many frames as its poses", "Leave it out, or cut the pose video")
    scale = ("Animate has one guidance scale", "Use animate_guidance_scale")
    rules = {"num_frames": length, "guidance_scale_high": scale, "guidance_scale_low": scale}
    found = [(name, config.values[name], name) for name in rules if config.overridden(name)]
    found += [
        (line.field("num_frames"), line.num_frames, "num_frames")
        for line in lines
        if line.num_frames is not None
    ]
    Collector(
        [
            Problem(name=shown, value=value, rule=rules[name][0], remedy=rules[name][1])
            for shown, value, name in found
        ]
    ).raise_if_any()


def states_inputs(config: Config, lines: Sequence[VideoRequestLine]) -> bool:
    """Returns whether the config or a line names an image or a video."""
    bare = VideoRequestLine(prompt="")
    kept = ("prompt", "seed", "height", "width", "num_frames", "source")
    return any(stated_inputs(config).values()) or any(
        replace(line, **{name: vars(bare)[name] for name in kept}) != bare for line in lines
    )


def check_model_type(config: Config, spec: WanSpec) -> None:
    """Raises if `model_type` is not that of the model."""
    possible = ("I2V",) if spec.image_channels else ("T2V", "I2V")
    possible = possible if spec.image_channels or spec.time_per_token else ("T2V",)
    if config.model_type not in possible:
        problem = Problem(
            name="model_type",
            value=config.model_type,
            rule=f"{config.pretrained_model_name_or_path!r} is a model of type "
            f"{' and '.join(possible)}",
            remedy=f"Use model_type={possible[0]}, or another model",
        )
        raise ProblemsFound([problem])
