"""From a YAML file and overrides to a config, with everything that is wrong reported at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.config.config import OVERRIDE_SOURCE, Config
from maxdiffusion.config.keys import KEYS
from maxdiffusion.config.kinds import MisreadError, literal, nearest_word
from maxdiffusion.config.schema import Frozen, Key, Table
from maxdiffusion.config.yaml_files import BASE_KEY, Entry, read_chain
from maxdiffusion.runtime.problems import Problem, ProblemsFound


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A config as far as it could be read, and what was wrong: bad values are at their defaults."""

    config: Config
    problems: tuple[Problem, ...]


def load_config(argv: Sequence[str]) -> Config:
    """The config for `FILE [key=value ...]` (the arguments after the program's name).

    Raises ProblemsFound with all problems. No device is touched.
    """
    reading = read_config(argv)
    if reading.problems:
        raise ProblemsFound(reading.problems)
    return reading.config


def read_config(argv: Sequence[str]) -> Reading:
    """As load_config, but wrong values are handed on, so that later checks can be added to them.

    Raises ProblemsFound only when the files themselves cannot be read.
    """
    if not argv or ("=" in argv[0] and not argv[0].endswith((".yml", ".yaml"))):
        raise ProblemsFound([no_file(argv[0] if argv else "")])
    chain = read_chain(argv[0])
    assembly = Assembly()
    for entry in chain.entries:
        assembly.put_entry(entry)
    for argument in argv[1:]:
        assembly.put_override(argument)
    unreadable = [problem for problem in chain.problems if problem.name in ("config", BASE_KEY)]
    problems = (*chain.problems, *assembly.problems)
    if unreadable:
        raise ProblemsFound(problems)
    return Reading(config=assembly.config(chain.files), problems=problems)


def no_file(argument: str) -> Problem:
    """The problem of a command line that does not begin with a file."""
    return Problem(
        name="config",
        value=argument,
        rule="the first argument must be a YAML file",
        remedy="Write the file first, for example configs/wan_tiny.yml seed=7",
    )


class Assembly:
    """Values laid over the defaults one after another; what does not fit becomes a problem."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {name: key.default for name, key in KEYS.items()}
        self.sources: dict[str, str] = {}
        self.problems: list[Problem] = []

    def config(self, files: tuple[str, ...]) -> Config:
        """The finished config."""
        return Config(values=Frozen(self.values), sources=Frozen(self.sources), files=files)

    def put_entry(self, entry: Entry) -> None:
        """Lays a value of a file over what is there; a table is merged into the table there."""
        key = KEYS.get(entry.name)
        if key is None:
            self.problems.append(unknown_key(entry.name, entry.value, entry.source))
        elif isinstance(key.kind, Table) and isinstance(entry.value, Mapping):
            self._merge(key, entry.value, entry.source)
        else:
            self._put(key, entry.value, entry.source, lambda: key.kind.read(entry.value))

    def put_override(self, argument: str) -> None:
        """Lays `key=value`, `table.entry=value` or `table={...}` over what is there."""
        name, equals, text = argument.partition("=")
        table, dot, inner = name.partition(".")
        if not equals:
            self.problems.append(no_equals(argument))
        elif table not in KEYS or (dot and not isinstance(KEYS[table].kind, Table)):
            self.problems.append(unknown_key(name, text, OVERRIDE_SOURCE))
        elif table == BASE_KEY:
            rule, remedy = "belongs into a YAML file", "Give the other file as the first argument"
            self.problems.append(Problem(name=name, value=text, rule=rule, remedy=remedy))
        elif dot:
            self._put_inner(KEYS[table], inner, text)
        else:
            self._put_text(KEYS[table], text)

    def _put_text(self, key: Key, text: str) -> None:
        value = literal(text) if isinstance(key.kind, Table) else None
        if isinstance(value, Mapping):
            self._merge(key, value, OVERRIDE_SOURCE)
        else:
            self._put(key, text, OVERRIDE_SOURCE, lambda: key.kind.parse(text))

    def _put_inner(self, key: Key, inner: str, text: str) -> None:
        table = key.kind
        assert isinstance(table, Table)
        self._add(key, inner, text, OVERRIDE_SOURCE, lambda: table.parse_entry(inner, text))

    def _merge(self, key: Key, entries: Mapping[Any, Any], source: str) -> None:
        table = key.kind
        assert isinstance(table, Table)
        self.sources.setdefault(key.name, source)
        for inner, value in ((str(inner), value) for inner, value in entries.items()):

            def read(inner: str = inner, value: Any = value) -> Any:
                return table.read_entry(inner, value)

            self._add(key, inner, value, source, read)

    def _add(self, key: Key, inner: str, raw: object, source: str, read: Callable[[], Any]) -> None:
        try:
            value = freeze(read())
        except MisreadError as error:
            self.problems.append(misread(f"{key.name}.{inner}", raw, source, error))
            return
        self.values[key.name] = Frozen({**self.values[key.name], inner: value})
        self.sources[f"{key.name}.{inner}"] = source

    def _put(self, key: Key, raw: object, source: str, read: Callable[[], Any]) -> None:
        try:
            self.values[key.name] = freeze(read())
        except MisreadError as error:
            remedy = error.remedy or default_remedy(key)
            self.problems.append(misread(key.name, raw, source, MisreadError(error.rule, remedy)))
            return
        self.sources[key.name] = source


def freeze(value: Any) -> Any:
    """The same value with tuples for lists and frozen tables for dicts, at any depth."""
    if isinstance(value, Mapping):
        return Frozen({str(name): freeze(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def misread(name: str, value: object, source: str, error: MisreadError) -> Problem:
    """The problem for a value that its key does not accept."""
    where = "" if source == OVERRIDE_SOURCE else f" ({source})"
    remedy = error.remedy or "Correct it or leave it out"
    return Problem(name=name, value=value, rule=error.rule + where, remedy=remedy)


def default_remedy(key: Key) -> str:
    """The way out of a value that nothing is known about: the default, unless it is long."""
    shown = repr(key.default)
    return f"The default is {shown}" if len(shown) < 60 else "Correct it or leave it out"


def unknown_key(name: str, value: object, source: str) -> Problem:
    """The problem for a key that nobody knows, with the nearest one that is known."""
    where = "" if source == OVERRIDE_SOURCE else f" ({source})"
    remedy = nearest_word(name, tuple(KEYS)) or "docs/configuration.md lists all keys"
    return Problem(name=name, value=value, rule=f"is not a known key{where}", remedy=remedy)


def no_equals(argument: str) -> Problem:
    """The problem for an argument that is not an override."""
    name = argument.lstrip("-") or argument
    return Problem(
        name="argument",
        value=argument,
        rule="overrides are written key=value",
        remedy=f"Write {name}=VALUE, without spaces around `=`",
    )
