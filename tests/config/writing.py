"""Writes config files for tests and collects what is wrong with them."""

from maxdiffusion.config import load_config
from maxdiffusion.errors import ProblemsFound


def write(folder, text, name="job.yml"):
    """The path of a new file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems_of(*argv):
    """The problems of a command line, by name; fails if there are none."""
    try:
        load_config(argv)
    except ProblemsFound as error:
        return {problem.name: problem for problem in error.problems}
    raise AssertionError(f"nothing is wrong with {argv}")
