"""Reports what a job will do on a TPU slice that is not there: plan -> compile -> read -> report.

`preflight` plans the job of a config without reading weights and compiles every program of a
generation for the topology of the config. The schedule of the denoise step gives cycles and
collectives, the machine code of the kernels gives their time, and `assemble` adds both up.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxdiffusion.checkpoints.diffusers_folder import is_hub_id
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.costs.chips import Chip, Topology, read_topology
from maxdiffusion.costs.flops import ForwardFlops, forward_flops, step_bounds
from maxdiffusion.costs.links import Network, network
from maxdiffusion.costs.step_time import (
    KernelFigures,
    KernelTime,
    Runs,
    StepTime,
    VideoTime,
    kernel_calls,
    kernel_plans,
    step_time,
)
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.generation.job import ResolvedJob, plan_job
from maxdiffusion.generation.settings import (
    LineTasks,
    fill_aot_cache,
    run_plan,
    sampler,
    step_cache,
)
from maxdiffusion.mesh import MeshDevice
from maxdiffusion.models.clip import ClipVisionConfig
from maxdiffusion.models.umt5 import Umt5Config
from maxdiffusion.models.vae import WanVaeConfig
from maxdiffusion.models.vae.config import wan_2_2_vae
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.models.wan import config as sizes
from maxdiffusion.pipelines.spec import WanSpec, open_wan_folder
from maxdiffusion.preflight.compile import (
    DENOISE_STEP,
    ENCODE_IMAGE,
    PROMPT_ONLY_STEP,
    CompiledProgram,
    compile_all,
    encode_name,
    other_steps_of,
    programs_of,
    shorter_text_encoders,
    step_name,
)
from maxdiffusion.preflight.devices import describe_devices
from maxdiffusion.preflight.kernels import kernel_process
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.cycles import count_cycles, find_unestimated, weight_copies
from maxdiffusion.preflight.readers.hlo import read_program
from maxdiffusion.preflight.report import Report, residence
from maxdiffusion.runtime.tpu_flags import VARIABLE, describe_flags, pins_clock

# Every release names this sampler; its other settings do not change a program.
_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}


def _spec(transformer: WanTransformerConfig, **changes: Any) -> WanSpec:
    """Returns the spec of a release: WAN 2.1's autoencoder and one expert unless stated."""
    fields = {"vae": WanVaeConfig(), "boundary_ratio": None, **changes}
    return WanSpec(
        transformer=transformer, text_encoder=Umt5Config(), scheduler=_SCHEDULER, **fields
    )


_CLIP: Mapping[str, Any] = {"image_encoder": ClipVisionConfig(), "image_processor": {}}
_FIVE: Mapping[str, Any] = {"vae": wan_2_2_vae(), "time_per_token": True}
RELEASED: Mapping[str, WanSpec] = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _spec(sizes.wan_14b(), boundary_ratio=0.875),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _spec(sizes.wan_14b()),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _spec(sizes.wan_2_1_t2v_1_3b()),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": _spec(sizes.wan_2_2_i2v_a14b(), boundary_ratio=0.9),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _spec(sizes.wan_2_1_i2v_14b(), **_CLIP),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _spec(sizes.wan_2_1_i2v_14b(), **_CLIP),
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": _spec(sizes.wan_2_1_flf2v_14b(), **_CLIP),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": _spec(sizes.wan_2_2_ti2v_5b(), **_FIVE),
    "Wan-AI/Wan2.1-VACE-1.3B-diffusers": _spec(sizes.wan_2_1_vace_1_3b()),
    "Wan-AI/Wan2.1-VACE-14B-diffusers": _spec(sizes.wan_vace_14b()),
    "Wan-AI/Wan2.2-Animate-14B-Diffusers": _spec(sizes.wan_2_2_animate_14b(), **_CLIP),
}
"""Releases by hub id, described without a download."""


