"""A run that is cut short, in any way, ends where one ends that is not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.files import as_path
from maxdiffusion.training.checkpoints import Checkpoints, fingerprints
from maxdiffusion.training.run import LossNotFinite
from maxdiffusion.training.step import first_state
from tests import object_storage
from tests.training import toy_run

pytestmark = pytest.mark.slow

STEPS = 14


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The end of a run that nothing happens to."""
    state, _ = toy_run.run(tmp_path_factory.mktemp("whole"), STEPS)
    return toy_run.summary(state)


def process(folder, *limits):
    command = [sys.executable, toy_run.__file__, *map(str, (folder, STEPS, *limits))]
    # The same compiler settings as in this process, so that bits can be compared.
    environment = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def end_process_at(folder, step, how, *limits):
    """Runs until a step is done, sends a signal, and returns what was said after it."""
    with process(folder, 0.2, *limits) as running:
        for line in running.stdout:
            if line.strip() == f"step {step}":
                running.send_signal(how)
                break
        rest = running.stdout.read()
    return running.returncode, rest


@pytest.mark.slow
def test_sigterm_saves_and_says_so(whole, tmp_path):
    code, said = end_process_at(tmp_path, 5, signal.SIGTERM)
    assert code == 7
    assert "The same command continues" in said
    kept = Checkpoints(tmp_path).steps[-1]
    assert 5 <= kept <= 7
    state, _ = toy_run.run(tmp_path, STEPS)
    assert toy_run.summary(state) == whole


@pytest.mark.slow
def test_a_run_continues_from_a_bucket(whole, tmp_path, monkeypatch):
    with object_storage.served(tmp_path) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        object_storage.use_buckets()
        folder = as_path("gs://bucket/run")
        toy_run.run(folder, 9)
        flip(largest_file(tmp_path / "bucket" / "run" / "9" / "state"))
        state, said = toy_run.run(folder, STEPS)
    assert "checkpoint of step 9 is damaged" in said[0]
    assert said[0].endswith("it is now gs://bucket/run/damaged-9; continuing from step 8")
    assert toy_run.summary(state) == whole


def largest_file(folder):
    return max((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_a_damaged_newest_gives_way_to_the_one_before(whole, tmp_path, damage, capfd):
    toy_run.run(tmp_path, 9)
    assert Checkpoints(tmp_path).steps == (4, 8, 9)
    damage(largest_file(tmp_path / "9" / "state"))
    state, said = toy_run.run(tmp_path, STEPS)
    assert "checkpoint of step 9 is damaged" in said[0]
    assert "continuing from step 8" in said[0]
    assert (tmp_path / "damaged-9").is_dir()
    assert toy_run.summary(state) == whole
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_without_a_list_of_its_files_is_read(whole, tmp_path):
    toy_run.run(tmp_path, 9)
    (tmp_path / "9" / "files.json").unlink()
    state, said = toy_run.run(tmp_path, STEPS)
    assert not said
    assert toy_run.summary(state) == whole


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_whole_checkpoint(whole, tmp_path):
    toy_run.run(tmp_path, 4)
    # In a process of its own: orbax leaves writes behind that fail in threads of their own.
    with process(tmp_path, 0.0, 10_000) as full:
        said = full.stdout.read()
    assert full.returncode == 7
    assert "the checkpoint of step 8 could not be written" in said
    assert "the last whole one is of step 4" in said
    assert "Make room there" in said
    assert [folder.name for folder in tmp_path.iterdir()] == ["4"]
    state, _ = toy_run.run(tmp_path, STEPS)
    assert toy_run.summary(state) == whole


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good(tmp_path):
    def bad(values, batch, key):
        loss, figures = toy_run.noisy_loss(values, batch, key)
        # The kernel grows by AdamW's first steps: after some of them the loss has no value.
        return jnp.where(
            jnp.abs(values["toy"]["kernel"][0, 0] - start) > 0.035, jnp.nan, loss
        ), figures

    start = np.asarray(toy_run.start().values["toy"]["kernel"])[0, 0]
    with pytest.raises(LossNotFinite, match=r"loss of step \d+ is nan") as caught:
        toy_run.run(tmp_path, 40, loss=bad, every=1)
    kept = Checkpoints(tmp_path)
    assert f"the last good checkpoint is of step {kept.steps[-1]}" in str(caught.value)
    good = kept.restore(toy_run.start()).state
    assert np.isfinite(np.asarray(good.values["toy"]["kernel"])).all()


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    toy_run.run(tmp_path, 2)
    values = {"toy": {"kernel": jnp.zeros((8, 8))}}
    other = first_state(values, toy_run.RULE, seed=0, mesh=toy_run.single_device_mesh())
    with pytest.raises(ProblemsFound, match=r"kernel=\(64, 64\): has shape \(8, 8\)"):
        Checkpoints(tmp_path).restore(other)


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    assert Checkpoints(tmp_path / "new").restore(toy_run.start()) is None


def test_fingerprints_see_every_bit_and_every_place():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = fingerprints({"a": jnp.asarray(array)})["a"]
    swapped, flipped = array.copy(), array.copy()
    swapped[0, 1], swapped[2, 3] = array[2, 3], array[0, 1]
    flipped.view(np.uint32)[1, 1] ^= 1
    for other in (swapped, flipped):
        assert fingerprints({"a": jnp.asarray(other)})["a"] != found
