"""From a config and a topology to a report on a run that has not happened."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from maxdiffusion.commands.auto_attention import settle_attention
from maxdiffusion.commands.kept_programs import fill_programs
from maxdiffusion.commands.pipeline_settings import program_shape, sampler
from maxdiffusion.commands.preparation import ModelChecks
from maxdiffusion.commands.tile_search import tile_notes
from maxdiffusion.commands.weight_placement import settle_weights
from maxdiffusion.config.config import Config
from maxdiffusion.config.loading import Reading
from maxdiffusion.config.validation import check_job
from maxdiffusion.pipelines.programs import ProgramShape, Workshop
from maxdiffusion.preflight.collectives import find_collectives
from maxdiffusion.preflight.cycles import count_cycles
from maxdiffusion.preflight.flops import forward_flops, step_bounds
from maxdiffusion.preflight.hlo import read_program
from maxdiffusion.preflight.kernels import KernelFigures, kernel_plans, use_of
from maxdiffusion.preflight.links import network
from maxdiffusion.preflight.memory import residence
from maxdiffusion.preflight.programs import (
    DENOISE_STEP,
    CompiledProgram,
    compile_all,
    programs_of,
    shorter_text_encoders,
)
from maxdiffusion.preflight.released import find_spec
from maxdiffusion.preflight.report import Report
from maxdiffusion.preflight.step_time import KernelTime, step_time
from maxdiffusion.preflight.topology import Topology, describe_devices, read_topology
from maxdiffusion.preflight.video_time import video_time
from maxdiffusion.runtime.libtpu_flags import describe_flags
from maxdiffusion.runtime.problems import RunFailed

KERNELS_MODULE = "maxdiffusion.commands.preflight_kernels"


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job on devices that need not be there, without its weights."""

    config: Config
    workshop: Workshop
    shape: ProgramShape
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Preflight(PlannedJob):
    """A job that can be compiled for a topology."""

    topology: Topology


def preflight(reading: Reading, arguments: Sequence[str]) -> None:
    """Compiles the job of a config, prints the report and writes it where `report` says."""
    job = prepare(reading)
    flags = describe_flags(job.topology.chip.name)
    say("\n".join([*job.notes, *flags, job.workshop.attention(job.shape).describe()]))
    report = compiled_report(job, arguments)
    say(report.describe())
    if job.config.report:
        Path(job.config.report).write_text(json.dumps(report.as_json(), indent=2) + "\n")
        say(f"wrote {job.config.report}")


def compiled_report(job: Preflight, arguments: Sequence[str], only: str = "") -> Report:
    """The report on the programs of a job, or on the one that is named `only`."""
    made = programs_of(job.workshop, job.shape, sampler(job.config, job.workshop.spec))
    makers = tuple(maker for maker in made if only in ("", maker.name))
    if job.config.aot_cache_dir and not only:
        makers += shorter_text_encoders(job.workshop)
    with tempfile.TemporaryDirectory(prefix="preflight_") as folder:
        kernels = start_kernels(job, arguments, Path(folder))
        try:
            programs = tuple(compile_all(makers, job.topology.chip, say))
            figures = finish_kernels(kernels, Path(folder))
        finally:
            stop(kernels)
    return assemble(job, programs, figures)


def say(text: str) -> None:
    """Prints at once."""
    print(text, flush=True)


def prepare(reading: Reading) -> Preflight:
    """The checked job of a config on its topology; raises ProblemsFound with all that is wrong."""
    topology = read_topology(reading.config.topology)
    planned = plan_job(reading, describe_devices(topology))
    return Preflight(
        topology=topology,
        config=planned.config,
        workshop=fill_programs(planned.workshop, planned.config),
        shape=planned.shape,
        notes=(*planned.notes, *tile_notes(planned.workshop, planned.shape)),
    )


