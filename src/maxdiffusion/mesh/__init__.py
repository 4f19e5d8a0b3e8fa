"""The device mesh: axes, device order, and the axes that each dimension is split over."""

from maxdiffusion.mesh.axes import AXES, CONTEXT_AXES, MeshShape
from maxdiffusion.mesh.layout import ActivationLayout, parameter_sharding

__all__ = ["AXES", "CONTEXT_AXES", "ActivationLayout", "MeshShape", "parameter_sharding"]
