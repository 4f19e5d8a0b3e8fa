"""Checks of a config by itself. Each check raises ProblemsFound with all that it finds.

Such a config loads and prints; it does not run.
"""

import itertools
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from string import Formatter
from typing import Any

from maxdiffusion.config.compat import COMPAT_FIELDS
from maxdiffusion.config.config import FIELDS, Config
from maxdiffusion.config.fields import Effect, Field, InvalidValue, ListOf, Text, nearest_word
from maxdiffusion.distributed.coordination import writes_files
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.runtime.files import FilePath, check_object_store, is_object_store

AUTO = "auto"  # resolved for the devices before attention is planned

ORBAX_FIELDS = ("pretrained_orbax_dir", "checkpoint_dir")
NAME_FIELDS = frozenset({"seed", "i"})


def check_refused(config: Config) -> None:
    """Refuses public keys that ask for something that this program does not offer."""
    Collector(
        [
            refusal(field, config.compat[name])
            for name, field in COMPAT_FIELDS.items()
            if field.effect is Effect.REFUSED and config.compat[name] != field.default
        ]
    ).raise_if_any()


def refusal(field: Field, value: object) -> Problem:
    """Returns the problem of a refused key that is not at its default."""
    meaning = field.meaning.rstrip(".")
    rule = f"not offered ({meaning[0].lower()}{meaning[1:]})"
    return Problem(name=field.name, value=value, rule=rule, remedy=field.way_out)


def check_attention_name(config: Config) -> None:
    """Refuses unknown attention names."""
    # The registry imports jax, which reading and printing a config does not need.
    from maxdiffusion.attention import ATTENTION_NAMES

    names = (AUTO, *ATTENTION_NAMES)
    if config.attention not in names:
        rule = f"must be one of {', '.join(names)}"
        remedy = nearest_word(config.attention, names)
        problem = Problem(name="attention", value=config.attention, rule=rule, remedy=remedy)
        raise ProblemsFound([problem])


def check_guidance(config: Config) -> None:
    """Refuses guidance scales of the other model family."""
    if config.model_name == "wan2.2" and config.guidance_scale is not None:
        problem = Problem(
            name="guidance_scale",
            value=config.guidance_scale,
            rule="wan2.2 has a scale for each of its two experts",
            remedy="Set guidance_scale_high and guidance_scale_low",
        )
        raise ProblemsFound([problem])
    of_two_experts = {
        "guidance_scale_high": config.guidance_scale_high,
        "guidance_scale_low": config.guidance_scale_low,
        "boundary_ratio": config.boundary_ratio,
    }
    rule, remedy = "wan2.1 has one transformer only", "Set guidance_scale, or leave it out"
    Collector(
        [
            Problem(name=name, value=value, rule=rule, remedy=remedy)
            for name, value in of_two_experts.items()
            if config.model_name == "wan2.1" and config.overridden(name)
        ]
    ).raise_if_any()


def check_steps(config: Config) -> None:
    """Checks the lists of steps, and the numbers of steps that the config names."""
    steps, problems = config.num_inference_steps, Collector()
    lists = {"denoising_step_list": config.denoising_step_list, "sigmas": config.sigmas}
    given = {name: values for name, values in lists.items() if values}
    if len(given) == 2:
        rule, remedy = "denoising_step_list gives the steps as well", "Leave one of them out"
        problem = Problem(name="sigmas", value=config.sigmas, rule=rule, remedy=remedy)
        problems.problems.append(problem)
    for name, values in given.items():
        if any(later >= earlier for earlier, later in itertools.pairwise(values)):
            rule = "must fall from each step to the next"
            problems.problems.append(Problem(name=name, value=values, rule=rule))
        if len(values) != steps:
            rule, remedy = f"{name} has {len(values)}", f"Use num_inference_steps={len(values)}"
            problem = Problem(name="num_inference_steps", value=steps, rule=rule, remedy=remedy)
            problems.problems.append(problem)
    if config.model_name == "wan2.1" and config.boundary_step_index is not None:
        rule, remedy = "wan2.1 has one transformer only", "Leave it out"
        value = config.boundary_step_index
        problem = Problem(name="boundary_step_index", value=value, rule=rule, remedy=remedy)
        problems.problems.append(problem)
    problems.raise_if_any()


