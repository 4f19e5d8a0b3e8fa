"""Says what a job will do on a TPU: python -m maxdiffusion.preflight_wan CONFIG.yml topology=..."""

import sys
from collections.abc import Sequence

from maxdiffusion.commands.entry import run_command
from maxdiffusion.config.loading import Reading
from maxdiffusion.preflight.topology import (
    Topology,
    check_libtpu,
    prepare_environment,
    read_topology,
)
from maxdiffusion.runtime.problems import ProblemsFound

USAGE = """usage: python -m maxdiffusion.preflight_wan CONFIG.yml topology=NAME [key=value ...]

  CONFIG.yml              a YAML file, such as configs/base_wan_27b.yml
  topology=tpu7x:2x2x1    the TPU slice to compile for; no TPU is needed
  key=value               overrides a key, as for generate_wan
  report=preflight.json   writes the report as JSON too
  compare='["ulysses_custom", "ulysses_ring_custom:2x2"]'    ranks attentions and splits
  aot_cache_dir=programs  keeps the programs, for generate_wan to start from with the same key
  scan_cp=4,8,16,32       estimates how the cost grows with the context; compiles nothing

docs/preflight.md explains the report, docs/configuration.md lists all keys."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(arguments, usage=USAGE, work=work)


def work(reading: Reading, arguments: Sequence[str]) -> None:
    """Reports on one job, ranks several attentions, or shows how the cost grows with devices."""
    start_without_tpu(reading)
    from maxdiffusion.commands import preflight, preflight_ranking

    if reading.config.compare:
        preflight_ranking.compare(reading, arguments)
    if reading.config.scan_cp:
        preflight_ranking.scan(reading)
    if not (reading.config.compare or reading.config.scan_cp):
        preflight.preflight(reading, arguments)


def start_without_tpu(reading: Reading) -> None:
    """Sets what libtpu and jax read when they are imported; call it before they are."""
    topology = topology_of(reading)
    check_libtpu()
    prepare_environment(topology)


def topology_of(reading: Reading) -> Topology:
    """The topology that a config names; what else is wrong with the config is reported with it."""
    try:
        return read_topology(reading.config.topology)
    except ProblemsFound as error:
        raise ProblemsFound([*reading.problems, *error.problems]) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
