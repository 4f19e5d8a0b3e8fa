"""Jobs as the device loop sees them: config, line, identity, adapters.

fields of a job --> config fields        replace those of the server
                --> lora_NAME            factors on the strengths of adapters
                --> names of files       image, video, ... of the line
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from maxdiffusion.config import Config
from maxdiffusion.config.config import FIELDS
from maxdiffusion.config.validate import VideoRequestLine
from maxdiffusion.errors import Collector, Problem
from maxdiffusion.generation.lora import lora_choices
from maxdiffusion.generation.resume import Provenance, Video
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.pipelines.wan import VideoPipeline
from maxdiffusion.pipelines.weights import LoraChoice, find_lora
from maxdiffusion.serving.offer import ADAPTER
from maxdiffusion.serving.store import Job
from maxdiffusion.serving.uploads import UPLOADS, InputFiles, inputs_of

ADAPTER_NAME = re.compile(r"[a-z0-9_]{1,40}")


@dataclass(frozen=True, kw_only=True)
class Work:
    """A job with everything that its video is made from."""

    job: Job
    config: Config
    provenance: Provenance
    video: Video
    factors: Mapping[str, float]

    @property
    def line(self) -> VideoRequestLine:
        """The prompt and the inputs of the video."""
        assert self.video.line is not None
        return self.video.line


def config_of(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns the server's config with the fields of a job, and inputs of the job alone."""
    changed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name in FIELDS and name not in UPLOADS
    }
    return replace(config, **{"image_url": "", "last_image_path": "", **changed})


def line_of(fields: Mapping[str, Any], files: InputFiles) -> VideoRequestLine:
    """Returns the prompt of a job and the paths of its inputs."""
    paths: dict[str, Any] = {}
    for name, value in inputs_of(fields).items():
        several = not isinstance(value, str)
        found = tuple(str(files.path(one)) for one in (value if several else [value]))
        paths[UPLOADS[name].line] = found if several else found[0]
    return VideoRequestLine(prompt=fields["prompt"], **paths)


def factors_of(fields: Mapping[str, Any]) -> dict[str, float]:
    """Returns the factors of a job on the strengths of adapters, by adapter."""
    return {
        name.removeprefix(ADAPTER): float(value)
        for name, value in fields.items()
        if name.startswith(ADAPTER) and name not in FIELDS
    }


def identity_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a video depends on besides the usual config fields."""
    files = inputs_of(fields)
    used = ("image_fit", "strength", "conditioning_scale") if files else ()
    kept = {name: fields[name] for name in used if name in fields}
    strengths = {f"{ADAPTER}{name}": factor for name, factor in factors_of(fields).items()}
    return {**files, **kept, **strengths}


def freeze(fields: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Returns the fields of a job that its programs may depend on, as a value."""
    free = ("prompt", "negative_prompt", "seed", "fps")
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(fields.items())
        if name not in free
    )


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
