"""Values gathered from several processes and compared; one process agrees with itself at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from maxdiffusion.distributed.coordination import (
    Coordinator,
    Difference,
    NoAnswer,
    Process,
    all_gather_str,
    all_processes,
    assert_equal_across_processes,
    assert_same_result,
    barrier,
    broadcast_from_first,
    differences,
    this_process,
)
from tests.distributed.memory_service import MemoryClient, services

PROCESSES = tuple(Process(index=index, host=f"host-{index}", pid=index) for index in range(3))


def test_texts_of_all_processes_are_gathered_in_order_and_old_rounds_are_removed():
    client = MemoryClient()
    coordinators = [Coordinator(service) for service in services(client, 3)]

    def gather(index):
        return [coordinators[index].all_gather("topic", f"{index}/{turn}") for turn in range(5)]

    with ThreadPoolExecutor(3) as pool:
        gathered = list(pool.map(gather, range(3)))
    expected = [tuple(f"{index}/{turn}" for index in range(3)) for turn in range(5)]
    assert gathered == [expected] * 3
    assert {key.split("/")[-2] for key in client.values} == {"4"}


def test_topics_do_not_mix():
    client = MemoryClient()
    first, second = (Coordinator(service) for service in services(client, 2))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: (second.all_gather("a", "2a"), second.all_gather("b", "2b")))
        assert first.all_gather("a", "1a") == ("1a", "2a")
        assert first.all_gather("b", "1b") == ("1b", "2b")
        assert other.result() == (("1a", "2a"), ("1b", "2b"))


def test_a_process_that_is_missing_is_named():
    first = Coordinator(services(MemoryClient(), 2)[0])
    with pytest.raises(NoAnswer, match="process 1 did not answer"):
        first.all_gather("topic", "text", timeout=0.01)


def difference(name, value, process, usual):
    return Difference(name=name, value=value, usual=usual, process=process)


def test_the_odd_one_is_found_with_its_value_and_the_usual_one():
    facts = [{"a": 1, "b": [1, 2]}, {"a": 2, "b": [1, 2]}, {"a": 1, "b": [1, 2]}]
    assert differences(facts, PROCESSES) == [difference("a", 2, PROCESSES[1], 1)]


def test_of_two_the_first_is_usual():
    found = differences([{"a": 1}, {"a": 2}], PROCESSES[:2])
    assert found == [difference("a", 2, PROCESSES[1], 1)]


def test_a_fact_that_is_missing_somewhere_differs():
    found = differences([{"a": 1}, {"a": 1}, {}], PROCESSES)
    assert found == [difference("a", None, PROCESSES[2], 1)]


def test_long_values_are_shown_where_they_differ():
    prompts = [f"a red circle moves right, number {index}" for index in range(9)]
    facts = [{"prompts": prompts}, {"prompts": prompts}, {"prompts": [*prompts[:-1], "a cube"]}]
    (found,) = differences(facts, PROCESSES)
    problem = found.as_problem()
    assert problem.name == "prompts on process 2 (host host-2, pid 2)"
    assert str(problem.value).endswith("'a cube']")
    assert "number 8'] on the other processes" in problem.rule
    assert str(problem.value).startswith("...")


def test_one_process_agrees_with_itself():
    assert all_processes() == (this_process(),)
    assert_equal_across_processes("start", {"a": 1})
    assert_same_result("latents", "digest")
    barrier("here")
    assert all_gather_str("topic", "word") == ("word",)
    assert broadcast_from_first("topic", lambda: (1, 2)) == (1, 2)


def test_an_error_of_the_first_process_is_raised():
    def fail():
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        broadcast_from_first("topic", fail)
