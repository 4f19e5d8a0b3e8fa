"""The order of devices in the mesh."""

from itertools import pairwise

import jax
import numpy as np
import pytest

from maxdiffusion.mesh import AXES, MeshShape, build_mesh, with_data_in_ring
from maxdiffusion.mesh.mesh import hardware_order
from tests.described_tpus import Core, DescribedCore


def cores(x: int, y: int, z: int, *, per_chip: int = 2) -> list[Core]:
    grid = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    return [Core(coords=chip, core_on_chip=core) for core in range(per_chip) for chip in grid]


def hops(a: Core, b: Core) -> int:
    return sum(abs(p - q) for p, q in zip(a.coords, b.coords, strict=True))


def test_described_devices_are_ordered_like_real_ones():
    real = hardware_order(cores(2, 2, 2))
    described = hardware_order(
        [DescribedCore(coords=c.coords, core_on_chip=c.core_on_chip) for c in cores(2, 2, 2)]
    )
    assert [(c.coords, c.core_on_chip) for c in described] == [
        (c.coords, c.core_on_chip) for c in real
    ]


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 2), (4, 4, 4), (4, 2, 1)])
def test_cores_of_a_chip_are_side_by_side_and_chips_are_neighbours(shape):
    ordered = hardware_order(cores(*shape))
    for first, second in zip(ordered[::2], ordered[1::2], strict=True):
        assert first.coords == second.coords
    chips = ordered[::2]
    assert all(hops(a, b) == 1 for a, b in pairwise(chips))


@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 2)])
def test_the_walk_closes_in_a_small_block(shape):
    ordered = hardware_order(cores(*shape))
    assert hops(ordered[0], ordered[-1]) == 1


def test_ulysses_falls_on_one_chip_and_ring_on_neighbours():
    ordered = np.asarray(hardware_order(cores(2, 2, 1)), dtype=object)
    grid = ordered.reshape(MeshShape(data=2, ring=2, ulysses=2).sizes)
    for data in range(2):
        for ring in range(2):
            assert hops(grid[data, 0, ring, 0, 0], grid[data, 0, ring, 1, 0]) == 0
        assert hops(grid[data, 0, 0, 0, 0], grid[data, 0, 1, 0, 0]) == 1


def test_mesh_has_the_five_axes_in_order():
    mesh = build_mesh(MeshShape(data=2, ring=2, ulysses=2))
    assert mesh.axis_names == AXES
    assert tuple(mesh.shape.values()) == (2, 1, 2, 2, 1)
    assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_device_count_must_fit():
    with pytest.raises(ValueError, match="needs 4 devices, there are 8"):
        build_mesh(MeshShape(data=4))
    with pytest.raises(ValueError, match="need 2 slices, there are 1"):
        build_mesh(MeshShape(data=4), dcn=MeshShape(data=2))


def test_sizes_are_whole_numbers():
    with pytest.raises(ValueError, match="mesh axis ring=0"):
        MeshShape(ring=0)
    assert MeshShape(ring=2, ulysses=4).context == 8
    assert len(jax.devices()) == 8


def test_the_data_axis_joins_the_ring_without_moving_a_device():
    mesh = build_mesh(MeshShape(data=2, ring=2, ulysses=2))
    folded = with_data_in_ring(mesh)
    assert dict(folded.shape) == {"data": 1, "fsdp": 1, "ring": 4, "ulysses": 2, "tensor": 1}
    assert [*folded.devices.flat] == [*mesh.devices.flat]
    assert with_data_in_ring(build_mesh(MeshShape(ring=8))) is None
    assert with_data_in_ring(build_mesh(MeshShape(data=2, fsdp=4))) is None
