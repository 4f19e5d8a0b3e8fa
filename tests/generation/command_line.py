"""Runs the command as a person does: another process, a config file and overrides."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "wan_tiny.yml"


def generate_wan(*arguments: object, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """Returns what `python -m maxdiffusion.generate_wan` did on so many virtual devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.run(
        [sys.executable, "-m", "maxdiffusion.generate_wan", *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=600,
    )
