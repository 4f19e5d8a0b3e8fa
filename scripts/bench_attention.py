#!/usr/bin/env python
"""Times a denoise step for every attention and batch size on this machine's devices.

    python scripts/bench_attention.py CONFIG.yml [key=value ...] \
        [--attentions flash,ulysses_custom,ulysses_ring_custom:2x4] [--batches 1,2,4,8]
        [--steps 5] [--results bench.jsonl] [--profile 2]

CONFIG.yml and key=value are those of generate_wan: configs/wan_tiny.yml on a CPU,
configs/base_wan_27b.yml on TPUs. name:UxR splits the context into U devices of ulysses and R of
ring. Started on every host of a slice, as generate_wan is, it measures the slice; the first process
writes. Each case is a line of JSON in `--results`, where an interrupted run continues. At the end a
table is printed and a chart written next to the results. `--profile` traces the measured steps of
these batch sizes. Weights are random: nothing is loaded.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from maxdiffusion.cli.entry import run_reporting, with_config
from maxdiffusion.config.load import ParsedConfig

ATTENTIONS = "flash,tokamax_ring,ulysses,ulysses_ring,ulysses_custom,ulysses_ring_custom"


def main(words: Sequence[str]) -> int:
    """Measures; returns the exit code."""
    arguments = parse_arguments(words)
    run = with_config(lambda parsed, config: bench(parsed, config, arguments))
    return run_reporting(run, arguments.config)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="+", help="CONFIG.yml and overrides")
    parser.add_argument("--attentions", default=ATTENTIONS, type=lambda text: text.split(","))
    parser.add_argument("--batches", default="1,2,4,8", type=numbers)
    parser.add_argument("--steps", default=5, type=int)
    parser.add_argument("--results", default="bench_attention.jsonl", type=Path)
    parser.add_argument("--profile", default="", type=numbers)
    arguments = parser.parse_intermixed_args(words)
    if arguments.steps < 1 or not all(batch > 0 for batch in arguments.batches):
        parser.error("--steps and --batches must be positive integers")
    return arguments


def numbers(text: str) -> list[int]:
    """Returns the integers of a comma-separated list."""
    return [int(word) for word in text.split(",") if word]


def bench(parsed: ParsedConfig, config: Sequence[str], arguments: argparse.Namespace) -> None:
    """Runs the sweep on all processes of the job."""
    from maxdiffusion.cli.distributed_run import run_distributed

    run_distributed(parsed, lambda parsed: sweep(parsed, config, arguments))


def sweep(parsed: ParsedConfig, config: Sequence[str], arguments: argparse.Namespace) -> None:
    """Measures the missing cases, prints the table, and writes the chart."""
    import jax

    from maxdiffusion import __version__
    from maxdiffusion.preflight.benchmark import (
        Results,
        Sweep,
        cases_of,
        chart,
        run_sweep,
        table,
    )
    from maxdiffusion.runtime.charts import require_matplotlib

    require_matplotlib()
    kind, count = jax.devices()[0].device_kind, jax.device_count()
    job = f"{parsed.config.digest()[:12]} {count} x {kind}, {__version__}, {arguments.steps} steps"
    results = Results(arguments.results, job)
    run_sweep(
        Sweep(
            arguments=tuple(config),
            cases=tuple(cases_of(arguments.attentions, arguments.batches)),
            steps=arguments.steps,
            profile_batches=frozenset(arguments.profile),
            profile_folder=str(arguments.results.with_suffix(".profile")),
        ),
        results,
    )
    if jax.process_index() == 0:
        lines = results.lines()
        size = f"{parsed.config.width}x{parsed.config.height}, {parsed.config.num_frames} frames"
        drawing = arguments.results.with_suffix(".svg")
        drawing.write_text(chart(f"Denoise step, {size}, {count} x {kind}", lines))
        print(f"{table(lines)}\nwrote {arguments.results} and {drawing}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