def check_quantization(config: Config) -> None:
    """Refuses fields of 8-bit weights that have no meaning together."""
    chosen, activations = config.quantization, config.quantize_activations
    problems = []
    if chosen and not config.use_qwix_quantization:
        rule = "has no effect without use_qwix_quantization: true, as in public configs"
        remedy = "Set use_qwix_quantization=true for 8-bit weights, or quantization='' for none"
        problems.append(Problem(name="quantization", value=chosen, rule=rule, remedy=remedy))
    if config.use_qwix_quantization and not chosen:
        rule, remedy = "needs a format", "Set quantization=int8 or quantization=fp8"
        name = "use_qwix_quantization"
        problems.append(Problem(name=name, value=True, rule=rule, remedy=remedy))
    refused = {"": "always", "fp8_full": "never"}
    if activations == refused.get(chosen):
        rule = f"contradicts quantization={chosen!r}"
        remedy = "Leave it at auto, or set quantization=int8 or quantization=fp8"
        name = "quantize_activations"
        problems.append(Problem(name=name, value=activations, rule=rule, remedy=remedy))
    Collector(problems).raise_if_any()


def check_output(config: Config, videos: int | None) -> None:
    """Checks the names and folders of output files; `videos` is their number, if known."""
    problems = Collector()
    with problems:
        check_output_name(config.output_name, videos)
    with problems:
        check_object_storage(
            output_dir=config.output_dir,
            timing_file=config.timing_file,
            pretrained_orbax_dir=config.pretrained_orbax_dir,
            jax_cache_dir=config.jax_cache_dir,
            aot_cache_dir=config.aot_cache_dir,
            prompt_embeddings_cache_dir=config.prompt_embeddings_cache_dir,
        )
    with problems:
        if not config.output_dir:
            rule, remedy = "must be the path of a folder", "Use output_dir=outputs"
            raise ProblemsFound([Problem(name="output_dir", value="", rule=rule, remedy=remedy)])
    # The first process writes all files but profiles, which every process writes.
    if writes_files() or config.enable_profiler:
        prompts = config.prompt_embeddings_cache_dir
        with problems:
            check_writable("output_dir", config.output_dir, Path(config.output_dir))
        with problems:
            check_writable("prompt_embeddings_cache_dir", prompts, Path(prompts).expanduser())
        with problems:
            check_writable("timing_file", config.timing_file, Path(config.timing_file).parent)
    problems.raise_if_any()


def check_object_storage(**paths: str) -> None:
    """Checks the paths of fields (by name) that may be in object storage."""
    problems = Collector()
    for name, path in paths.items():
        with problems:
            if not is_object_store(path):
                continue
            if name in ORBAX_FIELDS and not path.startswith("gs://"):
                rule = "orbax writes arrays to disks and to gs:// only"
                raise ProblemsFound([Problem(name=name, value=path, rule=rule)])
            check_object_store(name, path)
    problems.raise_if_any()


def check_on_disk(**paths: str) -> None:
    """Checks the paths of fields (by name) that must be on a disk."""
    rule = "must be on a disk: lines are appended to it, which object storage cannot do"
    Collector(
        [
            Problem(name=name, value=path, rule=rule, remedy="Copy it there afterwards")
            for name, path in paths.items()
            if is_object_store(path)
        ]
    ).raise_if_any()


def check_writable(name: str, value: str, folder: FilePath) -> None:
    """Checks that files can be written to a folder, or to its nearest existing parent."""
    if not value or is_object_store(value):
        return
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        rule = f"nothing can be written there: {error.strerror} ({existing})"
        remedy = "Name a folder that you may write to, such as outputs"
        raise ProblemsFound([Problem(name=name, value=value, rule=rule, remedy=remedy)]) from None


def check_output_name(pattern: str, videos: int | None) -> None:
    """Checks the pattern for the names of videos."""
    remedy = "Use a name like wan_output_{seed}_{i}.mp4"
    Collector(
        [
            Problem(name="output_name", value=pattern, rule=rule, remedy=remedy)
            for rule in broken_name_rules(pattern, videos)
        ]
    ).raise_if_any()


