"""Facts of several processes compared; what one process says is agreed on at once."""

import pytest

from maxdiffusion.runtime import agreement
from maxdiffusion.runtime.agreement import agree, agree_on_result, differences
from maxdiffusion.runtime.coordination import Member, barrier, exchange, from_first, several
from maxdiffusion.runtime.problems import ProblemsFound

MEMBERS = tuple(Member(index=index, host=f"host-{index}", pid=index) for index in range(3))


def test_the_odd_one_is_found_with_its_value_and_the_usual_one():
    said = [{"a": 1, "b": [1, 2]}, {"a": 2, "b": [1, 2]}, {"a": 1, "b": [1, 2]}]
    assert differences(said, MEMBERS) == [("a", 2, MEMBERS[1], 1)]


def test_of_two_the_first_is_usual():
    assert differences([{"a": 1}, {"a": 2}], MEMBERS[:2]) == [("a", 2, MEMBERS[1], 1)]


def test_a_fact_that_is_missing_somewhere_differs():
    said = [{"a": 1}, {"a": 1}, {}]
    assert differences(said, MEMBERS) == [("a", None, MEMBERS[2], 1)]


def test_long_values_are_shown_where_they_differ(monkeypatch):
    prompts = [f"a red circle moves right, number {index}" for index in range(9)]
    said = [{"prompts": prompts}, {"prompts": prompts}, {"prompts": [*prompts[:-1], "a cube"]}]
    monkeypatch.setattr(agreement, "members", lambda: MEMBERS)
    monkeypatch.setattr(agreement, "_said", lambda topic, facts: said)
    with pytest.raises(ProblemsFound) as caught:
        agree("inputs", {})
    (problem,) = caught.value.problems
    assert problem.name == "prompts on process 2 (host host-2, pid 2)"
    assert str(problem.value).endswith("'a cube']")
    assert "number 8'] on the other processes" in problem.rule
    assert str(problem.value).startswith("...")


def test_one_process_agrees_with_itself():
    assert not several()
    agree("start", {"a": 1})
    agree_on_result("latents", "digest")
    barrier("here")
    assert exchange("topic", "word") == ("word",)
    assert from_first("topic", lambda: (1, 2)) == (1, 2)


def test_an_error_of_the_first_process_is_raised():
    def fail():
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        from_first("topic", fail)
