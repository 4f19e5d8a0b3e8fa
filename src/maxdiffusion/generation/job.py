"""Resolves a job: all decisions and all refusals, before any weight is read.

    check_config    the config alone; nothing is opened or downloaded yet
    check_model     config x model: experts, video size, sampler
    check_mesh      config x devices x heads; the one place that resolves the mesh
    plan_job        what `auto` stands for, the programs and the one attention plan of the run

The problems of all steps are raised together.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.attention.options import searched_row
from maxdiffusion.attention.registry import DOT_PRODUCT
from maxdiffusion.checkpoints.diffusers_folder import ModelFolder, component_digests, is_hub_id
from maxdiffusion.config import Config
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.config.validate import (
    AUTO,
    VideoRequestLine,
    check_attention_name,
    check_guidance,
    check_output,
    check_profile,
    check_quantization,
    check_refused,
    check_steps,
    check_vae,
    read_request_lines,
)
from maxdiffusion.diffusion.guidance import GuidanceScales
from maxdiffusion.diffusion.registry import find_sampler
from maxdiffusion.distributed.coordination import assert_equal_across_processes, is_multiprocess
from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.generation.settings import (
    TEXT,
    LineTasks,
    guidance_scales,
    pipeline_settings,
    run_plan,
    transformer_files,
    use_aot_cache,
)
from maxdiffusion.mesh import MeshDevice, build_mesh
from maxdiffusion.mesh.mesh import slice_index
from maxdiffusion.mesh.resolve import AxisSizes, MeshRequest, MeshSplit, resolve
from maxdiffusion.pipelines.programs import ProgramBuilder, ProgramShape
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.runtime.tpu_flags import VARIABLE

SearchTiles = Callable[[ProgramBuilder, Config, ProgramShape], ProgramBuilder]
"""Returns the builder with the best block sizes for its kernels: preflight's tile search."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The videos to make: every line `videos_per_prompt` times, `batch_size` videos at once."""

    lines: tuple[VideoRequestLine, ...]
    videos_per_prompt: int
    batch_size: int
    guidance: GuidanceScales

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts of all lines."""
        return tuple(line.prompt for line in self.lines)

    @property
    def videos(self) -> int:
        """Number of videos in all."""
        return len(self.lines) * self.videos_per_prompt


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values in force where a config may say `auto`, and a line on each that was chosen."""

    attention: str
    mesh: MeshSplit
    weight_placement: str
    notes: tuple[str, ...] = ()

    @property
    def shards_weights(self) -> bool:
        """Returns whether the blocks' weights are sharded over the devices of a sequence."""
        return self.weight_placement == "shard"

    def fields_of(self, config: Config) -> dict[str, Any]:
        """Returns the fields of a config with the chosen values in place of `auto`."""
        chosen: dict[str, Any] = {
            "attention": self.attention,
            "weight_placement": self.weight_placement,
        }
        if config.attention == AUTO and self.attention != DOT_PRODUCT:
            chosen["ulysses_shards"] = self.mesh.shape.ulysses
        return {**config.values, **chosen}


