"""The model is held to steps that were measured."""

from pathlib import Path

import pytest

from maxdiffusion.costs.published import FITTED, STEPS, calibration_table

DOCS = Path(__file__).parents[2] / "docs/preflight.md"


@pytest.mark.parametrize("step", [s for s in STEPS if s is not FITTED], ids=lambda s: s.name)
def test_measured_steps_are_met_within_ten_percent(step):
    assert abs(step.error) < 0.10


def test_the_kernels_are_those_that_were_counted():
    # 5 heads x 9 q blocks x (73 whole blocks and a masked one of 848 keys) at 2.2 GHz.
    ulysses = STEPS[-1]
    cycles = 5 * 9 * (73 * 14_104 + 13_187 * 848 / 1024)
    assert ulysses.calls.cycles(ulysses.kernel) == pytest.approx(cycles)
    assert ulysses.kernel_seconds / 40 == pytest.approx(21.3e-3, rel=0.01)


def test_the_docs_show_the_table():
    assert calibration_table() in DOCS.read_text(encoding="utf-8")