def plan_job(reading: Reading, devices: Sequence[jax.Device]) -> PlannedJob:
    """The checked job of a config on these devices."""
    spec = find_spec(reading.config.pretrained_model_name_or_path)
    config, notes = settle_attention(reading.config, spec, devices)
    config, why = settle_weights(config, spec, devices)
    count = len(devices)
    checks = ModelChecks(spec=spec, device_count=count, slice_count=1, devices=tuple(devices))
    job = check_job(
        config,
        device_count=count,
        heads=spec.transformer.heads,
        checks=(checks,),
        earlier=list(reading.problems),
    )
    return PlannedJob(
        config=config,
        workshop=checks.workshop(config),
        shape=program_shape(config, spec, min(job.batch_size, job.videos)),
        notes=(*notes, *why),
    )


def start_kernels(
    job: Preflight, arguments: Sequence[str], folder: Path
) -> subprocess.Popen[bytes] | None:
    """Begins to compile the kernels alone, in a process whose libtpu writes their machine code.

    libtpu reads once, when it starts, what it is to write; of whole programs it would be too much.
    """
    if not kernel_plans(job.workshop.attention(job.shape)):
        return None
    command = [sys.executable, "-m", KERNELS_MODULE, str(folder), *arguments]
    errors = (folder / "errors").open("wb")
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)


def finish_kernels(
    process: subprocess.Popen[bytes] | None, folder: Path
) -> tuple[KernelFigures, ...]:
    """The figures of the kernels once their process has ended."""
    if process is None:
        return ()
    say("waiting for the machine code of the kernels ...")
    if process.wait() != 0:
        errors = (folder / "errors").read_text(errors="replace").strip().splitlines()
        reason = errors[-1] if errors else f"exit code {process.returncode}"
        raise RunFailed(f"the kernels could not be compiled alone: {reason}")
    rows = json.loads((folder / "kernels.json").read_text())
    return tuple(KernelFigures.from_json(row) for row in rows)


def stop(process: subprocess.Popen[bytes] | None) -> None:
    """Ends the process of the kernels if it still runs."""
    if process is not None and process.poll() is None:
        process.terminate()
        process.wait()


def assemble(
    job: Preflight, programs: Sequence[CompiledProgram], figures: Sequence[KernelFigures]
) -> Report:
    """The report on compiled programs and kernels."""
    workshop, shape, chip = job.workshop, job.shape, job.topology.chip
    transformer, mesh = workshop.spec.transformer, workshop.mesh
    (step,) = (program for program in programs if program.name == DENOISE_STEP)
    schedule = read_program(step.text)
    cycles = count_cycles(schedule, transformer.layers, chip)
    collectives = find_collectives(schedule, mesh.shape)
    flops = forward_flops(
        transformer,
        tokens=shape.latent.tokens,
        text_length=shape.text_length,
        batch=shape.model_batch,
    )
    links = network(job.topology, mesh.devices.flatten().tolist())
    seconds = step_time(
        chip=chip,
        kernels=kernel_times(job, figures),
        cycles=cycles,
        collectives=collectives,
        network=links,
    )
    return Report(
        topology=job.topology,
        mesh=dict(mesh.shape),
        attention=job.config.attention,
        programs=programs,
        residence=residence(workshop, programs),
        kernels=figures,
        cycles=cycles,
        collectives=collectives,
        flops=flops,
        bounds=step_bounds(flops, chip, mesh.size, transformer.head_dim),
        step=seconds,
        video=video_time(programs, runs_of(job), seconds.total, chip=chip, network=links),
    )


def runs_of(job: Preflight) -> dict[str, int]:
    """How often each program runs for one batch of videos of the same prompt."""
    return {
        "text_encoder": job.shape.guidance.copies,
        "read_text": len(job.workshop.spec.experts),
        "start": 1,
        DENOISE_STEP: job.config.num_inference_steps,
        "decode": job.shape.videos,
    }


def kernel_times(job: Preflight, figures: Sequence[KernelFigures]) -> dict[str, KernelTime]:
    """The seconds of each kernel, of a call and of a step."""
    chip, layers = job.topology.chip, job.workshop.spec.transformer.layers
    plans = kernel_plans(job.workshop.attention(job.shape))
    times = {}
    for kernel in figures:
        use = use_of(plans[kernel.purpose])
        attention = chip.seconds(use.cycles(kernel))
        times[kernel.name] = KernelTime(
            call=attention / (use.calls * use.groups), step=attention * layers
        )
    return times
