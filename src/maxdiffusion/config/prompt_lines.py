"""Lines of a prompts file: a prompt each, or JSON objects with inputs and sizes of their own.

    A red fox trots along a snowy path.

    {"prompt": "The fox turns its head.", "image": "fox.png", "seed": 3, "num_frames": 49}

A file whose name ends in .jsonl, or whose first line begins like a JSON object, is JSON lines
throughout. Paths in it are relative to its folder. A field that a line leaves out comes from the
config. Everything wrong with a file is raised at once, with the number of each line.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion.config.config import FIELDS, Config
from maxdiffusion.config.fields import InvalidValue, ListOf, Text, nearest_word
from maxdiffusion.errors import Collector, Problem, ProblemsFound

SUFFIX = ".jsonl"
JSON_OBJECT = re.compile(r'\s*\{\s*["}]')
PATHS = ("image", "last_image", "video", "mask")
NUMBERS = ("seed", "height", "width", "num_frames")
REMEDY = "Give a text file in UTF-8 with one prompt per line"


@dataclass(frozen=True, kw_only=True)
class VideoRequestLine:
    """One line of a prompts file. None, or an empty tuple, stands for the value of the config."""

    prompt: str
    image: str | None = None
    last_image: str | None = None
    video: str | None = None
    mask: str | None = None
    reference_images: tuple[str, ...] = ()
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    source: str = ""
    """File and line number for messages; empty if the line is not from a file."""

    def field(self, name: str) -> str:
        """Returns the name of a field in messages."""
        return f"{self.source} {name}".strip()


NAMES = ("prompt", *PATHS, "reference_images", *NUMBERS)


def read_request_lines(config: Config) -> tuple[VideoRequestLine, ...]:
    """Returns the videos that a config asks for: of its prompts file, or of `prompt`."""
    if not config.prompts_file:
        prompts = (config.prompt,) if isinstance(config.prompt, str) else config.prompt
        return tuple(VideoRequestLine(prompt=prompt) for prompt in prompts)
    if config.overridden("prompt") and config.overridden("prompts_file"):
        rule = "the command line gives prompt as well"
        raise _file_problem(config.prompts_file, rule, "Leave out prompt or prompts_file")
    return read_prompts_file(config.prompts_file)


def read_prompts_file(name: str) -> tuple[VideoRequestLine, ...]:
    """Returns the lines of a prompts file that are not blank."""
    path = Path(name)
    text = _text(path, name)
    if path.suffix.lower() != SUFFIX and not JSON_OBJECT.match(text):
        lines = _numbered(name, text.splitlines())
        return tuple(
            VideoRequestLine(prompt=line, source=f"{path.name}:{number}") for number, line in lines
        )
    problems, found = Collector(), []
    # JSON may hold other characters that end a line in Unicode.
    for number, line in _numbered(name, text.split("\n")):
        with problems:
            found.append(_json_line(path, number, line))
    problems.raise_if_any()
    return tuple(found)


def _numbered(name: str, lines: Sequence[str]) -> list[tuple[int, str]]:
    """Returns the lines that are not blank, with their numbers from 1."""
    found = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise _file_problem(name, "has no prompts", REMEDY)
    return found


def _text(path: Path, name: str) -> str:
    try:
        # Some editors begin a file with a byte order mark, which is no part of a prompt.
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise _file_problem(name, rule, REMEDY) from None
    except UnicodeDecodeError:
        raise _file_problem(name, "is not text in UTF-8", REMEDY) from None


def _json_line(path: Path, number: int, line: str) -> VideoRequestLine:
    """Returns a line of JSON; raises all that is wrong with it."""
    source = f"{path.name}:{number}"
    fields = _json_object(source, line)
    problems = Collector(_unknown_names(source, fields))
    values: dict[str, Any] = {}
    for name in NAMES:
        if fields.get(name) is not None:
            with problems:
                values[name] = _read_field(source, name, fields[name], path.parent)
    if fields.get("prompt") is None:
        rule, remedy = "a line needs a prompt", 'Add "prompt": "..."; it may be empty'
        problems.problems.append(_problem(source, "prompt", None, rule, remedy))
    problems.raise_if_any()
    return VideoRequestLine(**values, source=source)


def _json_object(source: str, line: str) -> Mapping[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: stated twice")
        return dict(pairs)

    try:
        value = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        rule = f"is not JSON ({str(error).splitlines()[0]})"
        remedy = "Write one JSON object on each line"
        raise ProblemsFound([_problem(source, "", _short(line), rule, remedy)]) from None
    if not isinstance(value, dict):
        rule, remedy = "must be a JSON object", 'Write {"prompt": "..."}'
        raise ProblemsFound([_problem(source, "", _short(line), rule, remedy)])
    return value


def _unknown_names(source: str, fields: Mapping[str, Any]) -> list[Problem]:
    known = f"Use some of {', '.join(NAMES)}"
    return [
        _problem(source, name, value, "no such field in a line", nearest_word(name, NAMES) or known)
        for name, value in fields.items()
        if name not in NAMES
    ]


def _read_field(source: str, name: str, value: Any, folder: Path) -> Any:
    """Returns the typed value of a field; the rules of numbers are those of the config."""
    try:
        if name in NUMBERS:
            if not isinstance(value, int):  # the config also accepts numbers as text
                raise InvalidValue("must be a number")
            return FIELDS[name].read(value)
        if name == "reference_images":
            return tuple(_located(path, folder) for path in ListOf(_Path()).read(value))
        return Text().read(value) if name == "prompt" else _located(_Path().read(value), folder)
    except InvalidValue as error:
        raise ProblemsFound([_problem(source, name, value, error.rule, error.remedy)]) from None


class _Path(Text):
    """A path or address."""

    def describe(self) -> str:
        return "the path or address of a file"

    def convert(self, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self.refuse()
        return super().convert(value)


def _located(text: str, folder: Path) -> str:
    """Returns a path of a line, relative to the folder of its file; addresses are unchanged."""
    return text if "://" in text else str(folder / Path(text).expanduser())


def _short(line: str) -> str:
    return line if len(line) <= 80 else f"{line[:77]}..."


def _problem(source: str, name: str, value: object, rule: str, remedy: str) -> Problem:
    return Problem(name=f"{source} {name}".strip(), value=value, rule=rule, remedy=remedy)


def _file_problem(file: str, rule: str, remedy: str) -> ProblemsFound:
    return ProblemsFound([Problem(name="prompts_file", value=file, rule=rule, remedy=remedy)])
