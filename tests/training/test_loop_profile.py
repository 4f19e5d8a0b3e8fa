"""Training steps in a profile: those asked for, or what there was of them."""

import jax
import pytest

from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.runtime.timing import ProfilePlan, Profiler
from maxdiffusion.training.data.batches import Batches, Order
from maxdiffusion.training.run import Loop, LoopPlan
from maxdiffusion.training.step import make_step
from tests.training import toy_run


def traced_steps(folder) -> list[int]:
    """The numbers of the training steps in the one trace below a folder."""
    (trace,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(trace)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    numbers = [dict(event.stats).get("step_num") for event in events if event.name == "train"]
    return sorted(int(number) for number in numbers if number is not None)


@pytest.mark.parametrize(("skip", "steps", "traced"), [(1, 2, [1, 2]), (3, 10, [3, 4])])
def test_the_steps_asked_for_are_traced(tmp_path, skip, steps, traced):
    program = jax.jit(make_step(toy_run.noisy_loss, toy_run.RULE, trained=("toy",)))
    profiler = Profiler(ProfilePlan(folder=str(tmp_path), skip=skip, steps=steps))
    batches = Batches(toy_run.Rows(), Order(batch=8, seed=2))
    with jax.set_mesh(single_device_mesh()):
        Loop(LoopPlan(steps=5), {"": program}, batches, profiler=profiler).run(toy_run.start())
    assert traced_steps(tmp_path / "host_0") == traced
