"""Finds the best tiles of a job's kernels: python -m maxdiffusion.tune_attention CONFIG.yml"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from maxdiffusion.commands.entry import run_command
from maxdiffusion.config.loading import Reading
from maxdiffusion.preflight.topology import check_libtpu, prepare_environment
from maxdiffusion.preflight_wan import topology_of

USAGE = """usage: python -m maxdiffusion.tune_attention CONFIG.yml [topology=NAME] [key=value ...]

  topology=tpu7x:2x2x1        ranks tiles by what they compile to; without it they are timed here
  attention=..., sizes        as for generate_wan: tiles are tried for exactly that job
  tile_search_out=FOLDER      a table of what was tried, where a later run goes on, and pictures
  tuned_blocks_file=FILE      where the best tiles are kept; jobs with the same key use them
  tile_search_mode=full       tries more forms of every tile
  tile_search_iters=10        timed runs of every tile"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    return run_command(arguments, usage=USAGE, work=work)


def work(reading: Reading, arguments: Sequence[str]) -> None:
    """Finds the best tiles of the config's attention."""
    if not reading.config.topology:
        from maxdiffusion.commands.tune_attention import tune_here

        tune_here(reading)
        return
    topology = topology_of(reading)
    check_libtpu()
    with tempfile.TemporaryDirectory(prefix="tune_") as dump:
        prepare_environment(topology, dump=dump)
        from maxdiffusion.commands.tune_attention import tune_for_topology

        tune_for_topology(reading, Path(dump))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
