"""Field types of a config: which values they accept from files and from the command line.

`setting` declares a typed attribute of the config:

    height: int = setting(720, "Rows of the video, in pixels.", Integer(minimum=16, step=16))

The third argument is left out where the default says enough: text, booleans and any finite number.
"""

import ast
import dataclasses
import difflib
import json
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar, dataclass_transform

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

DECIMAL = re.compile(r"[-+]?[0-9]{1,30}")
TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})


class InvalidValue(ValueError):
    """A value that a field does not accept: the rule and, where there is one, a remedy."""

    def __init__(self, rule: str, remedy: str = ""):
        super().__init__(rule)
        self.rule = rule
        self.remedy = remedy


class FrozenDict(dict[str, T]):
    """A dict that cannot be changed and can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((name, repr(value)) for name, value in self.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenDict, (dict(self),))

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("a config cannot be changed after it is loaded")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


class Kind(ABC, Generic[T_co]):
    """The type of a field's value: `read` takes values of a file, `parse` the text after `=`."""

    @abstractmethod
    def describe(self) -> str:
        """Returns a noun phrase for the accepted values."""

    @abstractmethod
    def convert(self, value: object) -> T_co:
        """Returns the typed value of one that is not null."""

    def read(self, value: object) -> T_co:
        """Returns the typed value of one from a file or from JSON."""
        if value is None:
            raise InvalidValue(f"null is not {self.describe()}")
        return self.convert(value)

    def parse(self, text: str) -> T_co:
        """Returns the typed value for the text of an override."""
        return self.read(None if text == "null" else text)

    def refuse(self, remedy: str = "") -> InvalidValue:
        """Returns the error for a value that is not of this kind."""
        return InvalidValue(f"must be {self.describe()}", remedy)


class Boolean(Kind[bool]):
    """True or false, also written 1/0, yes/no and on/off."""

    def describe(self) -> str:
        return "true or false"

    def convert(self, value: object) -> bool:
        word = str(value).lower()
        if word in TRUE_WORDS:
            return True
        if word in FALSE_WORDS:
            return False
        raise self.refuse()


@dataclass(frozen=True, kw_only=True)
class Integer(Kind[int]):
    """An integer within limits, on a grid of `step` from `offset`; or one of `special`."""

    minimum: int | None = None
    maximum: int | None = None
    step: int = 1
    offset: int = 0
    special: tuple[int, ...] = ()

    def describe(self) -> str:
        words = "an integer" if self.step == 1 else f"a multiple of {self.step}"
        if self.offset:
            words = f"an integer of the form {self.step}n+{self.offset}"
        others = "".join(f" or {value}" for value in self.special)
        return words + limits(self.minimum, self.maximum) + others

    def convert(self, value: object) -> int:
        number = as_integer(value)
        if number is None:
            raise self.refuse()
        if number in self.special:
            return number
        low = number if self.minimum is None else max(number, self.minimum)
        inside = low if self.maximum is None else min(low, self.maximum)
        if inside != number or (number - self.offset) % self.step:
            raise self.refuse(self.nearest(inside))
        return number

    def nearest(self, number: int) -> str:
        """Returns a remedy that names the allowed numbers on both sides."""
        below = number - (number - self.offset) % self.step
        candidates = [below] if below == number else [below, below + self.step]
        allowed = [n for n in candidates if self.minimum is None or n >= self.minimum]
        return "Use " + " or ".join(str(n) for n in allowed)


