"""Says where the time of profiled steps went: python -m maxdiffusion.read_profile FOLDER"""

import sys
from collections.abc import Sequence
from pathlib import Path

from maxdiffusion.commands.entry import report
from maxdiffusion.runtime.problems import BAD_INPUT, ProblemsFound

USAGE = """usage: python -m maxdiffusion.read_profile FOLDER [DEPTH]

  FOLDER    OUTPUT_DIR/profile of a run with enable_profiler=true
  DEPTH     how many parts of a scope to tell apart (3: blocks/self_attention/kernel)

docs/profiling.md explains the scopes."""


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else BAD_INPUT
    from maxdiffusion.commands.read_profile import DEPTH, table
    from maxdiffusion.runtime.traces import read_profiles

    folder, *depth = arguments
    try:
        print(table(read_profiles(Path(folder)), int(depth[0]) if depth else DEPTH))
    except ProblemsFound as error:
        print(report(error), file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
