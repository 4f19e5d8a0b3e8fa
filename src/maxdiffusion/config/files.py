"""Reads config files: YAML with line numbers, Python files with `get_config()`, and base files.

A Python file defines `get_config()`, which returns an `ml_collections.ConfigDict` (or a dict) with
the same fields as a YAML file. Either form may be the `base_config` of the other.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from maxdiffusion.errors import Collector, Problem, ProblemsFound

BASE_FIELD = "base_config"
PYTHON_SUFFIX = ".py"
SUFFIXES = (".yml", ".yaml", PYTHON_SUFFIX)
PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{word}"
    for word in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)


class CoreLoader(yaml.SafeLoader):
    """Reads plain words as YAML 1.2 does: `1e-5` is a number, `no` a word, `010` ten."""


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


def plain_int(loader: CoreLoader, node: yaml.ScalarNode) -> int:
    """Returns the decimal number of a node; a leading zero does not make it octal."""
    return int(loader.construct_scalar(node))


CoreLoader.add_constructor("tag:yaml.org,2002:int", plain_int)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One value of a file, with its source as `FILE:LINE` or the path of a Python file."""

    name: str
    value: object
    source: str


@dataclass(frozen=True, kw_only=True)
class FileChain:
    """A file and its bases: entries in the order in which later ones win, and all problems."""

    files: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """The entries of one file, and the names that appear in it twice."""

    entries: tuple[Entry, ...] = ()
    repeated: tuple[Problem, ...] = ()

    @property
    def base(self) -> object:
        """Returns the value of `base_config`; None if there is none."""
        return next((entry.value for entry in self.entries if entry.name == BASE_FIELD), None)

    @property
    def own_entries(self) -> tuple[Entry, ...]:
        """Returns the entries without `base_config`."""
        return tuple(entry for entry in self.entries if entry.name != BASE_FIELD)


def read_chain(path: str) -> FileChain:
    """Reads a file and its bases."""
    return read_bases(os.path.normpath(path), FileChain(), asked_by=None)


def read_mapping(values: Mapping[str, object], source: str) -> FileChain:
    """Reads the values of a mapping and the base file that it names, relative to this folder."""
    own = ConfigFile(entries=mapping_entries(values, source))
    problems = Collector()
    chain = FileChain()
    with problems:
        base = base_path(source, own.base)
        chain = chain if base is None else read_bases(base, chain, asked_by=source)
    return FileChain(
        files=chain.files,
        entries=(*chain.entries, *own.own_entries),
        problems=(*problems.problems, *chain.problems),
    )


def read_bases(path: str, below: FileChain, *, asked_by: str | None) -> FileChain:
    """Reads a file that is the base of `below`, and the base of that one, and so on.

    `asked_by` is the file or mapping that names the file as its base; None for the first file.
    """
    problems = Collector(below.problems)
    found, base = ConfigFile(), None
    with problems:
        check_not_repeated(path, below.files)
        found = read_file(path, asked_by=asked_by)
    with problems:
        if found.repeated:
            raise ProblemsFound(found.repeated)
    with problems:
        base = base_path(path, found.base)
    chain = FileChain(
        files=(*below.files, path),
        entries=(*found.own_entries, *below.entries),
        problems=tuple(problems.problems),
    )
    return chain if base is None else read_bases(base, chain, asked_by=path)


def check_not_repeated(path: str, files: tuple[str, ...]) -> None:
    """Raises ProblemsFound if a file is, indirectly, its own base."""
    if any(os.path.realpath(path) == os.path.realpath(seen) for seen in files):
        rule = f"files must not be based on each other: {' -> '.join([*files, path])}"
        remedy = f"Remove {BASE_FIELD} from one of them"
        raise ProblemsFound([Problem(name=BASE_FIELD, value=path, rule=rule, remedy=remedy)])


def base_path(path: str, base: object) -> str | None:
    """Returns the path of a file's base, given the value of `base_config`; None without one."""
    if base is None:
        return None
    if not isinstance(base, str) or not base:
        rule = f"must be the path of a YAML or Python file ({path})"
        raise ProblemsFound([Problem(name=BASE_FIELD, value=base, rule=rule)])
    return os.path.normpath(os.path.join(os.path.dirname(path), base))


def read_file(path: str, *, asked_by: str | None) -> ConfigFile:
    """Reads one YAML or Python file; raises ProblemsFound if it cannot be read."""

    def problem(rule: str, remedy: str = "") -> ProblemsFound:
        name = "config" if asked_by is None else BASE_FIELD
        where = "" if asked_by is None else f" (asked for by {asked_by})"
        return ProblemsFound([Problem(name=name, value=path, rule=rule + where, remedy=remedy)])

    try:
        text = Path(path).read_text(encoding="utf-8")
        return run_python(path) if path.endswith(PYTHON_SUFFIX) else read_yaml(text, path)
    except OSError as error:
        raise problem(f"cannot be read: {error.strerror}", missing_remedy(path)) from None
    except UnicodeDecodeError:
        raise problem("is not a text file in UTF-8", "Give a YAML or Python file") from None
    except FormError as error:
        raise problem(str(error), error.remedy) from None
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        # `!!int x` and the like end in whatever Python's own conversion raises.
        raise problem(f"is not YAML: {yaml_complaint(error)}") from None


