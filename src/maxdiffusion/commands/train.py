"""From a config to a trained WAN model: clips, steps, checkpoints, samples, a diffusers folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxdiffusion import __version__
from maxdiffusion.commands.entry import chip_of
from maxdiffusion.commands.generate import say, use_cache
from maxdiffusion.commands.pipeline_settings import pipeline_settings
from maxdiffusion.commands.profiles import profile_notes, profile_plan
from maxdiffusion.commands.training_data import as_clip_batch, cached_clips, encoder_of
from maxdiffusion.commands.training_settings import (
    batch_shape,
    caption_length,
    clips,
    wan_training,
)
from maxdiffusion.config.config import Config
from maxdiffusion.config.loading import Reading
from maxdiffusion.config.profile_checks import profile_problems
from maxdiffusion.models.vae import WanVae
from maxdiffusion.pipelines.loading import WanParameters
from maxdiffusion.pipelines.programs import Workshop
from maxdiffusion.pipelines.prompts import PromptTokenizer
from maxdiffusion.pipelines.shapes import VideoShape, latent_shape
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.pipelines.wan import WanPipeline
from maxdiffusion.runtime.libtpu_flags import describe_flags
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.runtime.profiling import Profiler
from maxdiffusion.runtime.progress import Advance, steps_bar
from maxdiffusion.runtime.video import write_video
from maxdiffusion.training.checkpoints import Checkpoints
from maxdiffusion.training.data import Batches, Order
from maxdiffusion.training.experts import HIGH_NOISE, LOW_NOISE
from maxdiffusion.training.export import NewPart, export_model
from maxdiffusion.training.flops import FORMULA, step_work
from maxdiffusion.training.loop import Loop, LoopPlan
from maxdiffusion.training.metrics import Figures, MetricsWriter, Work
from maxdiffusion.training.parts import Part, Values, values_of
from maxdiffusion.training.state import TrainState, first_state
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.wan_training import WanTraining
from maxdiffusion.weights.folder import ModelFolder
from maxdiffusion.weights.loading import ComponentSource, load_parameters
from maxdiffusion.weights.transformer_map import transformer_map
from maxdiffusion.weights.umt5_map import umt5_map
from maxdiffusion.weights.vae_map import vae_map


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training that can run."""

    config: Config
    folder: ModelFolder
    spec: WanSpec
    training: WanTraining
    batches: Batches


def train(reading: Reading) -> None:
    """Trains as the config says, from the newest checkpoint if there is one."""
    config = reading.config
    check(config, list(reading.problems))
    use_cache(config)
    job = prepare(config)
    say(start_up_plan(job))
    checkpoints = Checkpoints(Path(config.checkpoint_dir), keep=config.keep_checkpoints, say=say)
    try:
        state = run(job, checkpoints)
    finally:
        checkpoints.close()
    if config.export_dir:
        export(job, state)
        say(f"wrote {config.export_dir}")


def check(config: Config, earlier: list[Problem]) -> None:
    """Raises what stands between a config and a training, before anything is read."""
    problems = [*earlier, *profile_problems(config, "max_train_steps")]
    for name in ("checkpoint_dir", "latent_cache_dir"):
        if not config.values[name]:
            rule = "training needs a folder of its own"
            remedy = f"Set {name}=FOLDER"
            problems.append(Problem(name=name, value="", rule=rule, remedy=remedy))
    if config.synthetic_window:
        rule = "windows are for the autoencoder: experts train on whole clips"
        remedy = "Use synthetic_window=0"
        value = config.synthetic_window
        problems.append(Problem(name="synthetic_window", value=value, rule=rule, remedy=remedy))
    if config.export_dir and Path(config.export_dir).expanduser() == Path(
        config.pretrained_model_name_or_path
    ):
        rule, remedy = "must not be the model that training starts from", "Name another folder"
        problems.append(
            Problem(name="export_dir", value=config.export_dir, rule=rule, remedy=remedy)
        )
    if problems:
        raise ProblemsFound(problems)


