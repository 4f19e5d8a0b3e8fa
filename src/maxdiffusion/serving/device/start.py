"""The start of a server: sizes, inputs that requests may bring, adapters, and timed phases."""

import io
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from PIL import Image

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.config import Config
from maxdiffusion.config.job_fields import stated_inputs
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.distributed.coordination import (
    all_gather_str,
    broadcast_from_first,
    is_multiprocess,
)
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.job import ResolvedJob, resolve_job
from maxdiffusion.generation.lora import lora_choices
from maxdiffusion.generation.settings import transformer_files
from maxdiffusion.pipelines.request import VideoShape
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.pipelines.wan import VideoPipeline
from maxdiffusion.pipelines.weights import LoraChoice, find_lora
from maxdiffusion.runtime.progress import PROGRESS
from maxdiffusion.serving.offer import Size
from maxdiffusion.serving.uploads import InputFiles

logger = logging.getLogger(__name__)
SAMPLE_SIDE = 64
ADAPTER_NAME = re.compile(r"[a-z0-9_]{1,40}")
Phase = Callable[[str, float], None]
"""Gets the name of a phase of the start and its seconds."""


def parse_sizes(config: Config) -> tuple[Size, ...]:
    """Returns `serve_sizes`, or the one size of the config; raises all that cannot be read."""
    usual = Size(width=config.width, height=config.height, frames=config.num_frames)
    found = {text: Size.parse(text, config.num_frames) for text in config.serve_sizes}
    rule = "must be WIDTHxHEIGHTxFRAMES, such as 1280x720x81"
    Collector(
        [
            Problem(name="serve_sizes", value=text, rule=rule)
            for text, size in found.items()
            if size is None
        ]
    ).raise_if_any()
    return tuple(size for size in found.values() if size is not None) or (usual,)


def offered_inputs(spec: WanSpec) -> dict[str, bool]:
    """Returns the images and videos that requests may bring, and whether they must."""
    if spec.transformer.control_layers:
        return {"input_video": False, "input_mask": False, "reference_images": False}
    if spec.image_channels:
        last = {"input_last_image": spec.image_encoder is not None}
        takes_last = spec.image_encoder is None or spec.transformer.image_positions is not None
        return {"input_reference": True, **(last if takes_last else {})}
    first = {"input_reference": False} if spec.time_per_token else {}
    return {**first, "input_video": False}


def check_servable(spec: WanSpec) -> None:
    """Raises for a model whose videos are made in segments."""
    if spec.animates:
        rule = (
            "Animate makes a video in segments, and the server resumes, cancels and estimates "
            "videos of one segment"
        )
        remedy = "Use generate_wan_animate for this model"
        problem = Problem(
            name="pretrained_model_name_or_path", value="Animate", rule=rule, remedy=remedy
        )
        raise ProblemsFound([problem])


def sample_image(files: InputFiles) -> str:
    """Keeps a gray image and returns its name."""
    buffer = io.BytesIO()
    Image.new("RGB", (SAMPLE_SIDE, SAMPLE_SIDE), "gray").save(buffer, format="PNG")
    return files.keep("input_reference", buffer.getvalue())


def resolve_model(parsed: ParsedConfig, files: InputFiles) -> tuple[ResolvedJob, ModelFolder]:
    """Returns the job of a server's config; images that its model needs are gray ones."""
    config = parsed.config
    if has_adapters(config):  # loaded by their names, not fused
        config = replace(config, enable_lora=False)
    if config.model_type == "I2V":
        config = replace(config, image_url=str(files.path(sample_image(files))))
    try:
        return resolve_job(replace(parsed, config=config))
    except ProblemsFound as found:
        if not {problem.name for problem in found.problems} <= {*stated_inputs(config)}:
            raise
        # Only inputs are wrong, so the model can be opened: it alone knows what it needs.
        _, spec = open_wan_folder(config.pretrained_model_name_or_path, transformer_files(config))
        check_servable(spec)
        if not offered_inputs(spec).get("input_last_image"):
            raise
    last = replace(config, last_image_path=config.image_url)
    return resolve_job(replace(parsed, config=last))


