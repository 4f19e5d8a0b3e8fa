"""Kernels as an exchange sees them: one device, [B, S, N, H] arrays, keys that count."""

from maxdiffusion.attention.on_device.site import Alone, DeviceKernel, KernelSite

__all__ = ["Alone", "DeviceKernel", "KernelSite"]
