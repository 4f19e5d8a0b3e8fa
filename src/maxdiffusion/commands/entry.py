"""What every command does with its arguments: usage, config, one report of problems, exit codes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maxdiffusion.config.config import Config
from maxdiffusion.config.loading import Reading, read_config
from maxdiffusion.runtime.libtpu_flags import PRESETS, apply_flags, find_chip
from maxdiffusion.runtime.problems import BAD_INPUT, STOPPED, ProblemsFound, RunFailed

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
            apply_flags(reading.config.libtpu_init_args, chip_of(reading.config))
            work(reading, arguments)
    except (ProblemsFound, RunFailed) as error:
        told = outcome(error)
        assert told is not None
        print(told.text, file=sys.stderr)
        return told.code
    return 0


def chip_of(config: Config) -> str | None:
    """The kind of TPU that programs are compiled for: of `topology`, or of this machine."""
    described = config.topology.partition(":")[0]
    return described if described in PRESETS else find_chip()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended: its exit code, and what is told of it."""

    code: int
    text: str


def outcome(error: BaseException) -> Outcome | None:
    """The end that an error makes of a command; None for one that nobody foresaw."""
    if isinstance(error, ProblemsFound):
        return Outcome(code=BAD_INPUT, text=report(error))
    if isinstance(error, RunFailed):
        return Outcome(code=STOPPED, text=f"stopped: {error}")
    return None


def report(error: ProblemsFound) -> str:
    """All problems, a line each."""
    count = len(error.problems)
    title = "1 problem" if count == 1 else f"{count} problems"
    return "\n".join([f"{title}, nothing was run:", *(f"  {line}" for line in error.problems)])
