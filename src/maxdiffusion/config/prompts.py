"""The prompts of a job, from the config or from a file of lines."""

from pathlib import Path

from maxdiffusion.config.config import Config
from maxdiffusion.runtime.problems import Problem, ProblemsFound


def read_prompts(config: Config) -> tuple[str, ...]:
    """The prompts in order; raises ProblemsFound if there are none."""
    if not config.prompts_file:
        return (config.prompt,) if isinstance(config.prompt, str) else config.prompt
    if config.overridden("prompt") and config.overridden("prompts_file"):
        rule = "the command line also gives prompt, and only one of the two can hold"
        raise ProblemsFound([file_problem(config, rule, "Leave out prompt or prompts_file")])
    return read_lines(config)


def read_lines(config: Config) -> tuple[str, ...]:
    """The lines of the prompts file that are not blank."""
    remedy = "Give a text file in UTF-8 with one prompt per line"
    try:
        # Some editors begin a file with a mark of its encoding, which is no part of a prompt.
        text = Path(config.prompts_file).read_text(encoding="utf-8-sig")
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise ProblemsFound([file_problem(config, rule, remedy)]) from None
    except UnicodeDecodeError:
        raise ProblemsFound([file_problem(config, "is not text in UTF-8", remedy)]) from None
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise ProblemsFound([file_problem(config, "holds no prompts", remedy)])
    return lines


def file_problem(config: Config, rule: str, remedy: str) -> Problem:
    """A problem with the prompts file."""
    return Problem(name="prompts_file", value=config.prompts_file, rule=rule, remedy=remedy)
