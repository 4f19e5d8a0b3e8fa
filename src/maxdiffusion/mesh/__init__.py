"""The device mesh: axes, device order and axis rules."""

from maxdiffusion.mesh.mesh import (
    AXES,
    CONTEXT_AXES,
    ActivationLayout,
    MeshDevice,
    MeshShape,
    build_mesh,
    parameter_layout,
    parameter_sharding,
    single_device_mesh,
    with_data_in_ring,
)

__all__ = [
    "AXES",
    "CONTEXT_AXES",
    "ActivationLayout",
    "MeshDevice",
    "MeshShape",
    "build_mesh",
    "parameter_layout",
    "parameter_sharding",
    "single_device_mesh",
    "with_data_in_ring",
]
