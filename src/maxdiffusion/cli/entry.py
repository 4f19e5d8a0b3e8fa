"""Runs a command: help, version, config, one report of all problems, exit codes.

Help, version, a config that cannot be read and `print_config=true` need no jax, which takes seconds
to import: the work of a command imports what it needs.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import jax

from maxdiffusion import __version__
from maxdiffusion.config import Config, ParsedConfig, read_config
from maxdiffusion.config.config import FIELDS
from maxdiffusion.distributed.coordination import (
    all_processes,
    assert_equal_across_processes,
    barrier,
    is_multiprocess,
    this_process,
)
from maxdiffusion.distributed.initialize import (
    ClusterConfig,
    Timeouts,
    configured_cluster,
    detect_cluster,
    join,
)
from maxdiffusion.distributed.watchdog import Watchdog, hard_exit
from maxdiffusion.errors import BAD_INPUT, STOPPED, ProblemsFound, RunFailed
from maxdiffusion.runtime.progress import PROGRESS, configure_logging
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
        apply_flags(config.libtpu_init_args, target_chip(config.topology))
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


def run_distributed(parsed: ParsedConfig, work: Callable[[ParsedConfig], None]) -> None:
    """Does the work on every process of the job; a failure of one process ends all of them."""
    watchdog = start(parsed.config)
    if watchdog is None:
        work(parsed)
        return
    try:
        agree_on_start(parsed.config)
        work(parsed)
        barrier("end")
    except BaseException as error:
        end_with(watchdog, error)
    watchdog.stop()
    jax.distributed.shutdown()


def start(config: Config) -> Watchdog | None:
    """Joins the job of the config or of the machine; returns None if this process runs alone."""
    timeouts = Timeouts(
        join=config.jax_distributed_initialization_timeout,
        heartbeat=config.jax_distributed_heartbeat_timeout_seconds,
        hang=config.hang_timeout_seconds,
    )
    if config.skip_jax_distributed_system:
        return None
    stated = ClusterConfig(
        address=config.jax_coordinator_address or None,
        processes=config.jax_num_processes,
        process=config.jax_process_id,
    )
    group = detect_cluster(configured_cluster(stated, os.environ), timeouts=timeouts)
    if group is None:
        return None
    join(group, timeouts)
    configure_logging(first_process=group.process == 0)
    watchdog = Watchdog(all_processes(), timeouts, address=group.address)
    watchdog.start()
    print(f"{this_process()} of {group.processes} joined the job at {group.address}", flush=True)
    return watchdog


def agree_on_start(config: Config) -> None:
    """Raises an error if package, config or devices differ between processes."""
    if not is_multiprocess():
        return
    PROGRESS.checkpoint("starting devices")
    devices = own_devices()
    # jax may number processes in another order once it has devices; process 0 writes the files.
    configure_logging(first_process=jax.process_index() == 0)
    facts = {
        "maxdiffusion version": __version__,
        "jax version": jax.__version__,
        "local devices": len(devices),
        "device kind": devices[0].device_kind,
    }
    assert_equal_across_processes("start", facts | config.shared_values())


def own_devices() -> list[jax.Device]:
    """Returns the devices of this process, which jax starts on the first request.

    Raises RunFailed if they do not start, so that the other processes learn of it.
    """
    try:
        devices: list[jax.Device] = jax.local_devices()
    except RuntimeError as error:
        raise RunFailed(
            f"the devices of this process did not start: {_first_line(error)}. Look for other "
            "programs that use them, and at the output of this process."
        ) from error
    return devices


def end_with(watchdog: Watchdog, error: BaseException) -> NoReturn:
    """Reports an error to the user and to the other processes, and ends this process."""
    # Another process may have failed first: then the watchdog ends this one and names the other.
    if isinstance(error, jax.errors.JaxRuntimeError):
        watchdog.await_diagnosis()
    status = exit_status(error)
    if status is None:
        traceback.print_exception(error)
        status = ExitStatus(code=STOPPED, text=_first_line(error))
    else:
        print(status.text, file=sys.stderr, flush=True)
    watchdog.fail(status.text.removeprefix("stopped: "))
    hard_exit(status.code)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
