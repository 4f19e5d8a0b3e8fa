"""Pipelines of the WAN family, by the names of diffusers' classes; imported when asked for."""

import importlib
from typing import Any

MODULES = {
    "WanPipeline": "wan",
    "WanImageToVideoPipeline": "tasks.image_to_video",
    "WanAnimatePipeline": "tasks.animate",
    "WanVACEPipeline": "tasks.vace",
    "WanVideoToVideoPipeline": "tasks.video_to_video",
}
"""The module of each pipeline; adding a pipeline is one file and one row."""


def pipeline_named(name: str) -> Any:
    """Returns the class of a pipeline."""
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
