"""The device mesh: axes, device order, and the axes that each dimension is split over."""

from maxdiffusion.mesh.axes import AXES, CONTEXT_AXES, MeshShape
from maxdiffusion.mesh.devices import build_mesh, single_device_mesh
from maxdiffusion.mesh.layout import ActivationLayout, parameter_sharding

__all__ = [
    "AXES",
    "CONTEXT_AXES",
    "ActivationLayout",
    "MeshShape",
    "build_mesh",
    "parameter_sharding",
    "single_device_mesh",
]
