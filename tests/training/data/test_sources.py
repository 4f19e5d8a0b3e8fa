"""Windows of synthetic clips show a part of the clip that has the shape in it."""

import numpy as np
import pytest

from maxdiffusion.training.data.batches import SyntheticClips
from maxdiffusion.training.data.synthetic import ClipFormat

WHOLE = SyntheticClips(clip=ClipFormat(pair_share=0.5), count=40, seed=3)
WINDOWS = SyntheticClips(clip=WHOLE.clip, count=40, seed=3, window=32)


def is_part(window: np.ndarray, video: np.ndarray) -> bool:
    places = np.lib.stride_tricks.sliding_window_view(video, window.shape[1:3], axis=(1, 2))
    return bool((places == np.moveaxis(window, 3, 1)[:, None, None]).all((0, 3, 4, 5)).any())


def test_a_window_is_a_part_of_its_clip():
    for index in range(8):
        window, video = WINDOWS[index]["video"], WHOLE[index]["video"]
        assert window.shape == (9, 32, 32, 3)
        assert is_part(window, video)


def test_a_window_shows_a_shape():
    for index in range(len(WINDOWS)):
        pixels = WINDOWS[index]["video"].astype(int)
        background = WHOLE[index]["video"][0, 0, 0].astype(int)
        assert (np.abs(pixels - background).sum(-1) > 100).mean() > 0.05


@pytest.mark.parametrize("window", [0, 24, 80])
def test_windows_that_do_not_fit_are_refused(window):
    with pytest.raises(ValueError, match="multiple of 16 up to 64"):
        SyntheticClips(clip=ClipFormat(), count=1, window=window)
