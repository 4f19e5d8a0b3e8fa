"""Runs a command: help, version, config, one report of all problems, exit codes.

Help, version, a config that cannot be read and `print_config=true` need no jax, which takes seconds
to import: the work of a command imports what it needs.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from maxdiffusion import __version__
from maxdiffusion.config import ParsedConfig, read_config
from maxdiffusion.config.config import FIELDS
from maxdiffusion.errors import BAD_INPUT, STOPPED, ProblemsFound, RunFailed
from maxdiffusion.runtime.tpu_flags import apply_flags, target_chip

HELP = ("-h", "--help")
VERSION = "--version"

Run = Callable[[Sequence[str]], None]
Work = Callable[[ParsedConfig, Sequence[str]], None]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: its module, its help text, and the function that gets its arguments.

    `common` are the config fields that people set most often; `--help` lists their defaults.
    """

    name: str
    summary: str
    arguments: str
    details: str
    run: Run
    common: tuple[str, ...] = ()

    def main(self, arguments: Sequence[str]) -> int:
        """Runs the command; returns the exit code."""
        if not arguments or any(argument in HELP for argument in arguments):
            print(self.help())
            return 0 if arguments else BAD_INPUT
        if VERSION in arguments:
            print(f"maxdiffusion {__version__}")
            return 0
        return run_reporting(self.run, arguments)

    def help(self) -> str:
        """Returns the help text, with the defaults of the common fields."""
        parts = [
            f"usage: python -m maxdiffusion.{self.name} {self.arguments}",
            self.summary,
            self.details,
        ]
        if self.common:
            parts.append("Common keys and their defaults:\n" + "\n".join(self._field_lines()))
        return "\n\n".join(parts)

    def _field_lines(self) -> list[str]:
        shown = [f"{name}={short_default(name)}" for name in self.common]
        width = max(map(len, shown))
        return [
            f"  {text:<{width}}  {FIELDS[name].meaning}"
            for name, text in zip(self.common, shown, strict=True)
        ]


def short_default(name: str, longest: int = 24) -> str:
    """Returns the default of a field as it is written in YAML, cut where it is long."""
    default = FIELDS[name].default
    text = default if isinstance(default, str) and default else json.dumps(default)
    return text if len(text) <= longest else f"{text[:longest]}..."


def run_reporting(run: Run, arguments: Sequence[str]) -> int:
    """Runs a function; prints the problems of an expected error and returns the exit code."""
    try:
        run(arguments)
    except (ProblemsFound, RunFailed) as error:
        status = exit_status(error)
        assert status is not None
        print(status.text, file=sys.stderr)
        return status.code
    return 0


def with_config(work: Work) -> Run:
    """Returns the function of a command whose arguments are `CONFIG [key=value ...]`."""

    def run(arguments: Sequence[str]) -> None:
        parsed = read_config(arguments)
        config = parsed.config
        if config.print_config and not parsed.problems:
            print(config.describe())
            return
        from maxdiffusion.runtime.progress import configure_logging

        configure_logging()
        # libtpu reads its flags when jax starts, so before the work imports it.
        apply_flags(
            config.libtpu_init_args,
            target_chip(config.topology),
            pin_clock=config.tpu_pin_clock,
        )
        work(parsed, arguments)

    return run


@dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """The exit code of a failed command and its message."""

    code: int
    text: str


def exit_status(error: BaseException) -> ExitStatus | None:
    """Returns the exit status of an expected error; None for any other."""
    if isinstance(error, ProblemsFound):
        return ExitStatus(code=BAD_INPUT, text=report(error))
    if isinstance(error, RunFailed):
        return ExitStatus(code=STOPPED, text=f"stopped: {error}")
    return None


def report(error: ProblemsFound) -> str:
    """Returns all problems, one line each."""
    count = len(error.problems)
    title = "1 problem" if count == 1 else f"{count} problems"
    return "\n".join([f"{title}, nothing was run:", *(f"  {line}" for line in error.problems)])
