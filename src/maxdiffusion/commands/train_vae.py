"""From a config to a trained video autoencoder in a diffusers folder."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.commands.generate import say, use_cache
from maxdiffusion.commands.training_models import vae_of
from maxdiffusion.commands.training_run import Run, train_steps
from maxdiffusion.commands.training_settings import (
    folder_problems,
    optimiser,
    training_mesh,
    windows,
)
from maxdiffusion.config.config import Config
from maxdiffusion.config.loading import Reading
from maxdiffusion.config.profile_checks import profile_problems
from maxdiffusion.models.vae import ALL_FRAMES, WanVae
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.runtime.disk import writing
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.training.blank import vae_json
from maxdiffusion.training.data import Batches, Order
from maxdiffusion.training.export import NewPart, export_model
from maxdiffusion.training.latent_cache import CaptionedClips
from maxdiffusion.training.parts import Part, Values
from maxdiffusion.training.sources import as_signed
from maxdiffusion.training.state import TrainState, first_state, place_values
from maxdiffusion.training.vae_training import VAE, VaeTraining, peak_signal, with_statistics
from maxdiffusion.weights.folder import ModelFolder
from maxdiffusion.weights.vae_map import vae_map

MEASURED_CLIPS, AT_ONCE = 256, 16


def train_vae(reading: Reading) -> None:
    """Trains the autoencoder of a model folder, and writes the folder with the new one."""
    config = reading.config
    check(config, list(reading.problems))
    use_cache(config)
    folder, spec = open_wan_folder(config.pretrained_model_name_or_path)
    training = VaeTraining(
        config=spec.vae, optimiser=optimiser(config), mesh=training_mesh(config, None)
    )
    values = first_values(config, training, folder, spec)
    state = first_state({VAE: values}, training.optimiser, seed=config.seed, mesh=training.mesh)
    captioned = windows(config)
    order = Order(batch=config.global_batch_size or 8, seed=config.seed)
    run = Run(
        programs={VAE: training.step()},
        program_at=lambda step: VAE,
        batches=Batches(captioned, order),
    )
    state = train_steps(config, run, state)
    if config.export_dir:
        export(config, training, state, captioned, folder)


def check(config: Config, earlier: list[Problem]) -> None:
    """Raises what stands between a config and a training."""
    problems = [
        *earlier,
        *profile_problems(config, "max_train_steps"),
        *folder_problems(config, "checkpoint_dir"),
    ]
    if problems:
        raise ProblemsFound(problems)


def first_values(
    config: Config, training: VaeTraining, folder: ModelFolder, spec: WanSpec
) -> Values:
    """The parameters before the first step: those of the folder, or new ones."""
    if config.train_from_scratch:
        return training.first_values(config.seed)
    return place_values(vae_of(folder, spec)[1], training.part, training.mesh)


def export(
    config: Config,
    training: VaeTraining,
    state: TrainState,
    captioned: CaptionedClips,
    folder: ModelFolder,
) -> None:
    """Writes the folder with the new autoencoder and the statistics of its latents."""
    values, program = state.ema[VAE], there_and_back(training.part)
    latents, decibels = [], []
    for at in range(0, min(MEASURED_CLIPS, len(captioned)), AT_ONCE):
        stop = min(at + AT_ONCE, len(captioned))
        videos = np.stack([captioned[index]["video"] for index in range(at, stop)])
        mean, decoded = program(values, as_signed(videos))
        latents.append(np.asarray(mean))
        decibels.append(peak_signal((np.asarray(decoded) + 1) * 127.5, videos))
    measured = with_statistics(training.config, latents)
    part = NewPart(
        state=training.part.state(values),
        table=vae_map(measured),
        config={**folder.configs[VAE], **vae_json(measured)},
    )
    target = place(config.export_dir)
    with writing("the trained model", target):
        export_model(folder.root, target, {VAE: part})
    count = sum(map(len, latents))
    say(f"wrote {config.export_dir}: {np.mean(decibels):.2f} dB on {count} clips")


def there_and_back(part: Part[WanVae]) -> Callable[..., tuple[Array, Array]]:
    """A program from clips to their most likely latents and to what these decode to."""

    @jax.jit
    def run(
        values: Values, video: Float[Array, "B F Y X C"]
    ) -> tuple[Float[Array, "B f y x K"], Float[Array, "B F Y X C"]]:
        vae = part.merge(values)
        mean = vae.encode(video, chunk=ALL_FRAMES).mean
        return mean, vae.decode(mean, chunk=ALL_FRAMES)

    return run
