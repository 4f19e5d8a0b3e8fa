"""Benchmarks denoise steps on the devices of this machine, for every attention and batch size.

The model has its real sizes and random weights: nothing is loaded or downloaded, and the time of a
step does not depend on the values. (All heads pass the gate of fixed-m softmax.) `run_sweep`
measures cases, `Results` keeps a line of JSON for each, `table` and `chart` show them.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental.layout import Format

from maxdiffusion import __version__
from maxdiffusion.config.load import read_config
from maxdiffusion.diffusion.denoise import Expert, Experts, denoise, initial_noise
from maxdiffusion.diffusion.guidance import NO_GUIDANCE, GuidanceScales, plan_run
from maxdiffusion.distributed.coordination import (
    PREEMPTION,
    Preempted,
    all_gather_str,
    broadcast_from_first,
    this_process,
)
from maxdiffusion.errors import Problem, ProblemsFound, RunFailed
from maxdiffusion.generation.job import ResolvedJob
from maxdiffusion.generation.settings import sampler
from maxdiffusion.pipelines.programs import ProgramBuilder, compile_lowered
from maxdiffusion.preflight.command import plan_on
from maxdiffusion.preflight.plots import Line, line_chart
from maxdiffusion.preflight.ranking import entry_overrides
from maxdiffusion.runtime.progress import PROGRESS
from maxdiffusion.runtime.timing import ProfilePlan, Profiler

logger = logging.getLogger(__name__)

# Steps before the measured ones.
WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: an attention (or name:UxR) and the number of videos made at once."""

    attention: str
    videos: int

    def __post_init__(self) -> None:
        if self.videos < 1:
            raise ValueError(f"videos={self.videos}: must be at least 1")

    @property
    def key(self) -> str:
        """Returns the identity of a case within a job."""
        return f"{self.attention} b{self.videos}"

    @property
    def title(self) -> str:
        """Returns the case in words."""
        return f"{self.attention}, {self.videos} at once"


