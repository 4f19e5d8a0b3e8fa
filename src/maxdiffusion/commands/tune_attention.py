"""The best tiles of a job's kernels: timed where there are TPUs, else ranked by machine code."""

from dataclasses import replace
from pathlib import Path

import jax

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.commands.preflight import PlannedJob, plan_job, say
from maxdiffusion.commands.tile_search import (
    Measured,
    Meter,
    Search,
    clock_meter,
    keep_winners,
    subjects,
    table_of,
)
from maxdiffusion.config.loading import Reading
from maxdiffusion.config.schema import Frozen
from maxdiffusion.preflight.compile_errors import explain, is_refusal
from maxdiffusion.preflight.kernels import measure_kernel, use_of
from maxdiffusion.preflight.topology import Topology, describe_devices, read_topology
from maxdiffusion.runtime.problems import Problem, ProblemsFound


def tune_here(reading: Reading) -> None:
    """Times the tiles of a job on the devices that are there."""
    job = plan_job(searching(reading), jax.devices())
    search(job, clock_meter(jax.local_devices()[0], job.config.tile_search_iters))


def tune_for_topology(reading: Reading, dump: Path) -> None:
    """Ranks the tiles of a job by machine code; libtpu writes it into `dump`, from its start on."""
    topology = read_topology(reading.config.topology)
    job = plan_job(searching(reading), describe_devices(topology))
    search(job, machine_code_meter(topology, dump))


def searching(reading: Reading) -> Reading:
    """The config with its search on, so that the file of its winners need not be there yet."""
    config = reading.config
    values = Frozen({**config.values, "enable_tile_search": True})
    return replace(reading, config=replace(config, values=values))


def search(job: PlannedJob, meter: Meter) -> None:
    """Searches, shows and keeps the tiles of every kernel of a job."""
    found = subjects(job.workshop, job.shape)
    if not found:
        rule = "has no Pallas kernel for these sizes, so there are no tiles to choose"
        remedy = "Use an attention with a kernel of ours, such as ulysses_custom"
        name = job.config.attention
        raise ProblemsFound([Problem(name="attention", value=name, rule=rule, remedy=remedy)])
    mode, table = job.config.tile_search_mode, table_of(job.config)
    winners = Search(meter=meter, mode=mode, table=table, say=say).run(found)
    keep_winners(job.config, winners, say)


def machine_code_meter(topology: Topology, dump: Path) -> Meter:
    """Measures by compiling kernels for a topology and counting the bundles of their loops."""
    chip = topology.chip

    def measure(purpose: str, plan: AttentionPlan) -> Measured:
        try:
            found = list(measure_kernel(purpose, plan, chip, dump))
        except Exception as error:
            if not is_refusal(error):
                raise
            raise ProblemsFound([explain(purpose, str(error), chip)]) from error
        use = use_of(plan)
        slowest = max(found, key=use.cycles)
        return Measured(
            seconds=chip.seconds(use.cycles(slowest)),
            mxu_share=slowest.mxu_share,
            vmem_bytes=slowest.vmem_bytes,
        )

    return Meter(
        how=f"by machine code for {topology.name}",
        place=f"{topology.name}, compiled by jax {jax.__version__}",
        measure=measure,
    )
