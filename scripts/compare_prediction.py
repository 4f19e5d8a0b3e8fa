#!/usr/bin/env python
"""Compares a measured run with its prediction, and says where the model is wrong.

    python scripts/compare_prediction.py RUN [PREDICTION]

RUN         run.json of scripts/validate_on_tpu.sh, the timing_file of a run of generate_wan, or the
            .jsonl of scripts/bench_attention.py
PREDICTION  a report of preflight_wan for the same job; without it, those that docs/predictions.md
            publishes

A run is compared with the prediction of its own job only: model sizes, tokens, chip, mesh,
attention and clock.
"""

import sys
from collections.abc import Sequence

from maxdiffusion.cli.entry import HELP, run_reporting
from maxdiffusion.costs.predictions import describe
from maxdiffusion.errors import BAD_INPUT


def main(arguments: Sequence[str]) -> int:
    """Prints the comparison; returns the exit code."""
    if not arguments or any(argument in HELP for argument in arguments):
        print(__doc__)
        return 0 if arguments else BAD_INPUT
    return run_reporting(lambda given: print(describe(given)), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