def broken_name_rules(pattern: str, videos: int | None) -> list[str]:
    """Returns the rules that a pattern for the names of videos breaks."""
    try:
        parts = list(Formatter().parse(pattern))
    except ValueError:
        return ["braces must enclose seed or i"]
    fields = {field for _, field, _, _ in parts if field is not None}
    plain = not any(spec or conversion for _, _, spec, conversion in parts)
    is_video_name = PurePath(pattern).name == pattern and PurePath(pattern).suffix == ".mp4"
    rules = {
        "may contain {seed} and {i} only": fields <= NAME_FIELDS and plain,
        "must contain {i}, so that several videos get different names": "i" in fields
        or videos == 1,
        "must be a file name without folders that ends in .mp4": is_video_name,
    }
    return [rule for rule, kept in rules.items() if not kept]


def check_vae(config: Config, devices: int) -> None:
    """Checks the tiles of the VAE and the devices that split a frame."""
    problems: list[Problem] = []
    for side, tile, stride in (
        ("height", config.vae_tile_height, config.vae_tile_stride_height),
        ("width", config.vae_tile_width, config.vae_tile_stride_width),
    ):
        if stride > tile:
            name = f"vae_tile_stride_{side}"
            rule = f"must not exceed vae_tile_{side}={tile}, or pixels are left out"
            remedy = f"Use at most {tile}"
            problems.append(Problem(name=name, value=stride, rule=rule, remedy=remedy))
    if config.vae_spatial != -1 and devices % config.vae_spatial:
        divisors = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        rule = f"must divide the {devices} devices"
        remedy = f"Use one of {divisors}, or -1 for all"
        name, value = "vae_spatial", config.vae_spatial
        problems.append(Problem(name=name, value=value, rule=rule, remedy=remedy))
    Collector(problems).raise_if_any()


def check_profile(config: Config, steps_field: str, steps: int) -> None:
    """Checks that a profile begins before the last step; `steps_field` names the step count."""
    skip = config.skip_first_n_steps_for_profiler
    if config.enable_profiler and skip >= steps:
        name = "skip_first_n_steps_for_profiler"
        rule = f"leaves nothing to profile of {steps_field}={steps}"
        remedy = f"Use at most {max(0, steps - 1)}, or enable_profiler=false"
        raise ProblemsFound([Problem(name=name, value=skip, rule=rule, remedy=remedy)])


SUFFIX = ".jsonl"
JSON_OBJECT = re.compile(r'\s*\{\s*["}]')
PATHS = ("image", "last_image", "video", "mask")
NUMBERS = ("seed", "height", "width", "num_frames")
REMEDY = "Give a text file in UTF-8 with one prompt per line"


@dataclass(frozen=True, kw_only=True)
class VideoRequestLine:
    """One line of a prompts file. None, or an empty tuple, stands for the value of the config."""

    prompt: str
    image: str | None = None
    last_image: str | None = None
    video: str | None = None
    mask: str | None = None
    reference_images: tuple[str, ...] = ()
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    source: str = ""
    """File and line number for messages; empty if the line is not from a file."""

    def field(self, name: str) -> str:
        """Returns the name of a field in messages."""
        return f"{self.source} {name}".strip()


NAMES = ("prompt", *PATHS, "reference_images", *NUMBERS)


def read_request_lines(config: Config) -> tuple[VideoRequestLine, ...]:
    """Returns the videos that a config asks for: of its prompts file, or of `prompt`."""
    if not config.prompts_file:
        prompts = (config.prompt,) if isinstance(config.prompt, str) else config.prompt
        return tuple(VideoRequestLine(prompt=prompt) for prompt in prompts)
    if config.overridden("prompt") and config.overridden("prompts_file"):
        rule = "the command line gives prompt as well"
        raise _file_problem(config.prompts_file, rule, "Leave out prompt or prompts_file")
    return read_prompts_file(config.prompts_file)


