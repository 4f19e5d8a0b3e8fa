"""The model is held to steps that were measured."""

from pathlib import Path

import pytest

from maxdiffusion.costs.published import (
    FITTED,
    PINNED,
    STEPS,
    calibration_table,
)

DOCS = Path(__file__).parents[2] / "docs/preflight.md"


@pytest.mark.parametrize("step", [s for s in STEPS if s is not FITTED], ids=lambda s: s.name)
def test_measured_steps_are_met_within_ten_percent(step):
    assert abs(step.error) < 0.10


def test_eleven_steps_of_two_chips_were_not_fitted():
    held = [step for step in STEPS if step is not FITTED]
    assert len(held) == 11
    assert {step.topology.chip.name for step in held} == {"tpu7x", "v6e"}


def test_a_kernel_for_text_changes_a_step_by_what_was_timed():
    before, after = (s for s in STEPS if s.clock == PINNED)
    saved = 40 * (1.81e-3 - 0.487e-3) + 1.75 / 40
    assert before.predicted - after.predicted == pytest.approx(saved)


def test_a_pinned_clock_makes_the_step_quicker_by_the_published_ratio():
    slow, quick = (step for step in STEPS if step.name == "launcher 0a2db3a0")
    assert slow.kernel_seconds / quick.kernel_seconds == pytest.approx(112.8 / 99.4)
    assert slow.collective_seconds == quick.collective_seconds  # links keep their clock


def test_the_kernels_are_those_that_were_counted():
    # 5 heads x 9 q blocks x (73 whole blocks and a masked one of 848 keys) at 2.2 GHz.
    ulysses = STEPS[4]
    cycles = 5 * 9 * (73 * 14_104 + 13_187 * 848 / 1024)
    assert ulysses.calls.cycles(ulysses.kernel) == pytest.approx(cycles)
    assert ulysses.kernel_seconds / 40 == pytest.approx(21.3e-3, rel=0.01)


def test_the_docs_show_the_table():
    assert calibration_table() in DOCS.read_text(encoding="utf-8")
