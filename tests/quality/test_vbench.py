"""The package vbench in its own process; a package of that name stands in for it here."""

import numpy as np
import pytest

from maxdiffusion.errors import ProblemsFound, RunFailed
from maxdiffusion.quality.vbench import DIMENSIONS, Vbench

# As the real one: scores and single results by dimension, in <name>_eval_results.json.
PACKAGE = """
import json, os
class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.output_path = output_path
        os.makedirs(output_path)
    def evaluate(self, videos_path, name, dimension_list=None, mode="vbench_standard"):
        assert mode == "custom_input"
        found = sorted(os.listdir(videos_path))
        if os.environ["VBENCH_CACHE_DIR"].endswith("bad"):
            raise ValueError("no weights")
        scores = {one: [len(one) + len(found) / 10, found] for one in dimension_list}
        with open(os.path.join(self.output_path, name + "_eval_results.json"), "w") as file:
            json.dump(scores, file)
"""
TORCH = """
device = str
class cuda:
    is_available = staticmethod(lambda: False)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in (("vbench", PACKAGE), ("torch", TORCH)):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return tmp_path


def clips():
    return [np.zeros((3, 32, 32, 3), np.uint8)] * 2


def test_scores_of_all_dimensions(package):
    found = Vbench.find(package, 8)(clips())
    assert found == {name: pytest.approx(len(name) + 0.2) for name in DIMENSIONS}


def test_a_failure_names_its_reason(package):
    bad = package / "bad"
    bad.mkdir()
    with pytest.raises(RunFailed, match="exit code 1: ValueError: no weights"):
        Vbench.find(bad, 8)(clips())


def test_what_is_missing_is_one_line(tmp_path):
    with pytest.raises(ProblemsFound, match=r"gone': must be a folder with VBench's weights"):
        Vbench.find(tmp_path / "gone", 8)
    with pytest.raises(ProblemsFound, match="needs the package vbench, which is not installed"):
        Vbench.find(tmp_path, 8)
