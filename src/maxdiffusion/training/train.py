"""Training commands: caches of encoded clips, transformers, and the video autoencoder.

preprocess   clips -> latents and text embeddings on disk
train        clips -> experts, with checkpoints and samples -> a diffusers folder
train_vae    clips -> autoencoder -> a diffusers folder
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion import __version__
from maxdiffusion.checkpoints.diffusers_folder import ModelFolder, component_digests
from maxdiffusion.checkpoints.lora import LoraFile
from maxdiffusion.config import Config
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.config.validate import check_profile
from maxdiffusion.diffusion.registry import find_sampler
from maxdiffusion.distributed.coordination import assert_equal_across_processes, is_multiprocess
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.settings import (
    profile_notes,
    transformer_files,
    use_compilation_cache,
)
from maxdiffusion.models.abstract import AbstractModel, Values
from maxdiffusion.models.vae import ALL_FRAMES, WanVae
from maxdiffusion.models.vae.checkpoint import vae_map
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.runtime.files import FilePath, as_path, check_free_space, read_json_lines, writing
from maxdiffusion.runtime.tpu_flags import describe_flags, target_chip
from maxdiffusion.training.data.batches import Batches, Order, Samples, as_signed
from maxdiffusion.training.data.latent_cache import SKIPPED, CachedClips, CaptionedClips
from maxdiffusion.training.data.store import ClipSet, ClipStore, as_clip_batch, open_store
from maxdiffusion.training.lora.adapters import check_experts, check_lora
from maxdiffusion.training.lora.base import AdapterRun
from maxdiffusion.training.loss import TrainedExperts
from maxdiffusion.training.memory.placement import DEVICE
from maxdiffusion.training.metrics import describe_utilisation
from maxdiffusion.training.models import initial_state, vae_of
from maxdiffusion.training.random_init import vae_json
from maxdiffusion.training.results import (
    Model,
    NewPart,
    SampleVideos,
    export,
    export_model,
    sample_inputs,
)
from maxdiffusion.training.run import Run, check_base, train_steps
from maxdiffusion.training.settings import (
    batch_shape,
    check_folders,
    optimiser,
    training_mesh,
    wan_training,
    windows,
)
from maxdiffusion.training.step import TrainState, first_state, place_values
from maxdiffusion.training.vae import VAE, VaeTraining, peak_signal, with_statistics
from maxdiffusion.training.wan import BucketedTraining, StoredText, Tokens
from maxdiffusion.training.watch.evaluation import Evaluation

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A resolved job: the model, the training of every bucket, and the batches.

    `adapters` is for a training of adapters alone, `start` has the files that they start from.
    """

    model: Model
    buckets: BucketedTraining
    batches: Batches
    held_out: tuple[Samples, ...] = ()  # for evaluation
    adapters: AdapterRun | None = None
    start: Mapping[str, LoraFile] = field(default_factory=dict)


def train(parsed: ParsedConfig) -> None:
    """Trains the experts or adapters of a config, from the newest checkpoint if there is one."""
    config = parsed.config
    check(config, parsed.problems)
    use_compilation_cache(config)
    job = resolve_job(config)
    about = start_up_plan(job)
    logger.info(about)
    model, training, adapters = job.model, job.model.training, job.adapters
    base: Mapping[str, str] = {}
    if adapters is not None:
        base = adapters.base_identity()
        check_base(config, base)
        model = replace(model, frozen=adapters.frozen_values())
    steps = {name: job.buckets.bucketed_step(name, model.frozen) for name in training.experts.names}
    evaluation = evaluation_of(job)
    run = Run(
        steps=steps,
        expert_at=training.experts.at,
        batches=job.batches,
        work_of=job.buckets.work_of,
        make_sample=SampleVideos(model=model),
        evaluate=replace(evaluation, frozen=model.frozen) if evaluation else lambda state: {},
        about=about,
        base=base,
    )
    if adapters is None:
        initial = initial_state(config, training, model.folder, model.spec)
    else:
        initial = adapters.initial_state(job.start)
    state = train_steps(config, run, initial)
    if config.export_dir and adapters is None:
        export(model, state)
    elif config.export_dir and adapters is not None:
        adapters.export(state)


