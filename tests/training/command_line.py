"""Arguments of train_wan for a run of seconds: eight clips of 32x32 on eight devices."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from maxdiffusion.config.load import load_config
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.pipelines.text import PromptTokenizer
from maxdiffusion.training.data.batches import SyntheticClips
from maxdiffusion.training.data.latent_cache import CachePlan, fill_cache
from maxdiffusion.training.data.store import SHARD, model_hash
from maxdiffusion.training.data.synthetic import ClipFormat
from maxdiffusion.training.models import initial_state
from maxdiffusion.training.train import resolve_job

CONFIG = Path(__file__).parents[2] / "configs" / "train_embedded.yml"
CLIPS = SyntheticClips(clip=ClipFormat(frames=5, size=32), count=8, seed=0)
LATENTS = (2, 4, 4, 16)  # of a clip


def small_run(model: Path | str, tmp_path: Path, *more: str) -> list[str]:
    """Returns the arguments for `model`, with the latent cache in `tmp_path`; `more` come last."""
    return [
        str(CONFIG),
        f"pretrained_model_name_or_path={model}",
        "model_name=wan2.1",
        *("num_frames=5", "height=32", "width=32", "seed=0"),
        *("synthetic_clips=8", "synthetic_pair_share=0"),
        *("global_batch_size=8", "ici_data_parallelism=8"),
        f"latent_cache_dir={tmp_path / 'cache'}",
        *more,
    ]


def noise(latents=LATENTS):
    """Draws latents in place of an autoencoder, which is quicker."""
    rng = np.random.default_rng(0)
    return lambda videos: rng.standard_normal((len(videos), *latents))


def fill(cache, location, encode, clips=CLIPS):
    """Clips that were encoded before: by a function instead of an autoencoder."""
    folder, _ = open_wan_folder(location)
    tokenizer = PromptTokenizer.load(folder.root / "tokenizer")
    longest = max(len(tokenizer.ids(clips.caption(index))) for index in range(len(clips)))
    plan = CachePlan(
        model=model_hash(folder),
        caption_tokens=next(size for size in (32, 64, 128) if longest <= size),
        shard=SHARD,
    )
    fill_cache(cache, clips, plan, encode=encode, tokenize=tokenizer.ids)


def losses_of(arguments, steps, *, alone=False):
    """The losses of the first steps of a command: on its mesh, or on one device, dense."""
    config = load_config([*map(str, arguments)])
    job = resolve_job(config)
    model, training = job.model, job.model.training
    if alone:
        training = replace(training, mesh=single_device_mesh(), attention="dot_product")
    state = initial_state(config, training, model.folder, model.spec)
    programs = {name: training.step(name) for name in training.experts.names}
    losses = []
    for number in range(steps):
        state, report = programs[training.experts.at(number)](state, next(job.batches))
        losses.append(float(report.loss))
    return losses
