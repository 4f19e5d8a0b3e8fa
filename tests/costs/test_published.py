"""The model is held to steps that were measured."""

from pathlib import Path

import pytest

from maxdiffusion.costs.published import (
    BEYOND_TEN_PERCENT,
    FITTED,
    STEPS,
    calibration_table,
)

DOCS = Path(__file__).parents[2] / "docs/preflight.md"


# Steps whose error is above 10 %, stated in the docs: their code has kernels that the inputs of the
# model lack, or a chip whose programs were not compiled.
KNOWN = {
    ("full stack", "tpu7x:2x2x1"): 0.13,
    ("main a4ff3aec, fixed-m", "v6e:2x4"): 0.11,
    ("full stack", "v6e:2x4"): 0.12,
}


@pytest.mark.parametrize("step", [s for s in STEPS if s is not FITTED], ids=lambda s: s.name)
def test_measured_steps_are_met_within_ten_percent_or_known_not_to_be(step):
    assert abs(step.error) < KNOWN.get((step.name, step.topology.name), 0.10)


def test_the_steps_beyond_ten_percent_are_the_known_ones():
    assert {(step.name, step.topology.name) for step in BEYOND_TEN_PERCENT} == {*KNOWN}
    assert len(STEPS) == 12


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
