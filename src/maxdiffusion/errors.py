"""Problems that a person can fix, raised all at once, and the exit codes of commands.

A check raises `ProblemsFound`. Code that runs several checks collects what they raise:

    problems = Collector()
    with problems:
        mesh = resolve_mesh(config)
    with problems:
        prompts = read_prompts(config)
    problems.raise_if_any()
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

# Exit codes.
STOPPED = 1
BAD_INPUT = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One invalid input: its name, its value, the rule it breaks and, if there is one, a remedy."""

    name: str
    value: object
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        sentences = [f"{self.name}={self.value!r}: {self.rule}.", self.remedy and f"{self.remedy}."]
        return " ".join(sentence for sentence in sentences if sentence)


class ProblemsFound(ValueError):
    """Every problem of an input, so that a person fixes them in one go."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


class RunFailed(RuntimeError):
    """A run that cannot go on, although what was asked for made sense."""


class Collector:
    """Collects the problems that checks raise inside its `with` blocks."""

    def __init__(self, earlier: Sequence[Problem] = ()):
        self.problems: list[Problem] = [*earlier]

    def __enter__(self) -> "Collector":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, ProblemsFound):
            return False
        # Two checks may need the same value, and raise its problem both.
        self.problems.extend(new for new in error.problems if new not in self.problems)
        return True

    def raise_if_any(self) -> None:
        """Raises `ProblemsFound` with all collected problems, if there are any."""
        if self.problems:
            raise ProblemsFound(self.problems)
