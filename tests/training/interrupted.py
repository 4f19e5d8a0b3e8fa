"""Ends of a training run in the middle, and the weights that it leaves."""

import os
import signal
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from maxdiffusion.training import run as training_run


class Ends:
    """Ends a run after a step: asked by SIGTERM, or by an error before anything is saved."""

    def __init__(self, monkeypatch):
        self._reporter = training_run.reporter
        self._monkeypatch = monkeypatch

    def after(self, step, how):
        def reporter(*values):
            report = self._reporter(*values)

            def reported(figures):
                report(figures)
                if figures.step == step:
                    how()

            return reported

        self._monkeypatch.setattr(training_run, "reporter", reporter)

    def never(self):
        self._monkeypatch.setattr(training_run, "reporter", self._reporter)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


class Killed(BaseException):
    """Ends a process; no command handles it."""


def die():
    raise Killed


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
