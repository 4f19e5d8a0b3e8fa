"""Values that each kind of field accepts, and the rule and remedy of those that it refuses."""

import pytest

from maxdiffusion.config.fields import (
    Boolean,
    Choice,
    Integer,
    InvalidValue,
    ListOf,
    Nullable,
    Number,
    NumberOrNumbers,
    Text,
    TextOrTexts,
)

POSITIVE = Integer(minimum=1)
ROWS = Integer(minimum=16, step=16)
FRAMES = Integer(minimum=1, step=4, offset=1)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Boolean(), True, True),
        (Boolean(), "FALSE", False),
        (Boolean(), 1, True),
        (Boolean(), "0", False),
        (Boolean(), "yes", True),
        (Boolean(), "off", False),
        (POSITIVE, 3, 3),
        (POSITIVE, "3", 3),
        (Integer(minimum=1, special=(-1,)), -1, -1),
        (ROWS, 720, 720),
        (FRAMES, "81", 81),
        (FRAMES, 1, 1),
        (Number(), "1e-5", 1e-5),
        (Number(), 3, 3.0),
        (Number(above=0), "0.5", 0.5),
        (Text(), "null and void", "null and void"),
        (Choice(("a", "b")), "b", "b"),
        (ListOf(Number()), [1, "2.5"], (1.0, 2.5)),
        (Nullable(POSITIVE), None, None),
        (TextOrTexts(), ["one", "two"], ("one", "two")),
        (NumberOrNumbers(), 1, 1.0),
        (NumberOrNumbers(), [1, 0.5], (1.0, 0.5)),
    ],
)
def test_accepts(kind, value, expected):
    read = kind.read(value)
    assert read == expected
    assert type(read) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value", "rule"),
    [
        (Boolean(), "maybe", "must be true or false"),
        (Boolean(), 2, "must be true or false"),
        (POSITIVE, 0, "must be an integer >= 1"),
        (POSITIVE, True, "must be an integer >= 1"),
        (POSITIVE, "8.0", "must be an integer >= 1"),
        (POSITIVE, "1_000", "must be an integer >= 1"),
        (POSITIVE, None, "null is not an integer >= 1"),
        (ROWS, 721, "must be a multiple of 16 >= 16"),
        (FRAMES, 80, "must be an integer of the form 4n+1 >= 1"),
        (Number(), "nan", "must be a finite number"),
        (Number(), float("inf"), "must be a finite number"),
        (Number(), "fast", "must be a finite number"),
        (Number(), False, "must be a finite number"),
        (Number(above=0), 0, "must be a finite number > 0"),
        (Number(minimum=0, maximum=1), 1.5, "must be a finite number from 0 to 1"),
        (Text(), None, "null is not text"),
        (Text(), 7, "must be text"),
        (Text(), "\udcff", "must be text"),
        (Choice(("float32", "bfloat16")), "bf16", "must be one of 'float32', 'bfloat16'"),
        (ListOf(POSITIVE), "3", "must be a list, each item an integer >= 1"),
        (ListOf(POSITIVE), [1, 0], "must be an integer >= 1"),
        (TextOrTexts(), [], "must be text or a non-empty list of texts"),
        (TextOrTexts(), [None], "null is not text"),
        (NumberOrNumbers(), [], "must be a finite number or a non-empty list of them"),
        (NumberOrNumbers(), "inf", "must be a finite number or a non-empty list of them"),
        (NumberOrNumbers(), ["x"], "must be a finite number"),
    ],
)
def test_refuses(kind, value, rule):
    with pytest.raises(InvalidValue) as caught:
        kind.read(value)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("kind", "value", "remedy"),
    [
        (ROWS, 725, "Use 720 or 736"),
        (ROWS, 3, "Use 16"),
        (FRAMES, 80, "Use 77 or 81"),
        (Integer(minimum=1, maximum=10), 99, "Use 10"),
        (Choice(("float32", "bfloat16")), "bfloat", "The nearest is 'bfloat16'"),
        (Text(), 7, 'Put it in quotes: "7"'),
    ],
)
def test_offers_a_way_out(kind, value, remedy):
    with pytest.raises(InvalidValue) as caught:
        kind.read(value)
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (Text(), "a=b", "a=b"),
        (Text(), "", ""),
        (TextOrTexts(), '["a, b", "c"]', ("a, b", "c")),
        (TextOrTexts(), "['a', 'b']", ("a", "b")),
        (TextOrTexts(), "[close-up] a cat", "[close-up] a cat"),
        (TextOrTexts(), r"['\d']", (r"\d",)),
        (ListOf(Integer()), "[1, 2]", (1, 2)),
        (NumberOrNumbers(), "0.5", 0.5),
        (NumberOrNumbers(), "[1, 0.5]", (1.0, 0.5)),
        (Nullable(Number()), "null", None),
        (Nullable(Number()), "0.25", 0.25),
    ],
)
def test_parses_overrides(kind, text, expected):
    assert kind.parse(text) == expected


def test_null_on_the_command_line_is_not_a_text():
    with pytest.raises(InvalidValue, match="null is not text"):
        Text().parse("null")
