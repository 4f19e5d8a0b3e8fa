"""A rise is found soon, and noise is not taken for one."""

import math

import numpy as np
import pytest

from maxdiffusion.training.watch.divergence import LIMIT, WINDOW, DivergenceWatch


def watch():
    return DivergenceWatch(learning_rate=1e-4)


def first_warning(losses, norms=None, part="transformer"):
    norms = np.ones(len(losses)) if norms is None else norms
    found = watch()
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
        text = found.add(step, part, loss=float(loss), norm=float(norm))
        if text is not None:
            return step, text
    return None


def noise(seed, steps, shape=4.0):
    """Losses of mean 1 with a long tail: a deviation of 0.5 for shape 4."""
    return np.random.default_rng(seed).gamma(shape, 1 / shape, steps)


def test_noise_with_a_long_tail_is_no_rise():
    assert first_warning(noise(0, 8_000)) is None


def test_a_falling_loss_is_no_rise():
    steps = np.arange(3000)
    assert first_warning((0.2 + np.exp(-steps / 300)) * noise(1, 3000)) is None


@pytest.mark.parametrize(("rise", "within"), [(2.0, 32), (0.8, 100)])
def test_a_rise_is_found_within_steps_and_names_a_way_out(rise, within):
    # A rise of 2 is 4 deviations, of 0.8 about 1.6: less than 1.8 of 16 steps, enough for 64.
    losses = noise(2, 1000)
    losses[600:] += rise
    step, text = first_warning(losses)
    assert 600 < step <= 600 + within
    assert "the loss of transformer rises" in text
    assert "learning_rate=5e-05" in text
    assert "opt_enable_grad_global_norm_clipping=true max_grad_norm=1 (the median)" in text


def test_a_slow_rise_is_found_against_the_lowest_level():
    steps = np.arange(6000)
    found = first_warning((1 + np.maximum(0, steps - 1000) / 5000) * noise(3, 6000))
    assert found is not None
    assert 1000 < found[0] < 5000


def test_gradient_norms_that_grow_fourfold_are_found():
    norms = np.exp(np.random.default_rng(4).normal(0, 0.3, 1000))
    assert first_warning(np.ones(1000), norms) is None
    norms[500:] *= 6
    step, text = first_warning(np.ones(1000), norms)
    assert 500 < step < 532
    assert "the gradient norm of transformer rises" in text


def test_experts_are_watched_alone_and_warned_of_once():
    found, warnings = watch(), []
    for step in range(1, 1200):
        loss = noise(step, 1)[0] * (1.0 if step % 2 else 0.2)
        loss += 3.0 if step > 900 and step % 2 else 0.0
        text = found.add(step, "high" if step % 2 else "low", loss=loss, norm=1.0)
        warnings += [text] if text else []
    assert len(warnings) == 1
    assert "loss of high rises" in warnings[0]


def test_a_continued_run_knows_the_steps_before():
    losses = noise(5, 700)
    losses[600:] += 3.0
    lines = [
        {"step": step, "part": "", "learning/loss": float(loss), "learning/gradient_norm": 1.0}
        for step, loss in enumerate(losses[:600], start=1)
    ]
    found = watch()
    found.replay(lines)
    texts = [found.add(601 + n, "", loss=float(losses[600 + n]), norm=1.0) for n in range(32)]
    assert any(texts)


def test_the_limit_is_that_of_its_derivation():
    # Student's t with 255 degrees is nearly normal: P(t > 5) is about 5e-7.
    from scipy import stats

    assert stats.t.sf(5, WINDOW - 1) < 6e-7
    selection = math.sqrt(2 * math.log(1000)) * math.sqrt(1 / WINDOW)
    assert 5 + selection / math.sqrt(1 / 64 + 1 / WINDOW) < LIMIT