def read_prompts_file(name: str) -> tuple[VideoRequestLine, ...]:
    """Returns the lines of a prompts file that are not blank."""
    path = Path(name)
    text = _text(path, name)
    if path.suffix.lower() != SUFFIX and not JSON_OBJECT.match(text):
        lines = _numbered(name, text.splitlines())
        return tuple(
            VideoRequestLine(prompt=line, source=f"{path.name}:{number}") for number, line in lines
        )
    problems, found = Collector(), []
    # JSON may hold other characters that end a line in Unicode.
    for number, line in _numbered(name, text.split("\n")):
        with problems:
            found.append(_json_line(path, number, line))
    problems.raise_if_any()
    return tuple(found)


def _numbered(name: str, lines: Sequence[str]) -> list[tuple[int, str]]:
    """Returns the lines that are not blank, with their numbers from 1."""
    found = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise _file_problem(name, "has no prompts", REMEDY)
    return found


def _text(path: Path, name: str) -> str:
    try:
        # Some editors begin a file with a byte order mark, which is no part of a prompt.
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise _file_problem(name, rule, REMEDY) from None
    except UnicodeDecodeError:
        raise _file_problem(name, "is not text in UTF-8", REMEDY) from None


def _json_line(path: Path, number: int, line: str) -> VideoRequestLine:
    """Returns a line of JSON; raises all that is wrong with it."""
    source = f"{path.name}:{number}"
    fields = _json_object(source, line)
    problems = Collector(_unknown_names(source, fields))
    values: dict[str, Any] = {}
    for name in NAMES:
        if fields.get(name) is not None:
            with problems:
                values[name] = _read_field(source, name, fields[name], path.parent)
    if fields.get("prompt") is None:
        rule, remedy = "a line needs a prompt", 'Add "prompt": "..."; it may be empty'
        problems.problems.append(_problem(source, "prompt", None, rule, remedy))
    problems.raise_if_any()
    return VideoRequestLine(**values, source=source)


def _json_object(source: str, line: str) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: stated twice")
        return dict(pairs)

    try:
        value = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        rule = f"is not JSON ({str(error).splitlines()[0]})"
        remedy = "Write one JSON object on each line"
        raise ProblemsFound([_problem(source, "", _short(line), rule, remedy)]) from None
    if not isinstance(value, dict):
        rule, remedy = "must be a JSON object", 'Write {"prompt": "..."}'
        raise ProblemsFound([_problem(source, "", _short(line), rule, remedy)])
    return value


def _unknown_names(source: str, fields: Mapping[str, Any]) -> list[Problem]:
    known = f"Use some of {', '.join(NAMES)}"
    return [
        _problem(source, name, value, "no such field in a line", nearest_word(name, NAMES) or known)
        for name, value in fields.items()
        if name not in NAMES
    ]


def _read_field(source: str, name: str, value: Any, folder: Path) -> Any:
    """Returns the typed value of a field; the rules of numbers are those of the config."""
    try:
        if name in NUMBERS:
            if not isinstance(value, int):  # the config also accepts numbers as text
                raise InvalidValue("must be a number")
            return FIELDS[name].read(value)
        if name == "reference_images":
            return tuple(_located(path, folder) for path in ListOf(_Path()).read(value))
        return Text().read(value) if name == "prompt" else _located(_Path().read(value), folder)
    except InvalidValue as error:
        raise ProblemsFound([_problem(source, name, value, error.rule, error.remedy)]) from None


class _Path(Text):
    """A path or address."""

    def describe(self) -> str:
        return "the path or address of a file"

    def convert(self, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self.refuse()
        return super().convert(value)


def _located(text: str, folder: Path) -> str:
    """Returns a path of a line, relative to the folder of its file; addresses are unchanged."""
    return text if "://" in text else str(folder / Path(text).expanduser())


def _short(line: str) -> str:
    return line if len(line) <= 80 else f"{line[:77]}..."


def _problem(source: str, name: str, value: object, rule: str, remedy: str) -> Problem:
    return Problem(name=f"{source} {name}".strip(), value=value, rule=rule, remedy=remedy)


def _file_problem(file: str, rule: str, remedy: str) -> ProblemsFound:
    return ProblemsFound([Problem(name="prompts_file", value=file, rule=rule, remedy=remedy)])
