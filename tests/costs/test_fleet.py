"""The simulated queue agrees with queueing theory, and the command with its arguments."""

import json

import pytest

from maxdiffusion.cli.commands import PLAN_FLEET
from maxdiffusion.costs.fleet import Load, Work, least_replicas, parse_arguments, simulate
from maxdiffusion.errors import ProblemsFound


def load(per_hour, *seconds):
    works = tuple(Work(name=str(one), seconds=one) for one in seconds)
    return Load(per_hour=per_hour, works=works)


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_one_server_waits_as_pollaczek_and_khinchine_say(busy):
    """M/D/1: the mean wait is busy x seconds / (2 (1 - busy)).

    The mean of 36,000 correlated waits has a standard error of about 3 % at 0.8.
    """
    found = simulate(load(busy * 360, 10.0), 1)
    assert found.mean == pytest.approx(busy * 10 / (2 * (1 - busy)), rel=0.1)


def test_a_mix_waits_as_its_second_moment_says():
    """M/G/1: the mean wait is rate x E[s^2] / (2 (1 - busy))."""
    mix = load(180, 4.0, 16.0)
    rate, second_moment = 180 / 3600, (4**2 + 16**2) / 2
    expected = rate * second_moment / (2 * (1 - mix.busy_replicas))
    assert simulate(mix, 1).mean == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("per_hour", [10, 1000, 200_000])
def test_the_answer_is_the_least_that_suffices(per_hour):
    asked = load(per_hour, 95.0)
    best = least_replicas(asked, 30.0)
    assert best.p95 <= 30.0
    fewer = best.replicas - 1
    assert fewer <= asked.busy_replicas or simulate(asked, fewer).p95 > 30.0


def test_reports_of_preflight_give_seconds_and_chips(tmp_path):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"predicted_seconds_per_video": 95.0, "devices": 8}))
    request = parse_arguments(["rate=100", f"mix=720p:{report}:3", "mix=480p:20"])
    assert request.chips == 8
    assert request.load.mean_seconds == pytest.approx((3 * 95 + 20) / 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ["mix=a:1"],
        ["rate=1"],
        ["rate=0", "mix=a:1"],
        ["rate=1", "mix=a"],
        ["x=1"],
        ["rate=1", "mix=a:-1"],
    ],
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ProblemsFound):
        parse_arguments(arguments)


def test_the_command_prints_a_table_and_draws(tmp_path, capsys):
    plot = tmp_path / "fleet.svg"
    arguments = ["rate=60", "mix=a:30", "mix=b:10:2", "chips=4", "wait=20", f"plot={plot}"]
    assert PLAN_FLEET.main(arguments) == 0
    text = capsys.readouterr().out
    assert "| replicas | chips |" in text
    assert "60 videos per hour" in text
    assert plot.read_text().startswith("<?xml")