def prepare(config: Config) -> TrainingJob:
    """The job: its clips encoded, its programs planned."""
    folder, spec = open_wan_folder(config.pretrained_model_name_or_path)
    video = VideoShape(height=config.height, width=config.width, num_frames=config.num_frames)
    latent = latent_shape(video, spec.vae, spec.transformer)
    tokenizer = PromptTokenizer.load(folder.root / "tokenizer")
    captioned = clips(config)
    length = config.max_sequence_length
    tokens = caption_length(captioned, lambda text: tokenizer.ids(text, length), length)
    batch = batch_shape(config, (latent.frames, latent.rows, latent.columns), tokens)
    training = wan_training(config, spec, batch, tokenizer.ids("", length))
    training.block_attention  # noqa: B018 - refuses here what cannot run
    samples = cached_clips(
        Path(config.latent_cache_dir).expanduser(),
        captioned,
        folder,
        encode=lambda: encoder_of(*vae_of(folder, spec)),
        caption_tokens=tokens,
        length=length,
    )
    seed = config.seed if config.enable_data_shuffling else None
    order = Order(batch=batch.clips, seed=seed)
    return TrainingJob(
        config=config,
        folder=folder,
        spec=spec,
        training=training,
        batches=Batches(samples, order, as_clip_batch),
    )


def vae_of(folder: ModelFolder, spec: WanSpec) -> tuple[Part[WanVae], Values]:
    """The autoencoder of a folder, in float32."""
    part: Part[WanVae] = Part.of(lambda rngs: WanVae(spec.vae, rngs=rngs))
    return part, loaded(folder, "vae", part, vae_map(spec.vae), None)


def loaded(folder: ModelFolder, name: str, part: Part[Any], table: Any, mesh: Any) -> Values:
    """The parameters of one component as the part has them."""
    source = ComponentSource(stored=folder.weights[name], table=table, abstract=part.variables)
    return values_of(load_parameters(source, mesh=mesh)[0])


def first(job: TrainingJob) -> TrainState:
    """The state before the first step: the weights of the folder."""
    training, spec = job.training, job.spec
    tables = {name: transformer_map(spec.transformer) for name in training.experts.names}
    tables[TEXT_ENCODER] = umt5_map(spec.text_encoder)
    values = {
        name: loaded(job.folder, name, part, tables[name], training.mesh)
        for name, part in training.parts.items()
    }
    return first_state(values, training.optimiser, seed=job.config.seed, mesh=training.mesh)


def run(job: TrainingJob, checkpoints: Checkpoints) -> TrainState:
    """The state after the last step."""
    config, training = job.config, job.training
    state = first(job)
    restored = checkpoints.restore(state)
    if restored is not None:
        state = restored.state
        job.batches.seek(restored.data)
        say(f"continuing after step {int(state.step)} from {checkpoints.folder}")
    batch = training.batch
    work = step_work(
        training.transformer,
        clips=batch.clips,
        tokens=training.transformer.tokens(batch.latent),
        text_rows=batch.caption_tokens + 1,
        devices=training.mesh.size,
    )
    metrics = metrics_writer(config, work)
    metrics.start(int(state.step))
    plan = LoopPlan(
        steps=config.max_train_steps,
        checkpoint_every=max(0, config.checkpoint_every),
        visit_every=config.sample_every,
        program_at=training.experts.at,
    )
    programs = {name: training.step(name) for name in training.experts.names}
    try:
        with steps_bar("Training", max(0, plan.steps - int(state.step))) as advance:
            loop = Loop(
                plan,
                programs,
                job.batches,
                checkpoints=checkpoints,
                report=reporter(metrics, advance, plan.steps),
                visit=lambda state: sample(job, state),
                profiler=Profiler(profile_plan(config)),
            )
            return loop.run(state)
    finally:
        metrics.close()