@dataclass(frozen=True, kw_only=True)
class Number(Kind[float]):
    """A finite number within limits; `above` is a limit that is itself excluded."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def describe(self) -> str:
        over = "" if self.above is None else f" > {self.above}"
        return "a finite number" + over + limits(self.minimum, self.maximum)

    def convert(self, value: object) -> float:
        number = as_number(value)
        if number is None or not math.isfinite(number):
            raise self.refuse()
        too_low = self.minimum is not None and number < self.minimum
        too_high = self.maximum is not None and number > self.maximum
        if too_low or too_high or (self.above is not None and number <= self.above):
            raise self.refuse()
        return number


class Text(Kind[str]):
    """Any text, unchanged."""

    def describe(self) -> str:
        return "text"

    def convert(self, value: object) -> str:
        if isinstance(value, str) and is_unicode(value):
            return value
        if isinstance(value, bool | int | float):
            raise self.refuse(f'Put it in quotes: "{value}"')
        raise self.refuse()


class Secret(Kind[str]):
    """A text that is replaced by `hidden`, so that it cannot be printed."""

    def describe(self) -> str:
        return "text that is not stored"

    def convert(self, value: object) -> str:
        return "hidden" if Text().convert(value) else ""


@dataclass(frozen=True)
class Choice(Kind[str]):
    """One of a few words."""

    words: tuple[str, ...]

    def describe(self) -> str:
        return "one of " + ", ".join(repr(word) for word in self.words)

    def convert(self, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        raise self.refuse(nearest_word(str(value), self.words))


@dataclass(frozen=True)
class ListOf(Kind[tuple[T_co, ...]]):
    """A list of items of one kind, stored as a tuple."""

    item: Kind[T_co]

    def describe(self) -> str:
        return f"a list, each item {self.item.describe()}"

    def convert(self, value: object) -> tuple[T_co, ...]:
        if not isinstance(value, list | tuple):
            raise self.refuse()
        return tuple(self.item.read(entry) for entry in value)

    def parse(self, text: str) -> tuple[T_co, ...]:
        value = literal(text)
        if not isinstance(value, list | tuple):
            raise self.refuse('Write it as ["one", "two"]')
        return self.read(value)


class TextOrTexts(Kind[str | tuple[str, ...]]):
    """One text or a list of texts."""

    def describe(self) -> str:
        return "text or a non-empty list of texts"

    def convert(self, value: object) -> str | tuple[str, ...]:
        if not isinstance(value, list | tuple):
            return Text().convert(value)
        if not value:
            raise self.refuse()
        return ListOf(Text()).convert(value)

    def parse(self, text: str) -> str | tuple[str, ...]:
        value = literal(text) if text.startswith("[") else None
        if isinstance(value, list):
            return self.read(value)
        return super().parse(text)


class NumberOrNumbers(Kind[float | tuple[float, ...]]):
    """One number or a list of numbers."""

    def describe(self) -> str:
        return "a finite number or a non-empty list of them"

    def convert(self, value: object) -> float | tuple[float, ...]:
        if not isinstance(value, list | tuple):
            number = as_number(value)
            if number is None or not math.isfinite(number):
                raise self.refuse()
            return number
        if not value:
            raise self.refuse()
        return ListOf(Number()).convert(value)

    def parse(self, text: str) -> float | tuple[float, ...]:
        value = literal(text) if text.startswith("[") else None
        return self.read(value if isinstance(value, list) else text)


@dataclass(frozen=True)
class Nullable(Kind[T_co | None]):
    """Another kind, or null."""

    kind: Kind[T_co]

    def describe(self) -> str:
        return f"{self.kind.describe()}, or null"

    def convert(self, value: object) -> T_co | None:
        return self.kind.convert(value)

    def read(self, value: object) -> T_co | None:
        return None if value is None else self.kind.read(value)

    def parse(self, text: str) -> T_co | None:
        return None if text == "null" else self.kind.parse(text)


class AnyList(Kind[tuple[object, ...]]):
    """A list whose items are not checked."""

    def describe(self) -> str:
        return "a list"

    def convert(self, value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise self.refuse()
        return tuple(value)

    def parse(self, text: str) -> tuple[object, ...]:
        return self.read(literal(text))


@dataclass(frozen=True)
class Table(Kind[FrozenDict[T]]):
    """A table of values. `entries` are the known names; without them any name is accepted."""

    entries: Mapping[str, Kind[T]] = dataclasses.field(default_factory=dict, hash=False)

    def describe(self) -> str:
        return "a table of names and values"

    def read(self, value: object) -> FrozenDict[T]:
        # Null clears the table of a base file; an empty table would be merged into it.
        return self.convert({} if value is None else value)

    def convert(self, value: object) -> FrozenDict[T]:
        if not isinstance(value, Mapping):
            raise self.refuse('Write it as {"name": value}')
        return FrozenDict({str(n): self.read_entry(str(n), item) for n, item in value.items()})

    def parse(self, text: str) -> FrozenDict[T]:
        return self.read(None) if text == "null" else self.convert(literal(text))

    def read_entry(self, name: str, value: object) -> Any:
        """Returns the typed value of one entry."""
        return self._known(name).read(value) if self.entries else value

    def parse_entry(self, name: str, text: str) -> Any:
        """Returns the typed value of one entry for the text of an override."""
        if self.entries:
            return self._known(name).parse(text)
        value = literal(text)
        return text if value is None else value

    def _known(self, name: str) -> Kind[T]:
        if name not in self.entries:
            known = tuple(self.entries)
            remedy = nearest_word(name, known) or f"Use one of {', '.join(known)}"
            raise InvalidValue("is not a known name in this table", remedy)
        return self.entries[name]


class Effect(Enum):
    """Treatment of a field by the program."""

    USED = "used"
    TRAINING = "used in training"
    NO_MEANING = "no meaning here"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field: its name, the values it accepts, its default and its meaning for the docs.

    A refused field loads and prints with any value, but runs at its default only; `way_out` is the
    remedy for other values.
    """

    name: str
    kind: Kind[object]
    default: object
    meaning: str
    effect: Effect = Effect.USED
    way_out: str = ""

    def __post_init__(self) -> None:
        if self.kind.read(self.default) != self.default:
            raise ValueError(f"default of {self.name}: {self.default!r} is read as another value")
        if (self.effect is Effect.REFUSED) != bool(self.way_out):
            raise ValueError(f"{self.name}: a refused field, and no other, has a way out")

    def read(self, value: object) -> object:
        """Returns the typed value of one from a file."""
        return frozen(self.kind.read(value))

    def parse(self, text: str) -> object:
        """Returns the typed value for the text of an override."""
        return frozen(self.kind.parse(text))


