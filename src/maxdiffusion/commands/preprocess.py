"""From a config to caches of latents and text embeddings, which training then reads."""

from collections.abc import Iterable
from pathlib import Path

from maxdiffusion.commands.clip_sets import ClipSet, clip_sets
from maxdiffusion.commands.generate import say, use_cache
from maxdiffusion.commands.training_data import ClipStore
from maxdiffusion.commands.training_settings import folder_problems
from maxdiffusion.config.loading import Reading
from maxdiffusion.pipelines.spec import open_wan_folder
from maxdiffusion.runtime.json_lines import whole_lines
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.training.cached_clips import CachedClips
from maxdiffusion.training.latent_cache import SKIPPED


def preprocess(reading: Reading) -> None:
    """Encodes the clips of a config; the same command goes on where it was cut short."""
    config = reading.config
    problems = [*reading.problems, *folder_problems(config, "latent_cache_dir")]
    if problems:
        raise ProblemsFound(problems)
    use_cache(config)
    folder, spec = open_wan_folder(config.pretrained_model_name_or_path)
    store = ClipStore.of(config, folder, spec, clip_sets(config, spec))
    store.fill()
    for held in store.sets:
        say(summary(held, store))
    tell_skipped({place(config.latent_cache_dir), *(held.cache for held in store.sets)})


def summary(held: ClipSet, store: ClipStore) -> str:
    """What a cache holds, in words."""
    cached = CachedClips(held.cache)
    text = "text embeddings" if store.keeps_text else "tokens"
    return (
        f"{held.cache}: {len(cached)} of {len(held.clips)} clips of {held.size} (frames, height, "
        f"width) as latents {cached.latent_shape} and {text} of {cached.caption_tokens} rows"
    )


def tell_skipped(folders: Iterable[Path]) -> None:
    """Says which clips were left out, and why."""
    for file in sorted(folder / SKIPPED for folder in folders):
        lines = whole_lines(file)
        if not lines:
            continue
        say(f"{len(lines)} clips were skipped ({file}):")
        for line in lines:
            say(f"  {line['reason']}")
