"""`WanPipeline.from_config` builds what `generate_wan` would from the same config."""

import jax
import ml_collections
import numpy as np
import pytest

from maxdiffusion import WanPipeline
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.pipelines.programs import ProgramBuilder
from tests.generation.command_line import TINY

pytestmark = pytest.mark.slow

SIZE = {"height": 16, "width": 16, "num_frames": 1}
OVERRIDES = {
    **SIZE,
    "num_inference_steps": 2,
    "attention": "ulysses",
    "per_device_batch_size": 0.125,
}


def test_a_yaml_file_with_overrides(monkeypatch):
    pipeline = WanPipeline.from_config(TINY, **OVERRIDES, ici_ring_parallelism=2)
    mesh = dict(pipeline.builder.mesh.shape)
    assert (mesh["ring"], mesh["ulysses"]) == (2, len(jax.devices()) // 2)
    assert pipeline.builder.settings.attention == "ulysses"
    # The plan of the config's own shape comes with the job.
    monkeypatch.setattr(ProgramBuilder, "attention", lambda *_: pytest.fail("planned again"))
    output = pipeline("a red circle", num_inference_steps=2, output_type="latent", **SIZE)
    assert np.isfinite(output.frames).all()


def test_a_python_file_and_a_config_dict_give_the_same_pipeline(tmp_path):
    values = {"base_config": str(TINY), **OVERRIDES}
    file = tmp_path / "tiny.py"
    file.write_text(
        "import ml_collections\n\n\n"
        f"def get_config():\n    return ml_collections.ConfigDict({values!r})\n"
    )
    config = ml_collections.ConfigDict(values)
    of_file, of_dict = WanPipeline.from_config(file), WanPipeline.from_config(config)
    assert of_file.builder.settings == of_dict.builder.settings
    assert of_file.builder.settings.attention == "ulysses"
    assert of_file.builder.mesh == of_dict.builder.mesh


def test_all_problems_are_raised_before_weights_are_read():
    with pytest.raises(ProblemsFound, match=r"(?s)height=50.*attention='flsh'"):
        WanPipeline.from_config(TINY, height=50, attention="flsh")