def find_spec(location: str) -> WanSpec:
    """Returns the spec of a folder, or of a released model by its hub id; downloads nothing."""
    if not is_hub_id(location):
        return open_wan_folder(location)[1]
    if location not in RELEASED:
        raise ProblemsFound(
            [
                Problem(
                    name="pretrained_model_name_or_path",
                    value=location,
                    rule="its sizes are not known here, and preflight downloads nothing",
                    remedy=f"Use a local folder, or one of {', '.join(RELEASED)}",
                )
            ]
        )
    return RELEASED[location]


@dataclass(frozen=True, kw_only=True)
class TopologyJob:
    """A planned job on the described devices of a topology."""

    topology: Topology
    planned: ResolvedJob


def plan_for_topology(parsed: ParsedConfig) -> TopologyJob:
    """Returns the checked job of a config on its topology; raises every problem at once."""
    topology = read_topology(parsed.config.topology)
    planned = plan_on(parsed, describe_devices(topology))
    builder = fill_aot_cache(planned.builder, planned.config)
    return TopologyJob(topology=topology, planned=replace(planned, builder=builder))


def plan_on(parsed: ParsedConfig, devices: Sequence[MeshDevice]) -> ResolvedJob:
    """Returns the checked job of a config on these devices, real or described.

    No image or video is opened; those that the model needs count as given.
    """
    spec = find_spec(parsed.config.pretrained_model_name_or_path)
    tasks = LineTasks(config=parsed.config, spec=spec, described=True)
    return plan_job(parsed, spec, devices, tasks=tasks)


logger = logging.getLogger(__name__)


def preflight(parsed: ParsedConfig, arguments: Sequence[str]) -> None:
    """Compiles the job of a config, shows the report and writes it to `report` as JSON."""
    job = plan_for_topology(parsed)
    planned = job.planned
    flags = describe_flags(job.topology.chip.name)
    plan = planned.attention.describe()
    logger.info("\n".join([*planned.notes, *flags, plan]))
    report = compiled_report(job, arguments)
    logger.info(report.describe())
    path = planned.config.report
    if path:
        Path(path).write_text(json.dumps(report.as_json(), indent=2) + "\n")
        logger.info(f"wrote {path}")


def compiled_report(job: TopologyJob, arguments: Sequence[str], only: str = "") -> Report:
    """Returns the report on all programs of a job, or on the one with the name `only`."""
    planned, chip = job.planned, job.topology.chip
    builder, shape = planned.builder, planned.shape
    steps = shape.task.sampler(sampler(planned.config, builder.spec))
    cache = step_cache(planned.config, builder.spec)
    every = programs_of(builder, shape, sampler=steps, attention=planned.attention, cache=cache)
    plan = run_plan(planned.config, builder.spec, shape.task)
    every += other_steps_of(builder, shape, sampler=steps, plan=plan, cache=cache)
    makers = tuple(maker for maker in every if only in ("", maker.name))
    if planned.config.aot_cache_dir and not only:
        makers += shorter_text_encoders(builder)
    if not kernel_plans(planned.attention):
        return assemble(job, tuple(compile_all(makers, chip)), ())
    with kernel_process(arguments) as kernels:
        programs = tuple(compile_all(makers, chip))
        return assemble(job, programs, kernels.result())


