"""Kinds of values that a key can hold: what they accept, from YAML and from the command line."""

import ast
import difflib
import json
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WHOLE = re.compile(r"[-+]?[0-9]{1,30}")
TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})


class MisreadError(ValueError):
    """A value that its kind does not accept; says the rule and, where there is one, a way out."""

    def __init__(self, rule: str, remedy: str | None = None, *, name: str | None = None):
        super().__init__(rule)
        self.rule = rule
        self.remedy = remedy
        self.name = name


class Kind(ABC):
    """What a value may be; `read` takes values of a file, `parse` the text after `key=`."""

    @abstractmethod
    def describe(self) -> str:
        """A noun phrase for the values that are accepted."""

    @abstractmethod
    def convert(self, value: object) -> Any:
        """The typed value for one that is not null."""

    def read(self, value: object) -> Any:
        """The typed value for one from a file or from JSON."""
        if value is None:
            raise MisreadError(f"null is not {self.describe()}")
        return self.convert(value)

    def parse(self, text: str) -> Any:
        """The typed value for the text of an override."""
        return self.read(None if text == "null" else text)

    def refuse(self, remedy: str | None = None) -> MisreadError:
        """The error for a value that is not of this kind."""
        return MisreadError(f"must be {self.describe()}", remedy)


@dataclass(frozen=True)
class Boolean(Kind):
    """True or false; the command line may also write 1/0, and YAML yes/no and on/off."""

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
class Integer(Kind):
    """A whole number, within limits and on a grid of `step` from `offset`, or one of `special`."""

    minimum: int | None = None
    maximum: int | None = None
    step: int = 1
    offset: int = 0
    special: tuple[int, ...] = ()

    def describe(self) -> str:
        words = "a whole number" if self.step == 1 else f"a multiple of {self.step}"
        if self.offset:
            words = f"a whole number of the form {self.step}n+{self.offset}"
        return words + limits(self.minimum, self.maximum) + or_special(self.special)

    def convert(self, value: object) -> int:
        number = whole_number(value)
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
        """The way out: the allowed numbers on both sides."""
        below = number - (number - self.offset) % self.step
        candidates = [below] if below == number else [below, below + self.step]
        allowed = [n for n in candidates if self.minimum is None or n >= self.minimum]
        return "Use " + " or ".join(str(n) for n in allowed)


@dataclass(frozen=True, kw_only=True)
class Number(Kind):
    """A finite number within limits; `above` is a limit that is not itself allowed."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def describe(self) -> str:
        over = "" if self.above is None else f" above {self.above}"
        return "a finite number" + over + limits(self.minimum, self.maximum)

    def convert(self, value: object) -> float:
        number = real_number(value)
        if number is None or not math.isfinite(number):
            raise self.refuse()
        too_low = self.minimum is not None and number < self.minimum
        too_high = self.maximum is not None and number > self.maximum
        if too_low or too_high or (self.above is not None and number <= self.above):
            raise self.refuse()
        return number


@dataclass(frozen=True)
class Text(Kind):
    """Any text, taken as it is written."""

    def describe(self) -> str:
        return "text"

    def convert(self, value: object) -> str:
        if isinstance(value, str) and is_unicode(value):
            return value
        if isinstance(value, bool | int | float):
            raise self.refuse(f'Put it in quotes: "{value}"')
        raise self.refuse()


@dataclass(frozen=True)
class Secret(Kind):
    """A text that is not kept, so that it cannot be printed; only whether there was one is."""

    def describe(self) -> str:
        return "text that is not kept"

    def convert(self, value: object) -> str:
        return "hidden" if Text().convert(value) else ""


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few words."""

    words: tuple[str, ...]

    def describe(self) -> str:
        return "one of " + ", ".join(repr(word) for word in self.words)

    def convert(self, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        raise self.refuse(nearest_word(str(value), self.words))


@dataclass(frozen=True)
class ListOf(Kind):
    """A list whose items are all of one kind; kept as a tuple."""

    item: Kind

    def describe(self) -> str:
        return f"a list, each item {self.item.describe()}"

    def convert(self, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise self.refuse()
        return tuple(self.item.read(entry) for entry in value)

    def parse(self, text: str) -> tuple[Any, ...]:
        value = literal(text)
        if not isinstance(value, list | tuple):
            raise self.refuse('Write it as ["one", "two"]')
        return self.read(value)


@dataclass(frozen=True)
class TextOrTexts(Kind):
    """One text or a list of texts."""

    def describe(self) -> str:
        return "text or a list of texts with at least one"

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


@dataclass(frozen=True)
class Nullable(Kind):
    """Another kind, or null."""

    kind: Kind

    def describe(self) -> str:
        return f"{self.kind.describe()}, or null"

    def convert(self, value: object) -> Any:
        return self.kind.convert(value)

    def read(self, value: object) -> Any:
        return None if value is None else self.kind.read(value)

    def parse(self, text: str) -> Any:
        return None if text == "null" else self.kind.parse(text)


@dataclass(frozen=True)
class Structure(Kind):
    """A list of anything, nested as it likes; kept, but not looked into."""

    def describe(self) -> str:
        return "a list"

    def convert(self, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise self.refuse()
        return tuple(value)

    def parse(self, text: str) -> tuple[Any, ...]:
        return self.read(literal(text))


def limits(minimum: float | None, maximum: float | None) -> str:
    """Words for a range."""
    low = "" if minimum is None else f" from {minimum}"
    return low + ("" if maximum is None else f" up to {maximum}")


def or_special(special: Sequence[int]) -> str:
    """Words for values outside of a range that are allowed as well."""
    return "".join(f" or {value}" for value in special)


def whole_number(value: object) -> int | None:
    """The integer that a value is or spells; None if it is not one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and WHOLE.fullmatch(value) else None


def real_number(value: object) -> float | None:
    """The number that a value is or spells; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str) or "_" in str(value):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def is_unicode(text: str) -> bool:
    """Whether a text can be written; bytes of the command line that are not UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def literal(text: str) -> object:
    """The list or dict that a text spells, in JSON or in Python's own form; None if it does not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python's about odd escapes
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def nearest_word(word: str, known: Sequence[str]) -> str | None:
    """A way out that offers the nearest known word, if one is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"The nearest is {near[0]!r}" if near else None
