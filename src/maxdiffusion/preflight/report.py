"""What a preflight found: for people as text, for scripts as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.preflight.collectives import Collective, bytes_by_axes
from maxdiffusion.preflight.cycles import Cycles
from maxdiffusion.preflight.flops import Bounds, ForwardFlops
from maxdiffusion.preflight.kernels import KernelFigures
from maxdiffusion.preflight.memory import Residence
from maxdiffusion.preflight.programs import CompiledProgram
from maxdiffusion.preflight.step_time import StepTime, in_words
from maxdiffusion.preflight.topology import Topology
from maxdiffusion.preflight.video_time import VideoTime

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is known of a job before it runs; every figure is of one device."""

    topology: Topology
    mesh: Mapping[str, int]
    attention: str
    programs: Sequence[CompiledProgram]
    residence: Residence
    kernels: Sequence[KernelFigures]
    cycles: Cycles
    collectives: Sequence[Collective]
    flops: ForwardFlops
    bounds: Bounds
    step: StepTime
    video: VideoTime

    @property
    def mfu(self) -> float:
        """The share of bfloat16 peak that the predicted step reaches."""
        return self.bounds.mfu(self.flops.total, self.step.total)

    def as_json(self) -> dict[str, Any]:
        """Everything, with the figures that scripts compare at the top."""
        return {
            "predicted_seconds_per_step": self.step.total,
            "bound_seconds_per_step": self.bounds.head_dim_aware,
            "spec_bound_seconds_per_step": self.bounds.spec,
            "mfu": self.mfu,
            "mfu_denominator_flops_per_device": self.bounds.peak_flops,
            "hbm_bytes_per_device": self.residence.peak,
            "usable_hbm_bytes_per_device": self.topology.chip.usable_hbm_bytes,
            "cycles_per_layer_outside_kernels": self.cycles.layer,
            "kernels": [kernel.as_json() for kernel in self.kernels],
            "topology": self.topology.name,
            "devices": self.topology.device_count,
            "mesh": dict(self.mesh),
            "attention": self.attention,
            "seconds": self.step.parts(),
            "predicted_seconds_per_video": self.video.total,
            "seconds_of_programs": self.video.as_json(),
            "flops_per_step": self.flops.parts(),
            "cycles_per_layer": {part.value: n for part, n in self.cycles.per_layer.items()},
            "cycles_per_step": {part.value: n for part, n in self.cycles.total.items()},
            "hbm": self.residence.as_json(),
            "programs": [_program_json(program) for program in self.programs],
            "collectives": [_collective_json(collective) for collective in self.collectives],
        }

    def describe(self) -> str:
        """The report for people."""
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
        ]
        return "\n".join(lines)

    def _step_lines(self) -> list[str]:
        bounds, total = self.bounds, self.step.total
        parts = sorted(self.step.parts().items(), key=lambda item: -item[1])
        return [
            f"predicted: {in_words(total)}/step",
            *(f"  {in_words(time):>10} {time / total:6.1%}  {name}" for name, time in parts),
            f"bound on {bounds.devices} devices: {in_words(bounds.spec)}/step at peak, "
            f"{in_words(bounds.head_dim_aware)} with heads of this width on these MXUs",
            f"MFU: {self.mfu:.1%} of {bounds.peak_flops / 1e12:.1f} TFLOP/s (bf16) a device",
        ]

    def _kernel_lines(self) -> list[str]:
        if not self.kernels:
            return ["kernels: none, XLA runs the attention"]
        lines = ["kernels:"]
        for kernel in self.kernels:
            lines.append(
                f"  {kernel.name} ({kernel.purpose}): main loop {kernel.main_loop_bundles:,} "
                f"bundles, MXU bound {kernel.mxu_bound_bundles:,} ({kernel.mxu_share:.1%}); "
                f"spills {kernel.spill_stores:,} out, {kernel.spill_loads:,} in; VMEM "
                f"{kernel.vmem_bytes / 2**20:.1f} of {kernel.vmem_limit_bytes / 2**20:.0f} MiB"
            )
        return lines

    def _cycle_lines(self) -> list[str]:
        parts = sorted(self.cycles.per_layer.items(), key=lambda item: -item[1])
        return [
            f"cycles of a layer outside kernels (XLA's estimate): {self.cycles.layer:,}",
            *(f"  {cycles:>12,}  {purpose.value}" for purpose, cycles in parts),
        ]

    def _collective_lines(self) -> list[str]:
        lines = ["exchanges (bytes that a device sends each time):"]
        for one in self.collectives:
            lines.append(f"  x{one.times:<4} {one.sent / 1e6:9.2f} MB  {_collective_words(one)}")
        totals = ", ".join(
            f"{axes} {size / 1e9:.2f} GB" for axes, size in bytes_by_axes(self.collectives)
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


def _collective_words(one: Collective) -> str:
    where = " x ".join(one.axes) or "no axis"
    if one.meanwhile is None or not (one.meanwhile.cycles or one.meanwhile.kernels):
        how = "waited for"
    else:
        kernels = ", ".join(one.meanwhile.kernels) or "no kernel"
        how = f"under {one.meanwhile.cycles:,} cycles and {kernels}"
    return f"{one.kind} over {where} of {one.group}, {how}"


def _collective_json(one: Collective) -> dict[str, Any]:
    meanwhile = one.meanwhile
    return {
        "name": one.name,
        "kind": one.kind,
        "axes": list(one.axes),
        "group": one.group,
        "bytes": one.bytes,
        "bytes_sent": one.sent,
        "times": one.times,
        "asynchronous": one.asynchronous,
        "cycles_between": meanwhile.cycles if meanwhile else 0,
        "kernels_between": list(meanwhile.kernels) if meanwhile else [],
        "operation": one.operation,
    }


def _program_json(program: CompiledProgram) -> dict[str, Any]:
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
