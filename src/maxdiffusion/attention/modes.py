"""The one table of attention names: exchange x kernel x softmax."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maxdiffusion.attention.exchanges import ByXla, Exchange
from maxdiffusion.attention.exchanges.choice import gathered
from maxdiffusion.attention.on_device.reference import DenseKernel
from maxdiffusion.attention.on_device.site import DeviceKernel, KernelSite
from maxdiffusion.attention.on_device.splash import JaxSplashKernel
from maxdiffusion.mesh.axes import MeshShape

ExchangeChoice = Callable[[MeshShape, int], Exchange | ByXla]
KernelChoice = Callable[[KernelSite], DeviceKernel]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One row: how devices exchange, which kernel runs on a device, and what short sequences get.

    `gives_way`: below `flash_min_seq_length` self-attention runs `dot_product`. `cross` is the
    kernel over text keys, which are local to every device.
    """

    exchange: ExchangeChoice
    kernel: KernelChoice
    cross: KernelChoice
    gives_way: bool = False


def by_xla(shape: MeshShape, chunks: int) -> ByXla:
    """The compiler's own exchange, on any mesh."""
    del shape, chunks
    return ByXla()


DOT_PRODUCT = "dot_product"
MODES: Mapping[str, Mode] = {
    DOT_PRODUCT: Mode(exchange=by_xla, kernel=DenseKernel, cross=DenseKernel),
    "flash": Mode(exchange=gathered, kernel=JaxSplashKernel, cross=JaxSplashKernel, gives_way=True),
}
ATTENTION_NAMES = tuple(MODES)