class Results:
    """The lines of one job in a file that may contain other jobs too.

    `job` identifies config, devices and versions. An interrupted run continues where it stopped; a
    half-written line is measured again.
    """

    def __init__(self, path: Path, job: str):
        self._path = path
        self._job = job

    def lines(self) -> list[dict[str, Any]]:
        """Returns the complete lines of this job, the latest of each case."""
        return [*{line["key"]: line for line in self._read()}.values()]

    def finished(self) -> Iterator[str]:
        """Yields the keys of the measured cases."""
        yield from (line["key"] for line in self.lines())

    def add(self, case: Case, line: dict[str, Any]) -> None:
        """Appends the line of a case and syncs it to disk."""
        named = {"job": self._job, "key": case.key, "attention": case.attention}
        text = json.dumps(named | {"videos": case.videos} | line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # A half-written last line is ended first.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            gap = b"" if file.read(1) in (b"", b"\n") else b"\n"
            file.write(gap + text.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if not isinstance(line, dict):
                rule = "is not a file of results"
                raise ProblemsFound([Problem(name="results", value=str(self._path), rule=rule)])
            if line.get("job") == self._job:
                yield line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Returns seconds per step and video, a row per attention, a column per batch size."""
    attentions, batches = axes(lines)
    width = max((len(name) for name in attentions), default=0) + 2
    measured = {(line["attention"], line["videos"]): line for line in lines}
    head = f"{'s per step and video':{max(width, 22)}}" + "".join(f"{f'b{b}':>12}" for b in batches)
    rows = [head, "-" * len(head)]
    for name in attentions:
        cells = "".join(f"{cell(measured.get((name, batch))):>12}" for batch in batches)
        rows.append(f"{name:{max(width, 22)}}{cells}")
    refusals = [f"{line['key']}: {line['refusal']}" for line in lines if line["refusal"]]
    return "\n".join([*rows, *refusals])


def cell(line: dict[str, Any] | None) -> str:
    """Returns one measurement as a cell of the table."""
    if line is None:
        return ""
    return "refused" if line["refusal"] else f"{line['seconds_per_video_step']:.4g}"


def axes(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """Returns the attentions in their order, and the batch sizes from small to large."""
    attentions = dict.fromkeys(line["attention"] for line in lines)
    return [*attentions], sorted({line["videos"] for line in lines})


def chart(title: str, lines: Sequence[dict[str, Any]]) -> str:
    """Returns an SVG of seconds per step and video over the batch size, a line per attention."""
    attentions, batches = axes(lines)
    seconds = {
        (line["attention"], line["videos"]): line["seconds_per_video_step"]
        for line in lines
        if not line["refusal"]
    }
    return line_chart(
        title,
        [
            Line(
                label=f"{name} ({_last(seconds.get((name, batches[-1])))} at {batches[-1]})",
                points=[
                    (batch, seconds[name, batch]) for batch in batches if (name, batch) in seconds
                ],
            )
            for name in attentions
        ],
        x_label="videos at once",
        y_label="seconds per step and video",
    )


def _last(seconds: float | None) -> str:
    return "refused" if seconds is None else f"{seconds:.3g} s"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The arguments of a benchmark: config, cases, steps of each, and which ones to profile."""

    arguments: tuple[str, ...]
    cases: tuple[Case, ...]
    steps: int
    profile_batches: frozenset[int] = frozenset()
    profile_folder: str = ""


def run_sweep(sweep: Sweep, results: Results) -> None:
    """Measures every case that the results do not have yet; the first process writes them.

    A case that is refused or runs out of memory is recorded, and the others continue. SIGTERM ends
    the sweep after the current step, without the result of that case.
    """
    finished = set(broadcast_from_first("bench finished", lambda: [*results.finished()]))
    bench, cases = Bench(sweep), enumerate(sweep.cases, 1)
    with PREEMPTION.guard():
        for number, case in ((number, case) for number, case in cases if case.key not in finished):
            PROGRESS.checkpoint(f"bench {case.key}")
            logger.info(f"[{number}/{len(sweep.cases)}] {case.title} ...")
            try:
                line = bench.measure(case)
            except Preempted:
                raise RunFailed(
                    f"as asked, at case {number} of {len(sweep.cases)}. The same command continues "
                    "there."
                ) from None
            if jax.process_index() == 0:
                results.add(case, line)
            logger.info(f"[{number}/{len(sweep.cases)}] {case.title}: {describe(line)}")


def describe(line: dict[str, Any]) -> str:
    """Returns the result of a case in a few words."""
    if line["refusal"]:
        return f"refused: {line['refusal']}"
    return f"{line['seconds_per_step']:.4g} s a step, compiled in {line['compile_seconds']:.1f} s"


class Bench:
    """Measures cases one after the other; weights are reused while the mesh stays the same."""

    def __init__(self, sweep: Sweep):
        self._sweep = sweep
        self._weights: tuple[Any, nnx.State] | None = None

    def measure(self, case: Case) -> dict[str, Any]:
        """Returns the line of a case: its times, or the reason of its refusal."""
        facts = {"devices": jax.device_count(), "device_kind": jax.devices()[0].device_kind}
        line = facts | {"processes": jax.process_count(), "software": f"maxdiffusion {__version__}"}
        try:
            prepared = self.prepare(case)
            return line | self.run(case, prepared) | {"refusal": ""}
        except ProblemsFound as error:
            return line | {"refusal": str(error).splitlines()[0]}
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return line | {"refusal": "out of memory"}

    def prepare(self, case: Case) -> ResolvedJob:
        """Returns the checked case; raises every problem at once."""
        count = jax.device_count()
        overrides = (
            *entry_overrides(case.attention),
            f"num_videos={case.videos}",
            # Half a video more, so that rounding down gives the exact number.
            f"per_device_batch_size={(case.videos + 0.5) / count}",
            f"num_inference_steps={WARM_UP + self._sweep.steps}",
        )
        parsed = read_config([*self._sweep.arguments, *overrides])
        return plan_on(parsed, jax.devices())

    def run(self, case: Case, prepared: ResolvedJob) -> dict[str, Any]:
        """Returns the times of a case and the slowest process."""
        builder, shape = prepared.builder, prepared.shape
        steps = sampler(prepared.config, builder.spec)
        began = time.perf_counter()
        lowered = builder.lower_denoise_step(shape, steps, prepared.attention)
        program = compile_lowered(lowered)
        compiled = time.perf_counter() - began
        expert = self.expert(prepared)
        noise = initial_noise(range(shape.videos), shape.latent.dims)
        start = compile_lowered(builder.lower_start(shape, steps, prepared.attention))
        seeds = np.arange(shape.videos, dtype=np.uint32)
        state = start(*jax.device_put((noise, seeds), builder.everywhere))
        experts = Experts(
            high_noise=expert,
            low_noise=expert,
            conditioning=jax.tree.map(drawn, builder.conditioning(shape)),
        )
        scale = 4.0 if shape.guidance.copies == 2 else NO_GUIDANCE
        plan = plan_run(
            steps,
            scales=GuidanceScales(high_noise=scale, low_noise=scale),
            boundary_ratio=None,
        )
        loop = PREEMPTION.until_preempted(
            denoise(lambda _: program, state, sampler=steps, plan=plan, experts=experts)
        )
        seconds = [step.seconds for _, step in self.profiler(case).watch(loop)][WARM_UP:]
        mine = median(seconds)
        hosts = [float(said) for said in all_gather_str("bench seconds", repr(mine))]
        names = all_gather_str("bench hosts", this_process().host)
        slowest = int(np.argmax(hosts))
        return {
            **prepared.step_facts(),
            "attention": case.attention,
            "runs": prepared.attention.self_attention.runs,
            "compile_seconds": compiled,
            "step_seconds": seconds,
            "seconds_per_step": max(hosts),
            "seconds_per_video_step": max(hosts) / shape.videos,
            "slowest_host": f"{slowest} ({names[slowest]})",
            "hbm_bytes": bytes_needed(program),
        }

    def profiler(self, case: Case) -> Profiler:
        """Returns the profiler of a case; it traces the measured steps of `profile_batches`."""
        sweep = self._sweep
        if case.videos not in sweep.profile_batches:
            return Profiler(None)
        folder = f"{sweep.profile_folder}/{case.key.replace(':', '_').replace(' ', '_')}"
        return Profiler(ProfilePlan(folder=folder, skip=WARM_UP, steps=sweep.steps))

    def expert(self, prepared: ResolvedJob) -> Expert:
        """Returns a transformer with random weights and the keys and values of a random text."""
        builder, shape = prepared.builder, prepared.shape
        key = (builder.mesh, builder.settings.precision.weights)
        if self._weights is None or self._weights[0] != key:
            self._weights = None  # frees the memory of the old ones first
            self._weights = (key, random_weights(builder))
        weights = self._weights[1]
        size = (shape.model_batch, shape.text_length, builder.spec.transformer.text_dim)
        rows = np.random.default_rng(0).standard_normal(size, np.float32)
        rows = rows.astype(builder.settings.precision.activations)
        read_text = compile_lowered(builder.lower_read_text(shape))
        image = jax.tree.map(drawn, builder.image_tokens(shape))
        faces = jax.tree.map(drawn, builder.faces(shape))
        text = read_text(weights, jax.device_put(rows, builder.everywhere), image, faces)
        return Expert(name="random weights", weights=weights, texts={shape.guidance: text})


def bytes_needed(program: jax.stages.Compiled) -> int:
    """Returns a device's memory for arguments and temporaries; 0 if the compiler does not know."""
    stats = program.memory_analysis()
    return 0 if stats is None else stats.argument_size_in_bytes + stats.temp_size_in_bytes


def random_weights(builder: ProgramBuilder) -> nnx.State:
    """Returns small random parameters of a transformer, each made on its own devices."""
    return jax.tree.map(drawn, builder.models.transformer.on(builder.mesh))


def drawn(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns one random array, small enough to keep activations of any depth finite."""
    return drawing(leaf.shape, leaf.dtype, leaf.format)(jax.random.key(0))


@cache
def drawing(shape: tuple[int, ...], dtype: Any, form: Format) -> Callable[..., Any]:
    """Returns the program that draws parameters of one shape and format; layers share it."""
    return jax.jit(
        lambda key: jax.random.uniform(key, shape, dtype, -0.05, 0.05), out_shardings=form
    )


def cases_of(attentions: Sequence[str], batches: Sequence[int]) -> Iterator[Case]:
    """Yields every attention with every batch size, small batches first."""
    for videos in sorted({*batches}):
        for attention in dict.fromkeys(attentions):
            yield Case(attention=attention, videos=videos)
