"""Marks the costly parameters of a test."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns `values` as parameters of a test, marked slow unless they are among `quick`."""
    wanted = list(quick)
    return [
        value if value in wanted else pytest.param(value, marks=pytest.mark.slow)
        for value in values
    ]
