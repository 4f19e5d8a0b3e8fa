"""Samplers, guidance, noise and the denoising loop.

A sampler is one file and one row of `registry.SAMPLERS`.
"""

from maxdiffusion.diffusion.flow_match_euler import FlowMatchEuler
from maxdiffusion.diffusion.registry import from_scheduler_config, sampler_named
from maxdiffusion.diffusion.sampler import Sampler, step_row
from maxdiffusion.diffusion.unipc import UniPC

__all__ = [
    "FlowMatchEuler",
    "Sampler",
    "UniPC",
    "from_scheduler_config",
    "sampler_named",
    "step_row",
]
