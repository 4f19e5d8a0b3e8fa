"""One form for everything that can be wrong with what a person asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

# Exit codes.
STOPPED = 1
BAD_INPUT = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: what it is called, what it is, the rule it breaks, the way out."""

    name: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}: {self.rule}. {self.remedy}."


class ProblemsFound(ValueError):
    """Everything that is wrong at once, so that a person mends it in one go."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RunFailed(RuntimeError):
    """A run that had to stop; its message tells a person what happened and what to do."""
