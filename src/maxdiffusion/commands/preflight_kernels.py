"""Compiles the kernels of a config alone and writes kernels.json; preflight starts it.

usage: python -m maxdiffusion.commands.preflight_kernels FOLDER CONFIG.yml [key=value ...]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from maxdiffusion.config.loading import read_config
from maxdiffusion.preflight.topology import prepare_environment, read_topology


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    folder, config = Path(arguments[0]), arguments[1:]
    dump = folder / "dump"
    dump.mkdir()
    reading = read_config(config)
    topology = read_topology(reading.config.topology)
    prepare_environment(topology, dump=str(dump))
    from maxdiffusion.commands.preflight import prepare
    from maxdiffusion.preflight.kernels import measure_kernels

    job = prepare(reading)
    attention = job.workshop.attention(job.shape)
    figures = measure_kernels(attention, topology.chip, dump)
    (folder / "kernels.json").write_text(json.dumps([kernel.as_json() for kernel in figures]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
