"""Bad input to the command, none of which needs a compiler."""

import importlib.util
from pathlib import Path

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.preflight.command import RELEASED, find_spec
from maxdiffusion.preflight_wan import main

CONFIG = str(Path(__file__).parents[2] / "configs/wan_tiny.yml")


def test_help_and_no_arguments(capsys):
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert capsys.readouterr().out.count("usage: python -m maxdiffusion.preflight_wan") == 2


@pytest.mark.parametrize("topology", ["", "v9:2x2"])
def test_an_unknown_topology_is_refused(topology, capsys):
    assert main([CONFIG, f"topology={topology}"]) == 2
    captured = capsys.readouterr()
    assert "tpu7x:{2x2x1" in captured.err
    assert captured.out == ""


def test_no_libtpu(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([CONFIG, "topology=tpu7x:2x2x1"]) == 2
    assert 'pip install "maxdiffusion[tpu]"' in capsys.readouterr().err


def test_a_misspelled_key_is_refused_before_libtpu_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([CONFIG, "topologi=tpu7x:2x2x1"]) == 2
    errors = capsys.readouterr().err
    assert "topologi" in errors
    assert "The nearest is 'topology'" in errors
    assert "libtpu" not in errors


def test_released_models_need_no_download():
    spec = find_spec("Wan-AI/Wan2.2-T2V-A14B-Diffusers")
    assert spec.experts == ("transformer", "transformer_2")
    assert (spec.transformer.layers, spec.transformer.model_dim) == (40, 5120)
    assert find_spec("Wan-AI/Wan2.1-T2V-1.3B-Diffusers").experts == ("transformer",)
    assert find_spec("embedded").transformer.layers < 10


def test_an_unknown_model_is_refused_with_the_list():
    with pytest.raises(ProblemsFound) as error:
        find_spec("Someone/Else")
    assert all(name in str(error.value) for name in RELEASED)
