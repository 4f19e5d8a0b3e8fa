"""Ranks tiles of a kernel: python -m maxdiffusion.tune_attention CONFIG.yml topology=NAME"""

import sys
from collections.abc import Sequence

from maxdiffusion.commands.entry import run_command
from maxdiffusion.config.loading import Reading
from maxdiffusion.preflight_wan import start_without_tpu

USAGE = """usage: python -m maxdiffusion.tune_attention CONFIG.yml topology=NAME [key=value ...]

  topology=tpu7x:2x2x1    the TPU slice to compile for; no TPU is needed
  attention=..., sizes    as for generate_wan: tiles are tried for exactly that job
  report=tiles.csv        keeps what was tried; a later run goes on from there"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(arguments, usage=USAGE, work=work)


def work(reading: Reading, arguments: Sequence[str]) -> None:
    """Ranks the tiles of the config's attention."""
    start_without_tpu(reading)
    from maxdiffusion.commands.tune_attention import tune

    tune(reading, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
