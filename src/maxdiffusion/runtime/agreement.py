"""Facts that must be the same on every process, and the process that has others."""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from maxdiffusion.runtime.coordination import Member, exchange, members
from maxdiffusion.runtime.problems import Problem, ProblemsFound, RunFailed

REMEDY = "Start all processes with the same command, package, files and model"
_SHOWN, _BEFORE = 120, 30  # characters of a value, and of what comes before a difference


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
    start = _shown_from(repr(value), repr(usual))
    rule = f"is {_cut(usual, start)} on the other processes"
    return Problem(name=f"{name} on {member}", value=_cut(value, start), rule=rule, remedy=REMEDY)


def _shown_from(one: str, other: str) -> int:
    """Where two texts are shown from: shortly before they part, if they are too long for all."""
    if max(len(one), len(other)) <= _SHOWN:
        return 0
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return max(0, sum(1 for _ in same) - _BEFORE)


def _cut(value: object, start: int) -> object:
    """The value itself, or the part of its text that is shown."""
    text = repr(value)
    if not start and len(text) <= _SHOWN:
        return value
    end = start + _SHOWN
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")
