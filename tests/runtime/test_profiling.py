"""Profiles of real programs: which steps are in them, and where they are written."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from maxdiffusion.runtime.timing import ProfilePlan, Profiler
from tests import object_storage


@jax.jit
def work(x):
    with jax.named_scope("squares"):
        return jnp.square(x).sum()


def loop(steps: int) -> Iterator[int]:
    """A loop of so many steps, each under its number."""
    for step in range(steps):
        with jax.profiler.StepTraceAnnotation("denoise", step_num=step):
            work(jnp.ones(64)).block_until_ready()
        yield step


def traced_steps(folder: Path) -> list[int]:
    """The numbers of the steps in the one trace of a folder."""
    (trace,) = folder.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(trace))
    events = [event for plane in data.planes for line in plane.lines for event in line.events]
    numbers = [dict(event.stats).get("step_num") for event in events if event.name == "denoise"]
    return sorted(int(number) for number in numbers if number is not None)


def test_the_steps_asked_for_are_in_the_folder_of_this_process(tmp_path):
    plan = ProfilePlan(folder=str(tmp_path), skip=2, steps=3)
    assert [*Profiler(plan).watch(loop(8))] == [*range(8)]
    assert [path.name for path in tmp_path.iterdir()] == ["host_0"]
    assert traced_steps(tmp_path / "host_0") == [2, 3, 4]


def test_a_profile_ends_with_its_loop_and_is_made_once(tmp_path):
    profiler = Profiler(ProfilePlan(folder=str(tmp_path), skip=3, steps=10))
    assert len([*profiler.watch(loop(5))]) == 5
    assert traced_steps(tmp_path) == [3, 4]
    assert len([*profiler.watch(loop(5))]) == 5
    assert traced_steps(tmp_path) == [3, 4]


def test_a_step_that_fails_is_still_written(tmp_path):
    profiler = Profiler(ProfilePlan(folder=str(tmp_path), skip=0, steps=5))

    def failing():
        yield from loop(1)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        list(profiler.watch(failing()))
    assert traced_steps(tmp_path) == [0]
    with jax.profiler.trace(str(tmp_path / "next")):  # nothing is left running
        pass


def test_without_a_plan_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [*Profiler(None).watch(loop(3))] == [0, 1, 2]
    assert not [*tmp_path.iterdir()]


def test_a_profile_goes_to_object_storage(tmp_path, monkeypatch):
    monkeypatch.setenv(object_storage.ROOT, str(tmp_path))
    object_storage.use_buckets()
    plan = ProfilePlan(folder="gs://bucket/profile", skip=0, steps=1)
    assert [*Profiler(plan).watch(loop(1))] == [0]
    assert traced_steps(tmp_path / "bucket" / "profile") == [0]


def test_a_plan_of_no_steps_is_refused():
    with pytest.raises(ValueError, match="steps=0: must be at least 1"):
        ProfilePlan(folder="x", skip=0, steps=0)
