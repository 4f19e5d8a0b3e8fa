"""Messages of the first process, and progress bars on its terminal; silent elsewhere."""

import io
import logging
import subprocess
import sys

import jax
import pytest

from maxdiffusion.runtime.progress import bytes_bar, configure_logging, steps_bar

logger = logging.getLogger("maxdiffusion.somewhere")


@pytest.fixture(autouse=True)
def restored_logging():
    yield
    configure_logging()


def test_messages_go_to_stdout_as_plain_text(capsys):
    configure_logging()
    logger.info("wrote %s", "video.mp4")
    logger.debug("a detail")
    assert capsys.readouterr() == ("wrote video.mp4\n", "")


def test_a_second_call_does_not_repeat_messages(capsys):
    configure_logging()
    configure_logging()
    logger.info("once")
    assert capsys.readouterr().out == "once\n"


def test_other_processes_write_only_warnings(capsys):
    configure_logging(first_process=False)
    logger.info("message")
    logger.warning("warning")
    assert capsys.readouterr() == ("", "warning\n")


def test_messages_of_other_packages_are_not_shown(capsys):
    configure_logging()
    logging.getLogger("elsewhere").info("message")
    assert capsys.readouterr() == ("", "")


def test_logging_does_not_import_jax():
    code = (
        "import sys; from maxdiffusion.runtime.progress import configure_logging;"
        "configure_logging(); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
