"""Clips are the same for the same numbers, keep to their pool, and are described truly."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from maxdiffusion.training.data.synthetic import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT,
    MOTIONS,
    NOUNS,
    SHAPES,
    ClipFormat,
    MovingShape,
    Pool,
    Scene,
    caption,
    draw_scene,
    every_word,
    render,
    scene_of,
)

ONE = ClipFormat()
TWO = ClipFormat(pair_share=1.0)


def scenes(clip, pool, count, seed=0):
    return [draw_scene(clip, pool, seed=seed, index=index) for index in range(count)]


def test_the_same_numbers_give_the_same_clip():
    first, again = (draw_scene(ONE, Pool.ALL, seed=3, index=8) for _ in range(2))
    assert first == again
    assert caption(first, seed=3, index=8) == caption(again, seed=3, index=8)
    one, two = (render(scene, frames=9, size=64) for scene in (first, again))
    np.testing.assert_array_equal(one, two)


def test_other_numbers_give_other_clips():
    assert len({*scenes(ONE, Pool.ALL, 50)}) == 50
    assert draw_scene(ONE, Pool.ALL, seed=0, index=1) != draw_scene(ONE, Pool.ALL, seed=1, index=1)


def test_training_never_draws_what_is_held_out():
    drawn = {m.combination for scene in scenes(ONE, Pool.TRAINED, 2000) for m in scene.objects}
    drawn |= {m.combination for scene in scenes(TWO, Pool.TRAINED, 300) for m in scene.objects}
    assert not drawn & HELD_OUT
    held = {m.combination for scene in scenes(ONE, Pool.HELD_OUT, 300) for m in scene.objects}
    assert held <= HELD_OUT


def test_what_is_held_out_is_seen_in_pairs():
    trained = set(Pool.TRAINED.value)
    for first, second in ((COLOURS, SHAPES), (COLOURS, MOTIONS), (SHAPES, MOTIONS)):
        pairs = {pair for one in trained for pair in product(one, one)}
        assert {*product(first, second)} <= pairs
    assert len(HELD_OUT) == pytest.approx(len(Pool.ALL.value) / 9, abs=2)


def test_motions_are_equally_frequent():
    counts = Counter(scene.objects[0].motion for scene in scenes(ONE, Pool.TRAINED, 1100))
    # 100 are expected of each; five standard deviations are 48.
    assert set(counts) == set(MOTIONS)
    assert max(counts.values()) < 150
    assert min(counts.values()) > 50


@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_cover_the_area_of_the_circle(shape):
    moving = MovingShape(
        shape=shape, colour="red", motion="stay", row=32, column=32, radius=11, travel=0
    )
    clip = render(Scene(background="black", objects=(moving,)), frames=1, size=64)
    red = (clip[0, ..., 0].astype(float) - BACKGROUNDS["black"][0]) / (225 - 12)
    # Anti-aliasing is exact to a few hundredths of a pixel along the edge, which is 70 to 90 long.
    assert red.sum() == pytest.approx(np.pi * 11**2, abs=4)


def test_edges_are_smooth_and_colours_true():
    scene = draw_scene(ONE, Pool.ALL, seed=0, index=0)
    clip = render(scene, frames=17, size=64)
    assert clip.shape == (17, 64, 64, 3)
    assert clip.dtype == np.uint8
    moving = scene.objects[0]
    middle = clip[8, round(moving.row), round(moving.column)]
    np.testing.assert_array_equal(middle, COLOURS[moving.colour])
    np.testing.assert_array_equal(clip[0, 0, 0], BACKGROUNDS[scene.background])
    assert len(np.unique(clip.reshape(-1, 3), axis=0)) > 10


def test_captions_name_what_is_shown_in_words_that_are_known():
    known, sentences = {*every_word()}, set()
    for index, scene in enumerate([*scenes(ONE, Pool.ALL, 200), *scenes(TWO, Pool.ALL, 50)]):
        text = caption(scene, seed=0, index=index)
        words = text.replace(",", "").replace(".", "").split()
        assert {*words} <= known
        assert {scene.background, "grey"} & {*words}
        for moving in scene.objects:
            assert moving.colour in words
            assert {*NOUNS[moving.shape]} & {*words}
        sentences.add(text)
    assert len(sentences) > 200


@pytest.mark.parametrize(
    ("values", "message"),
    [({"frames": 8}, "4n"), ({"size": 40}, "multiple of 16"), ({"pair_share": 2.0}, "between")],
)
def test_bad_formats_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        ClipFormat(**values)


def test_captions_are_read_back():
    clip = ClipFormat()
    for index in range(200):
        scene = draw_scene(clip, Pool.ALL, seed=1, index=index)
        found = scene_of(caption(scene, seed=1, index=index))
        assert found is not None
        assert found.background == scene.background
        assert found.objects[0].combination == scene.objects[0].combination


@pytest.mark.parametrize(
    "text", ["", "a red fox", "a red circle", "a red circle moves right on a pink background"]
)
def test_other_texts_have_no_scene(text):
    assert scene_of(text) is None
