"""SSIM and MS-SSIM against pytorch-msssim, in float64."""

import sys

import numpy as np
import pytest
import pytorch_msssim
import torch
from scipy import ndimage, signal

from maxdiffusion.quality.metrics import distance, ms_ssim, scale_weights, ssim

# float64: one window has 121 terms of up to 255^2, and variances cancel to the constant 58.5.
TOLERANCE = 121 * 255**2 / 58.5 * np.finfo(np.float64).eps * 10
# The library rounds its own window to float32, and takes another.
WINDOW = torch.from_numpy(signal.windows.gaussian(11, 1.5)).reshape(1, 1, 1, 11).repeat(3, 1, 1, 1)
WINDOW /= WINDOW[0].sum()
OPTIONS = {"data_range": 255.0, "win": WINDOW}


def clips(rows, columns):
    """Two clips: smooth pictures, and the same with noise."""
    rng = np.random.default_rng(rows)
    smooth = ndimage.gaussian_filter(rng.uniform(0, 255, (2, rows, columns, 3)), (0, 3, 3, 0))
    smooth = 255 * (smooth - smooth.min()) / np.ptp(smooth)
    noisy = np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255)
    return smooth.astype(np.uint8), noisy.astype(np.uint8)


def batch(clip):
    return torch.from_numpy(clip.astype(np.float64)).movedim(-1, 1)


@pytest.mark.parametrize("size", [(64, 64), (50, 47), (176, 182)])
def test_ssim(size):
    one, two = clips(*size)
    expected = pytorch_msssim.ssim(batch(two), batch(one), **OPTIONS)
    assert distance(two, one).ssim == pytest.approx(float(expected), abs=TOLERANCE)


# The library pads odd sizes with a row of zeros where ours leaves the last row out.
@pytest.mark.parametrize("size", [(176, 192), (256, 176)])
def test_ms_ssim(size):
    one, two = clips(*size)
    weights = scale_weights(*size)
    expected = pytorch_msssim.ms_ssim(batch(two), batch(one), **OPTIONS, weights=[*weights])
    assert distance(two, one).ms_ssim == pytest.approx(float(expected), abs=TOLERANCE)


def test_fewer_scales_where_frames_are_small():
    """The library refuses frames of 64 x 64; its own steps give the value of three scales."""
    one, two = clips(64, 64)
    parts, pair = [], (batch(two), batch(one))
    module = sys.modules["pytorch_msssim.ssim"]  # the package has a function of this name
    for _ in range(3):
        parts.append(module._ssim(*pair, 255.0, WINDOW))
        pair = tuple(torch.nn.functional.avg_pool2d(each, 2) for each in pair)
    terms = [contrast for _, contrast in parts[:-1]] + [parts[-1][0]]
    weights = scale_weights(64, 64)
    product = torch.stack(
        [term.relu() ** weight for term, weight in zip(terms, weights, strict=True)]
    ).prod(0)
    assert distance(two, one).ms_ssim == pytest.approx(float(product.mean(1).mean()), abs=TOLERANCE)


def test_opposite_pictures():
    """Negative structure: SSIM keeps its sign, MS-SSIM counts it as 0."""
    one, _ = clips(64, 64)
    frame, other = one[0].astype(np.float64), 255.0 - one[0]
    expected = pytorch_msssim.ssim(batch(frame[None]), batch(other[None]), **OPTIONS)
    assert ssim(frame, other) == pytest.approx(float(expected), abs=TOLERANCE)
    assert ssim(frame, other) < 0
    assert ms_ssim(frame, other) == 0.0
