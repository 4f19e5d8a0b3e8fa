"""Ranks tiles of a kernel: python -m maxdiffusion.tune_attention CONFIG.yml topology=NAME"""

import sys
from collections.abc import Sequence

from maxdiffusion.config.loading import read_config
from maxdiffusion.generate_wan import BAD_INPUT, STOPPED, report
from maxdiffusion.preflight.topology import check_libtpu, prepare_environment
from maxdiffusion.preflight_wan import topology_of
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed

USAGE = """usage: python -m maxdiffusion.tune_attention CONFIG.yml topology=NAME [key=value ...]

  topology=tpu7x:2x2x1    the TPU slice to compile for; no TPU is needed
  attention=..., sizes    as for generate_wan: tiles are tried for exactly that job
  report=tiles.csv        keeps what was tried; a later run goes on from there"""


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
        from maxdiffusion.commands.tune_attention import tune

        tune(reading, arguments)
    except ProblemsFound as error:
        print(report(error), file=sys.stderr)
        return BAD_INPUT
    except RunFailed as error:
        print(f"stopped: {error}", file=sys.stderr)
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
