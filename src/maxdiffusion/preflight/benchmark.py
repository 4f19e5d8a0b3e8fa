"""Seconds per denoise step for every attention and batch size, on the devices that are there.

The model has its real sizes and random weights: nothing is loaded or downloaded, and the time of a
step does not depend on the values. (All heads pass the gate of fixed-m softmax.)
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from maxdiffusion import __version__
from maxdiffusion.commands.bench_results import Case, Results
from maxdiffusion.commands.pipeline_settings import program_shape, sampler
from maxdiffusion.commands.preflight_ranking import entry_overrides
from maxdiffusion.commands.preparation import ModelChecks
from maxdiffusion.config.config import Config
from maxdiffusion.config.loading import read_config
from maxdiffusion.config.validation import check_job
from maxdiffusion.mesh.devices import slice_index
from maxdiffusion.pipelines.denoise import Expert, Experts, denoise
from maxdiffusion.pipelines.noise import initial_noise
from maxdiffusion.pipelines.programs import ProgramShape, Workshop
from maxdiffusion.preflight.released import find_spec
from maxdiffusion.runtime.coordination import exchange, from_first, this_member
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed
from maxdiffusion.runtime.profiling import ProfilePlan, Profiler
from maxdiffusion.runtime.stopping import STOPS, StopAsked

WARM_UP = 1


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to measure: a config, the cases, steps of each, and where profiles of some go."""

    arguments: tuple[str, ...]
    cases: tuple[Case, ...]
    steps: int
    profile_batches: frozenset[int] = frozenset()
    profile_folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A case that can run."""

    config: Config
    workshop: Workshop
    shape: ProgramShape


def run_sweep(sweep: Sweep, results: Results) -> None:
    """Measures every case that the results do not hold yet; the first process writes them.

    A case that is refused, or does not fit into memory, is noted, and the others go on. SIGTERM
    ends the sweep after a step, without the case of that step.
    """
    finished = set(from_first("bench finished", lambda: [*results.finished()]))
    bench, cases = Bench(sweep), enumerate(sweep.cases, 1)
    with STOPS.heeded():
        for number, case in ((number, case) for number, case in cases if case.key not in finished):
            MARKS.reach(f"bench {case.key}")
            say(f"[{number}/{len(sweep.cases)}] {case.title} ...")
            try:
                line = bench.measure(case)
            except StopAsked:
                raise RunFailed(
                    f"as asked, at case {number} of {len(sweep.cases)}. The same command goes on "
                    "there."
                ) from None
            if jax.process_index() == 0:
                results.add(case, line)
            say(f"[{number}/{len(sweep.cases)}] {case.title}: {in_words(line)}")


def say(text: str) -> None:
    """Prints once for all processes."""
    if jax.process_index() == 0:
        print(text, flush=True)


def in_words(line: dict[str, Any]) -> str:
    """What came of a case, in a few words."""
    if line["refusal"]:
        return f"refused: {line['refusal']}"
    return f"{line['seconds_per_step']:.4g} s a step, compiled in {line['compile_seconds']:.1f} s"


class Bench:
    """Measures cases one after the other; weights stay from case to case while the mesh does."""

    def __init__(self, sweep: Sweep):
        self._sweep = sweep
        self._weights: tuple[Any, nnx.State] | None = None

    def measure(self, case: Case) -> dict[str, Any]:
        """The line of a case: its times, or why there are none."""
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

    def prepare(self, case: Case) -> Prepared:
        """The checked case; raises ProblemsFound with all that is wrong."""
        count = jax.device_count()
        overrides = (
            *entry_overrides(case.attention),
            f"num_videos={case.videos}",
            # Half a video more, so that rounding down gives the number itself.
            f"per_device_batch_size={(case.videos + 0.5) / count}",
            f"num_inference_steps={WARM_UP + self._sweep.steps}",
        )
        reading = read_config([*self._sweep.arguments, *overrides])
        config = reading.config
        spec = find_spec(config.pretrained_model_name_or_path)
        slices = len({*map(slice_index, jax.devices())})
        checks = ModelChecks(spec=spec, device_count=count, slice_count=slices)
        job = check_job(
            config,
            device_count=count,
            slice_count=slices,
            heads=spec.transformer.heads,
            checks=(checks,),
            earlier=list(reading.problems),
        )
        return Prepared(
            config=config,
            workshop=checks.workshop(config),
            shape=program_shape(config, spec, job.batch_size),
        )

    def run(self, case: Case, prepared: Prepared) -> dict[str, Any]:
        """The times of a case, with the slowest process named."""
        workshop, shape = prepared.workshop, prepared.shape
        steps = sampler(prepared.config, workshop.spec)
        began = time.perf_counter()
        program = workshop.lower_denoise_step(shape, steps).compile()
        compiled = time.perf_counter() - began
        expert = self.expert(prepared)
        noise = initial_noise(range(shape.videos), shape.latent)
        start = workshop.lower_start(shape, steps).compile()
        state = start(jax.device_put(noise, workshop.everywhere))
        experts = Experts(high_noise=expert, low_noise=expert, boundary=0.0)
        loop = STOPS.between(denoise(program, state, sampler=steps, experts=experts))
        seconds = [step.seconds for _, step in self.profiler(case).watch(loop)][WARM_UP:]
        mine = median(seconds)
        hosts = [float(said) for said in exchange("bench seconds", repr(mine))]
        names = exchange("bench hosts", this_member().host)
        slowest = int(np.argmax(hosts))
        return {
            "mesh": dict(workshop.mesh.shape),
            "tokens": shape.latent.tokens,
            "runs": workshop.attention(shape).self_attention.runs,
            "compile_seconds": compiled,
            "step_seconds": seconds,
            "seconds_per_step": max(hosts),
            "seconds_per_video_step": max(hosts) / shape.videos,
            "slowest_host": f"{slowest} ({names[slowest]})",
            "hbm_bytes": bytes_needed(program),
        }

    def profiler(self, case: Case) -> Profiler:
        """Traces the measured steps of the batch sizes that are to be profiled."""
        sweep = self._sweep
        if case.videos not in sweep.profile_batches:
            return Profiler(None)
        folder = f"{sweep.profile_folder}/{case.key.replace(':', '_').replace(' ', '_')}"
        return Profiler(ProfilePlan(folder=folder, skip=WARM_UP, steps=sweep.steps))

    def expert(self, prepared: Prepared) -> Expert:
        """A transformer of random weights that has read a random text."""
        workshop, shape = prepared.workshop, prepared.shape
        place = (workshop.mesh, workshop.settings.precision.weights)
        if self._weights is None or self._weights[0] != place:
            self._weights = None  # the old ones go before the new ones come
            self._weights = (place, random_weights(workshop))
        weights = self._weights[1]
        size = (shape.model_batch, shape.text_length, workshop.spec.transformer.text_dim)
        rows = np.random.default_rng(0).standard_normal(size, np.float32)
        rows = rows.astype(workshop.settings.precision.activations)
        read_text = workshop.lower_read_text(shape).compile()
        text = read_text(weights, jax.device_put(rows, workshop.everywhere))
        return Expert(name="random weights", weights=weights, text=text, guidance_scale=4.0)


def bytes_needed(program: jax.stages.Compiled) -> int:
    """Memory of one device for arguments and temporaries; 0 where the compiler does not say."""
    stats = program.memory_analysis()
    return 0 if stats is None else stats.argument_size_in_bytes + stats.temp_size_in_bytes


def random_weights(workshop: Workshop) -> nnx.State:
    """Small random parameters of a transformer, each made where it lies."""
    return jax.tree.map(drawn, workshop.models.transformer.on(workshop.mesh))


def drawn(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """One random parameter, small enough to keep activations of any depth finite."""
    return drawing(leaf.shape, leaf.dtype, leaf.sharding)(jax.random.key(0))


@cache
def drawing(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Callable[..., Any]:
    """The program that draws parameters of one shape in one place; many layers share it."""
    return jax.jit(
        lambda key: jax.random.uniform(key, shape, dtype, -0.05, 0.05), out_shardings=sharding
    )


def cases_of(attentions: Sequence[str], batches: Sequence[int]) -> Iterator[Case]:
    """Every attention with every batch size, small batches first."""
    for videos in sorted({*batches}):
        for attention in dict.fromkeys(attentions):
            yield Case(attention=attention, videos=videos)