@dataclass(frozen=True, kw_only=True)
class ResolvedJob:
    """A job that can run, with every decision made once.

    `config` is the config as it was read; `choices` holds the values that its `auto`s stand for,
    with the mesh. Lines may differ in size and task: `plans` has the attention of each shape, and
    `shape` is that of the first line. `input_notes` are about images and videos that do not fit,
    `step_notes` about steps without guidance in a guided run.
    """

    config: Config
    choices: Choices
    workload: Workload
    builder: ProgramBuilder
    tasks: LineTasks
    shape: ProgramShape
    plans: Mapping[ProgramShape, BlockAttention]
    input_notes: tuple[str, ...] = ()
    step_notes: tuple[str, ...] = ()

    @property
    def attention(self) -> BlockAttention:
        """The plan of every denoising step of the first line."""
        return self.plans[self.shape]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines of the start-up plan: choices, tiles that a search has found, inputs, steps."""
        tiles = tile_notes(self.attention)
        return (*self.choices.notes, *tiles, *self.input_notes, *self.step_notes)

    def step_facts(self) -> dict[str, Any]:
        """Returns what the time of a step depends on; timing files and predictions record it."""
        mesh, transformer = self.builder.mesh, self.builder.spec.transformer
        return {
            "device_kind": mesh.devices.flat[0].device_kind,
            "devices": mesh.size,
            "mesh": {str(axis): size for axis, size in mesh.shape.items()},
            "attention": self.choices.attention,
            "tokens": self.shape.latent.tokens,
            "model_batch": self.shape.model_batch,
            "layers": transformer.layers,
            "model_dim": transformer.model_dim,
            "libtpu_flags": os.environ.get(VARIABLE, ""),
        }

    def with_searched_tiles(self, search: SearchTiles) -> "ResolvedJob":
        """Returns the job with the block sizes of a search, and attention planned for them."""
        builder = search(self.builder, self.config, self.shape)
        if builder is self.builder:
            return self
        return replace(self, builder=builder, plans=planned(builder, self.plans))


def resolve_job(
    parsed: ParsedConfig, *, search_tiles: SearchTiles | None = None
) -> tuple[ResolvedJob, ModelFolder]:
    """Returns the job of a config on the devices of this machine, and the folder of its model.

    Raises `ProblemsFound` with everything that is wrong. `search_tiles` does the work of
    `enable_tile_search`; without it that field is refused.
    """
    config, devices = parsed.config, jax.devices()
    folder, spec = open_model(parsed, devices)
    job = plan_job(parsed, spec, devices)
    if is_multiprocess():
        lines = {"lines": [input_facts(job, line) for line in job.workload.lines]}
        inputs = {**lines, **component_digests(folder), **latents_facts(job)}
        assert_equal_across_processes("inputs", inputs)
    if config.enable_tile_search:
        job = job.with_searched_tiles(search_tiles or refuse_tile_search)
    return replace(job, builder=use_aot_cache(job.builder, config)), folder


def open_model(parsed: ParsedConfig, devices: Sequence[MeshDevice]) -> tuple[ModelFolder, WanSpec]:
    """Returns the model folder and its sizes; a refused folder is reported with the config."""
    config, problems = parsed.config, Collector(parsed.problems)
    location = config.pretrained_model_name_or_path
    if is_hub_id(location):  # nothing is downloaded for a job that cannot run
        with problems:
            check_without_model(config, **counts(devices))
        problems.raise_if_any()
    with problems:
        folder, spec = open_wan_folder(location, transformer_files(config))
        if config.enable_lora:
            from maxdiffusion.generation.lora import fuse_lora_files  # for `enable_lora` alone

            folder = fuse_lora_files(config, folder, spec)
        return folder, spec
    with problems:
        check_without_model(config, **counts(devices))
    raise ProblemsFound(problems.problems)


def plan_job(
    parsed: ParsedConfig,
    spec: WanSpec,
    devices: Sequence[MeshDevice],
    *,
    tasks: LineTasks | None = None,
) -> ResolvedJob:
    """Returns the job of a config for a model of these sizes on these devices.

    The devices may be described ones that this machine does not have, and `tasks` those of inputs
    that do not exist. Raises `ProblemsFound` with everything that is wrong.
    """
    config, problems = parsed.config, Collector(parsed.problems)
    tasks, lines = tasks or LineTasks(config=config, spec=spec), request_lines(config)
    notes: tuple[str, ...] | None = None
    with problems:
        workload = check_config(config, device_count=len(devices), spec=spec)
    with problems:
        check_model(config, spec)
    with problems:
        notes = tasks.check(lines)
    with problems:
        mesh = check_mesh(config, **counts(devices), heads=spec.transformer.heads, spec=spec)
        check_attention_name(config)
        batch = batch_size(config, len(devices))
        # Where inputs are refused, the rest is planned as if there were none.
        shapes = [
            tasks.shape_for(TEXT, line, batch) if notes is None else tasks.shape(line, batch)
            for line in lines
        ]
        choices = choose(config, spec, devices, mesh=mesh, shape=shapes[0])
        builder = program_builder(config, spec, choices, devices)
        plans = planned(builder, shapes)
        step_notes = prompt_only_notes(config, builder, shapes)
    problems.raise_if_any()
    if config.latents_path:
        from maxdiffusion.generation.latents import load_latents  # for this field alone

        load_latents(config, shapes, workload.videos)
    return ResolvedJob(
        config=config,
        choices=choices,
        workload=workload,
        builder=builder,
        tasks=tasks,
        shape=shapes[0],
        plans=plans,
        input_notes=notes or (),
        step_notes=step_notes,
    )


def prompt_only_notes(
    config: Config, builder: ProgramBuilder, shapes: Sequence[ProgramShape]
) -> tuple[str, ...]:
    """Plans the steps of a guided run that compute the prompt only; returns a line on them."""
    notes = dict[str, None]()
    for shape in dict.fromkeys(shapes):
        for guidance in run_plan(config, builder.spec, shape.task).guidances:
            if guidance == shape.guidance:
                continue
            single = shape.with_guidance(guidance)
            folded = builder.folded_for(single)
            attention = folded.attention(single).self_attention
            assert isinstance(attention, AttentionPlan)
            ring, data = folded.mesh.shape["ring"], folded.mesh.shape["data"]
            line = f"prompt-only steps: data {data}, ring {ring}, attention {attention.runs}"
            notes[line] = None
    return tuple(notes)


def planned(
    builder: ProgramBuilder, shapes: Iterable[ProgramShape]
) -> dict[ProgramShape, BlockAttention]:
    """Returns the attention of each shape, planned once."""
    return {shape: builder.attention(shape) for shape in dict.fromkeys(shapes)}


def request_lines(config: Config) -> tuple[VideoRequestLine, ...]:
    """Returns the lines of a config; one without inputs if they cannot be read.

    `check_config` reports what is wrong with them.
    """
    try:
        return read_request_lines(config)
    except ProblemsFound:
        return (VideoRequestLine(prompt=""),)


def input_facts(job: ResolvedJob, line: VideoRequestLine) -> list[str]:
    """Returns what all processes must have in common of a line: its texts, and its pixels."""
    inputs = job.tasks.inputs(line)
    return [repr(line), "" if inputs is None else inputs.digest]


def latents_facts(job: ResolvedJob) -> dict[str, str]:
    """Returns a digest of the initial latents of each video; nothing if seeds give them."""
    config, workload = job.config, job.workload
    if not config.latents_path:
        return {}
    from maxdiffusion.generation.latents import load_latents, row_digest  # for this field alone

    latents = load_latents(config, [job.shape], workload.videos)
    return {f"latents {index}": row_digest(latents, index) for index in range(workload.videos)}


def choose(
    config: Config,
    spec: WanSpec,
    devices: Sequence[MeshDevice],
    *,
    mesh: MeshSplit,
    shape: ProgramShape,
) -> Choices:
    """Returns the choices for a config on its resolved mesh."""
    attention, placement = config.attention, config.weight_placement
    notes: tuple[str, ...] = ()
    split = mesh
    if AUTO in (attention, placement):
        from maxdiffusion.generation import auto  # for `auto` alone

        if attention == AUTO:
            attention, split, notes = auto.choose_attention(
                config, spec, devices, mesh=mesh, shape=shape
            )
        if placement == AUTO:
            placement, reasons = auto.choose_weight_sharding(
                config, spec, devices, mesh=mesh, shape=shape
            )
            notes = (*notes, *reasons)
    return Choices(attention=attention, mesh=split, weight_placement=placement, notes=notes)


def tile_notes(attention: BlockAttention) -> tuple[str, ...]:
    """Returns a line for every kernel whose block sizes are from a search."""
    notes = []
    for purpose, plan in attention.plans.items():
        assert isinstance(plan, AttentionPlan)
        row = searched_row(plan.local, plan.backend.options, plan.backend.search_name)
        if row is not None:
            tile = ", ".join(f"{name} {size}" for name, size in row.blocks.given().items())
            notes.append(f"tiles of {purpose} from a search, {row.how}: {tile}")
    return tuple(notes)


def program_builder(
    config: Config, spec: WanSpec, choices: Choices, devices: Sequence[MeshDevice]
) -> ProgramBuilder:
    """Returns the builder of a job's programs, on its mesh."""
    return ProgramBuilder(
        spec=spec.with_scan(config.scan_layers)
        .with_spread_weights(choices.shards_weights)
        .with_adapter_rank(config.lora_rank),
        settings=pipeline_settings(config, choices.attention, devices[0].device_kind),
        mesh=build_mesh(choices.mesh.ici, dcn=choices.mesh.dcn, devices=devices),
    )


