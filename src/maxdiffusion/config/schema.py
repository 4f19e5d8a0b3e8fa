"""The form of one row in the table of keys, and of a key that holds a table itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from maxdiffusion.config.kinds import Kind, MisreadError, literal, nearest_word


class Use(Enum):
    """What becomes of a key."""

    USED = "used"
    TRAINING = "used in training"
    NO_MEANING = "no meaning here"
    REFUSED = "refused unless at its default"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key: its name, what it may hold, its default, its meaning, and what becomes of it.

    A key that is REFUSED changes what a run does in the public program, in a way that this program
    does not offer: any value outside of `harmless` loads and prints, and refuses to run.
    """

    name: str
    kind: Kind
    default: Any
    meaning: str
    use: Use = Use.USED
    harmless: tuple[Any, ...] = ()
    way_out: str = ""

    def __post_init__(self) -> None:
        if self.kind.read(self.default) != self.default:
            raise ValueError(f"default of {self.name}: {self.default!r} is read as another value")
        if (self.use is Use.REFUSED) != bool(self.way_out):
            raise ValueError(f"{self.name}: a refused key, and only that, names a way out")


def used(name: str, kind: Kind, default: Any, meaning: str) -> Key:
    """A key that this program acts on."""
    return Key(name=name, kind=kind, default=default, meaning=meaning)


def trains(name: str, kind: Kind, default: Any, meaning: str) -> Key:
    """A key that training acts on, and generation does not look at."""
    return Key(name=name, kind=kind, default=default, meaning=meaning, use=Use.TRAINING)


def unused(name: str, kind: Kind, default: Any, meaning: str) -> Key:
    """A key of the public program that has no meaning here."""
    return Key(name=name, kind=kind, default=default, meaning=meaning, use=Use.NO_MEANING)


def refused(name: str, kind: Kind, default: Any, meaning: str, *, way_out: str) -> Key:
    """A key of the public program that this program cannot act on unless it is at its default."""
    return Key(
        name=name,
        kind=kind,
        default=default,
        meaning=meaning,
        use=Use.REFUSED,
        harmless=(default,),
        way_out=way_out,
    )


class Frozen(dict[str, Any]):
    """A dict that is not changed after it was built, and can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted((key, repr(value)) for key, value in self.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Frozen, (dict(self),))

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("a config does not change once it is loaded")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse


@dataclass(frozen=True)
class Table(Kind):
    """A table of values; with `entries` only those names are known, without any name is."""

    entries: Mapping[str, Kind] = field(default_factory=dict, hash=False)

    def describe(self) -> str:
        return "a table of names and values"

    def read(self, value: object) -> Frozen:
        # Null clears what a base file put in, which an empty table that is merged could not.
        return self.convert({} if value is None else value)

    def convert(self, value: object) -> Frozen:
        if not isinstance(value, Mapping):
            raise self.refuse('Write it as {"name": value}')
        return Frozen({str(name): self.read_entry(str(name), item) for name, item in value.items()})

    def parse(self, text: str) -> Frozen:
        return self.read(None) if text == "null" else self.convert(literal(text))

    def read_entry(self, name: str, value: object) -> Any:
        """The typed value of one entry."""
        return self._checked(name, lambda kind: kind.read(value), value)

    def parse_entry(self, name: str, text: str) -> Any:
        """The typed value of one entry for the text of an override."""
        loose = literal(text)
        return self._checked(name, lambda kind: kind.parse(text), text if loose is None else loose)

    def _checked(self, name: str, convert: Any, loose: object) -> Any:
        if not self.entries:
            return loose
        if name not in self.entries:
            known = tuple(self.entries)
            remedy = nearest_word(name, known) or f"Known are {', '.join(known)}"
            raise MisreadError("is not a known name in this table", remedy, name=name)
        try:
            return convert(self.entries[name])
        except MisreadError as error:
            raise MisreadError(error.rule, error.remedy, name=name) from None
