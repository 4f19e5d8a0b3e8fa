"""The one table of attention names: exchange x kernel (with its softmax).

No code after this table looks at a name: a plan holds the exchange and the kernel it chose.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from maxdiffusion.attention.exchanges import ByXla, Exchange
from maxdiffusion.attention.exchanges.choice import (
    by_xla,
    gathered,
    ulysses_line,
    ulysses_pair_ring,
    ulysses_ring,
    whole_ring,
    whole_ulysses,
)
from maxdiffusion.attention.geometry import Geometry
from maxdiffusion.attention.on_device.cudnn import CudnnKernel
from maxdiffusion.attention.on_device.flash import FixedMFlashKernel, FlashKernel
from maxdiffusion.attention.on_device.fp8 import Fp8FlashKernel
from maxdiffusion.attention.on_device.kernel import DeviceKernel
from maxdiffusion.attention.on_device.reference import DenseKernel
from maxdiffusion.attention.on_device.splash import JaxSplashKernel, TokamaxKernel

ExchangeChoice = Callable[[Geometry, int], Exchange | ByXla]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One row: how devices exchange, and which kernel (with which softmax) runs on a device.

    `cross` is the kernel over text keys, which are local to every device. `gives_way`: with fewer
    queries or keys than `flash_min_seq_length` it runs `dot_product`, over tokens and over text.
    """

    exchange: ExchangeChoice
    kernel: type[DeviceKernel]
    cross: type[DeviceKernel]
    gives_way: bool = False


def _row(
    exchange: ExchangeChoice,
    kernel: type[DeviceKernel],
    *,
    cross: type[DeviceKernel] | None = None,
    gives_way: bool = False,
) -> Mode:
    return Mode(exchange=exchange, kernel=kernel, cross=cross or kernel, gives_way=gives_way)


DOT_PRODUCT = "dot_product"
MODES: Mapping[str, Mode] = {
    DOT_PRODUCT: _row(by_xla, DenseKernel),
    "flash": _row(gathered, JaxSplashKernel, gives_way=True),
    "tokamax_flash": _row(gathered, TokamaxKernel, gives_way=True),
    "cudnn_flash_te": _row(gathered, CudnnKernel),
    "ring": _row(whole_ring, TokamaxKernel),
    "tokamax_ring": _row(whole_ring, TokamaxKernel),
    "tokamax_ring_custom": _row(whole_ring, FlashKernel),
    "ulysses": _row(whole_ulysses, JaxSplashKernel, gives_way=True),
    "ulysses_custom": _row(whole_ulysses, FlashKernel, gives_way=True),
    "ulysses_custom_fixed_m": _row(
        whole_ulysses, FixedMFlashKernel, cross=FlashKernel, gives_way=True
    ),
    "ulysses_ring": _row(ulysses_ring, TokamaxKernel, gives_way=True),
    "ulysses_ring_custom": _row(ulysses_pair_ring, FlashKernel),
    "ulysses_ring_custom_bidir": _row(ulysses_line, FlashKernel),
    "ulysses_ring_custom_fp8": _row(ulysses_pair_ring, Fp8FlashKernel, cross=FlashKernel),
    "ulysses_ring_custom_fixed_m": _row(ulysses_pair_ring, FixedMFlashKernel, cross=FlashKernel),
}
ATTENTION_NAMES = tuple(MODES)
