"""Help, version, exit codes and reports of every command."""

import importlib
import json
from pathlib import Path

import pytest

import maxdiffusion
from maxdiffusion.cli.commands import COMMANDS, GENERATE, PREFLIGHT, READ_PROFILE
from maxdiffusion.cli.entry import Command, exit_status, short_default, with_config
from maxdiffusion.config.config import FIELDS
from maxdiffusion.errors import Problem, ProblemsFound, RunFailed
from tests.processes import output_of

TINY = str(Path(__file__).parents[2] / "configs/wan_tiny.yml")
BY_NAME = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def failing(error: Exception) -> Command:
    def run(arguments):
        raise error

    return Command(name="fail", summary="", arguments="", details="", run=run)


@BY_NAME
def test_every_command_has_its_public_module(command):
    module = importlib.import_module(f"maxdiffusion.{command.name}")
    assert module.main == command.main


@BY_NAME
@pytest.mark.parametrize(
    "arguments", [["-h"], ["--help"], [TINY, "seed=1", "-h"], ["no.yml", "--help", "x=1"]]
)
def test_help_works_in_any_position(command, arguments, capsys):
    assert command.main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m maxdiffusion.{command.name} {command.arguments}\n")
    for name in command.common:
        assert f"\n  {name}={short_default(name)} " in text
        assert text.count(FIELDS[name].meaning) == 1


@BY_NAME
def test_help_fits_a_terminal_but_for_meanings(command):
    head = command.help().split("Common keys")[0]
    assert max(map(len, head.splitlines())) <= 100


@BY_NAME
def test_no_arguments_are_bad_input(command, capsys):
    assert command.main([]) == 2
    assert capsys.readouterr().out.startswith("usage:")


@BY_NAME
@pytest.mark.parametrize("arguments", [["--version"], ["gone.yml", "--version"]])
def test_version(command, arguments, capsys):
    assert command.main(arguments) == 0
    assert capsys.readouterr().out == f"maxdiffusion {maxdiffusion.__version__}\n"


def test_defaults_are_cut_where_they_are_long():
    assert short_default("seed") == "0"
    assert short_default("topology") == '""'
    assert short_default("compare") == "[]"
    assert short_default("ici_context_parallelism") == "null"
    assert short_default("prompt") == "A red fox trots along a ..."


def test_nothing_of_this_needs_jax(tmp_path):
    bad = tmp_path / "bad.yml"
    bad.write_text("heigth: [480\n")
    code = (
        "import sys; from maxdiffusion.cli.commands import COMMANDS, GENERATE\n"
        "for command in COMMANDS:\n"
        "    assert command.main(['x', '--help']) == command.main(['--version']) == 0\n"
        f"assert GENERATE.main([{str(bad)!r}]) == 2\n"
        f"assert GENERATE.main([{TINY!r}, 'print_config=true']) == 0\n"
        "heavy = {'jax', 'ml_collections', 'pydantic', 'numpy', 'tqdm'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    lines = output_of("-c", "import json\n" + code).splitlines()
    assert json.loads(lines[-1]) == []


def test_an_unreadable_config_is_bad_input(capsys):
    assert GENERATE.main(["gone.yml", "heigth=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("2 problems, nothing was run:\n  config='gone.yml': cannot be")
    assert "The nearest is 'height'" in captured.err


def test_print_config_does_no_work(capsys):
    def work(parsed, arguments):
        raise AssertionError

    run = with_config(work)
    run([TINY, "print_config=true", "seed=7"])
    assert "\nseed: 7  # command line\n" in capsys.readouterr().out


def test_exit_codes(capsys):
    problem = Problem(name="seed", value=-1, rule="must be an integer >= 0")
    assert failing(ProblemsFound([problem])).main(["x"]) == 2
    assert capsys.readouterr().err == (
        "1 problem, nothing was run:\n  seed=-1: must be an integer >= 0.\n"
    )
    assert failing(RunFailed("the disk is full")).main(["x"]) == 1
    assert capsys.readouterr().err == "stopped: the disk is full\n"
    assert exit_status(ValueError("x")) is None
    with pytest.raises(ValueError, match="x"):
        failing(ValueError("x")).main(["x"])


def test_preflight_reports_a_missing_topology_with_other_problems(capsys):
    assert PREFLIGHT.main([TINY, "heigth=1"]) == 2
    errors = capsys.readouterr().err
    assert "heigth='1'" in errors
    assert "topology=''" in errors


def test_read_profile_refuses_other_depths(tmp_path, capsys):
    assert READ_PROFILE.main([str(tmp_path), "deep"]) == 2
    assert "DEPTH='deep': must be a positive integer." in capsys.readouterr().err
    assert READ_PROFILE.main([str(tmp_path)]) == 2
    assert "host_N" in capsys.readouterr().err
