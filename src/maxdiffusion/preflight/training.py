"""Reports what a training will do on a TPU slice that is not there: plan, compile, read, report.

The step of one expert is compiled for the topology of the config, as `train_wan` would run it. Its
schedule gives cycles and collectives, the machine code of the kernels gives their time, and the
abstract state says what the memory is used for.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.costs.chips import GIB, Chip, Topology
from maxdiffusion.costs.flops import forward_flops
from maxdiffusion.costs.links import DeviceCollective, bytes_by_axes, network
from maxdiffusion.costs.step_time import KernelFigures, StepTime, format_seconds, label, step_time
from maxdiffusion.costs.training import TrainingBounds, training_bounds
from maxdiffusion.preflight.compile import CompiledProgram, ProgramMaker, compile_all
from maxdiffusion.preflight.kernels import kernel_process
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.cycles import Cycles, count_cycles
from maxdiffusion.preflight.readers.hlo import ScheduledProgram, read_program
from maxdiffusion.preflight.report import collective_json, collective_words, program_json
from maxdiffusion.preflight.training_job import (
    StepInputs,
    TopologyTraining,
    lower_step,
    plan_training,
    step_inputs,
)
from maxdiffusion.preflight.training_kernels import direction, training_kernel_times
from maxdiffusion.runtime.tpu_flags import VARIABLE, describe_flags, pins_clock
from maxdiffusion.training.memory.placement import HOST, bytes_on_device, gradient_bytes

logger = logging.getLogger(__name__)
TRAIN_STEP = "train_step"
KERNELS = "maxdiffusion.preflight.training_kernels"


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes on one device by what they are; `host` are those in the memory of its host.

    Gradients are float32, those of matrices of blocks split over all axes, others sharded as their
    parameters. What else a step needs at its peak are activations and workspace.
    """

    weights: int
    running_means: int
    moments: int
    gradients: int
    activations: int
    idle_expert: int
    other: int
    host: int

    @property
    def peak(self) -> int:
        """Returns the bytes on the device at the peak of a step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Returns the parts on the device by their keys in JSON reports."""
        return {
            "weights": self.weights,
            "running means": self.running_means,
            "moments": self.moments,
            "gradients": self.gradients,
            "activations and workspace": self.activations,
            "expert that is not trained": self.idle_expert,
            "batch and code": self.other,
        }


