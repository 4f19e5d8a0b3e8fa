"""Distances of clips: closed forms here, libraries in tests/parity."""

import numpy as np
import pytest

from maxdiffusion.quality.metrics import (
    SCALE_WEIGHTS,
    Distance,
    distance,
    mean_distance,
    ms_ssim,
    psnr_of,
    scale_weights,
    ssim,
)


def clip(seed=0, frames=3, side=24):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 200, (frames, side, side, 3)).astype(np.uint8)


def test_equal_clips_have_no_distance():
    found = distance(clip(), clip())
    assert (found.squared_error, found.psnr, found.flicker) == (0.0, float("inf"), 0.0)
    assert found.ssim == pytest.approx(1.0, abs=1e-12)
    assert found.ms_ssim == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("shift", [1, 5, 50])
def test_psnr_of_a_constant_shift(shift):
    found = distance((clip() + shift).astype(np.uint8), clip())
    assert found.psnr == pytest.approx(20 * np.log10(255 / shift), rel=1e-12)
    assert found.flicker == 0.0  # it is in every frame


def test_flicker_counts_what_comes_and_goes():
    blinking = clip().astype(np.int16)
    blinking[1] += 7  # of three frames: it comes, and it goes
    assert distance(blinking.astype(np.uint8), clip()).flicker == 7.0
    assert distance(clip(frames=1), clip(1, frames=1)).flicker == 0.0


def test_ssim_of_flat_pictures_is_the_luminance_term():
    one, two = np.full((16, 16, 3), 100.0), np.full((16, 16, 3), 120.0)
    small = (0.01 * 255) ** 2
    expected = (2 * 100 * 120 + small) / (100**2 + 120**2 + small)
    assert ssim(one, two) == pytest.approx(expected, rel=1e-9)


def test_the_number_of_scales_leaves_room_for_the_window():
    assert len(scale_weights(64, 64)) == 3
    assert len(scale_weights(720, 1280)) == 5
    assert len(scale_weights(175, 999)) == 4
    assert scale_weights(176, 176) == SCALE_WEIGHTS
    assert sum(scale_weights(64, 64)) == pytest.approx(1)
    assert scale_weights(11, 400) == (1.0,)


def test_with_one_scale_both_similarities_agree():
    one = clip(0, side=20)[0].astype(float)
    two = one + clip(1, side=20)[0] / 10
    assert ms_ssim(one, two) == pytest.approx(ssim(one, two))


def test_the_mean_pools_squared_errors():
    parts = [
        Distance(squared_error=error, ssim=1.0, ms_ssim=0.5, flicker=2.0) for error in (0.0, 2.0)
    ]
    assert mean_distance(parts).psnr == psnr_of(1.0)


def test_clips_that_cannot_be_compared(unchecked_types):
    with pytest.raises(ValueError, match="cannot be compared"):
        distance(clip(frames=3), clip(frames=2))
    with pytest.raises(ValueError, match="needs 11 rows"):
        distance(clip(side=10), clip(side=10))
