"""A plain run loads few modules, plans attention once and resolves the mesh once."""

import json

import pytest

from tests.generation.command_line import TINY
from tests.processes import run_python

pytestmark = pytest.mark.slow
MOST_MODULES = 110
UNWANTED = ("preflight", "costs", "training", "serving")

# Counts every call, wherever the function was imported to.
PROGRAM = """
import json, sys
from maxdiffusion.generate_wan import main
import maxdiffusion.mesh.resolve as mesh
import maxdiffusion.attention.plan as plan

calls = {{}}

def counted(module, name):
    function = getattr(module, name)
    def count(*arguments, **options):
        calls[name] = calls.get(name, 0) + 1
        return function(*arguments, **options)
    setattr(module, name, count)

counted(mesh, "resolve")
import maxdiffusion.attention
for name in ("plan_attention", "plan_cross_attention"):
    counted(maxdiffusion.attention, name)
code = main({arguments!r})
modules = [name for name in sys.modules if name.split(".")[0] == "maxdiffusion"]
print(json.dumps({{"code": code, "calls": calls, "modules": modules}}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns what a tiny run of the command called and loaded."""
    folder = tmp_path_factory.mktemp("videos")
    arguments = [
        *(str(TINY), "height=16", "width=16", "num_frames=1", "num_inference_steps=2"),
        *("attention=flash", "weight_placement=replicate", f"output_dir={folder}"),
    ]
    done = run_python("-c", PROGRAM.format(arguments=arguments), devices=1)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_attention_is_planned_once_and_the_mesh_resolved_once(run):
    assert run["code"] == 0
    assert run["calls"] == {"resolve": 1, "plan_attention": 1, "plan_cross_attention": 1}


def test_few_modules_are_loaded(run):
    assert len(run["modules"]) <= MOST_MODULES, sorted(run["modules"])


@pytest.mark.parametrize("room", UNWANTED)
def test_rooms_that_a_plain_run_does_not_need_stay_unloaded(run, room):
    assert not [name for name in run["modules"] if name.split(".")[1:2] == [room]]
