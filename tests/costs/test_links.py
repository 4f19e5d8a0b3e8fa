"""Seconds of collectives from the links they cross."""

import pytest

from maxdiffusion.costs.chips import read_topology
from maxdiffusion.costs.links import DeviceCollective, Overlap, Scheduled, grid_network
from maxdiffusion.costs.step_time import KernelTime, exposed_seconds

# Bytes of one tensor of all tokens of a 720p video: 75,600 tokens of 5120 in bfloat16.
WHOLE = 75_600 * 5120 * 2


def network_of(name):
    return grid_network(read_topology(name))


def collective(kind, size, **fields):
    return DeviceCollective(kind=kind, bytes=size, **fields)


def test_ulysses_over_two_chips_waits_for_the_link_between_them():
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    all_to_all = collective("all-to-all", WHOLE // 4, groups=groups)
    # 4 of them a layer cross one link of 100 GB/s with 774 MB: 7.74 ms.
    assert 4 * network_of("tpu7x:2x2x1").seconds(all_to_all) == pytest.approx(7.74e-3, rel=1e-3)


def test_ulysses_on_one_chip_uses_the_link_between_its_cores():
    groups = ((0, 1), (2, 3), (4, 5), (6, 7))
    all_to_all = collective("all-to-all", WHOLE // 4, groups=groups)
    seconds = 4 * network_of("tpu7x:2x2x1").seconds(all_to_all)
    assert seconds == pytest.approx(0.645e-3, rel=1e-3)


def test_a_ring_hop_shares_the_link_between_the_cores_of_two_chips():
    pairs = ((0, 2), (2, 0), (1, 3), (3, 1))
    hop = collective("collective-permute", WHOLE // 4, pairs=pairs)
    assert 2 * network_of("tpu7x:2x2x1").seconds(hop) == pytest.approx(7.74e-3, rel=1e-3)


def test_long_sides_are_walked_the_short_way_round():
    torus, line = network_of("tpu7x:4x4x4"), network_of("tpu7x:2x2x1")
    assert len(list(torus.route((0, 0, 0), (3, 0, 0)))) == 1
    assert len(list(torus.route((0, 0, 0), (2, 2, 2)))) == 6
    assert len(list(line.route((0, 0, 0), (1, 1, 0)))) == 2
    assert len(list(network_of("v6e:2x4").route((0, 0, 0), (0, 3, 0)))) == 3


@pytest.mark.parametrize("kind", ["all-to-all", "all-gather", "all-reduce", "reduce-scatter"])
def test_every_byte_that_is_sent_is_transferred(kind):
    one = collective(kind, 1000, groups=((0, 1, 2, 3),))
    from_first = sum(size for source, _, size in one.transfers() if source == 0)
    assert from_first == pytest.approx(one.sent)


def test_only_what_is_not_hidden_counts():
    links = network_of("tpu7x:2x2x1")
    pairs = ((0, 2), (2, 0))
    kernels = {"flash": KernelTime(call=1e-3, step=1.0)}

    def exposed(overlap):
        hop = collective("collective-permute", 200_000_000, pairs=pairs, overlap=overlap)
        (seconds,) = exposed_seconds([hop], kernels, links)
        return seconds

    assert exposed(None) == pytest.approx(2e-3)
    assert exposed(Overlap(cycles=2_200_000, kernels=())) == pytest.approx(1e-3, rel=1e-3)
    assert exposed(Overlap(cycles=0, kernels=("flash.3",))) == pytest.approx(1e-3)
    assert exposed(Overlap(cycles=0, kernels=("flash.3", "flash_carried.4", "flash.5"))) == 0.0


def waits(*windows):
    """Seconds of waiting for hops of 1 ms over one link, each started and done at a position.

    Ten positions of the schedule are 1 ms of work.
    """
    links = network_of("v6e:2x4")
    cycles = round(links.topology.chip.clock_hz * 1e-3)

    def work(start, done):
        return Overlap(cycles=cycles * (done // 10 - start // 10), kernels=())

    found = [
        collective(
            "collective-permute",
            100_000_000,
            pairs=((0, 1), (1, 0)),
            overlap=None if start == done else work(start, done),
            scheduled=Scheduled(computation="body", start=start, done=done, before=work(0, start)),
        )
        for start, done in windows
    ]
    return [round(seconds * 1e3, 3) for seconds in exposed_seconds(found, {}, links)]


def test_collectives_in_flight_share_their_links():
    assert waits((0, 10)) == [0.0]
    assert waits((0, 10), (1, 11)) == [1.0, 0.0], "each is half as fast, and both end after 2 ms"
    assert waits((0, 20), (1, 21)) == [0.0, 0.0]
    assert waits((0, 30), (1, 1)) == [0.0, 2.0]
    assert waits((0, 20), (10, 20)) == [0.0, 0.0], "the first has ended when the second starts"


def test_a_wait_for_one_collective_hides_others():
    assert waits((0, 0), (1, 11)) == [1.0, 0.0]
    assert waits((0, 2), (1, 11)) == [2.0, 0.0]
