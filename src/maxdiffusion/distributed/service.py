"""Connects to the coordination service of jax, which carries short strings between processes.

The service is a key-value store in the first process; arrays go over the devices' own links
instead. jax has no public name for its client and for its cluster detection, so every use of these
internals is in this module. orbax uses the same names.

Processes are numbered as they joined. jax.process_index() starts the devices and may number them in
another order; it decides only which process writes files.
"""

import os
import socket
import time
from dataclasses import dataclass
from typing import Any, final

import jax

from maxdiffusion.errors import RunFailed

ROOT = "maxdiffusion"
TESTED_JAX = "0.10"
POLL_SECONDS = 5.0  # Python handles signals only between blocking calls


class NoAnswer(RunFailed):
    """A process did not publish its value in time."""


class UnsupportedJax(RunFailed):
    """The installed jax lacks an internal that jobs of several processes need."""

    def __init__(self, name: str):
        super().__init__(
            f"jax {jax.__version__} has no {name}, which jobs of several processes need. Install "
            f"jax {TESTED_JAX}, or set skip_jax_distributed_system=true to run one process."
        )


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process of a job: its index in the order of joining, its host and its pid."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


@final
class Service:
    """The key-value store of a job, as seen by one of its processes."""

    def __init__(self, client: Any, *, index: int, count: int):
        self._client, self.index, self.count = client, index, count

    def publish(self, key: str, text: str) -> None:
        """Writes the value of a new key. Raises an error of jax if the key has one."""
        self._client.key_value_set(f"{ROOT}/{key}", text)

    def update(self, key: str, text: str) -> None:
        """Writes a value, over an older one of the same key."""
        self._client.key_value_set(f"{ROOT}/{key}", text, allow_overwrite=True)

    def receive(self, key: str, *, sender: int, timeout: float) -> str:
        """Waits for a value. Raises NoAnswer, with the sender's index, after `timeout` seconds."""
        ends = time.monotonic() + timeout
        while True:
            left = max(0.001, min(POLL_SECONDS, ends - time.monotonic()))
            try:
                return self._client.blocking_key_value_get(f"{ROOT}/{key}", int(left * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if time.monotonic() >= ends:
                    raise NoAnswer(f"process {sender} did not answer for {timeout:g} s") from error

    def entries(self, folder: str) -> dict[str, str]:
        """Returns all values below `folder`, by the rest of their keys."""
        prefix = f"{ROOT}/{folder}/"
        found = self._client.key_value_dir_get(prefix.rstrip("/"))
        return {key.split(prefix, 1)[1]: value for key, value in found}

    def delete(self, key: str) -> None:
        """Removes a value."""
        self._client.key_value_delete(f"{ROOT}/{key}")


def this_process() -> Process:
    """Returns this process; its index is 0 before it has joined a job."""
    index = _global_state().process_id if jax.distributed.is_initialized() else 0
    return Process(index=index, host=socket.gethostname(), pid=os.getpid())


def is_multiprocess() -> bool:
    """Returns whether this process has joined a job of more than one process."""
    return jax.distributed.is_initialized() and _global_state().num_processes > 1


def writes_files() -> bool:
    """Returns whether this is the process that writes the files of the job."""
    return not is_multiprocess() or jax.process_index() == 0


def joined_service() -> Service:
    """Returns the service of the job that this process has joined."""
    state = _global_state()
    assert state.client is not None, "jax.distributed is not initialized"
    return Service(state.client, index=state.process_id, count=state.num_processes)


def auto_detect(
    address: str | None, processes: int | None, process: int | None, *, timeout: int
) -> tuple[str | None, int | None, int | None]:
    """Fills in missing values from the cluster that jax detects, if it detects one.

    jax knows Cloud TPU slices, GKE (JobSets too), Slurm and Open MPI.
    """
    try:
        from jax._src.clusters import ClusterEnv
    except ImportError as error:
        raise UnsupportedJax("jax._src.clusters.ClusterEnv") from error
    detected = ClusterEnv.auto_detect_unset_distributed_params(
        address, processes, process, None, None, timeout
    )
    return detected[0], detected[1], detected[2]


def _global_state() -> Any:
    try:
        from jax._src.distributed import global_state
    except ImportError as error:
        raise UnsupportedJax("jax._src.distributed.global_state") from error
    return global_state
