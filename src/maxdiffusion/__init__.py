"""WAN 2.2 video diffusion on TPUs with JAX and Flax NNX."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxdiffusion.pipelines.wan import WanPipeline


__all__ = ["WanPipeline", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that `import maxdiffusion` is quick and touches no device.
    if name == "WanPipeline":
        from maxdiffusion.pipelines.wan import WanPipeline

        return WanPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
