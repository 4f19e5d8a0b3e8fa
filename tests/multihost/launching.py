"""Starts the processes of a job on this machine, and ends them whatever happens."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "wan_tiny.yml"
DEVICES = 8
LONGEST = 600  # seconds; everything ends long before


class Started:
    """One running process, and what it has said so far."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self._lines.extend(stream)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for(self, words: str) -> None:
        """Returns when the process has said something; fails if it ends without."""
        ends = time.monotonic() + LONGEST
        while words not in self.output:
            assert time.monotonic() < ends, f"no {words!r} in:\n{self.output}"
            assert self.process.poll() is None or words in self.output, self.output
            time.sleep(0.02)

    def end(self) -> int:
        """The exit code, once the process has ended."""
        code = self.process.wait(LONGEST)
        self._reader.join(10)
        return code

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def environment(processes: int, index: int, address: str) -> dict[str, str]:
    """What process `index` of a job on this machine is started with."""
    # Programs here compile for longer than they run, and twice as fast without optimisation.
    quick = "--xla_backend_optimization_level=0"
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes} {quick}"
    joins = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(index),
    }
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "PYTHONUNBUFFERED": "1"}
    alone = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **paths}
    return alone | own | (joins if processes > 1 else {})


@contextmanager
def launched(
    processes: int,
    command: Sequence[object],
    *,
    own: Sequence[Sequence[object]] = (),
    variables: Mapping[str, str] | None = None,
    own_variables: Sequence[Mapping[str, str]] = (),
) -> Iterator[list[Started]]:
    """The running processes of `python COMMAND`; `own` holds further arguments for each."""
    address = free_address()
    started: list[Started] = []
    try:
        for index in range(processes):
            arguments = [*command, *(own[index] if own else ())]
            line = [sys.executable, *map(str, arguments)]
            found = environment(processes, index, address) | dict(variables or {})
            found |= own_variables[index] if own_variables else {}
            started.append(Started(line, found))
        yield started
    finally:
        for one in started:
            one.process.kill()
        for one in started:
            one.end()


def run(
    processes: int, command: Sequence[object], *, variables: Mapping[str, str] | None = None
) -> list[str]:
    """What each process said, all of which must end well."""
    with launched(processes, command, variables=variables) as started:
        codes = [one.end() for one in started]
        said = [one.output for one in started]
    assert codes == [0] * processes, "\n\n".join(said)
    return said