def check(config: Config, earlier: Sequence[Problem]) -> None:
    """Raises ProblemsFound with everything that a config alone shows to be wrong."""
    problems = Collector(earlier)
    with problems:
        find_sampler(config.scheduler)  # of the sample videos
    with problems:
        check_profile(config, "max_train_steps", config.max_train_steps)
    with problems:
        check_folders(
            config,
            checkpoint_dir=config.checkpoint_dir,
            latent_cache_dir=config.latent_cache_dir,
        )
    with problems:
        check_whole_clips(config)
    with problems:
        check_lora(config)
    with problems:
        check_export_target(config)
    with problems:
        check_not_quantized(config)
    with problems:
        check_turns(config)
    problems.raise_if_any()


def check_turns(config: Config) -> None:
    """Raises ProblemsFound if turns of experts are stated for a training of one network."""
    if config.train_experts == TrainedExperts.BOTH.value:
        return
    rule = f"train_experts={config.train_experts} trains one network, which takes no turns"
    problems = [
        Problem(name=name, value=vars(config)[name], rule=rule, remedy="Use train_experts=both")
        for name, usual in (("idle_expert_memory", DEVICE), ("expert_turn_steps", 1))
        if vars(config)[name] != usual
    ]
    Collector(problems).raise_if_any()


def check_not_quantized(config: Config) -> None:
    """Raises ProblemsFound if weights are to be kept in 8 bits, which have no gradients."""
    if config.quantization or config.use_qwix_quantization:
        rule = "training updates weights in float32; 8-bit weights are for generation"
        value, remedy = config.quantization, "Set quantization='' and use_qwix_quantization=false"
        raise ProblemsFound([Problem(name="quantization", value=value, rule=rule, remedy=remedy)])


def check_whole_clips(config: Config) -> None:
    """Raises ProblemsFound if clips are cut to windows, which only the autoencoder trains on."""
    if config.synthetic_window:
        rule = "windows are for the autoencoder: experts train on whole clips"
        value, remedy = config.synthetic_window, "Use synthetic_window=0"
        raise ProblemsFound(
            [Problem(name="synthetic_window", value=value, rule=rule, remedy=remedy)]
        )


def check_export_target(config: Config) -> None:
    """Raises ProblemsFound if the export would overwrite the model that training starts from."""
    source = Path(config.pretrained_model_name_or_path)
    if config.export_dir and Path(config.export_dir).expanduser() == source:
        rule, remedy = "must not be the model that training starts from", "Name another folder"
        problem = Problem(name="export_dir", value=config.export_dir, rule=rule, remedy=remedy)
        raise ProblemsFound([problem])


def resolve_job(config: Config) -> TrainingJob:
    """Returns the job: attention planned for every bucket, clips encoded."""
    folder, spec = open_wan_folder(config.pretrained_model_name_or_path, transformer_files(config))
    if config.enable_lora:
        from maxdiffusion.generation.lora import fuse_lora_files  # for `enable_lora` alone

        folder = fuse_lora_files(config, folder, spec)
    if is_multiprocess():
        assert_equal_across_processes("inputs", component_digests(folder))
    if config.sample_every:
        sample_inputs(config, spec)
    check_experts(config, spec)
    check_export_room(config, folder)
    store = open_store(config, folder, spec)
    latents = [*dict.fromkeys(store.latents)]
    batch = batch_shape(config, latents[0], store.caption_tokens)
    training = wan_training(config, spec, batch, Tokens(empty=store.empty_caption))
    BucketedTraining(training=training, latents=latents).check_attention()
    adapters, start = None, {}
    if training.lora is not None:
        adapters = AdapterRun(config=config, folder=folder, spec=spec, training=training)
        start = adapters.starting_files()
        if config.export_dir:
            size = adapters.adapter_bytes
            check_free_space("export_dir", as_path(config.export_dir), size)
    store.fill()
    samples, text = store.read()
    training = replace(training, text=text)
    if adapters is not None:
        adapters = replace(adapters, training=training)
    seed = config.seed if config.enable_data_shuffling else None
    order = Order(batch=batch.clips, seed=seed, threads=config.data_threads)
    return TrainingJob(
        model=Model(config=config, folder=folder, spec=spec, training=training),
        buckets=BucketedTraining(training=training, latents=latents),
        batches=Batches(samples[: store.trained], order, as_clip_batch),
        held_out=samples[store.trained :],
        adapters=adapters,
        start=start,
    )


