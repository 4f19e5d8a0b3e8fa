"""Says what a job will do on a TPU: python -m maxdiffusion.preflight_wan CONFIG.yml topology=..."""

import sys
from collections.abc import Sequence

from maxdiffusion.config.loading import Reading, read_config
from maxdiffusion.generate_wan import BAD_INPUT, STOPPED, report
from maxdiffusion.preflight.topology import (
    Topology,
    check_libtpu,
    prepare_environment,
    read_topology,
)
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed

USAGE = """usage: python -m maxdiffusion.preflight_wan CONFIG.yml topology=NAME [key=value ...]

  CONFIG.yml              a YAML file, such as configs/base_wan_27b.yml
  topology=tpu7x:2x2x1    the TPU slice to compile for; no TPU is needed
  key=value               overrides a key, as for generate_wan
  report=preflight.json   writes the report as JSON too
  compare='["ulysses_custom", "ulysses_ring_custom:2x2"]'    ranks attentions and splits
  scan_cp=4,8,16,32       estimates how the cost grows with the context; compiles nothing

docs/preflight.md explains the report, docs/configuration.md lists all keys."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else BAD_INPUT
    try:
        reading = read_config(arguments)
        topology = topology_of(reading)
        check_libtpu()
        # What libtpu and jax read when they start has to be there before they are imported.
        prepare_environment(topology)
        run(reading, arguments)
    except ProblemsFound as error:
        print(report(error), file=sys.stderr)
        return BAD_INPUT
    except RunFailed as error:
        print(f"stopped: {error}", file=sys.stderr)
        return STOPPED
    return 0


def run(reading: Reading, arguments: Sequence[str]) -> None:
    """Reports on one job, ranks several attentions, or shows how the cost grows with devices."""
    from maxdiffusion.commands import preflight, preflight_ranking

    if reading.config.compare:
        preflight_ranking.compare(reading, arguments)
    if reading.config.scan_cp:
        preflight_ranking.scan(reading)
    if not (reading.config.compare or reading.config.scan_cp):
        preflight.preflight(reading, arguments)


def topology_of(reading: Reading) -> Topology:
    """The topology that a config names; what else is wrong with the config is reported with it."""
    try:
        return read_topology(reading.config.topology)
    except ProblemsFound as error:
        raise ProblemsFound([*reading.problems, *error.problems]) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
