"""The start of a job with several processes: found by jax, or as the config says."""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.clusters import ClusterEnv  # what jax.distributed.initialize itself asks

from maxdiffusion.runtime.problems import STOPPED, Problem, ProblemsFound, RunFailed

GRACE_SECONDS = 60  # so much later jax would abort
ADDRESS, PROCESSES, PROCESS = "jax_coordinator_address", "jax_num_processes", "jax_process_id"
# What launchers set where nobody writes keys; jax itself reads the first.
ENVIRONMENT: Mapping[str, str] = {
    ADDRESS: "JAX_COORDINATOR_ADDRESS",
    PROCESSES: "JAX_NUM_PROCESSES",
    PROCESS: "JAX_PROCESS_ID",
}


class CannotJoin(RunFailed):
    """This process could not become part of its job."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the processes of a job wait for each other, in seconds."""

    join: int = 300
    heartbeat: int = 100
    hang: int = 1800

    def __post_init__(self) -> None:
        for name, value in (("join", self.join), ("heartbeat", self.heartbeat)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1 second")

    @property
    def dead(self) -> float:
        """After so long without a sign a process counts as dead; before jax itself says so."""
        return self.heartbeat / 2


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job meets, how many processes it has, and which one this is."""

    address: str
    processes: int
    process: int


def stated_place(
    address: str, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What keys, and where they are silent the environment, say of a place; may be in part."""
    stated: dict[str, Any] = {ADDRESS: address or None, PROCESSES: processes, PROCESS: process}
    for name, variable in ENVIRONMENT.items():
        if stated[name] is None and environment.get(variable):
            text = environment[variable]
            stated[name] = text if name == ADDRESS else _whole(variable, text)
    return stated


def find_place(stated: Mapping[str, Any], *, patience: Patience) -> Place | None:
    """The place of this process; None if it runs alone. What nobody states is found by jax.

    jax knows Cloud TPU slices, GKE (JobSets too), Slurm and Open MPI.
    """
    found = dict(stated)
    if None in found.values():
        try:
            detected = ClusterEnv.auto_detect_unset_distributed_params(
                found[ADDRESS], found[PROCESSES], found[PROCESS], None, None, patience.join
            )
        except Exception as error:  # every kind of cluster has its own ways to fail
            raise CannotJoin(
                f"jax found a cluster here and could not read it: {error}. Set {ADDRESS}, "
                f"{PROCESSES} and {PROCESS}, or skip_jax_distributed_system=true to run alone."
            ) from error
        found = dict(zip((ADDRESS, PROCESSES, PROCESS), detected, strict=False))
    if found[PROCESSES] in (None, 1) and found[ADDRESS] is None and found[PROCESS] in (None, 0):
        return None
    problems = [*_missing(found), *_wrong(found)]
    if problems:
        raise ProblemsFound(problems)
    if found[PROCESSES] == 1:
        return None
    return Place(address=found[ADDRESS], processes=found[PROCESSES], process=found[PROCESS])


def join(place: Place, patience: Patience) -> None:
    """Makes this process part of its job, or ends in words after `patience.join` seconds."""
    if place.process == 0:
        _check_free(place)
    # Only CPUs ask for it: their processes have no links of their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    began = time.monotonic()
    try:
        with _deadline(patience.join, lambda: _too_late(place, patience)):
            jax.distributed.initialize(
                place.address,
                place.processes,
                place.process,
                cluster_detection_method="deactivate",
                initialization_timeout=patience.join + GRACE_SECONDS,
                heartbeat_timeout_seconds=patience.heartbeat,
                shutdown_timeout_seconds=patience.heartbeat,
            )
    except (RuntimeError, ValueError) as error:
        waited = f"after {time.monotonic() - began:.0f} s"
        raise CannotJoin(_not_joined(place, waited, _first_line(error))) from error


def answers(address: str, seconds: float) -> bool:
    """Whether somebody listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), seconds):
            return True
    except OSError:
        return False


def _check_free(place: Place) -> None:
    """Raises CannotJoin if the port where the job is to meet has a listener on this host.

    jax would die by a signal there, or share the port with another job, whichever listens.
    """
    port = int(place.address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise CannotJoin(
            f"process 0 cannot listen at {place.address} on host {socket.gethostname()}: "
            f"{error.strerror}. End what listens at port {port} there, perhaps an earlier run of "
            f"this job, or set {ADDRESS} to another port."
        ) from error


@contextmanager
def _deadline(seconds: float, last_words: Callable[[], str]) -> Iterator[None]:
    """Ends the process in words if the block takes longer.

    A join that fails within jax aborts the process with a C++ stack, so it must not get there.
    """

    def end() -> None:
        print(f"stopped: {last_words()}", file=sys.stderr, flush=True)
        os._exit(STOPPED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _too_late(place: Place, patience: Patience) -> str:
    if place.process:
        reason = "nobody answers there, or other processes are missing"
    else:
        port = place.address.rpartition(":")[2]
        reason = f"this process listens at port {port} of its host, and others are missing"
    key = f"jax_distributed_initialization_timeout={patience.join}"
    return _not_joined(place, f"within {key} s", reason)


def _not_joined(place: Place, waited: str, reason: str) -> str:
    return (
        f"process {place.process} of {place.processes} on host {socket.gethostname()} could not "
        f"join the job at {place.address} {waited}: {reason}. Start all {place.processes} "
        "processes, and check that every host reaches that address."
    )


def environment() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        remedy = f"Set it to a number, or unset {name}"
        problem = Problem(name=name, value=text, rule="must be a whole number", remedy=remedy)
        raise ProblemsFound([problem]) from None


def _missing(found: Mapping[str, Any]) -> list[Problem]:
    remedy = "Set all three keys, or none where jax finds the cluster by itself"
    rule = "a job of several processes needs it, and no cluster was found that says it"
    return [
        Problem(name=name, value=value, rule=rule, remedy=f"{remedy} ({ENVIRONMENT[name]} works)")
        for name, value in found.items()
        if value is None
    ]


def _wrong(found: Mapping[str, Any]) -> list[Problem]:
    problems = []
    address, processes, process = (found[name] for name in (ADDRESS, PROCESSES, PROCESS))
    if address is not None and not _has_port(address):
        remedy = "Name a host and a free port of it, such as 10.0.0.1:1234"
        rule = "must be host:port, with a port from 1 to 65535"
        problems.append(Problem(name=ADDRESS, value=address, rule=rule, remedy=remedy))
    if processes is not None and processes < 1:
        remedy = f"Set it to the number of processes ({ENVIRONMENT[PROCESSES]} works)"
        rule = "must be at least 1"
        problems.append(Problem(name=PROCESSES, value=processes, rule=rule, remedy=remedy))
    elif processes is not None and process is not None and not 0 <= process < processes:
        rule = f"must be below {PROCESSES}={processes}: processes count from 0"
        remedy = f"Use 0 to {processes - 1}, each once"
        problems.append(Problem(name=PROCESS, value=process, rule=rule, remedy=remedy))
    return problems


def _has_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 1 <= int(port) <= 65535


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else "no reason given"
