"""Joins the processes of a job by jax.distributed: configured, or detected by jax.

Every way to fail ends with a message that names the process, its host, the address and the field
to change, before jax would abort the process with a C++ stack.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from maxdiffusion.distributed.coordination import UnsupportedJax, auto_detect
from maxdiffusion.errors import STOPPED, Collector, Problem, ProblemsFound, RunFailed

GRACE_SECONDS = 60  # jax aborts this long after our own deadline
ADDRESS, PROCESSES, PROCESS = "jax_coordinator_address", "jax_num_processes", "jax_process_id"
# Variables that launchers set; jax itself reads only the first.
ENVIRONMENT: Mapping[str, str] = {
    ADDRESS: "JAX_COORDINATOR_ADDRESS",
    PROCESSES: "JAX_NUM_PROCESSES",
    PROCESS: "JAX_PROCESS_ID",
}


class CannotJoin(RunFailed):
    """This process could not join its job."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that the processes of a job wait for each other."""

    join: int = 300
    heartbeat: int = 100
    hang: int = 1800

    def __post_init__(self) -> None:
        for name, value in (("join", self.join), ("heartbeat", self.heartbeat)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1 second")

    @property
    def dead(self) -> float:
        """Seconds without a heartbeat after which a process counts as dead, before jax's own."""
        return self.heartbeat / 2


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """A job of several processes: its address, its size, and the index of this process."""

    address: str
    processes: int
    process: int


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The stated part of a process group; None for what is left to detection."""

    address: str | None = None
    processes: int | None = None
    process: int | None = None

    @property
    def is_complete(self) -> bool:
        """Returns whether nothing is left to detection."""
        return None not in (self.address, self.processes, self.process)

    @property
    def is_single(self) -> bool:
        """Returns whether nothing here names a job of several processes."""
        return self.address is None and self.processes in (None, 1) and self.process in (None, 0)


def configured_cluster(config: ClusterConfig, environment: Mapping[str, str]) -> ClusterConfig:
    """Fills in from the environment what the config leaves open."""

    def number(name: str) -> int | None:
        variable = ENVIRONMENT[name]
        return _parse_int(variable, environment[variable]) if environment.get(variable) else None

    return ClusterConfig(
        address=config.address or environment.get(ENVIRONMENT[ADDRESS]) or None,
        processes=number(PROCESSES) if config.processes is None else config.processes,
        process=number(PROCESS) if config.process is None else config.process,
    )


def detect_cluster(stated: ClusterConfig, *, timeouts: Timeouts) -> ProcessGroup | None:
    """Returns the group of this process, or None if it runs alone. jax detects what is not stated.

    Raises ProblemsFound for values that are missing or wrong.
    """
    found = stated
    if not stated.is_complete:
        try:
            address, processes, process = auto_detect(
                stated.address, stated.processes, stated.process, timeout=timeouts.join
            )
        except UnsupportedJax:
            raise
        except Exception as error:  # each kind of cluster has its own exceptions
            raise CannotJoin(
                f"jax detected a cluster and could not read it: {error}. Set {ADDRESS}, "
                f"{PROCESSES} and {PROCESS}, or skip_jax_distributed_system=true to run alone."
            ) from error
        found = ClusterConfig(address=address, processes=processes, process=process)
    if found.is_single:
        return None
    _check(found)
    assert found.address is not None
    assert found.processes is not None
    assert found.process is not None
    if found.processes == 1:
        return None
    return ProcessGroup(address=found.address, processes=found.processes, process=found.process)


def join(group: ProcessGroup, timeouts: Timeouts) -> None:
    """Joins the job. Raises CannotJoin, or ends the process after `timeouts.join` seconds."""
    if group.process == 0:
        _check_port(group)
    # CPUs have no links of their own; other devices ignore this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    began = time.monotonic()
    try:
        with _deadline(timeouts.join, lambda: _timeout_message(group, timeouts)):
            jax.distributed.initialize(
                group.address,
                group.processes,
                group.process,
                cluster_detection_method="deactivate",
                initialization_timeout=timeouts.join + GRACE_SECONDS,
                heartbeat_timeout_seconds=timeouts.heartbeat,
                shutdown_timeout_seconds=timeouts.heartbeat,
            )
    except (RuntimeError, ValueError) as error:
        waited = f"after {time.monotonic() - began:.0f} s"
        raise CannotJoin(_not_joined(group, waited, _first_line(error))) from error


def is_listening(address: str, timeout: float) -> bool:
    """Returns whether a connection to `host:port` succeeds within `timeout` seconds."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout):
            return True
    except OSError:
        return False


def report_exit(reason: str) -> None:
    """Writes why this process exits to stderr.

    Does not use logging, whose lock a thread that hangs may hold.
    """
    sys.stderr.write(f"stopped: {reason}\n")
    sys.stderr.flush()


def _check_port(group: ProcessGroup) -> None:
    """Raises CannotJoin if the coordinator's port is in use on this host.

    jax would either die by a signal there, or share the port with another job.
    """
    port = int(group.address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise CannotJoin(
            f"process 0 cannot listen at {group.address} on host {socket.gethostname()}: "
            f"{error.strerror}. End the program that uses port {port} there, perhaps an earlier "
            f"run of this job, or set {ADDRESS} to another port."
        ) from error


@contextmanager
def _deadline(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """Ends the process with a message if the block takes longer.

    A join that fails inside jax aborts the process with a C++ stack.
    """

    def end() -> None:
        report_exit(message())
        os._exit(STOPPED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _timeout_message(group: ProcessGroup, timeouts: Timeouts) -> str:
    if group.process:
        reason = "no answer from that address, or other processes are missing"
    else:
        port = group.address.rpartition(":")[2]
        reason = f"this process listens at port {port} of its host, and others are missing"
    field = f"jax_distributed_initialization_timeout={timeouts.join}"
    return _not_joined(group, f"within {field} s", reason)


def _not_joined(group: ProcessGroup, waited: str, reason: str) -> str:
    return (
        f"process {group.process} of {group.processes} on host {socket.gethostname()} could not "
        f"join the job at {group.address} {waited}: {reason}. Start all {group.processes} "
        "processes, and check that every host reaches that address."
    )


def _parse_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        remedy = f"Set it to a number, or unset {name}"
        problem = Problem(name=name, value=text, rule="must be a whole number", remedy=remedy)
        raise ProblemsFound([problem]) from None


def _check(found: ClusterConfig) -> None:
    """Raises ProblemsFound for every value that is missing or wrong."""
    problems = Collector()
    for check in (_check_complete, _check_address, _check_numbers):
        with problems:
            check(found)
    problems.raise_if_any()


def _check_complete(found: ClusterConfig) -> None:
    values = {ADDRESS: found.address, PROCESSES: found.processes, PROCESS: found.process}
    missing = [
        Problem(
            name=name,
            value=None,
            rule="a job of several processes needs it, and no detected cluster gives it",
            remedy=f"Set all three fields, or none where jax detects the cluster "
            f"({ENVIRONMENT[name]} works too)",
        )
        for name, value in values.items()
        if value is None
    ]
    if missing:
        raise ProblemsFound(missing)


def _check_address(found: ClusterConfig) -> None:
    if found.address is None:
        return
    host, _, port = found.address.rpartition(":")
    if not (host and port.isdecimal() and 1 <= int(port) <= 65535):
        rule = "must be host:port, with a port from 1 to 65535"
        remedy = "Name a host and a free port of it, such as 10.0.0.1:1234"
        raise ProblemsFound([Problem(name=ADDRESS, value=found.address, rule=rule, remedy=remedy)])


def _check_numbers(found: ClusterConfig) -> None:
    processes, process = found.processes, found.process
    if processes is None:
        return
    if processes < 1:
        remedy = f"Set it to the number of processes ({ENVIRONMENT[PROCESSES]} works)"
        rule = "must be at least 1"
        raise ProblemsFound([Problem(name=PROCESSES, value=processes, rule=rule, remedy=remedy)])
    if process is not None and not 0 <= process < processes:
        rule = f"must be below {PROCESSES}={processes}: processes count from 0"
        remedy = f"Use 0 to {processes - 1}, each once"
        raise ProblemsFound([Problem(name=PROCESS, value=process, rule=rule, remedy=remedy)])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else "no reason given"
