"""Loads a config from a file (or a mapping) and overrides, with all problems reported at once.

config = load_config(["configs/wan_tiny.yml", "seed=7"])
config = parse_config("sweep.py", {"seed": 7}).config
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.config.config import ALL_FIELDS, FIELDS, OVERRIDE_SOURCE, Config
from maxdiffusion.config.fields import (
    Field,
    FrozenDict,
    InvalidValue,
    Table,
    frozen,
    literal,
    nearest_word,
)
from maxdiffusion.config.files import (
    BASE_FIELD,
    SUFFIXES,
    Entry,
    FileChain,
    mapping_entries,
    plain_mapping,
    read_chain,
    read_mapping,
)
from maxdiffusion.errors import Problem, ProblemsFound

MAPPING_SOURCE = "mapping"


@dataclass(frozen=True, kw_only=True)
class ParsedConfig:
    """A config and the problems of reading it; fields with invalid values have their defaults.

    Later checks add their problems to these, so that a person sees all of them at once.
    """

    config: Config
    problems: tuple[Problem, ...] = ()

    def checked(self) -> Config:
        """Returns the config; raises ProblemsFound if there are problems."""
        if self.problems:
            raise ProblemsFound(self.problems)
        return self.config


def load_config(argv: Sequence[str]) -> Config:
    """Returns the config of `FILE [name=value ...]`; raises ProblemsFound with all problems."""
    return read_config(argv).checked()


def read_config(argv: Sequence[str]) -> ParsedConfig:
    """Parses `FILE [name=value ...]`, the arguments after the program's name.

    Raises ProblemsFound only if the files themselves cannot be read.
    """
    if not argv or ("=" in argv[0] and not argv[0].endswith(SUFFIXES)):
        raise ProblemsFound([no_file(argv[0] if argv else "")])
    return parse_config(argv[0], argv[1:])


def parse_config(
    source: object, overrides: Sequence[str] | Mapping[str, object] = ()
) -> ParsedConfig:
    """Parses a config from a path, a mapping or an `ml_collections.ConfigDict`, plus overrides.

    Overrides are texts `name=value` as on the command line, or a mapping of names to values.
    Raises ProblemsFound only if files cannot be read.
    """
    chain = read_source(source)
    values = Values()
    for entry in chain.entries:
        values.put_entry(entry)
    if isinstance(overrides, Mapping):
        for entry in mapping_entries(overrides, OVERRIDE_SOURCE):
            values.put_entry(entry)
    else:
        for argument in overrides:
            values.put_override(argument)
    problems = (*chain.problems, *values.problems)
    if any(problem.name in ("config", BASE_FIELD) for problem in chain.problems):
        raise ProblemsFound(problems)
    return ParsedConfig(config=values.config(chain.files), problems=problems)


def read_source(source: object) -> FileChain:
    """Returns the entries of a path, a mapping or a ConfigDict, with those of its base files."""
    if isinstance(source, str | os.PathLike):
        return read_chain(os.fspath(source))
    values = plain_mapping(source)
    if values is None:
        raise TypeError(f"a config is a path, a mapping or a ConfigDict, not {type(source)}")
    return read_mapping(values, MAPPING_SOURCE)


def no_file(argument: str) -> Problem:
    """Returns the problem of a command line that does not begin with a file."""
    return Problem(
        name="config",
        value=argument,
        rule="the first argument must be a YAML or Python file",
        remedy="Write the file first, for example configs/wan_tiny.yml seed=7",
    )


class Values:
    """Values and sources, put over the defaults one after another; invalid ones are problems."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {name: field.default for name, field in ALL_FIELDS.items()}
        self.sources: dict[str, str] = {}
        self.problems: list[Problem] = []

    def config(self, files: tuple[str, ...]) -> Config:
        """Returns the finished config."""
        compat = {name: value for name, value in self.values.items() if name not in FIELDS}
        return Config(
            **{name: self.values[name] for name in FIELDS},
            compat=FrozenDict(compat),
            sources=FrozenDict(self.sources),
            files=files,
        )

    def put_entry(self, entry: Entry) -> None:
        """Puts a value of a file; a table is merged into the table before it."""
        field = ALL_FIELDS.get(entry.name)
        if field is None:
            self.problems.append(unknown_field(entry.name, entry.value, entry.source))
        elif isinstance(field.kind, Table) and isinstance(entry.value, Mapping):
            self._merge(field, entry.value, entry.source)
        else:
            self._put(field, entry.value, entry.source, lambda: field.read(entry.value))

    def put_override(self, argument: str) -> None:
        """Puts `name=value`, `table.entry=value` or `table={...}`."""
        name, equals, text = argument.partition("=")
        table, dot, inner = name.partition(".")
        field = ALL_FIELDS.get(table)
        if not equals:
            self.problems.append(no_equals(argument))
        elif field is None or (dot and not isinstance(field.kind, Table)):
            self.problems.append(unknown_field(name, text, OVERRIDE_SOURCE))
        elif table == BASE_FIELD:
            rule, remedy = "belongs in a config file", "Give the other file as the first argument"
            self.problems.append(Problem(name=name, value=text, rule=rule, remedy=remedy))
        elif isinstance(field.kind, Table):
            self._put_table(field, field.kind, (inner if dot else None), text)
        else:
            self._put(field, text, OVERRIDE_SOURCE, lambda: field.parse(text))

    def _put_table(self, field: Field, table: Table[Any], inner: str | None, text: str) -> None:
        value = literal(text)
        if inner is not None:
            read = table.parse_entry
            self._add(field, inner, text, OVERRIDE_SOURCE, lambda: read(inner, text))
        elif isinstance(value, Mapping):
            self._merge(field, value, OVERRIDE_SOURCE)
        else:
            self._put(field, text, OVERRIDE_SOURCE, lambda: field.parse(text))

    def _merge(self, field: Field, entries: Mapping[Any, object], source: str) -> None:
        table = field.kind
        assert isinstance(table, Table)
        self.sources.setdefault(field.name, source)
        for inner, value in ((str(inner), value) for inner, value in entries.items()):

            def read(inner: str = inner, value: object = value) -> object:
                return table.read_entry(inner, value)

            self._add(field, inner, value, source, read)

    def _add(
        self, field: Field, inner: str, raw: object, source: str, read: Callable[[], object]
    ) -> None:
        name = f"{field.name}.{inner}"
        try:
            value = frozen(read())
        except InvalidValue as error:
            self.problems.append(invalid(name, raw, source, error))
            return
        self.values[field.name] = FrozenDict({**self.values[field.name], inner: value})
        self.sources[name] = source

    def _put(self, field: Field, raw: object, source: str, read: Callable[[], object]) -> None:
        try:
            self.values[field.name] = read()
        except InvalidValue as error:
            stated = InvalidValue(error.rule, error.remedy or default_remedy(field))
            self.problems.append(invalid(field.name, raw, source, stated))
            return
        self.sources[field.name] = source


def invalid(name: str, value: object, source: str, error: InvalidValue) -> Problem:
    """Returns the problem of a value that its field does not accept."""
    rule = error.rule + location(source)
    return Problem(name=name, value=value, rule=rule, remedy=error.remedy)


def location(source: str) -> str:
    """Returns the source of a value for an error message; empty for the command line."""
    return "" if source == OVERRIDE_SOURCE else f" ({source})"


def default_remedy(field: Field) -> str:
    """Returns a remedy that states the default, unless it is long."""
    shown = repr(field.default)
    return f"The default is {shown}" if len(shown) < 60 else ""


def unknown_field(name: str, value: object, source: str) -> Problem:
    """Returns the problem of an unknown key, with the nearest known one."""
    remedy = nearest_word(name, tuple(ALL_FIELDS)) or "docs/configuration.md lists all keys"
    rule = f"is not a known key{location(source)}"
    return Problem(name=name, value=value, rule=rule, remedy=remedy)


def no_equals(argument: str) -> Problem:
    """Returns the problem of an argument that is not an override."""
    name = argument.lstrip("-") or argument
    return Problem(
        name="argument",
        value=argument,
        rule="overrides are written key=value",
        remedy=f"Write {name}=VALUE, without spaces around `=`",
    )
