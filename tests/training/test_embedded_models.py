"""The models of the package, trained further on eight devices, learn as on one."""

from pathlib import Path

import numpy as np
import pytest

from maxdiffusion.training.data.batches import SyntheticClips
from maxdiffusion.training.data.synthetic import ClipFormat
from tests.training.command_line import fill, losses_of, noise
from tests.training.test_step import RTOL

CONFIGS = Path(__file__).parents[2] / "configs"
CLIPS = SyntheticClips(clip=ClipFormat(frames=9, size=64), count=8, seed=0)
STEPS = 4


def arguments(config: str, model: str, work: Path) -> list[str]:
    return [
        str(CONFIGS / config),
        f"pretrained_model_name_or_path={model}",
        *("train_experts=low_noise", "attention=ulysses_ring_custom"),
        *("ici_ring_parallelism=2", "ici_ulysses_parallelism=4"),
        *("synthetic_clips=8", f"synthetic_pair_share={CLIPS.clip.pair_share}", "seed=0"),
        *("global_batch_size=8", f"max_train_steps={STEPS}"),
        f"latent_cache_dir={work / 'cache'}",
        f"checkpoint_dir={work / 'checkpoints'}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "model"),
    [("train_embedded.yml", "embedded"), ("train_embedded_i2v.yml", "embedded_image")],
)
def test_losses_of_eight_devices_are_those_of_one(config, model, tmp_path):
    fill(tmp_path / "cache", model, noise((3, 8, 8, 16)), CLIPS)
    command = arguments(config, model, tmp_path)
    losses = losses_of(command, STEPS)
    np.testing.assert_allclose(losses, losses_of(command, STEPS, alone=True), rtol=RTOL)
    assert len({*losses}) == STEPS
