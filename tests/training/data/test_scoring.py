"""The scorer reads true clips, and is not fooled by wrong ones."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import ndimage

from maxdiffusion.training.data.scoring import compare, read_clip, score
from maxdiffusion.training.data.synthetic import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    ClipFormat,
    Pool,
    Scene,
    draw_scene,
    render,
)
from tests.marking import slow_except

FORMATS = {"one": ClipFormat(), "two": ClipFormat(pair_share=1.0), "long": ClipFormat(frames=17)}


def marks(scene, wanted=None, *, frames=9, blur=0.0, noise=0.0, seed=0):
    clip = render(scene, frames=frames, size=64).astype(np.float32)
    clip = ndimage.gaussian_filter(clip, (0, blur, blur, 0))
    clip += noise * np.random.default_rng(seed).standard_normal(clip.shape)
    return score(np.clip(clip, 0, 255).astype(np.uint8), wanted or scene)


@pytest.mark.parametrize("name", slow_except(["one"], FORMATS))
def test_true_clips_get_all_marks(name):
    clip = FORMATS[name]
    drawn = [draw_scene(clip, Pool.ALL, seed=5, index=index) for index in range(120)]
    right = [marks(scene, frames=clip.frames).all_right for scene in drawn]
    assert np.mean(right) >= 0.99


def test_soft_and_noisy_clips_are_still_read():
    # As soft as an autoencoder of about 28 dB: a blur of one pixel, noise of 6 of 255.
    drawn = [draw_scene(FORMATS["one"], Pool.ALL, seed=6, index=index) for index in range(150)]
    right = [marks(s, blur=1.0, noise=6.0, seed=i).all_right for i, s in enumerate(drawn)]
    assert np.mean(right) >= 0.97


def test_wrong_clips_lose_the_mark_of_what_is_wrong():
    for index in range(40):
        scene = draw_scene(FORMATS["one"], Pool.ALL, seed=7, index=index)
        moving, seen = scene.objects[0], read_clip(render(scene, frames=9, size=64))
        for field, known in (("colour", COLOURS), ("shape", SHAPES), ("motion", MOTIONS)):
            for name in {*known} - {getattr(moving, field)}:
                wanted = replace(scene, objects=(replace(moving, **{field: name}),))
                assert not getattr(compare(seen, wanted), field), (index, field, name)
        for name in {*BACKGROUNDS} - {scene.background}:
            assert not compare(seen, replace(scene, background=name)).background


def test_an_empty_clip_and_a_missing_shape_get_nothing():
    pair = draw_scene(FORMATS["two"], Pool.ALL, seed=0, index=0)
    alone = Scene(background=pair.background, objects=pair.objects[:1])
    found = marks(alone, pair)
    assert (found.colour, found.shape, found.motion, found.background) == (False,) * 3 + (True,)
    empty = np.full((9, 64, 64, 3), BACKGROUNDS["gray"], np.uint8)
    assert read_clip(empty).objects == ()
    assert not score(empty, pair).colour
