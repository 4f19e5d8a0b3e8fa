"""What every command does with its arguments: usage, config, one report of problems, exit codes."""

import sys
from collections.abc import Callable, Sequence

from maxdiffusion.config.loading import Reading, read_config
from maxdiffusion.runtime.problems import ProblemsFound, RunFailed

STOPPED = 1
BAD_INPUT = 2
# Imports what it needs itself: jax is slow to import, and a config that cannot be read, or that is
# only printed, does not need it.
Work = Callable[[Reading, Sequence[str]], None]


def run_command(arguments: Sequence[str], *, usage: str, work: Work) -> int:
    """Does the work that `CONFIG.yml key=value ...` asks for; returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return 0 if arguments else BAD_INPUT
    try:
        reading = read_config(arguments)
        if reading.config.print_config and not reading.problems:
            print(reading.config.describe())
        else:
            work(reading, arguments)
    except ProblemsFound as error:
        print(report(error), file=sys.stderr)
        return BAD_INPUT
    except RunFailed as error:
        print(f"stopped: {error}", file=sys.stderr)
        return STOPPED
    return 0


def report(error: ProblemsFound) -> str:
    """All problems, a line each."""
    count = len(error.problems)
    title = "1 problem" if count == 1 else f"{count} problems"
    return "\n".join([f"{title}, nothing was run:", *(f"  {line}" for line in error.problems)])
