"""Checks of what a job writes: names, folders, and how the VAE cuts frames."""

import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath
from string import Formatter

from maxdiffusion.config.config import Config
from maxdiffusion.runtime.coordination import writes_files
from maxdiffusion.runtime.places import is_remote, remote_problem
from maxdiffusion.runtime.problems import Problem

OF_ORBAX = ("pretrained_orbax_dir", "checkpoint_dir")
NAME_FIELDS = frozenset({"seed", "i"})


def output_problems(config: Config, videos: int | None) -> Iterator[Problem]:
    """Problems with the names and folders of the files; `videos` is how many there will be."""
    yield from name_problems(config.output_name, videos)
    yield from storage_problems(
        config,
        *("output_dir", "timing_file", "pretrained_orbax_dir", "jax_cache_dir", "aot_cache_dir"),
        "prompt_embeddings_cache_dir",
    )
    if not config.output_dir:
        rule, remedy = "must be a folder, or a new one", "Use output_dir=outputs"
        yield Problem(name="output_dir", value=config.output_dir, rule=rule, remedy=remedy)
    if writes_files() or config.enable_profiler:
        yield from own_file_problems(config)


def own_file_problems(config: Config) -> Iterator[Problem]:
    """Problems with files that the first process alone writes, but for profiles."""
    yield from writing_problems("output_dir", config.output_dir, Path(config.output_dir))
    prompts = config.prompt_embeddings_cache_dir
    yield from writing_problems("prompt_embeddings_cache_dir", prompts, Path(prompts).expanduser())
    yield from writing_problems("timing_file", config.timing_file, Path(config.timing_file).parent)


def storage_problems(config: Config, *names: str) -> Iterator[Problem]:
    """A problem for every key that names object storage which cannot be used."""
    for name in names:
        value = config.values[name]
        if not is_remote(value):
            continue
        if name in OF_ORBAX and not value.startswith("gs://"):
            rule, remedy = "orbax writes arrays to disks and to gs:// only", "Use one of these"
            yield Problem(name=name, value=value, rule=rule, remedy=remedy)
        elif (problem := remote_problem(name, value)) is not None:
            yield problem


def disk_problems(config: Config, *names: str) -> Iterator[Problem]:
    """A problem for every key that names object storage for what grows while it is written."""
    for name in names:
        value = config.values[name]
        if is_remote(value):
            rule = "must be on a disk: lines are added to it, which object storage cannot do"
            yield Problem(name=name, value=value, rule=rule, remedy="Copy it there afterwards")


def writing_problems(name: str, value: str, folder: Path) -> Iterator[Problem]:
    """A problem if no file can be written in a folder, or in the one that it would be made in."""
    if not value or is_remote(value):
        return
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return
    except OSError as error:
        rule = f"nothing can be written there: {error.strerror} ({there})"
        remedy = "Name a folder that you may write to, such as outputs"
        yield Problem(name=name, value=value, rule=rule, remedy=remedy)


def name_problems(pattern: str, videos: int | None) -> Iterator[Problem]:
    """Problems with the pattern for the names of videos."""

    def wrong(rule: str) -> Problem:
        remedy = "Use a name like wan_output_{seed}_{i}.mp4"
        return Problem(name="output_name", value=pattern, rule=rule, remedy=remedy)

    try:
        parts = list(Formatter().parse(pattern))
    except ValueError:
        yield wrong("braces must enclose seed or i")
        return
    fields = {field for _, field, _, _ in parts if field is not None}
    if not fields <= NAME_FIELDS or any(spec or conversion for _, _, spec, conversion in parts):
        yield wrong("knows {seed} and {i} only")
    if "i" not in fields and videos != 1:
        yield wrong("must hold {i}, so that several videos get several names")
    if PurePath(pattern).name != pattern or PurePath(pattern).suffix != ".mp4":
        yield wrong("must be a file name without folders that ends in .mp4")


def vae_problems(config: Config, devices: int) -> Iterator[Problem]:
    """Problems with how the VAE cuts frames into tiles and over devices."""
    for side in ("height", "width"):
        tile = config.values[f"vae_tile_{side}"]
        stride = config.values[f"vae_tile_stride_{side}"]
        if stride > tile:
            rule = f"must not exceed vae_tile_{side}={tile}, or pixels are left out"
            remedy = f"Use at most {tile}"
            name = f"vae_tile_stride_{side}"
            yield Problem(name=name, value=stride, rule=rule, remedy=remedy)
    if config.vae_spatial != -1 and devices % config.vae_spatial:
        fitting = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        rule = f"must divide the {devices} devices"
        remedy = f"Use one of {fitting}, or -1 for all"
        yield Problem(name="vae_spatial", value=config.vae_spatial, rule=rule, remedy=remedy)
