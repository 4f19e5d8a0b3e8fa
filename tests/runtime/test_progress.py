"""Progress bars: seen on a terminal of the first process, silent elsewhere."""

import io

import jax
import pytest

from maxdiffusion.runtime.progress import bytes_bar, steps_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_steps(stream):
    with steps_bar("Denoising", 3, stream=stream) as advance:
        for _ in range(3):
            advance()
    return stream.getvalue()


def run_bytes(stream):
    with bytes_bar("Loading", stream=stream) as report:
        for done in (0, 1_000_000, 2_000_000):
            report(done, 2_000_000)
    return stream.getvalue()


def test_steps_show_count_time_left_and_seconds_per_step():
    drawn = run_steps(Terminal())
    assert "Denoising" in drawn
    assert "3/3" in drawn
    assert "s/step" in drawn
    assert "<00:00" in drawn


def test_bytes_show_amount_and_speed():
    drawn = run_bytes(Terminal())
    assert "Loading: 100%" in drawn
    assert "2.00M/2.00M" in drawn
    assert "B/s" in drawn


@pytest.mark.parametrize("run", [run_steps, run_bytes])
def test_quiet_when_nobody_looks(run, monkeypatch):
    assert run(io.StringIO()) == ""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert run(Terminal()) == ""


def test_standard_error_by_default(capsys):
    with steps_bar("Denoising", 1) as advance:
        advance()
    assert capsys.readouterr() == ("", "")
