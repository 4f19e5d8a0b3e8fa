"""Calibration of MagCache: the command measures ratios that a run then uses."""

import pytest
import yaml

from maxdiffusion.calibrate_cache import main as calibrate
from maxdiffusion.generate_wan import main as generate
from tests.generation.command_line import TINY

pytestmark = pytest.mark.slow
SMALL = ("height=16", "width=16", "num_frames=1", "num_inference_steps=12")


def test_measured_ratios_are_used_by_the_next_run(tmp_path, capsys):
    out = f"output_dir={tmp_path}"
    prompts = 'prompt=["a red circle moves right", "a blue square moves up"]'
    assert calibrate([str(TINY), *SMALL, prompts, out]) == 0
    text = (tmp_path / "mag_ratios.yml").read_text()
    assert "mean of 2 videos, 12 steps of unipc" in text
    ratios = yaml.safe_load(text)["mag_ratios_base"]
    assert len(ratios) == 24
    assert ratios[:2] == [1.0, 1.0]
    assert all(0 < ratio < 3 for ratio in ratios)
    keys = ("use_magcache=true", "magcache_thresh=0.3", f"mag_ratios_base={ratios}")
    assert generate([str(TINY), *SMALL, *keys, out]) == 0
    assert "of 24 forwards through the blocks" in capsys.readouterr().out
    assert list(tmp_path.glob("*.mp4"))


def test_a_cache_is_not_measured_with_a_cache(tmp_path, capsys):
    arguments = [str(TINY), *SMALL, "use_sen_cache=true", f"output_dir={tmp_path}"]
    assert calibrate(arguments) == 2
    assert "every step computed" in "".join(capsys.readouterr())