def refuse_tile_search(
    builder: ProgramBuilder, config: Config, shape: ProgramShape
) -> ProgramBuilder:
    """Raises: stands in for the tile search where the caller has none."""
    del builder, shape
    rule = "tiles are searched by the commands only"
    remedy = "Run tune_attention, and set tuned_blocks_file here"
    value = config.enable_tile_search
    problem = Problem(name="enable_tile_search", value=value, rule=rule, remedy=remedy)
    raise ProblemsFound([problem])


def counts(devices: Sequence[MeshDevice]) -> dict[str, int]:
    """Returns the numbers of devices and slices that a config is checked against."""
    return {"device_count": len(devices), "slice_count": len({*map(slice_index, devices)})}


def check_without_model(
    config: Config, *, device_count: int, slice_count: int = 1, heads: int | None = None
) -> tuple[Workload, MeshSplit]:
    """Returns what the config asks for as far as no model is needed; raises all problems."""
    problems = Collector()
    with problems:
        workload = check_config(config, device_count=device_count)
    with problems:
        mesh = check_mesh(config, device_count=device_count, slice_count=slice_count, heads=heads)
    problems.raise_if_any()
    return workload, mesh


def check_config(config: Config, *, device_count: int, spec: WanSpec | None = None) -> Workload:
    """Returns the videos of a config; raises everything that is wrong with the config alone.

    `spec` is None while the model is not known.
    """
    problems = Collector()
    checks = (check_refused, check_attention_name, check_guidance, check_steps, check_quantization)
    for check in checks:
        with problems:
            check(config)
    with problems:
        find_sampler(config.scheduler)
    with problems:
        check_vae(config, device_count)
    with problems:
        check_profile(config, "num_inference_steps", config.num_inference_steps)
    lines: tuple[VideoRequestLine, ...] = ()
    with problems:
        lines = read_request_lines(config)
    per_prompt = batch = 0
    with problems:
        batch = batch_size(config, device_count)
        # Without a number, a prompt has as many videos as fit at once.
        per_prompt = config.num_videos or batch
    with problems:
        check_output(config, len(lines) * per_prompt or None)
    problems.raise_if_any()
    return Workload(
        lines=lines,
        videos_per_prompt=per_prompt,
        batch_size=batch,
        guidance=guidance_scales(config, spec),
    )


