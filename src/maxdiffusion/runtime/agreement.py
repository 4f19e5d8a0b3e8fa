"""Facts that must be the same on every process, and the process that has others."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from maxdiffusion.runtime.coordination import Member, exchange, members
from maxdiffusion.runtime.problems import Problem, ProblemsFound, RunFailed

REMEDY = "Start all processes with the same command, package, files and model"
_SHOWN = 120


class Diverged(RunFailed):
    """Processes that compute the same have different results."""


def agree(topic: str, facts: Mapping[str, object]) -> None:
    """Raises ProblemsFound, on every process alike, for each fact that differs somewhere."""
    problems = [
        _problem(name, value, member, usual)
        for name, value, member, usual in differences(_said(topic, facts), members())
    ]
    if problems:
        raise ProblemsFound(problems)


def agree_on_result(name: str, digest: str) -> None:
    """Raises Diverged, on every process alike, if a result is not the same everywhere."""
    found = differences(_said("results", {name: digest}), members())
    if found:
        odd = ", ".join(str(member) for _, _, member, _ in found)
        raise Diverged(
            f"{name} came out otherwise on {odd} than on the other processes. Nothing of it was "
            "kept. If it happens again, test the memory and the devices of that host."
        )


def differences(
    said: Sequence[Mapping[str, object]], speakers: Sequence[Member]
) -> list[tuple[str, object, Member, object]]:
    """(fact, value, whose, usual value) for all that is not usual; of two, the first is usual."""
    found = []
    names = dict.fromkeys(name for facts in said for name in facts)
    for name in names:
        texts = [json.dumps(facts.get(name)) for facts in said]
        usual = Counter(texts).most_common(1)[0][0]
        found += [
            (name, json.loads(text), member, json.loads(usual))
            for text, member in zip(texts, speakers, strict=True)
            if text != usual
        ]
    return found


def _said(topic: str, facts: Mapping[str, object]) -> list[Mapping[str, object]]:
    return [json.loads(text) for text in exchange(topic, json.dumps(facts))]


def _problem(name: str, value: object, member: Member, usual: object) -> Problem:
    rule = f"is {_short(usual)} on the other processes"
    return Problem(name=f"{name} on {member}", value=_cut(value), rule=rule, remedy=REMEDY)


def _cut(value: object) -> object:
    return value if len(repr(value)) <= _SHOWN else repr(value)[:_SHOWN] + "..."


def _short(value: object) -> str:
    return str(_cut(value)) if isinstance(_cut(value), str) else repr(value)