class FormError(ValueError):
    """A file that can be read but is not made of fields and values."""

    def __init__(self, rule: str, remedy: str = ""):
        super().__init__(rule)
        self.remedy = remedy


def run_python(path: str) -> ConfigFile:
    """Returns the entries of `get_config()` in a Python file."""
    import runpy

    try:
        get_config = runpy.run_path(path).get("get_config")
        values = None if get_config is None else plain_mapping(get_config())
    except Exception as error:
        raise FormError(f"fails with {python_complaint(error, path)}") from error
    if values is None:
        rule = "must define get_config(), which returns an ml_collections.ConfigDict"
        raise FormError(rule, "Write `def get_config(): ...` that returns the ConfigDict")
    return ConfigFile(entries=mapping_entries(values, path))


def plain_mapping(values: object) -> Mapping[str, object] | None:
    """Returns a mapping or an `ml_collections.ConfigDict` as a plain mapping; None for others."""
    if isinstance(values, Mapping):
        return values
    # Takes 0.1 s, which commands with YAML files need not spend.
    from ml_collections import ConfigDict

    if not isinstance(values, ConfigDict):
        return None
    return dict(values.to_dict())


def mapping_entries(values: Mapping[str, object], source: str) -> tuple[Entry, ...]:
    """Returns the values of a mapping as entries with one source."""
    return tuple(
        Entry(name=str(name), value=value, source=source) for name, value in values.items()
    )


def python_complaint(error: Exception, path: str) -> str:
    """Returns one line about an exception of a Python file, with the last line of that file."""
    import traceback

    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.realpath(frame.filename) == os.path.realpath(path)
    ]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f" (line {lines[-1]})" if lines else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + where


def read_yaml(text: str, path: str) -> ConfigFile:
    """Returns the entries of a YAML text, and the keys that it states twice."""
    loader = CoreLoader(text)
    remedy = "Give a file with lines of the form `key: value`"
    try:
        root = loader.get_single_node()
        if root is None or root.tag == "tag:yaml.org,2002:null":
            raise FormError("is empty", remedy)
        if not isinstance(root, yaml.MappingNode):
            held = "a list" if isinstance(root, yaml.SequenceNode) else "plain text"
            rule = f"must have keys and values at its top level, but has {held}"
            raise FormError(rule, remedy)
        repeated = tuple(repeated_keys(root, path, ()))
        lines = {str(key.value): key.start_mark.line + 1 for key, _ in root.value}
        values: Mapping[object, object] = loader.construct_document(root)
    finally:
        loader.dispose()
    entries = tuple(
        Entry(name=str(name), value=value, source=f"{path}:{lines.get(str(name), 1)}")
        for name, value in values.items()
    )
    return ConfigFile(entries=entries, repeated=repeated)


# The names and identities of the mappings around a node.
Parents = tuple[tuple[str, int], ...]


def repeated_keys(node: yaml.Node, path: str, parents: Parents) -> Iterator[Problem]:
    """Finds the keys that appear twice in one mapping, at any depth."""
    if any(identity == id(node) for _, identity in parents):
        raise yaml.YAMLError("an alias (*) refers to a value that contains the alias")
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
            yield repeated_key(parents, word, value, f"{path}, lines {seen[word]} and {line}")
        seen[word] = line
        yield from repeated_keys(value, path, (*parents, (word, id(node))))


def repeated_key(parents: Parents, word: str, value: yaml.Node, where: str) -> Problem:
    """Returns the problem of a key that appears twice."""
    name = ".".join([*(parent for parent, _ in parents if parent), word])
    shown = value.value if isinstance(value, yaml.ScalarNode) else "..."
    return Problem(name=name, value=shown, rule=f"is given twice ({where})")


def yaml_complaint(error: Exception) -> str:
    """Returns one line about where and why a text is not YAML."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark: Any = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())


def missing_remedy(path: str) -> str:
    """Returns the remedy for a file that cannot be read: a neighbour with a similar name."""
    try:
        neighbours = [f.name for f in Path(path).parent.iterdir() if f.suffix in SUFFIXES]
    except OSError:
        neighbours = []
    near = difflib.get_close_matches(Path(path).name, neighbours, n=1, cutoff=0.5)
    if near and near[0] != Path(path).name:
        return f"The nearest there is {Path(path).with_name(near[0])}"
    return ""
