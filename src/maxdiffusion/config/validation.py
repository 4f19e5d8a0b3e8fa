"""Everything about a job that can be checked before weights are touched, reported at once."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from maxdiffusion.config.config import Config
from maxdiffusion.config.features import (
    attention_problems,
    guidance_problems,
    model_refusal,
    refused_features,
)
from maxdiffusion.config.job import Job
from maxdiffusion.config.output_checks import output_problems, vae_problems
from maxdiffusion.config.profile_checks import profile_problems
from maxdiffusion.config.prompts import read_prompts
from maxdiffusion.mesh.request import MeshSplit, mesh_request, resolve
from maxdiffusion.pipelines.scales import GuidanceScales
from maxdiffusion.runtime.problems import Problem, ProblemsFound

# WAN 2.1 is published with this strength.
WAN_2_1_GUIDANCE = 5.0

Check = Callable[[Config], Iterable[Problem]]
Value = TypeVar("Value")


def check_job(
    config: Config,
    *,
    device_count: int,
    slice_count: int = 1,
    heads: int | None = None,
    checks: Sequence[Check] = (),
    earlier: Sequence[Problem] = (),
) -> Job:
    """The job of a config; raises ProblemsFound with all problems, `earlier` ones first.

    `heads` are those of the transformer, where they are known. `checks` yield (or raise) problems
    that other parts of the program find: in the checkpoint, in the attention plan.
    """
    refusal = model_refusal(config)
    if refusal is not None:
        raise ProblemsFound([*earlier, refusal])
    found = Collector([*earlier])
    for check in (refused_features, attention_problems, guidance_problems):
        found.add(lambda check=check: check(config))  # type: ignore[misc]
    found.add(lambda: vae_problems(config, device_count))
    found.add(lambda: profile_problems(config, "num_inference_steps"))
    prompts = found.value(lambda: read_prompts(config))
    mesh = found.value(lambda: resolve_mesh(config, device_count, slice_count, heads))
    batch = found.value(lambda: batch_size(config, device_count))
    # Without a number, a prompt has as many videos as fit at once.
    per_prompt = config.num_videos or batch
    videos = None if prompts is None or per_prompt is None else len(prompts) * per_prompt
    found.add(lambda: output_problems(config, videos))
    if batch is not None and mesh is not None:
        found.add(lambda: data_axis_problems(config, batch, mesh))
    if mesh is not None and heads is not None:
        found.add(lambda: tensor_axis_problems(heads, mesh))
    for extra in checks:
        found.add(lambda extra=extra: extra(config))  # type: ignore[misc]
    if found.problems or prompts is None or mesh is None or batch is None or per_prompt is None:
        raise ProblemsFound(found.problems)
    return Job(
        prompts=prompts,
        videos_per_prompt=per_prompt,
        batch_size=batch,
        guidance=guidance_scales(config),
        mesh=mesh,
    )


@dataclass(frozen=True)
class Collector:
    """Gathers problems from functions that yield them and from functions that raise them."""

    problems: list[Problem]

    def add(self, check: Callable[[], Iterable[Problem]]) -> None:
        """Takes the problems that a check yields or raises."""
        self.problems.extend(self.value(lambda: list(check())) or ())

    def value(self, make: Callable[[], Value]) -> Value | None:
        """What a function returns; None, and its problems are kept, if it raises them."""
        try:
            return make()
        except ProblemsFound as error:
            self.problems.extend(error.problems)
            return None


def resolve_mesh(config: Config, devices: int, slices: int, heads: int | None) -> MeshSplit:
    """The mesh that the config asks for on these devices."""
    request = mesh_request(config.values, config.ulysses_shards)
    return resolve(request, devices=devices, slices=slices, heads=heads)


def batch_size(config: Config, devices: int) -> int:
    """How many videos are made at once, of one prompt or of several."""
    per_device = config.per_device_batch_size
    if per_device is None:
        return 1
    videos = int(devices * per_device)
    if videos < 1:
        least = math.ceil(1e6 / devices) / 1e6
        rule = f"means no video at all: {devices} devices x {per_device:g}, rounded down, is 0"
        remedy = f"Use {least:g} for one video at a time, or leave the key out"
        name = "per_device_batch_size"
        raise ProblemsFound([Problem(name=name, value=per_device, rule=rule, remedy=remedy)])
    return min(videos, config.num_videos * prompt_count(config) if config.num_videos else videos)


def prompt_count(config: Config) -> int:
    """How many prompts there are; 1 while they cannot be read, which is reported elsewhere."""
    try:
        return len(read_prompts(config))
    except ProblemsFound:
        return 1


def guidance_scales(config: Config) -> GuidanceScales:
    """The strength of guidance for each expert."""
    if config.model_name == "wan2.2":
        return GuidanceScales(
            high_noise=config.guidance_scale_high, low_noise=config.guidance_scale_low
        )
    scale = WAN_2_1_GUIDANCE if config.guidance_scale is None else config.guidance_scale
    return GuidanceScales(high_noise=scale, low_noise=scale)


def data_axis_problems(config: Config, batch: int, mesh: MeshSplit) -> Iterable[Problem]:
    """A problem if the data axis does not divide the rows of a batch."""
    copies = 2 if guidance_scales(config).active else 1
    rows, data = batch * copies, mesh.shape.data
    if rows % data:
        fitting = " or ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        made_of = f"{batch} at once" + (" with guidance" if copies == 2 else " without guidance")
        rule = f"must divide the {rows} rows of a batch (videos: {made_of})"
        remedy = f"Use {fitting}, or more videos at once with per_device_batch_size"
        yield Problem(name=size_name("data", mesh.dcn.data), value=data, rule=rule, remedy=remedy)


def tensor_axis_problems(heads: int, mesh: MeshSplit) -> Iterable[Problem]:
    """A problem if the tensor axis does not divide the heads."""
    tensor = mesh.shape.tensor
    if heads % tensor:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        rule, remedy = f"must divide the {heads} heads", f"Use one of {fitting}"
        name = size_name("tensor", mesh.dcn.tensor)
        yield Problem(name=name, value=tensor, rule=rule, remedy=remedy)


def size_name(axis: str, across_slices: int) -> str:
    """What the size of an axis is called, which may be the product of two keys."""
    within = f"ici_{axis}_parallelism"
    return within if across_slices == 1 else f"{within} x dcn_{axis}_parallelism"