def check_model(config: Config, spec: WanSpec) -> None:
    """Raises everything about a config that its model cannot do."""
    problems = Collector()
    with problems:
        check_experts(config, spec)
    with problems:
        run_plan(config, spec)
    problems.raise_if_any()


def check_experts(config: Config, spec: WanSpec) -> None:
    """Raises if the config is for a model with another number of experts."""
    single = spec.time_per_token or spec.animates  # of WAN 2.2, with one transformer
    expected = 2 if config.model_name == "wan2.2" and not single else 1
    if len(spec.experts) != expected:
        other = "wan2.1" if expected == 2 else "wan2.2"
        problem = Problem(
            name="model_name",
            value=config.model_name,
            rule=f"has {expected} transformer(s), and "
            f"{config.pretrained_model_name_or_path!r} has {len(spec.experts)}",
            remedy=f"Use model_name={other}, or another model",
        )
        raise ProblemsFound([problem])
    if expected == 1 and config.boundary_step_index is not None:
        problem = Problem(
            name="boundary_step_index",
            value=config.boundary_step_index,
            rule="this model has one transformer for all noise levels",
            remedy="Leave it out",
        )
        raise ProblemsFound([problem])


def check_mesh(
    config: Config,
    *,
    device_count: int,
    slice_count: int,
    heads: int | None,
    spec: WanSpec | None = None,
) -> MeshSplit:
    """Returns the mesh of a config; raises if batch or heads do not divide over its axes.

    `heads` and `spec` are None while the model is not known.
    """
    mesh = resolve_mesh(config, device_count, slice_count, heads)
    problems = Collector()
    with problems:
        check_data_axis(config, batch_size(config, device_count), mesh, spec)
    if heads is not None:
        with problems:
            check_tensor_axis(heads, mesh)
    problems.raise_if_any()
    return mesh


