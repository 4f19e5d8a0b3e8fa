"""The CLIP vision tower of WAN 2.1 image-to-video."""

from maxdiffusion.models.clip.config import ClipVisionConfig
from maxdiffusion.models.clip.encoder import ClipVisionEncoder

__all__ = ["ClipVisionConfig", "ClipVisionEncoder"]
