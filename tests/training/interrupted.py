"""Ends of a training run in the middle, and the state and weights that it leaves."""

import base64
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file

from maxdiffusion.training import run as training_run
from tests.processes import run_python

KILLED_RUN = Path(__file__).parent / "killed_run.py"
SHARDED = "optimizer_state_sharding=all"
CACHE_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


class Ends:
    """Ends a run of this process after a step, asked by SIGTERM."""

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


@pytest.fixture
def shared_programs(tmp_path):
    """The argument by which the runs of a test share compiled programs; undone after the test."""
    before = {name: jax.config.values[name] for name in CACHE_SETTINGS}
    compilation_cache.reset_cache()  # jax looks for a folder once
    yield f"jax_cache_dir={tmp_path / 'compiled'}"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def run_until_killed(arguments, step, *, doing="computing"):
    """Runs train_wan in a process that SIGKILL ends while it computes or saves a step."""
    # The same compiler settings as in this process, so that bits can be compared.
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = run_python(KILLED_RUN, doing, step, *arguments, variables=quick)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]


def assert_same_end(one, other, *, step=4):
    """The whole state (weights, running means, moments, PRNG key, data), losses and exports."""
    assert notes_of(one, step) == notes_of(other, step)
    losses = losses_of(one)
    assert len(losses) == step
    assert losses == losses_of(other)
    files = sorted(file.relative_to(one) for file in one.rglob("model/**/*.safetensors"))
    assert files
    for file in files:
        held, found = load_file(one / file), load_file(other / file)
        assert held.keys() == found.keys()
        for name, value in held.items():
            np.testing.assert_array_equal(value, found[name], err_msg=name)


def losses_of(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["learning/loss"] for line in lines]


def notes_of(run, step):
    """The notes of a checkpoint: the position of the data, and a hash of every array."""
    notes = json.loads((run / "checkpoints" / str(step) / "notes" / "metadata").read_text())
    assert any(path.startswith("moments.") for path in notes["fingerprints"])
    return notes


def assert_moments_are_sharded(run, step=4):
    """Moments were stored in parts of the data axis, but for a few small arrays."""
    file = run / "checkpoints" / str(step) / "state" / "_sharding"
    placed = {base64.b64decode(k).decode(): v for k, v in json.loads(file.read_text()).items()}
    moments = [v for path, v in placed.items() if path.startswith("moments.") and "." in path[9:]]
    spread = ["data" in str(json.loads(value)["partition_spec"]) for value in moments]
    assert sum(spread) > 0.8 * len(spread)


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
