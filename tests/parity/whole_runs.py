"""Whole runs of diffusers' pipelines and ours from the same latents, and pictures to start from."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.oracle.arrays import as_numpy

# Velocities within 1e-5, times 2 * 6 - 1 by guidance, averaged over the steps.
TOLERANCE = 5e-5


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Returns a smooth picture with some noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (3 + c) + seed) * np.cos(columns / (5 + c)) for c in range(3)]
    values = 128 + 90 * np.stack(waves, -1) + rng.normal(0, 10, (height, width, 3))
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def compare_runs(
    pipelines: tuple[Any, Any],
    folder: Path,
    start: torch.Tensor,
    settings: dict[str, Any],
    tolerance: float = TOLERANCE,
) -> None:
    """Compares latents and frames of one call of diffusers' pipeline class and of ours."""
    theirs, ours = (pipeline.from_pretrained(folder) for pipeline in pipelines)
    theirs.set_progress_bar_config(disable=True)
    expected = as_numpy(theirs(**settings, latents=start, output_type="latent").frames)
    latents = ours(**settings, latents=start.numpy(), output_type="latent").frames
    np.testing.assert_allclose(latents, expected, rtol=0, atol=tolerance)
    expected = theirs(**settings, latents=start, output_type="np").frames
    frames = ours(**settings, latents=start.numpy(), output_type="np").frames
    np.testing.assert_allclose(frames, expected, rtol=0, atol=tolerance)