def evaluation_of(job: TrainingJob) -> Evaluation | None:
    """Returns the evaluation on held-out clips; None if the config asks for none."""
    if not job.held_out:
        return None
    config = job.model.config
    return Evaluation(
        buckets=job.buckets,
        samples=job.held_out,
        assemble=as_clip_batch,
        clips=config.num_eval_samples,
        seed=config.seed,
    )


def check_export_room(config: Config, folder: ModelFolder) -> None:
    """Raises ProblemsFound if `export_dir` has no room for a model as large as the folder's."""
    if config.export_dir and not config.train_lora:
        size = sum(file.stat().st_size for file in folder.root.rglob("*") if file.is_file())
        check_free_space("export_dir", as_path(config.export_dir), size)


def start_up_plan(job: TrainingJob) -> str:
    """Returns the start-up report."""
    config, training = job.model.config, job.model.training
    batch, mesh = training.batch, training.mesh
    start = "new weights" if config.train_from_scratch else config.pretrained_model_name_or_path
    reader = "stored embeddings" if isinstance(training.text, StoredText) else "the text encoder"
    sizes = " or ".join(map(str, job.buckets.latents))
    evaluation = evaluation_of(job)
    return "\n".join(
        [
            f"maxdiffusion {__version__} on {mesh.size} x {mesh.devices.flat[0].device_kind}",
            f"model: {start}, training {training.experts.names}",
            "mesh: " + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
            training.block_attention.describe(),
            training.image.describe(),
            training.placement.describe(training.optimiser.moments.value),
            *([] if job.adapters is None else job.adapters.describe()),
            *profile_notes(config),
            *describe_flags(target_chip(config.topology)),
            f"batch: {batch.clips} clips of latents {sizes} in {batch.accumulation} pieces, "
            f"captions of up to {batch.caption_tokens} tokens from {reader}, "
            + training.remat.describe(training.block_attention.self_attention),
            describe_utilisation(mesh.devices.flat[0].device_kind, 1 + training.backward),
            *([] if evaluation is None else [evaluation.describe()]),
        ]
    )


def preprocess(parsed: ParsedConfig) -> None:
    """Encodes the clips of a config; after an interruption the same command continues."""
    config = parsed.config
    problems = Collector(parsed.problems)
    with problems:
        check_folders(config, latent_cache_dir=config.latent_cache_dir)
    problems.raise_if_any()
    use_compilation_cache(config)
    folder, spec = open_wan_folder(config.pretrained_model_name_or_path)
    store = open_store(config, folder, spec)
    if not isinstance(store, ClipStore):
        logger.info(f"{store.describe()}; they are encoded already")
        return
    store.fill()
    for clips in store.sets:
        logger.info(summary(clips, store))
    log_skipped({as_path(config.latent_cache_dir), *(clips.cache for clips in store.sets)})


def summary(clips: ClipSet, store: ClipStore) -> str:
    """Returns one line about a cache."""
    cached = CachedClips(clips.cache)
    text = "text embeddings" if store.keeps_text else "tokens"
    return (
        f"{clips.cache}: {len(cached)} of {len(clips.clips)} clips of {clips.size} "
        f"(frames, height, width) as latents {cached.latent_shape} and {text} of "
        f"{cached.caption_tokens} rows"
    )


def log_skipped(folders: Iterable[FilePath]) -> None:
    """Logs which clips were skipped, and why."""
    for file in sorted(folder / SKIPPED for folder in folders):
        lines = read_json_lines(file)
        if not lines:
            continue
        logger.info(f"{len(lines)} clips were skipped ({file}):")
        for line in lines:
            logger.info(f"  {line['reason']}")


