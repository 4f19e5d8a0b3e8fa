"""The refusal of a plan that cannot run, with every reason at once."""

from collections.abc import Sequence

from maxdiffusion.runtime.problems import Problem, ProblemsFound


class UnsupportedAttention(ProblemsFound):
    """An attention that this mesh, these sizes or these devices cannot run; see `reasons`."""

    def __init__(self, name: str, problems: Sequence[Problem]):
        super().__init__(problems)
        self.name = name
        self.reasons: tuple[str, ...] = tuple(str(problem) for problem in self.problems)
        listed = "\n".join(f"  - {reason}" for reason in self.reasons)
        self.args = (f"attention={name!r} cannot run:\n{listed}",)
