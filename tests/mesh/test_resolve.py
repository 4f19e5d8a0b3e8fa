"""Requested sizes become the shape of the mesh, or problems with a remedy."""

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.mesh.resolve import AxisSizes, MeshRequest, resolve


def shape(devices=8, *, slices=1, heads=None, shards=-1, dcn=None, **ici):
    request = MeshRequest(ici=AxisSizes(**ici), dcn=AxisSizes(**dcn or {}), ulysses_shards=shards)
    return resolve(request, devices=devices, slices=slices, heads=heads).shape.sizes


def message(*args, **options):
    with pytest.raises(ProblemsFound) as caught:
        shape(*args, **options)
    return str(caught.value)


# Sizes in the order data, fsdp, ring, ulysses, tensor.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 1, 1, 8, 1)),
        ({"context": -1}, (1, 1, 1, 8, 1)),
        ({"data": 2, "context": 4}, (2, 1, 1, 4, 1)),
        ({"data": 2, "context": 4, "shards": 2}, (2, 1, 2, 2, 1)),
        ({"context": -1, "tensor": 2, "shards": 2}, (1, 1, 2, 2, 2)),
        ({"shards": 1}, (1, 1, 8, 1, 1)),
        ({"ring": 2, "ulysses": 4}, (1, 1, 2, 4, 1)),
        ({"ring": 2, "ulysses": 4, "context": 8}, (1, 1, 2, 4, 1)),
        ({"ring": 2, "ulysses": 4, "shards": 4}, (1, 1, 2, 4, 1)),
        ({"ring": 2}, (1, 1, 2, 4, 1)),
        ({"ulysses": 2}, (1, 1, 4, 2, 1)),
        ({"ring": -1, "ulysses": 2}, (1, 1, 4, 2, 1)),
        ({"ring": 2, "ulysses": -1, "data": 2}, (2, 1, 2, 2, 1)),
        ({"ring": 2, "ulysses": 2, "data": -1}, (2, 1, 2, 2, 1)),
        ({"data": -1}, (8, 1, 1, 1, 1)),
        ({"fsdp": -1}, (1, 8, 1, 1, 1)),
        ({"fsdp": -1, "ring": 2}, (1, 4, 2, 1, 1)),
        ({"devices": 1}, (1, 1, 1, 1, 1)),
    ],
)
def test_within_a_slice(options, expected):
    assert shape(**options) == expected


@pytest.mark.parametrize(
    ("heads", "options", "expected"),
    [
        (40, {}, (1, 1, 1, 8, 1)),
        (40, {"devices": 16}, (1, 1, 2, 8, 1)),
        (12, {}, (1, 1, 2, 4, 1)),
        (6, {}, (1, 1, 4, 2, 1)),
        (12, {"tensor": 4}, (1, 1, 2, 1, 4)),
        (6, {"shards": 8}, (1, 1, 1, 8, 1)),
    ],
)
def test_heads_decide_the_split_where_nothing_else_does(heads, options, expected):
    assert shape(heads=heads, **options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 1, 2, 8, 1)),
        ({"dcn": {"data": 2}}, (2, 1, 1, 8, 1)),
        ({"dcn": {"data": 2}, "data": 2}, (4, 1, 1, 4, 1)),
        ({"dcn": {"data": -1}}, (2, 1, 1, 8, 1)),
        ({"shards": 4}, (1, 1, 4, 4, 1)),
        ({"dcn": {"ulysses": 2}, "shards": 16}, (1, 1, 1, 16, 1)),
    ],
)
def test_across_two_slices(options, expected):
    assert shape(16, slices=2, **options) == expected


def test_shapes_within_and_across_are_kept_apart():
    request = MeshRequest(ici=AxisSizes(data=2), dcn=AxisSizes(data=2))
    split = resolve(request, devices=16, slices=2)
    assert split.ici.sizes == (2, 1, 1, 4, 1)
    assert split.dcn.sizes == (2, 1, 1, 1, 1)


def test_product_that_is_not_the_number_of_devices():
    assert message(data=2, context=3) == (
        "ici_*_parallelism='data=2, fsdp=1, context=3, tensor=1': their product is 6, but the "
        "number of devices in a slice is 8. Choose sizes whose product is 8, for example "
        "ici_context_parallelism=4."
    )
    assert "their product is 3, but the number of devices in a slice is 8" in message(data=3)
    assert "dcn_*_parallelism" in message(dcn={"data": 2})


def test_two_open_sizes():
    assert message(data=-1, context=-1) == (
        "ici_data_parallelism=-1: only one size can be filled in, but ici_data_parallelism and "
        "ici_context_parallelism are open. Give numbers to all but one of them."
    )
    assert "ici_ring_parallelism and ici_ulysses_parallelism are open" in message(
        ring=-1, ulysses=-1
    )


def test_context_that_contradicts_its_parts():
    assert message(context=8, ring=2, ulysses=2) == (
        "ici_context_parallelism='ring=2, ulysses=2': ring x ulysses must be the context of 8. "
        "Leave ici_context_parallelism out, or one of ring and ulysses."
    )
    assert "ring x ulysses must be the context of 8" in message(context=8, ring=3)


def test_ulysses_shards_that_do_not_fit():
    assert message(shards=3) == (
        "ulysses_shards=3: must divide the context of 8 devices. Use one of 1, 2, 4, 8."
    )
    assert message(ring=2, ulysses=4, shards=2) == (
        "ulysses_shards=2: contradicts the ulysses size 4 of the mesh. "
        "Leave out ulysses_shards or the ring and ulysses sizes."
    )


def test_sizes_below_one():
    assert "sizes are whole numbers from 1, or -1" in message(tensor=0)


def test_slices_of_unequal_size():
    assert "devices=7: must be a multiple of the 2 slices" in message(7, slices=2)


def test_problems_within_and_across_are_reported_together():
    with pytest.raises(ProblemsFound) as caught:
        shape(data=3, dcn={"data": 3})
    assert [p.name for p in caught.value.problems] == ["ici_*_parallelism", "dcn_*_parallelism"]


def test_problems_of_both_splits_are_reported_together():
    with pytest.raises(ProblemsFound) as caught:
        shape(16, slices=2, dcn={"ring": 3}, context=8, ring=3)
    names = [p.name for p in caught.value.problems]
    assert names == ["dcn_context_parallelism", "ici_context_parallelism"]