def assemble(
    job: TopologyJob, programs: Sequence[CompiledProgram], figures: Sequence[KernelFigures]
) -> Report:
    """Returns the report on compiled programs and kernels."""
    planned, chip = job.planned, job.topology.chip
    builder, mesh = planned.builder, planned.builder.mesh
    transformer = builder.spec.transformer
    (step,) = (program for program in programs if program.name == DENOISE_STEP)
    schedule = read_program(step.text)
    cycles = count_cycles(schedule, transformer.layers, chip)
    collectives = find_collectives(schedule, mesh.shape, chip)
    pinned = pins_clock(chip.name)
    topology = replace(job.topology, chip=chip.as_run(pinned=pinned))
    links = network(topology, mesh.devices.flatten().tolist())
    flops = step_flops(planned)

    def step_at(clocked: Chip) -> StepTime:
        return step_time(
            chip=clocked,
            kernels=kernel_times(planned, figures, clocked),
            cycles=cycles.by_key(),
            collectives=collectives,
            network=replace(links, topology=replace(topology, chip=clocked)),
        )

    seconds, slower = step_at(topology.chip), chip.unpinned()
    return Report(
        topology=topology,
        mesh=dict(mesh.shape),
        attention=planned.choices.attention,
        programs=programs,
        residence=residence(builder, programs),
        kernels=figures,
        cycles=cycles,
        collectives=collectives,
        flops=flops,
        bounds=step_bounds(
            flops,
            chip,
            devices=mesh.size,
            head_dim=transformer.head_dim,
            product_dtype=builder.settings.precision.product_dtype,
        ),
        step=seconds,
        video=video_time(programs, program_runs(planned), seconds.total, network=links),
        peak_step=step_at(chip),
        unpinned_step=None if slower is None else step_at(slower),
        pins_clock=pinned,
        flags=os.environ.get(VARIABLE, ""),
        copied_weights=weight_copies(schedule),
        unestimated={one.name: find_unestimated(read_program(one.text)) for one in programs},
        job=planned.step_facts(),
    )


def step_flops(job: ResolvedJob) -> ForwardFlops:
    """Returns the FLOPs of one denoise step over the whole batch."""
    return forward_flops(
        job.builder.spec.transformer,
        tokens=job.shape.latent.tokens,
        text_length=job.shape.text_length + job.shape.task.image_tokens,
        batch=job.shape.model_batch,
    )


def kernel_times(
    job: ResolvedJob, figures: Sequence[KernelFigures], chip: Chip
) -> dict[str, KernelTime]:
    """Returns the seconds of each kernel, of a call and of a step."""
    blocks = job.builder.spec.transformer.block_count
    plans = kernel_plans(job.attention)
    times = {}
    for kernel in figures:
        use = kernel_calls(plans[kernel.purpose])
        attention = chip.seconds(use.cycles(kernel))
        times[kernel.name] = KernelTime(
            call=attention / (use.calls * use.groups), step=attention * blocks
        )
    return times


def program_runs(job: ResolvedJob) -> dict[str, int]:
    """Returns how often each program runs for one batch of videos of the same prompt."""
    plan = run_plan(job.config, job.builder.spec, job.shape.task)
    clips = Counter(job.shape.task.encoded_frames(job.shape.latent, job.builder.spec.vae))
    return {
        "text_encoder": job.shape.guidance.copies,
        "read_text": len(job.builder.spec.experts),
        "start": 1,
        **Counter(step_name(step, job.shape) for step in plan),
        "decode": job.shape.videos,
        **dict.fromkeys([ENCODE_IMAGE] if job.shape.task.images else [], job.shape.videos),
        **{encode_name(frames): count * job.shape.videos for frames, count in clips.items()},
    }


def video_time(
    programs: Sequence[CompiledProgram],
    times: Mapping[str, int],
    step_seconds: float,
    *,
    network: Network,
) -> VideoTime:
    """Returns the time of programs that run `times`; that of a denoise step is `step_seconds`.

    A step of the prompt only is taken as half of a guided one.
    """
    known = {DENOISE_STEP: step_seconds, PROMPT_ONLY_STEP: step_seconds / 2}
    return VideoTime(
        programs={
            program.name: Runs(
                seconds=known[program.name]
                if program.name in known
                else program_seconds(program.text, network),
                times=times[program.name],
            )
            for program in programs
            if program.name in times
        }
    )


def program_seconds(text: str, network: Network) -> float:
    """Returns the seconds of a program without attention kernels."""
    schedule, chip = read_program(text), network.topology.chip
    return step_time(
        chip=chip,
        kernels={},
        cycles=count_cycles(schedule, 1, chip).by_key(),
        collectives=find_collectives(schedule, {"device": len(network.positions)}, chip),
        network=network,
    ).total
