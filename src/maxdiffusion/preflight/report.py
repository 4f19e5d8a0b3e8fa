"""The report of a preflight, as text and as JSON, with the HBM of the whole run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from maxdiffusion.costs.chips import GIB, Topology
from maxdiffusion.costs.flops import Bounds, ForwardFlops
from maxdiffusion.costs.links import DeviceCollective, bytes_by_axes
from maxdiffusion.costs.step_time import (
    INSTRUCTION_BUNDLES,
    NEAR_INSTRUCTION_MEMORY,
    KernelFigures,
    StepTime,
    VideoTime,
    format_seconds,
    label,
)
from maxdiffusion.kernels.tpu import MIB
from maxdiffusion.pipelines.programs import ProgramBuilder
from maxdiffusion.preflight.compile import CompiledProgram
from maxdiffusion.preflight.readers.cycles import Cycles, Unestimated


@dataclass(frozen=True, kw_only=True)
class Residence:
    """Bytes on one device: weights by model, state kept between steps, and the peak of a run."""

    weights: Mapping[str, int]
    kept: int
    peak: int
    peak_program: str

    def as_json(self) -> dict[str, Any]:
        """Returns all bytes by name."""
        return {
            "weights": dict(self.weights),
            "kept_between_steps": self.kept,
            "peak_bytes": self.peak,
            "peak_program": self.peak_program,
        }


def residence(builder: ProgramBuilder, programs: Sequence[CompiledProgram]) -> Residence:
    """Returns the HBM of a run that keeps all weights on the devices, as a pipeline does.

    Arguments of programs are not added. They are weights, which count once, or results of other
    programs (text keys and values of each expert, the sampler's state), which count once as `kept`.
    """
    models, mesh = builder.models, builder.mesh
    transformer = state_bytes(models.transformer.on(mesh))
    weights = {
        **dict.fromkeys(builder.spec.experts, transformer),
        "vae": state_bytes(models.vae.on(mesh)),
        "text_encoder": state_bytes(models.text_encoder.on(mesh)),
    }
    if models.image_encoder is not None:
        weights["image_encoder"] = state_bytes(models.image_encoder.on(mesh))
    results = {program.name: program.memory.outputs for program in programs}
    kept = len(builder.spec.experts) * results.get("read_text", 0) + results.get("start", 0)
    peaks = {
        program.name: sum(weights.values()) + kept + program.memory.without_arguments
        for program in programs
    }
    largest = max(peaks, key=lambda name: peaks[name])
    return Residence(weights=weights, kept=kept, peak=peaks[largest], peak_program=largest)


def state_bytes(state: nnx.State) -> int:
    """Returns the bytes of sharded parameters on one device."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.ShapeDtypeStruct)]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
        if leaf.sharding is not None
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that preflight finds out about a job; every figure is of one device.

    `step` and `video` are at the clock of the topology's chip, which is the one that the flags of
    the job give. `peak_step` is at the clock of the stated peak, `unpinned_step` at the one that
    power management leaves, where it is known. `pins_clock` and `flags` are those of the job.
    `copied_weights` are the bytes of weights that each step copies to other tiles, `unestimated`
    the operations of each program that its time leaves out. `job` has the facts by which a measured
    run is recognised as this job.
    """

    topology: Topology
    mesh: Mapping[str, int]
    attention: str
    programs: Sequence[CompiledProgram]
    residence: Residence
    kernels: Sequence[KernelFigures]
    cycles: Cycles
    collectives: Sequence[DeviceCollective]
    flops: ForwardFlops
    bounds: Bounds
    step: StepTime
    video: VideoTime
    peak_step: StepTime
    unpinned_step: StepTime | None = None
    pins_clock: bool = False
    flags: str = ""
    copied_weights: Mapping[str, int] = field(default_factory=dict)
    unestimated: Mapping[str, Unestimated] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mfu(self) -> float:
        """Returns the MFU of the predicted step, of bfloat16 peak."""
        return self.bounds.mfu(self.flops.total, self.step.total)

    @property
    def kernel_bundles(self) -> int:
        """Returns the bundles of the code of all kernels."""
        return sum(kernel.code_bundles for kernel in self.kernels)

    def warnings(self) -> list[str]:
        """Returns what the prediction does not include."""
        return [
            *code_warnings(self.kernels),
            *self._copy_warnings(),
            *self._unestimated_warnings(),
        ]

    def _copy_warnings(self) -> list[str]:
        copied = sum(self.copied_weights.values())
        if not copied:
            return []
        seconds = 2 * copied / self.topology.chip.hbm_bandwidth
        return [
            f"WARNING: denoise_step copies {len(self.copied_weights)} weights, "
            f"{copied / 1e9:.1f} GB, to other tiles in every step, which the prediction does not "
            f"include: at least {format_seconds(seconds)} (docs/design/weight_layouts.md)",
        ]

    def _unestimated_warnings(self) -> list[str]:
        """Returns a warning for each program with operations that its time leaves out."""
        warnings = []
        for name, found in self.unestimated.items():
            if not found.operations:
                continue
            least, runs = found.seconds(self.topology.chip), self.video.programs.get(name)
            share = "" if runs is None else f", {least / runs.seconds:.1%} of what it predicts"
            warnings.append(
                f"WARNING: the compiler gives no cycles for {found.operations} operations of "
                f"{name} ({found.describe()}), which the prediction counts as nothing: they take "
                f"at least {format_seconds(least)} by their bytes{share}"
            )
        return warnings

    def as_json(self) -> dict[str, Any]:
        """Returns everything by name; the figures that scripts compare come first."""
        slower = self.topology.chip.unpinned()
        return {
            "predicted_seconds_per_step": self.step.total,
            "clock_hz": self.topology.chip.clock_hz,
            "clock": self.topology.chip.clock,
            "job_pins_clock": self.pins_clock,
            "peak_clock_seconds_per_step": self.peak_step.total,
            "unpinned_seconds_per_step": self.unpinned_step and self.unpinned_step.total,
            "peak_clock_hz": self.topology.chip.at_peak().clock_hz,
            "unpinned_clock_hz": None if slower is None else slower.clock_hz,
            "libtpu_flags": self.flags,
            "bound_seconds_per_step": self.bounds.head_dim_aware,
            "spec_bound_seconds_per_step": self.bounds.spec,
            "mfu": self.mfu,
            "mfu_denominator_flops_per_device": self.bounds.peak_flops,
            "hbm_bytes_per_device": self.residence.peak,
            "usable_hbm_bytes_per_device": self.topology.chip.usable_hbm_bytes,
            "cycles_per_layer_outside_kernels": self.cycles.layer,
            "kernels": [kernel.as_json() for kernel in self.kernels],
            "kernel_code_bundles": self.kernel_bundles,
            "copied_weight_bytes_per_step": sum(self.copied_weights.values()),
            "unestimated_operations": {
                name: {"kinds": dict(found.kinds), "bytes": found.bytes}
                for name, found in self.unestimated.items()
                if found.operations
            },
            "warnings": self.warnings(),
            "topology": self.topology.name,
            "devices": self.topology.device_count,
            "mesh": dict(self.mesh),
            "attention": self.attention,
            "job": dict(self.job),
            "seconds": self.step.parts(),
            "peak_clock_seconds": self.peak_step.parts(),
            "unpinned_seconds": self.unpinned_step and self.unpinned_step.parts(),
            "predicted_seconds_per_video": self.video.total,
            "seconds_of_programs": self.video.as_json(),
            "flops_per_step": self.flops.parts(),
            "cycles_per_layer": {part.value: n for part, n in self.cycles.per_layer.items()},
            "cycles_per_step": {part.value: n for part, n in self.cycles.total.items()},
            "hbm": self.residence.as_json(),
            "programs": [program_json(program) for program in self.programs],
            "collectives": [collective_json(collective) for collective in self.collectives],
        }

    def describe(self) -> str:
        """Returns the report as text."""
        lines = [
            f"preflight for {self.topology.describe()}",
            "mesh: " + " x ".join(f"{axis} {size}" for axis, size in self.mesh.items()),
            "",
            *self._step_lines(),
            "",
            *self.video.lines(),
            "",
            *self._kernel_lines(),
            "",
            *self._cycle_lines(),
            "",
            *self._collective_lines(),
            "",
            *self._memory_lines(),
            *self.warnings(),
        ]
        return "\n".join(lines)

    def _step_lines(self) -> list[str]:
        bounds, total = self.bounds, self.step.total
        parts = sorted(self.step.parts().items(), key=lambda item: -item[1])
        return [
            f"predicted: {format_seconds(total)}/step",
            *self._clock_lines(),
            *(
                f"  {format_seconds(time):>10} {time / total:6.1%}  {label(name)}"
                for name, time in parts
            ),
            f"bound on {bounds.devices} devices: {format_seconds(bounds.spec)}/step at peak, "
            f"{format_seconds(bounds.head_dim_aware)} with heads of this width on these MXUs",
            f"MFU: {self.mfu:.1%} of {bounds.peak_flops / 1e12:.1f} TFLOP/s (bf16) a device",
        ]

    def _clock_lines(self) -> list[str]:
        lines = [f"  at {self.topology.chip.clock}"]
        if self.unpinned_step is not None:
            pins = "pins the clock" if self.pins_clock else "does not pin the clock"
            peak, other = format_seconds(self.peak_step.total), self.unpinned_step.total
            lines.append(
                f"  this job {pins}; pinned (tpu_pin_clock: true) {peak}/step, "
                f"not pinned {format_seconds(other)}/step"
            )
        return [*lines, f"  flags: {self.flags or 'none'}"]

    def _kernel_lines(self) -> list[str]:
        if not self.kernels:
            return ["kernels: none, XLA runs the attention"]
        lines = ["kernels:"]
        for kernel in self.kernels:
            lines.append(
                f"  {kernel.name} ({kernel.purpose}): main loop {kernel.main_loop_bundles:,} "
                f"bundles, MXU bound {kernel.mxu_bound_bundles:,} ({kernel.mxu_share:.1%}); "
                f"spills {kernel.spill_stores:,} out, {kernel.spill_loads:,} in; VMEM "
                f"{kernel.vmem_bytes / MIB:.1f} of {kernel.vmem_limit_bytes / MIB:.0f} MiB; "
                f"code {kernel.code_bundles:,} bundles"
            )
        return [
            *lines,
            f"  code of all kernels: {self.kernel_bundles:,} bundles",
        ]

    def _cycle_lines(self) -> list[str]:
        parts = sorted(self.cycles.per_layer.items(), key=lambda item: -item[1])
        return [
            f"cycles of a layer outside kernels (XLA's estimate): {self.cycles.layer:,}",
            *(f"  {cycles:>12,}  {label(purpose.value)}" for purpose, cycles in parts),
        ]

    def _collective_lines(self) -> list[str]:
        lines = ["collectives (bytes that a device sends each time):"]
        for one in self.collectives:
            lines.append(f"  x{one.times:<4} {one.sent / 1e6:9.2f} MB  {collective_words(one)}")
        totals = ", ".join(
            f"{axes} {size / 1e9:.2f} GB" for axes, size in bytes_by_axes(self.collectives).items()
        )
        return [*lines, f"  sent by a device in a step: {totals or 'nothing'}"]

    def _memory_lines(self) -> list[str]:
        has, residence = self.topology.chip.usable_hbm_bytes, self.residence
        lines = [
            f"HBM: {residence.peak / GIB:.2f} of {has / GIB:.2f} GiB at the peak "
            f"({residence.peak_program})" + ("" if residence.peak <= has else ": DOES NOT FIT"),
            *(f"  {size / GIB:8.2f} GiB  weights of {n}" for n, size in residence.weights.items()),
            f"  {residence.kept / GIB:8.2f} GiB  text keys and values, sampler state",
        ]
        for program in self.programs:
            memory = program.memory
            lines.append(
                f"  {memory.peak / GIB:8.2f} GiB  {program.name}: arguments "
                f"{memory.arguments / GIB:.2f}, temporaries {memory.temporaries / GIB:.2f}, "
                f"results {memory.outputs / GIB:.2f}; compiled in {program.seconds:.0f} s"
            )
        return lines


def code_warnings(kernels: Sequence[KernelFigures]) -> list[str]:
    """Returns a warning for each kernel whose code nearly fills instruction memory, or more."""
    return [
        f"WARNING: the code of {kernel.name} has {kernel.code_bundles:,} bundles, "
        f"{kernel.instruction_memory:.0%} of about {INSTRUCTION_BUNDLES:,} that instruction memory "
        "holds. A kernel past it was measured 2.1 times slower, which the prediction does not "
        "include. Use smaller flash_block_sizes or an attention without fixed_m"
        for kernel in kernels
        if kernel.instruction_memory >= NEAR_INSTRUCTION_MEMORY
    ]


def collective_words(one: DeviceCollective) -> str:
    """Returns kind, axes and overlap of a collective in a few words."""
    where = " x ".join(one.axes) or "no axis"
    overlap = one.overlap
    if overlap is None or not (overlap.cycles or overlap.kernels):
        how = "exposed"
    else:
        kernels = ", ".join(overlap.kernels) or "no kernel"
        how = f"under {overlap.cycles:,} cycles and {kernels}"
    return f"{one.kind} over {where} of {one.group_size}, {how}"


def collective_json(one: DeviceCollective) -> dict[str, Any]:
    """Returns a collective, ready for json.dump."""
    overlap = one.overlap
    return {
        "name": one.name,
        "kind": one.kind,
        "axes": list(one.axes),
        "group": one.group_size,
        "bytes": one.bytes,
        "bytes_sent": one.sent,
        "times": one.times,
        "asynchronous": one.asynchronous,
        "cycles_between": overlap.cycles if overlap else 0,
        "kernels_between": list(overlap.kernels) if overlap else [],
        "operation": one.operation,
    }


def program_json(program: CompiledProgram) -> dict[str, Any]:
    """Returns sizes and compile time of a program, ready for json.dump."""
    memory = program.memory
    return {
        "name": program.name,
        "compile_seconds": program.seconds,
        "flops": program.flops,
        "argument_bytes": memory.arguments,
        "output_bytes": memory.outputs,
        "temporary_bytes": memory.temporaries,
        "code_bytes": memory.code,
        "peak_bytes": memory.peak,
    }
