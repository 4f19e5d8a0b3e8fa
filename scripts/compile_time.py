#!/usr/bin/env python
"""Measures what it costs to compile the programs of a config for a TPU that is not there.

    python scripts/compile_time.py CONFIG.yml topology=tpu7x:2x2x1 [key=value ...] \
        [--programs decode,text_encoder] [--text FOLDER]

Prints a row for each program: CPU seconds of tracing and lowering, CPU seconds of XLA, predicted
seconds of one run, HBM for temporaries, and bytes of machine code. CPU seconds are those of all
threads of this process, so other work on the machine changes them little. The last line is the
same as one JSON object. `--text` keeps the scheduled programs. Needs libtpu.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

MIB = 2**20


def main() -> int:
    """Compiles, prints, returns 0."""
    arguments, config = parse_arguments()
    from maxdiffusion.config.load import read_config
    from maxdiffusion.costs.chips import read_topology
    from maxdiffusion.preflight.devices import prepare_environment
    from maxdiffusion.runtime.tpu_flags import apply_flags, target_chip

    parsed = read_config(config)
    topology = read_topology(parsed.config.topology)
    apply_flags(parsed.config.libtpu_init_args, target_chip(parsed.config.topology))
    prepare_environment(topology)
    rows = measure(parsed, arguments)
    print(json.dumps(rows))
    return 0


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of this script, and the config with its overrides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default="", help="names, separated by commas; default: all")
    parser.add_argument("--text", help="a folder for the scheduled programs")
    arguments, config = parser.parse_known_args()
    if not config:
        parser.error("a config is needed, such as configs/base_wan_27b.yml")
    return arguments, config


class Stopwatch:
    """Compiles programs, and keeps the CPU seconds of the last one."""

    def __init__(self) -> None:
        self.started = 0.0
        self.lowered = 0.0
        self.compiled = 0.0

    def __call__(self, name: str, lowered: Any) -> Any:
        from maxdiffusion.pipelines.programs import compile_now

        before = time.process_time()
        self.lowered = before - self.started
        compiled = compile_now(name, lowered)
        self.compiled = time.process_time() - before
        return compiled


def measure(parsed: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of the chosen programs by name, and prints each when it is there."""
    from maxdiffusion.costs.links import network
    from maxdiffusion.generation.settings import sampler
    from maxdiffusion.preflight.command import plan_for_topology, program_seconds
    from maxdiffusion.preflight.compile import compile_program, programs_of

    job, watch = plan_for_topology(parsed), Stopwatch()
    planned = job.planned
    builder = replace(planned.builder, compile=watch)
    steps = planned.shape.task.sampler(sampler(planned.config, builder.spec))
    makers = programs_of(builder, planned.shape, sampler=steps, attention=planned.attention)
    links = network(job.topology, builder.mesh.devices.flatten().tolist())
    chosen = [*filter(None, arguments.programs.split(","))] or [maker.name for maker in makers]
    print(
        f"{'program':20} {'lower, s':>9} {'XLA, s':>9} {'run, s':>8} {'temp, MiB':>10}", flush=True
    )
    rows = {}
    for maker in makers:
        if maker.name not in chosen:
            continue
        watch.started = time.process_time()
        program = compile_program(maker, job.topology.chip)
        row = rows[maker.name] = {
            "lower_cpu_seconds": round(watch.lowered, 2),
            "xla_cpu_seconds": round(watch.compiled, 2),
            "run_seconds": program_seconds(program.text, links),
            "temporary_bytes": program.memory.temporaries,
            "code_bytes": program.memory.code,
        }
        print(
            f"{maker.name:20} {watch.lowered:9.1f} {watch.compiled:9.1f} "
            f"{row['run_seconds']:8.3f} {program.memory.temporaries / MIB:10.0f}",
            flush=True,
        )
        if arguments.text:
            folder = Path(arguments.text)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{maker.name.replace(' ', '_')}.txt").write_text(program.text)
    return rows


if __name__ == "__main__":
    sys.exit(main())