def shared_inputs(
    inputs: Mapping[str, bool], files: InputFiles, output_dir: str
) -> Mapping[str, bool]:
    """Returns the inputs that all processes can read; raises if the model needs one of them.

    Process 0 stores what requests bring; the others read it from the same folder.
    """
    if not inputs or not is_multiprocess():
        return inputs
    name = broadcast_from_first("a sample of inputs", lambda: sample_image(files))
    if "" not in all_gather_str("inputs", "seen" if files.path(name).exists() else ""):
        return inputs
    rule = "files of requests are kept in its folder inputs, and not all processes see it"
    remedy = "Use a folder or bucket that all of them share"
    if any(inputs.values()):
        problem = Problem(name="output_dir", value=output_dir, rule=rule, remedy=remedy)
        raise ProblemsFound([problem])
    logger.warning("requests may not bring %s: output_dir: %s", ", ".join(inputs), rule)
    return {}


def shape_of(size: Size) -> VideoShape:
    """Returns the shape of a size."""
    return VideoShape(height=size.height, width=size.width, num_frames=size.frames)


@dataclass(frozen=True, kw_only=True)
class ServedAdapters:
    """Adapters of `lora_config` whose strengths requests may change; none without `lora_rank`."""

    choices: tuple[LoraChoice, ...]

    @classmethod
    def of(cls, config: Config, spec: WanSpec) -> "ServedAdapters":
        """Returns the adapters of a config; raises names that no request could use."""
        if not has_adapters(config):
            return cls(choices=())
        choices = tuple(
            replace(choice, name=choice.name or usual_name(choice))
            for choice in lora_choices(config.lora_config, spec.experts)
        )
        problems = [
            Problem(
                name="lora_config.adapter_name",
                value=choice.name,
                rule="requests name it: it must have 1 to 40 of the characters a-z, 0-9 and _",
                remedy="Choose another name",
            )
            for choice in choices
            if not ADAPTER_NAME.fullmatch(choice.name)
        ]
        Collector([*problems, *_repeated(choices)]).raise_if_any()
        return cls(choices=choices)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters."""
        return tuple(dict.fromkeys(choice.name for choice in self.choices))

    def load(self, pipeline: VideoPipeline, *, strict: bool) -> None:
        """Loads all adapters and puts them into the weights; raises what does not fit."""
        for choice in self.choices:
            file = find_lora(choice.location, choice.weight_name, name="lora_config")
            pipeline.lora.load(file, choice.name, choice.component, strict=strict)
        if self.choices:
            self.activate(pipeline, {})
            pipeline.apply_adapters()

    def activate(self, pipeline: VideoPipeline, factors: Mapping[str, float]) -> None:
        """Sets the strengths of the next videos: those of the config times the factors."""
        if not self.choices:
            return
        wanted = [name for name in self.names if factors.get(name, 1.0)]
        strengths: Sequence[Mapping[str, float]] = [
            {
                choice.component: choice.strength * factors.get(name, 1.0)
                for choice in self.choices
                if choice.name == name
            }
            for name in wanted
        ]
        pipeline.set_adapters(wanted, strengths)


def has_adapters(config: Config) -> bool:
    """Returns whether requests may set the strengths of adapters."""
    return config.enable_lora and config.lora_rank > 0


def usual_name(choice: LoraChoice) -> str:
    """Returns the name of an adapter that the config gives none: that of its file."""
    file = PurePosixPath(choice.weight_name or choice.location)
    stem = file.stem if file.suffix == ".safetensors" else file.name
    return re.sub(r"[^a-z0-9]+", "_", stem.lower()).strip("_")[:40]


def _repeated(choices: Sequence[LoraChoice]) -> list[Problem]:
    seen: set[tuple[str, str]] = set()
    problems = []
    for choice in choices:
        if (choice.name, choice.component) in seen:
            rule = "two files of one transformer have this name"
            remedy = "Give each file its own in lora_config.adapter_name"
            name = "lora_config.adapter_name"
            problems.append(Problem(name=name, value=choice.name, rule=rule, remedy=remedy))
        seen.add((choice.name, choice.component))
    return problems


class timed:  # noqa: N801
    """Measures a phase of the start and logs it."""

    def __init__(self, name: str, phase: Phase):
        self._name, self._phase = name, phase

    def __enter__(self) -> None:
        PROGRESS.checkpoint(self._name)
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            seconds = time.monotonic() - self._started
            logger.info("%s: %.2f s", self._name, seconds)
            self._phase(self._name, seconds)
