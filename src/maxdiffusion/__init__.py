"""WAN 2.1 and 2.2 video diffusion on TPUs with JAX and Flax NNX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxdiffusion.pipelines.tasks.animate import WanAnimatePipeline
    from maxdiffusion.pipelines.tasks.image_to_video import WanImageToVideoPipeline
    from maxdiffusion.pipelines.tasks.vace import WanVACEPipeline
    from maxdiffusion.pipelines.tasks.video_to_video import WanVideoToVideoPipeline
    from maxdiffusion.pipelines.wan import WanPipeline


__all__ = [
    "WanAnimatePipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
    "__version__",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that `import maxdiffusion` is quick and touches no device.
    if name in __all__:
        from maxdiffusion.pipelines import pipeline_named

        return pipeline_named(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