def training_memory(
    job: TopologyTraining, inputs: StepInputs, program: CompiledProgram
) -> TrainingMemory:
    """Returns the memory of a run: that of the compiled step, and the expert that waits."""
    state, memory = inputs.state, program.memory
    weights = bytes_on_device(state.values) + bytes_on_device(inputs.frozen)
    means, moments = bytes_on_device(state.ema), bytes_on_device(state.moments)
    trained = state.values[job.expert]
    gradients = min(gradient_bytes(trained), memory.temporaries)
    whole = {"values": state.values, "ema": state.ema, "moments": state.moments}
    of_expert = {kind: held[job.expert] for kind, held in whole.items()}
    frozen = inputs.frozen.get(job.expert, {})
    on_device = bytes_on_device(of_expert) + bytes_on_device(frozen)
    on_host = bytes_on_device(whole, HOST)
    parks = job.training.placement.parks
    idle = bytes_on_device(frozen) if parks else on_device
    waiting = bytes_on_device(of_expert) + bytes_on_device(of_expert, HOST) if parks else on_host
    return TrainingMemory(
        weights=weights,
        running_means=means,
        moments=moments,
        gradients=gradients,
        activations=memory.temporaries - gradients,
        idle_expert=job.idle_experts * idle,
        other=memory.arguments - weights - means - moments + memory.outputs + memory.code,
        host=on_host + job.idle_experts * waiting,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingReport:
    """Everything that preflight finds out about a training; every figure is of one device."""

    job: TopologyTraining
    program: CompiledProgram
    memory: TrainingMemory
    kernels: Sequence[KernelFigures]
    cycles: Cycles
    collectives: Sequence[DeviceCollective]
    bounds: TrainingBounds
    step: StepTime
    unpinned_step: StepTime | None

    @property
    def topology(self) -> Topology:
        """The slice."""
        return self.job.topology

    @property
    def mfu(self) -> float:
        """Returns the MFU of the predicted step, of bfloat16 peak."""
        return self.bounds.mfu(self.step.total)

    @property
    def fits(self) -> bool:
        """Returns whether the peak of a step fits into the HBM of a device."""
        return self.memory.peak <= self.topology.chip.usable_hbm_bytes

    @property
    def chip_hours(self) -> float:
        """Returns the chip-hours of a thousand steps."""
        return 1000 * self.step.total * self.topology.chips / 3600

    def as_json(self) -> dict[str, Any]:
        """Returns everything by name; the figures that scripts compare come first."""
        batch, chip = self.job.training.batch, self.topology.chip
        slower = self.unpinned_step
        return {
            "predicted_seconds_per_step": self.step.total,
            "clock_hz": chip.clock_hz,
            "clock": chip.clock,
            "job_pins_clock": pins_clock(chip.name),
            "unpinned_seconds_per_step": slower and slower.total,
            "libtpu_flags": os.environ.get(VARIABLE, ""),
            "bound_seconds_per_step": self.bounds.head_dim_aware,
            "spec_bound_seconds_per_step": self.bounds.spec,
            "mfu": self.mfu,
            "mfu_denominator_flops_per_device": self.bounds.peak_flops,
            "model_flops_per_step": self.bounds.model_flops,
            "chip_hours_per_1000_steps": self.chip_hours,
            "hbm_bytes_per_device": self.memory.peak,
            "usable_hbm_bytes_per_device": chip.usable_hbm_bytes,
            "host_bytes_per_device": self.memory.host,
            "hbm": self.memory.parts(),
            "topology": self.topology.name,
            "devices": self.topology.device_count,
            "mesh": dict(self.job.training.mesh.shape),
            "attention": self.job.training.attention,
            "remat_policy": self.job.training.remat.kind.value,
            "clips": batch.clips,
            "tokens_per_clip": self.job.training.transformer.tokens(batch.latent),
            "seconds": self.step.parts(),
            "cycles_per_step": {part.value: n for part, n in self.cycles.total.items()},
            "kernels": [kernel.as_json() for kernel in self.kernels],
            "program": program_json(self.program),
            "collectives": [collective_json(one) for one in self.collectives],
        }

    def describe(self) -> str:
        """Returns the report as text."""
        parts = (
            self._step_lines(),
            self._memory_lines(),
            self._kernel_lines(),
            self._collective_lines(),
        )
        return "\n\n".join("\n".join(lines) for lines in parts)

    def _step_lines(self) -> list[str]:
        training, total, bounds = self.job.training, self.step.total, self.bounds
        batch, chip = training.batch, self.topology.chip
        parts = sorted(self.step.parts().items(), key=lambda item: -item[1])
        slower = self.unpinned_step
        return [
            f"preflight of a training for {self.topology.describe()}",
            "mesh: " + " x ".join(f"{axis} {size}" for axis, size in training.mesh.shape.items()),
            f"batch: {batch.clips} clips of {training.transformer.tokens(batch.latent):,} tokens "
            f"in {batch.accumulation} pieces, "
            f"{training.remat.describe(training.block_attention.self_attention)}",
            f"predicted: {format_seconds(total)}/step at {chip.clock}",
            *([] if slower is None else [f"  {format_seconds(slower.total)}/step not pinned"]),
            *(f"  {format_seconds(t):>10} {t / total:6.1%}  {label(name)}" for name, t in parts),
            f"bound on {bounds.devices} devices: {format_seconds(bounds.spec)}/step at peak, "
            f"{format_seconds(bounds.head_dim_aware)} with products of these depths on these MXUs",
            f"MFU: {self.mfu:.1%} of {bounds.peak_flops / 1e12:.1f} TFLOP/s (bf16) a device, for "
            f"{1 + training.backward} x forward = {bounds.model_flops / 1e15:.1f} PFLOP a step",
            f"a thousand steps: {1000 * total / 3600:.1f} h, {self.chip_hours:.0f} chip-hours",
        ]

    def _memory_lines(self) -> list[str]:
        has, memory = self.topology.chip.usable_hbm_bytes, self.memory
        return [
            f"HBM: {memory.peak / GIB:.2f} of {has / GIB:.2f} GiB at the peak"
            + ("" if self.fits else ": DOES NOT FIT"),
            *(f"  {size / GIB:8.2f} GiB  {name}" for name, size in memory.parts().items() if size),
            *([f"  {memory.host / GIB:8.2f} GiB  in host memory, a device"] if memory.host else []),
            f"  compiled in {self.program.seconds:.0f} s",
        ]

    def _kernel_lines(self) -> list[str]:
        if not self.kernels:
            return ["kernels: none, XLA runs the attention"]
        return [
            "kernels:",
            *(
                f"  {kernel.name} ({direction(kernel.name)}): main loop "
                f"{kernel.main_loop_bundles:,} bundles, MXU bound {kernel.mxu_bound_bundles:,} "
                f"({kernel.mxu_share:.1%}); {kernel.spill_stores:,} spills"
                for kernel in self.kernels
            ),
        ]

    def _collective_lines(self) -> list[str]:
        lines = ["collectives of a layer (bytes that a device sends each time):"]
        for one in self.collectives:
            if one.times > 1 and one.sent > 1e6:
                words = collective_words(one)
                lines.append(f"  x{one.times:<4} {one.sent / 1e6:9.2f} MB  {words}")
        sums = bytes_by_axes(self.collectives).items()
        totals = ", ".join(f"{axes} {size / 1e9:.2f} GB" for axes, size in sums if size > 1e6)
        return [*lines, f"  sent by a device in a step: {totals or 'nothing'}"]


def preflight_training(parsed: ParsedConfig, arguments: Sequence[str]) -> TrainingReport:
    """Compiles the training step of a config, shows the report and writes it as JSON."""
    job = plan_training(parsed)
    training = job.training
    attention = training.block_attention.describe()
    logger.info("\n".join([*describe_flags(job.topology.chip.name), attention]))
    report = training_report(job, arguments)
    logger.info(report.describe())
    path = job.config.report
    if path:
        Path(path).write_text(json.dumps(report.as_json(), indent=2) + "\n")
        logger.info(f"wrote {path}")
    return report


def training_report(job: TopologyTraining, arguments: Sequence[str]) -> TrainingReport:
    """Returns the report on the compiled step of a planned training."""
    inputs = step_inputs(job)
    maker = ProgramMaker(name=TRAIN_STEP, compile=lambda: lower_step(job, inputs).compile())
    chip = job.topology.chip
    if job.training.block_attention.self_attention.backend.tile is None:
        (program,) = compile_all((maker,), chip)
        return assemble(job, inputs, program, ())
    with kernel_process(arguments, KERNELS) as kernels:
        (program,) = compile_all((maker,), chip)
        return assemble(job, inputs, program, kernels.result())


def assemble(
    job: TopologyTraining,
    inputs: StepInputs,
    program: CompiledProgram,
    figures: Sequence[KernelFigures],
) -> TrainingReport:
    """Returns the report on a compiled step and its kernels."""
    training, chip = job.training, job.topology.chip
    schedule = read_program(program.text)
    cycles = count_cycles(schedule, training.transformer.layers, chip)
    collectives = find_collectives(schedule, training.mesh.shape, chip)
    at: Mapping[str, Any] = {
        "schedule": schedule,
        "figures": figures,
        "cycles": cycles,
        "collectives": collectives,
    }
    slower = chip.unpinned()
    return TrainingReport(
        job=job,
        program=program,
        memory=training_memory(job, inputs, program),
        kernels=figures,
        cycles=cycles,
        collectives=collectives,
        bounds=bounds_of(job),
        step=step_at(job, chip, **at),
        unpinned_step=None if slower is None else step_at(job, slower, **at),
    )


def step_at(
    job: TopologyTraining,
    chip: Chip,
    *,
    schedule: ScheduledProgram,
    figures: Sequence[KernelFigures],
    cycles: Cycles,
    collectives: Sequence[DeviceCollective],
) -> StepTime:
    """Returns the parts of a step at the clock of a chip."""
    mesh, plan = job.training.mesh, job.training.block_attention.self_attention
    links = network(job.topology, mesh.devices.flatten().tolist())
    return step_time(
        chip=chip,
        kernels=training_kernel_times(schedule, figures, plan, chip) if figures else {},
        cycles=cycles.by_key(),
        collectives=collectives,
        network=replace(links, topology=replace(job.topology, chip=chip)),
    )


def bounds_of(job: TopologyTraining) -> TrainingBounds:
    """Returns the bounds of the step of one expert."""
    training, batch = job.training, job.training.batch
    forward = forward_flops(
        training.transformer,
        tokens=training.transformer.tokens(batch.latent),
        text_length=batch.caption_tokens + 1 + training.image.attended_tokens,
        batch=batch.clips,
    )
    return training_bounds(
        forward,
        job.topology.chip,
        backward=training.backward,
        devices=training.mesh.size,
        head_dim=training.transformer.head_dim,
    )
