"""Reading YAML files: what each key says and on which line, and everything wrong with a file."""

import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from maxdiffusion.runtime.problems import Problem

BASE_KEY = "base_config"
PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{word}"
    for word in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)


class CoreLoader(yaml.SafeLoader):
    """Plain words as YAML 1.2 reads them: `1e-5` is a number, `no` a word, `010` ten."""


CoreLoader.yaml_implicit_resolvers = {}
for tag, pattern, first in (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,30}", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), first
    )


def plain_int(loader: CoreLoader, node: Any) -> int:
    """The decimal number of a node; a leading zero does not make it octal."""
    return int(loader.construct_scalar(node))


CoreLoader.add_constructor("tag:yaml.org,2002:int", plain_int)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key of a file: its value, and where it stands."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, kw_only=True)
class FileChain:
    """A file and those that it is based on, entries of the outermost base first."""

    files: tuple[str, ...]
    entries: tuple[Entry, ...]
    problems: tuple[Problem, ...]


def read_chain(path: str) -> FileChain:
    """All entries of `path` and its bases, in the order in which later ones win."""
    files: list[str] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    following: str | None = os.path.normpath(path)
    while following is not None:
        if any(same_file(following, seen) for seen in files):
            rule = f"files must not be based on each other: {' -> '.join([*files, following])}"
            remedy = f"Remove {BASE_KEY} from one of them"
            problems.append(Problem(name=BASE_KEY, value=following, rule=rule, remedy=remedy))
            break
        found, mistakes = read_file(following, asked_by=files[-1] if files else None)
        files.append(following)
        problems += mistakes
        entries = [entry for entry in found if entry.name != BASE_KEY] + entries
        following = base_of(following, found, problems)
    return FileChain(files=tuple(files), entries=tuple(entries), problems=tuple(problems))


def base_of(path: str, entries: list[Entry], problems: list[Problem]) -> str | None:
    """The file that `path` is based on, from its entries; None if on nothing."""
    base = next((entry.value for entry in entries if entry.name == BASE_KEY), None)
    if base is None:
        return None
    if not isinstance(base, str) or not base:
        rule = f"must be the path of a YAML file ({path})"
        problems.append(Problem(name=BASE_KEY, value=base, rule=rule, remedy="Write one, or none"))
        return None
    return os.path.normpath(os.path.join(os.path.dirname(path), base))


def same_file(first: str, second: str) -> bool:
    """Whether two paths lead to one file."""
    return os.path.realpath(first) == os.path.realpath(second)


def read_file(path: str, *, asked_by: str | None) -> tuple[list[Entry], list[Problem]]:
    """The entries of one file, and everything that is wrong with its form."""
    name = "config" if asked_by is None else BASE_KEY

    def wrong(rule: str, remedy: str) -> tuple[list[Entry], list[Problem]]:
        where = "" if asked_by is None else f" (asked for by {asked_by})"
        return [], [Problem(name=name, value=path, rule=rule + where, remedy=remedy)]

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        return wrong(f"cannot be read: {error.strerror}", missing_remedy(path))
    except UnicodeDecodeError:
        return wrong("is not a text file in UTF-8", "Give a YAML file")
    try:
        return read_text(text, path)
    except FormError as error:
        return wrong(str(error), "Give a file with lines of the form `key: value`")
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        # `!!int x` and the like end in whatever Python's own conversion raises.
        rule = f"is not YAML: {yaml_complaint(error)}"
        return wrong(rule, "Mend that place, or give a YAML file")


class FormError(ValueError):
    """A YAML text that is not made of keys and values."""


def read_text(text: str, path: str) -> tuple[list[Entry], list[Problem]]:
    """The entries of a YAML text, and the keys that stand in it twice."""
    loader = CoreLoader(text)
    try:
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":
            raise FormError("is empty")
        if not isinstance(root, yaml.MappingNode):
            held = "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
            raise FormError(f"must hold keys and values at its top level, but holds {held}")
        problems = list(repeated_keys(root, path, ()))
        lines = {str(key.value): key.start_mark.line + 1 for key, _ in root.value}
        values = loader.construct_document(root)
    finally:
        loader.dispose()
    entries = [
        Entry(name=str(name), value=value, source=f"{path}:{lines.get(str(name), 1)}")
        for name, value in values.items()
    ]
    return entries, problems


def repeated_keys(
    node: yaml.Node, path: str, parents: tuple[tuple[str, int], ...]
) -> Iterator[Problem]:
    """A problem for every key that stands twice in one mapping, at any depth."""
    if any(identity == id(node) for _, identity in parents):
        raise yaml.YAMLError("an alias (*) stands for something that it is part of itself")
    if node.tag not in PLAIN_TAGS:
        raise yaml.MarkedYAMLError(
            problem=f"the tag {node.tag} is not known", problem_mark=node.start_mark
        )
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from repeated_keys(item, path, (*parents, ("", id(node))))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        word, line = str(key.value), key.start_mark.line + 1
        if word in seen and word != "<<":
            yield repeated(parents, word, value, f"{path}, lines {seen[word]} and {line}")
        seen[word] = line
        yield from repeated_keys(value, path, (*parents, (word, id(node))))


def repeated(
    parents: tuple[tuple[str, int], ...], word: str, value: yaml.Node, where: str
) -> Problem:
    """The problem for a key that stands twice."""
    name = ".".join([*(parent for parent, _ in parents if parent), word])
    shown = value.value if isinstance(value, yaml.ScalarNode) else "..."
    return Problem(
        name=name, value=shown, rule=f"is given twice ({where})", remedy="Keep one of the two"
    )


def yaml_complaint(error: Exception) -> str:
    """One line about where and why a text is not YAML."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())


def missing_remedy(path: str) -> str:
    """The way out for a file that cannot be read: a file beside it of nearly that name."""
    try:
        beside = [file.name for file in (Path(path).parent).iterdir() if file.suffix == ".yml"]
    except OSError:
        beside = []
    near = difflib.get_close_matches(Path(path).name, beside, n=1, cutoff=0.5)
    if near and near[0] != Path(path).name:
        return f"The nearest there is {Path(path).with_name(near[0])}"
    return "Give the path of a YAML file that can be read"