def resolve_mesh(config: Config, devices: int, slices: int, heads: int | None) -> MeshSplit:
    """Returns the mesh that the config asks for on these devices."""
    ici = AxisSizes(
        data=config.ici_data_parallelism,
        fsdp=config.ici_fsdp_parallelism,
        context=config.ici_context_parallelism,
        ring=config.ici_ring_parallelism,
        ulysses=config.ici_ulysses_parallelism,
        tensor=config.ici_tensor_parallelism,
    )
    dcn = AxisSizes(
        data=config.dcn_data_parallelism,
        fsdp=config.dcn_fsdp_parallelism,
        context=config.dcn_context_parallelism,
        ring=config.dcn_ring_parallelism,
        ulysses=config.dcn_ulysses_parallelism,
        tensor=config.dcn_tensor_parallelism,
    )
    request = MeshRequest(ici=ici, dcn=dcn, ulysses_shards=config.ulysses_shards)
    return resolve(request, devices=devices, slices=slices, heads=heads)


def batch_size(config: Config, devices: int) -> int:
    """Returns how many videos are made at once, of one prompt or of several."""
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
    return min(
        videos, config.num_videos * len(request_lines(config)) if config.num_videos else videos
    )


def check_data_axis(
    config: Config, batch: int, mesh: MeshSplit, spec: WanSpec | None = None
) -> None:
    """Raises if the data axis does not divide the rows of a batch."""
    copies = 2 if guidance_scales(config, spec).active else 1
    rows, data = batch * copies, mesh.shape.data
    if rows % data:
        fitting = " or ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        made_of = f"{batch} at once" + (" with guidance" if copies == 2 else " without guidance")
        rule = f"must divide the {rows} rows of a batch (videos: {made_of})"
        remedy = f"Use {fitting}, or more videos at once with per_device_batch_size"
        name = size_name("data", mesh.dcn.data)
        raise ProblemsFound([Problem(name=name, value=data, rule=rule, remedy=remedy)])


def check_tensor_axis(heads: int, mesh: MeshSplit) -> None:
    """Raises if the tensor axis does not divide the heads."""
    tensor = mesh.shape.tensor
    if heads % tensor:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        rule, remedy = f"must divide the {heads} heads", f"Use one of {fitting}"
        name = size_name("tensor", mesh.dcn.tensor)
        raise ProblemsFound([Problem(name=name, value=tensor, rule=rule, remedy=remedy)])


def size_name(axis: str, across_slices: int) -> str:
    """Returns the name of an axis size, which may be the product of two config fields."""
    within = f"ici_{axis}_parallelism"
    return within if across_slices == 1 else f"{within} x dcn_{axis}_parallelism"
