"""Runs a command on all processes of a job: they join, agree on their inputs and end together."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from maxdiffusion import __version__
from maxdiffusion.cli.entry import ExitStatus, exit_status
from maxdiffusion.config import Config, ParsedConfig
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
from maxdiffusion.errors import STOPPED, RunFailed
from maxdiffusion.runtime.progress import PROGRESS, configure_logging


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