MEASURED_CLIPS, AT_ONCE = 256, 16


def train_vae(parsed: ParsedConfig) -> None:
    """Trains the autoencoder of a model folder, and writes the folder with the new one."""
    config = parsed.config
    check_vae_run(config, parsed.problems)
    use_compilation_cache(config)
    folder, spec = open_wan_folder(config.pretrained_model_name_or_path)
    training = VaeTraining(
        config=spec.vae, optimiser=optimiser(config), mesh=training_mesh(config, None)
    )
    values = first_values(config, training, folder, spec)
    state = first_state({VAE: values}, training.optimiser, seed=config.seed, mesh=training.mesh)
    captioned = windows(config)
    order = Order(batch=config.global_batch_size or 8, seed=config.seed)
    run = Run(
        steps={VAE: training.step()},
        expert_at=lambda step: VAE,
        batches=Batches(captioned, order),
    )
    state = train_steps(config, run, state)
    if config.export_dir:
        export_vae(config, training, state, captioned, folder)


def check_vae_run(config: Config, earlier: Sequence[Problem]) -> None:
    """Raises ProblemsFound with everything that a config alone shows to be wrong."""
    problems = Collector(earlier)
    with problems:
        check_profile(config, "max_train_steps", config.max_train_steps)
    with problems:
        check_folders(config, checkpoint_dir=config.checkpoint_dir)
    with problems:
        check_all_weights(config)
    problems.raise_if_any()


def check_all_weights(config: Config) -> None:
    """Raises ProblemsFound if adapters of an autoencoder are asked for."""
    if config.train_lora:
        rule, remedy = "adapters are trained for transformers", "Set train_lora=false"
        raise ProblemsFound([Problem(name="train_lora", value=True, rule=rule, remedy=remedy)])


def first_values(
    config: Config, training: VaeTraining, folder: ModelFolder, spec: WanSpec
) -> Values:
    """Returns the parameters before the first step: those of the folder, or random ones."""
    if config.train_from_scratch:
        return training.first_values(config.seed)
    return place_values(vae_of(folder, spec)[1], training.model, training.mesh)


def export_vae(
    config: Config,
    training: VaeTraining,
    state: TrainState,
    captioned: CaptionedClips,
    folder: ModelFolder,
) -> None:
    """Writes the folder with the new autoencoder and the statistics of its latents."""
    values, program = state.ema[VAE], reconstruct(training.model)
    latents, decibels = [], []
    for at in range(0, min(MEASURED_CLIPS, len(captioned)), AT_ONCE):
        stop = min(at + AT_ONCE, len(captioned))
        videos = np.stack([captioned[index]["video"] for index in range(at, stop)])
        mean, decoded = program(values, as_signed(videos))
        latents.append(np.asarray(mean))
        decibels.append(peak_signal((np.asarray(decoded) + 1) * 127.5, videos))
    measured = with_statistics(training.config, latents)
    part = NewPart(
        state=training.model.state(values),
        table=vae_map(measured),
        config={**folder.configs[VAE], **vae_json(measured)},
    )
    target = as_path(config.export_dir)
    with writing("the trained model", target):
        export_model(folder.root, target, {VAE: part})
    count = sum(map(len, latents))
    logger.info(f"wrote {config.export_dir}: {np.mean(decibels):.2f} dB on {count} clips")


def reconstruct(model: AbstractModel[WanVae]) -> Callable[..., tuple[Array, Array]]:
    """Returns a program from clips to the means of their latents and the decoded clips."""

    @jax.jit
    def run(
        values: Values, video: Float[Array, "B F Y X C"]
    ) -> tuple[Float[Array, "B f y x O"], Float[Array, "B F Y X C"]]:
        vae = model.merge(values)
        mean = vae.encode(video, chunk=ALL_FRAMES).mean
        return mean, vae.decode(mean, chunk=ALL_FRAMES)

    return run
