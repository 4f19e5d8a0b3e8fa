"""Runs Python in a process of its own, as a person would."""

import os
import subprocess
import sys
from collections.abc import Mapping

DEVICE_COUNT = "--xla_force_host_platform_device_count"


def run_python(
    *arguments: object,
    devices: int | None = None,
    variables: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Returns the finished `python ARGUMENTS`, on `devices` virtual CPU devices if given."""
    environment = {**os.environ, **(variables or {})}
    if devices is not None:
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{DEVICE_COUNT}={devices}"}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def output_of(*arguments: object, timeout: float = 600) -> str:
    """Returns what `python ARGUMENTS` prints; fails unless it ends well."""
    done = run_python(*arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
