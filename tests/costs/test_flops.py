"""Work and bounds against the figures that are known for WAN 2.2 A14B, 720p, 81 frames."""

import dataclasses

import pytest

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.costs.flops import forward_flops, step_bounds
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.models.wan.config import wan_2_2_animate_14b

TOKENS = 21 * 45 * 80
A14B = WanTransformerConfig()


def test_parts_of_a_forward():
    flops = forward_flops(A14B, tokens=TOKENS, text_length=512)
    known = {
        "self_attention": 4682.0,
        "self_projections": 634.2,
        "cross_attention": 31.7,
        "cross_projections": 317.1,
        "feed_forward": 856.1,
    }
    for name, teraflops in known.items():
        assert getattr(flops, name) / 1e12 == pytest.approx(teraflops, abs=0.05), name
    assert flops.total == pytest.approx(sum(flops.parts().values()))
    assert flops.dense + flops.attention == pytest.approx(flops.total)


def test_a_batch_of_two_is_twice_the_work():
    one = forward_flops(A14B, tokens=TOKENS, text_length=512)
    two = forward_flops(A14B, tokens=TOKENS, text_length=512, batch=2)
    assert two.total == pytest.approx(2 * one.total)


@pytest.mark.parametrize(
    ("chip", "devices", "batch", "spec", "aware"),
    [
        ("tpu7x", 8, 2, 1.414, 1.925),
        ("tpu7x", 8, 1, 0.707, 0.962),
        ("tpu7x", 32, 2, 0.353, 0.481),
        ("v6e", 8, 2, 1.777, 2.418),
        ("v5p", 4, 2, 7.106, 7.106),
    ],
)
def test_bounds(chip, devices, batch, spec, aware):
    flops = forward_flops(A14B, tokens=TOKENS, text_length=512, batch=batch)
    bounds = step_bounds(flops, CHIPS[chip], devices=devices, head_dim=A14B.head_dim)
    # The published bounds count the keys of the text (0.03 %) and have three decimals.
    assert bounds.spec == pytest.approx(spec, rel=6e-4, abs=6e-4)
    assert bounds.head_dim_aware == pytest.approx(aware, rel=6e-4, abs=6e-4)


@pytest.mark.parametrize(
    ("chip", "dtype", "share"),
    [
        ("tpu7x", "float8_e4m3fn", 0.5),
        ("tpu7x", "int8", 1.0),
        ("v6e", "int8", 0.5),
        ("v6e", "float8_e4m3fn", 1.0),
        ("v5p", "float32", 1.0),
    ],
)
def test_products_of_blocks_run_at_the_peak_of_their_dtype(chip, dtype, share):
    flops = forward_flops(A14B, tokens=TOKENS, text_length=512)
    plain, eight_bit = (
        step_bounds(flops, CHIPS[chip], devices=8, head_dim=128, product_dtype=name)
        for name in ("bfloat16", dtype)
    )
    saved = (634.2 + 317.1 + 856.1) * 1e12 * (1 - share) / (8 * CHIPS[chip].bf16_flops)
    assert plain.spec - eight_bit.spec == pytest.approx(saved, rel=1e-3)
    assert plain.head_dim_aware - eight_bit.head_dim_aware == pytest.approx(saved, rel=1e-3)
    assert eight_bit.peak_flops == CHIPS[chip].bf16_flops


def test_mfu_is_work_over_peak():
    flops = forward_flops(A14B, tokens=TOKENS, text_length=512, batch=2)
    bounds = step_bounds(flops, CHIPS["tpu7x"], devices=8, head_dim=128)
    assert bounds.mfu(flops.total, bounds.spec) == pytest.approx(1.0)
    assert bounds.mfu(flops.total, 2.633) == pytest.approx(0.537, abs=1e-3)


def test_a_head_as_deep_as_the_mxu_loses_nothing():
    chip = CHIPS["tpu7x"]
    assert chip.score_share(256) == chip.score_share(512) == 1.0
    assert chip.score_share(128) == pytest.approx(2 / 3)
    assert CHIPS["v5p"].score_share(128) == 1.0


def test_clocks_follow_from_peaks():
    assert CHIPS["tpu7x"].clock_hz == pytest.approx(2.2e9, rel=1e-3)
    assert CHIPS["v6e"].clock_hz == pytest.approx(1.75e9, rel=1e-2)
    for chip in CHIPS.values():
        assert chip.sources
        assert dataclasses.replace(chip).seconds(chip.clock_hz) == pytest.approx(1.0)


def test_control_blocks_count_as_blocks():
    plain = forward_flops(A14B, tokens=TOKENS, text_length=512)
    layers = tuple(range(0, 40, 5))
    vace = dataclasses.replace(A14B, control_layers=layers, control_channels=96)
    control = forward_flops(vace, tokens=TOKENS, text_length=512)
    assert control.attention == pytest.approx(plain.attention * 48 / 40)
    assert control.feed_forward == pytest.approx(plain.feed_forward * 48 / 40)
    # One projection in, one out of each of eight blocks, and patches of 2 x 2 x 96 values.
    width = A14B.model_dim
    extra = 2 * TOKENS * width * (9 * width + 4 * 96)
    assert control.embeddings_and_head - plain.embeddings_and_head == pytest.approx(extra)


def test_face_adapters_count_their_projections():
    plain = forward_flops(A14B, tokens=TOKENS, text_length=512)
    animate = forward_flops(wan_2_2_animate_14b(), tokens=TOKENS, text_length=512)
    # Eight adapters of two projections, and the 20 more input channels of Animate.
    width = A14B.model_dim
    extra = 2 * TOKENS * width * (16 * width + 4 * 20)
    assert animate.embeddings_and_head - plain.embeddings_and_head == pytest.approx(extra)
    assert animate.attention == plain.attention
