"""Runs the command as a person does: another process, a config file and overrides."""

import subprocess
from pathlib import Path

from tests.processes import run_python

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "wan_tiny.yml"


def generate_wan(*arguments: object, devices: int = 1) -> subprocess.CompletedProcess[str]:
    """Returns the finished `python -m maxdiffusion.generate_wan` on `devices` virtual devices."""
    return run_python("-m", "maxdiffusion.generate_wan", *arguments, devices=devices)
