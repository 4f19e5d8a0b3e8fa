"""Samplers, guidance, noise and the denoising loop.

A sampler is one file and one row of `registry.SAMPLERS`.
"""

from maxdiffusion.diffusion.multistep import UniPC
from maxdiffusion.diffusion.registry import from_scheduler_config, sampler_named
from maxdiffusion.diffusion.sampler import Sampler, step_row

__all__ = [
    "Sampler",
    "UniPC",
    "from_scheduler_config",
    "sampler_named",
    "step_row",
]