def metrics_writer(config: Config, work: Work) -> MetricsWriter:
    """Where the figures of a run go."""
    return MetricsWriter(
        Path(config.metrics_file).expanduser() if config.metrics_file else None,
        work=work,
        tensorboard=Path(config.tensorboard_dir).expanduser() if config.tensorboard_dir else None,
    )


def reporter(metrics: MetricsWriter, advance: Advance, steps: int, every: int = 50) -> Any:
    """What is told after each step: a line of JSON, the bar, and now and then a line to read."""

    def report(figures: Figures) -> None:
        metrics(figures)
        advance()
        if figures.step % every == 0 or figures.step in (1, steps):
            parts = " ".join(f"{k}={v:.4f}" for k, v in figures.named_details().items())
            say(
                f"step {figures.step}/{steps} {figures.part} loss {figures.loss:.4f} "
                f"norm {figures.gradient_norm:.3f} {figures.seconds:.3f} s/step {parts}"
            )

    return report


def start_up_plan(job: TrainingJob) -> str:
    """What will run, in words."""
    config, training = job.config, job.training
    batch, mesh = training.batch, training.mesh
    return "\n".join(
        [
            f"maxdiffusion {__version__} on {mesh.size} x {mesh.devices.flat[0].device_kind}",
            f"model: {config.pretrained_model_name_or_path}, training {training.experts.names}",
            "mesh: " + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            training.block_attention.describe(),
            *profile_notes(config),
            *describe_flags(chip_of(config)),
            f"batch: {batch.clips} clips of latents {batch.latent} in {batch.accumulation} pieces, "
            f"captions of up to {batch.caption_tokens} tokens, remat {training.remat.kind.value}",
            f"TFLOP/s count {FORMULA}",
        ]
    )


def trained_states(job: TrainingJob, state: TrainState) -> dict[str, Any]:
    """The running means as models; a network for all noise levels stands for both experts."""
    training = job.training
    states = {name: training.parts[name].state(state.ema[name]) for name in training.parts}
    if len(training.experts.names) == 1 and training.experts.trained.value == "shared":
        states |= dict.fromkeys(job.spec.experts, states[HIGH_NOISE])
    return states


def export(job: TrainingJob, state: TrainState) -> None:
    """Writes the trained model as a diffusers folder."""
    tables = {
        HIGH_NOISE: transformer_map(job.spec.transformer),
        LOW_NOISE: transformer_map(job.spec.transformer),
        TEXT_ENCODER: umt5_map(job.spec.text_encoder),
    }
    parts = {
        name: NewPart(state=part, table=tables[name], config=job.folder.configs[name])
        for name, part in trained_states(job, state).items()
    }
    dtype = np.dtype(job.config.weights_dtype)
    export_model(job.folder.root, Path(job.config.export_dir).expanduser(), parts, dtype=dtype)


def sample(job: TrainingJob, state: TrainState) -> None:
    """Writes a video of the config's prompt with the running means."""
    config, training = job.config, job.training
    states = trained_states(job, state)
    if any(name not in states for name in job.spec.experts) or jax.process_count() > 1:
        say("no sample: it needs both experts on one process")
        return
    part, values = vae_of(job.folder, job.spec)
    workshop = Workshop(spec=job.spec, settings=pipeline_settings(config), mesh=training.mesh)
    pipeline = WanPipeline(
        workshop=workshop,
        parameters=WanParameters(
            transformers={name: states[name] for name in job.spec.experts},
            vae=part.state(values),
            text_encoder=states[TEXT_ENCODER],
        ),
        tokenizer=PromptTokenizer.load(job.folder.root / "tokenizer"),
    )
    frames = pipeline(
        config.prompt,
        height=config.height,
        width=config.width,
        num_frames=config.num_frames,
        num_inference_steps=config.num_inference_steps,
        guidance_scale=config.guidance_scale_high,
        seed=config.seed,
        flow_shift=config.flow_shift,
    ).frames[0]
    path = Path(config.output_dir) / f"step_{int(state.step):06d}.mp4"
    write_video(path, frames, fps=config.fps)
    say(f"wrote {path}")