def setting(default: T, meaning: str, kind: Kind[T] | None = None) -> T:
    """Declares an attribute of a config group; `kind` defaults to what the default implies."""
    stated: Kind[object] = implied_kind(default) if kind is None else kind
    declared: T = dataclasses.field(default=default, metadata={"kind": stated, "meaning": meaning})
    return declared


@dataclass_transform(frozen_default=True, kw_only_default=True)
def field_group(cls: type[T]) -> type[T]:
    """Makes a class a group of fields.

    Only the config that inherits from the groups gets methods: generating them for each group
    would double the time to import the schema.
    """
    make = dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
    return make(cls)


def implied_kind(default: object) -> Kind[object]:
    """Returns the kind of a field that is described by its default alone."""
    kinds: dict[type, Kind[object]] = {
        bool: Boolean(),
        str: Text(),
        float: Number(),
        FrozenDict: Table[object](),
    }
    return kinds[type(default)]


def declared_fields(group: Any, effect: Effect) -> tuple[Field, ...]:
    """Returns the fields that a config group declares with `setting`."""
    return tuple(
        Field(
            name=one.name,
            kind=one.metadata["kind"],
            default=one.default,
            meaning=one.metadata["meaning"],
            effect=effect,
        )
        for one in dataclasses.fields(group)
    )


def frozen(value: object) -> object:
    """Returns the value with tuples for lists and frozen dicts for dicts, at any depth."""
    if isinstance(value, Mapping):
        return FrozenDict({str(name): frozen(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    return value


def limits(minimum: float | None, maximum: float | None) -> str:
    """Returns the words for a range."""
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    low = "" if minimum is None else f" >= {minimum}"
    return low if maximum is None else f" <= {maximum}"


def as_integer(value: object) -> int | None:
    """Returns the integer that a value is or spells; None if it is not one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and DECIMAL.fullmatch(value) else None


def as_number(value: object) -> float | None:
    """Returns the number that a value is or spells; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
        return None
    return attempt(lambda: float(value))


def attempt(convert: Callable[[], T]) -> T | None:
    """Returns the result of a conversion, or None if it fails."""
    try:
        return convert()
    except (ValueError, OverflowError):
        return None


def is_unicode(text: str) -> bool:
    """Returns whether a text can be encoded, unlike bytes of arguments that are not UTF-8."""
    return attempt(text.encode) is not None


def literal(text: str) -> object:
    """Returns the list or dict that a text spells in JSON or Python syntax; None if it does not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns of unknown escapes
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def nearest_word(word: str, known: Sequence[str]) -> str:
    """Returns a remedy that offers the nearest known word; empty if none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"The nearest is {near[0]!r}" if near else ""
