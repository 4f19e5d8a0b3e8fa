"""Kernels as an exchange sees them: one device, [B, S, N, H] arrays, keys that count."""

from maxdiffusion.attention.on_device.kernel import DeviceKernel, GradientKernel
from maxdiffusion.attention.on_device.site import Alone, KernelSite, KernelSizes

__all__ = ["Alone", "DeviceKernel", "GradientKernel", "KernelSite", "KernelSizes"]
