"""The slowest host of a job, by name."""

import socket

import pytest

from maxdiffusion.distributed.coordination import gather_host_times
from maxdiffusion.runtime.timing import HostTimes, Stage, Timings, describe_hosts, slowest


def host(process: int, *, load: float = 1.0, denoise: float = 5.0) -> HostTimes:
    seconds = dict.fromkeys((stage.key for stage in Stage), 0.0)
    seconds |= {"load": load, "compile": 2.0, "inference": denoise, "denoise_total": denoise}
    return HostTimes(process=process, host=f"worker-{process}", seconds=seconds)


def test_one_process_is_its_own_slowest_host():
    timings = Timings()
    with timings.stage(Stage.LOAD):
        pass
    (alone,) = gather_host_times(timings)
    assert (alone.process, alone.host) == (0, socket.gethostname())
    assert alone.seconds["load"] == timings.seconds(Stage.LOAD) > 0
    assert describe_hosts([alone]) == f"  Slowest host: 0 ({socket.gethostname()}), 0.0s"


def test_stages_inside_of_others_count_once():
    assert host(0).total == pytest.approx(1 + 2 + 5)


def test_the_slowest_is_named_with_the_stage_that_it_lost_in():
    hosts = [host(0), host(1), host(2, load=4.5), host(3)]
    assert slowest(hosts).process == 2
    assert describe_hosts(hosts) == (
        "  Slowest host: 2 (worker-2), 11.5s "
        "(quickest of 4: 8.0s; 3.5s behind in Load (checkpoint))"
    )


def test_among_equals_the_first_is_named():
    assert slowest([host(0), host(1)]).process == 0
