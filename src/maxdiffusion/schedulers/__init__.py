"""Samplers: UniPC and flow-matching Euler, as plain arithmetic over rows of host-made numbers."""

from maxdiffusion.schedulers.flow_match_euler import FlowMatchEuler
from maxdiffusion.schedulers.sampler import Sampler, step_row
from maxdiffusion.schedulers.scheduler_config import from_scheduler_config
from maxdiffusion.schedulers.unipc import UniPC

__all__ = ["FlowMatchEuler", "Sampler", "UniPC", "from_scheduler_config", "step_row"]
