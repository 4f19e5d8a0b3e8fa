"""From a config to a trained WAN model: clips, steps, checkpoints, samples, a diffusers folder."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from maxdiffusion import __version__
from maxdiffusion.commands.clip_sets import clip_sets
from maxdiffusion.commands.entry import chip_of
from maxdiffusion.commands.generate import say, use_cache
from maxdiffusion.commands.profiles import profile_notes
from maxdiffusion.commands.training_data import ClipStore, as_clip_batch
from maxdiffusion.commands.training_models import first
from maxdiffusion.commands.training_results import Model, SampleVideos, export
from maxdiffusion.commands.training_run import Run, train_steps
from maxdiffusion.commands.training_settings import batch_shape, folder_problems, wan_training
from maxdiffusion.config.config import Config
from maxdiffusion.config.loading import Reading
from maxdiffusion.config.profile_checks import profile_problems
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.runtime.agreement import agree
from maxdiffusion.runtime.coordination import several
from maxdiffusion.runtime.disk import room_problems
from maxdiffusion.runtime.libtpu_flags import describe_flags
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.training.data import Batches, Order
from maxdiffusion.training.flops import FORMULA
from maxdiffusion.training.sized_steps import SizedTraining
from maxdiffusion.training.wan_training import StoredText, Tokens
from maxdiffusion.weights.folder import ModelFolder
from maxdiffusion.weights.identity import component_digests


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A training that can run."""

    model: Model
    sized: SizedTraining
    batches: Batches


def train(reading: Reading) -> None:
    """Trains as the config says, from the newest checkpoint if there is one."""
    config = reading.config
    check(config, list(reading.problems))
    use_cache(config)
    job = prepare(config)
    say(start_up_plan(job))
    model, training = job.model, job.model.training
    run = Run(
        programs={name: job.sized.step(name) for name in training.experts.names},
        program_at=training.experts.at,
        batches=job.batches,
        work_of=job.sized.work_of,
        visit=SampleVideos(model=model),
    )
    state = train_steps(config, run, first(config, training, model.folder, model.spec))
    if config.export_dir:
        export(model, state)


def check(config: Config, earlier: list[Problem]) -> None:
    """Raises what stands between a config and a training, before anything is read."""
    problems = [
        *earlier,
        *profile_problems(config, "max_train_steps"),
        *folder_problems(config, "checkpoint_dir", "latent_cache_dir"),
    ]
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
    """The job: its programs planned, its clips encoded."""
    folder, spec = open_wan_folder(config.pretrained_model_name_or_path)
    if several():
        agree("inputs", component_digests(folder))
    problems = list(export_problems(config, folder))
    if problems:
        raise ProblemsFound(problems)
    store = ClipStore.of(config, folder, spec, clip_sets(config, spec))
    latents = [store.latent(held).dims[:3] for held in store.sets]
    batch = batch_shape(config, latents[0], store.caption_tokens)
    training = wan_training(config, spec, batch, Tokens(empty=store.empty_caption))
    SizedTraining(training=training, latents=latents).by_latent  # noqa: B018 - refuses here
    store.fill()
    samples, text = store.read()
    training = replace(training, text=text)
    seed = config.seed if config.enable_data_shuffling else None
    return TrainingJob(
        model=Model(config=config, folder=folder, spec=spec, training=training),
        sized=SizedTraining(training=training, latents=latents),
        batches=Batches(samples, Order(batch=batch.clips, seed=seed), as_clip_batch),
    )


def export_problems(config: Config, folder: ModelFolder) -> Iterator[Problem]:
    """A problem if a model as large as the one in the folder has no room in `export_dir`."""
    if config.export_dir:
        size = sum(file.stat().st_size for file in folder.root.rglob("*") if file.is_file())
        yield from room_problems("export_dir", place(config.export_dir), size)


def start_up_plan(job: TrainingJob) -> str:
    """What will run, in words."""
    config, training = job.model.config, job.model.training
    batch, mesh = training.batch, training.mesh
    start = "new weights" if config.train_from_scratch else config.pretrained_model_name_or_path
    reader = "stored embeddings" if isinstance(training.text, StoredText) else "the text encoder"
    sizes = " or ".join(map(str, job.sized.latents))
    return "\n".join(
        [
            f"maxdiffusion {__version__} on {mesh.size} x {mesh.devices.flat[0].device_kind}",
            f"model: {start}, training {training.experts.names}",
            "mesh: " + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            training.block_attention.describe(),
            *profile_notes(config),
            *describe_flags(chip_of(config)),
            f"batch: {batch.clips} clips of latents {sizes} in {batch.accumulation} pieces, "
            f"captions of up to {batch.caption_tokens} tokens from {reader}, "
            f"remat {training.remat.kind.value}",
            f"TFLOP/s count {FORMULA}",
        ]
    )
