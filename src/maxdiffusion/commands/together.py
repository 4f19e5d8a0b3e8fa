"""A command on all processes of a job: they start together, agree, and end together."""

import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from maxdiffusion import __version__
from maxdiffusion.commands.entry import Outcome, outcome
from maxdiffusion.config.config import Config
from maxdiffusion.config.loading import Reading
from maxdiffusion.runtime.agreement import agree
from maxdiffusion.runtime.coordination import barrier, members, several, this_member
from maxdiffusion.runtime.joining import Patience, environment, find_place, join, stated_place
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.problems import STOPPED, RunFailed
from maxdiffusion.runtime.watch import Watch, leave


def together(reading: Reading, work: Callable[[Reading], None]) -> None:
    """Does the work on every process of the job; one that fails ends it on all of them."""
    watch = start(reading.config)
    if watch is None:
        work(reading)
        return
    try:
        agree_on_start(reading.config)
        work(reading)
        barrier("end")
    except BaseException as error:
        end_with(watch, error)
    watch.stop()
    jax.distributed.shutdown()


def start(config: Config) -> Watch | None:
    """Joins the job that the config or the machine names; None where the process runs alone."""
    patience = Patience(
        join=config.jax_distributed_initialization_timeout,
        heartbeat=config.jax_distributed_heartbeat_timeout_seconds,
        hang=config.hang_timeout_seconds,
    )
    if config.skip_jax_distributed_system:
        return None
    stated = stated_place(
        config.jax_coordinator_address,
        config.jax_num_processes,
        config.jax_process_id,
        environment(),
    )
    place = find_place(stated, patience=patience)
    if place is None:
        return None
    join(place, patience)
    watch = Watch(members(), patience, address=place.address)
    watch.start()
    print(f"{this_member()} of {place.processes} joined the job at {place.address}", flush=True)
    return watch


def agree_on_start(config: Config) -> None:
    """Raises what of package, config and devices differs on some process."""
    if not several():
        return
    MARKS.reach("starting devices")
    devices = own_devices()
    facts = {
        "maxdiffusion version": __version__,
        "jax version": jax.__version__,
        "local devices": len(devices),
        "device kind": devices[0].device_kind,
    }
    agree("start", facts | config.shared_values())


def own_devices() -> list[jax.Device]:
    """The devices of this process; raises RunFailed, for the others to hear, if they do not start.

    jax starts them when it is first asked for them.
    """
    try:
        return jax.local_devices()
    except RuntimeError as error:
        raise RunFailed(
            f"the devices of this process did not start: {_first_line(error)}. Look for other "
            "programs that hold them, and at what this process has printed."
        ) from error


def end_with(watch: Watch, error: BaseException) -> NoReturn:
    """Tells people and the other processes what stopped this one, and ends it."""
    # The error may come of another process's end: if so, the watch ends this one with its name.
    if isinstance(error, jax.errors.JaxRuntimeError):
        watch.await_verdict()
    told = outcome(error)
    if told is None:
        traceback.print_exception(error)
        told = Outcome(code=STOPPED, text=_first_line(error))
    else:
        print(told.text, file=sys.stderr, flush=True)
    watch.fail(told.text.removeprefix("stopped: "))
    leave(told.code)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
