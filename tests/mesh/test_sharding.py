"""Logical dimension names become mesh axes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh, parameter_sharding


def test_weights_are_split_by_width_and_features():
    mesh = build_mesh(MeshShape(fsdp=4, tensor=2))
    assert parameter_sharding(mesh, ("model", "mlp"), (8, 6)).spec == PartitionSpec(
        ("fsdp",), ("tensor",)
    )


def test_stacked_layers_stay_whole():
    mesh = build_mesh(MeshShape(fsdp=4, tensor=2))
    spec = parameter_sharding(mesh, ("model", "heads"), (40, 8, 6)).spec
    assert spec == PartitionSpec(None, ("fsdp",), ("tensor",))


def test_a_dimension_that_does_not_divide_stays_whole():
    mesh = build_mesh(MeshShape(fsdp=4, tensor=2))
    assert parameter_sharding(mesh, ("model", "mlp"), (6, 5)).spec == PartitionSpec(None, None)


def test_tokens_are_split_over_data_and_context():
    mesh = build_mesh(MeshShape(data=2, ring=2, ulysses=2))
    layout = ActivationLayout(mesh=mesh)
    with jax.set_mesh(mesh):
        tokens = jax.jit(lambda x: layout.constrain(x, "batch", "sequence", "model"))(
            jnp.ones((2, 8, 4))
        )
    assert tokens.addressable_shards[0].data.shape == (1, 2, 4)


def test_without_a_mesh_nothing_is_pinned():
    x = jnp.ones((2, 3))
    assert ActivationLayout().constrain(x, "batch", "sequence") is x


def test_another_mesh_is_refused():
    with pytest.raises(ValueError, match="must be"):
        ActivationLayout(mesh=Mesh(jax.devices(), ("x",)))
