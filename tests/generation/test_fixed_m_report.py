"""What the report of fixed-m's fast path says before and after a run."""

from types import MappingProxyType

import numpy as np
import pytest

from maxdiffusion.attention import AttentionOptions, AttentionProblem, plan_attention
from maxdiffusion.config import load_config
from maxdiffusion.generation.generate import FixedMReport
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.pipelines.programs import FixedMEligibleHeads
from tests.generation.command_line import TINY

SIZES = MappingProxyType({"batch": 1, "q_len": 32, "kv_len": 32, "heads": 2, "head_dim": 32})


def report(*overrides: str, name: str, shortest: int = 0) -> FixedMReport:
    config = load_config([str(TINY), *overrides])
    options = AttentionOptions(flash_min_seq_length=shortest)
    problem = AttentionProblem(**SIZES, dtype=np.dtype("float32"))
    return FixedMReport(config, plan_attention(name, problem, single_device_mesh(), options))


def test_nothing_is_said_or_watched_unless_asked() -> None:
    quiet = report(name="ulysses_custom_fixed_m")
    assert quiet.notes() == ()
    assert quiet.lines() == quiet.as_json() == []


@pytest.mark.parametrize(
    ("name", "shortest", "runs"),
    [("ulysses_custom", 0, "ulysses_custom"), ("ulysses_custom_fixed_m", 64, "dot_product")],
)
def test_a_run_without_fixed_m_says_why_nothing_is_counted(
    name: str, shortest: int, runs: str
) -> None:
    (note,) = report("report_fast_heads=true", name=name, shortest=shortest).notes()
    assert note == f"report_fast_heads: {runs} has no fixed-m softmax, nothing to count"


def test_a_count_names_the_layer_with_the_fewest() -> None:
    count = FixedMEligibleHeads(step=3, expert="low-noise expert", pairs=80, of_layers=(80, 71, 79))
    assert count.describe() == (
        "fixed-m softmax, step 4 (low-noise expert): 230 of 240 heads on the fast path; "
        "fewest in layer 1: 71 of 80"
    )
    assert count.as_json()["fast_pairs_of_layers"] == [80, 71, 79]
