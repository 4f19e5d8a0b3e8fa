"""Which tile sizes are worth trying for a kernel at its sizes."""

from collections.abc import Iterator, Sequence
from itertools import product

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.attention.on_device.flash import FlashKernel
from maxdiffusion.attention.on_device.kernel import DeviceKernel
from maxdiffusion.attention.on_device.splash import JaxSplashKernel, TokamaxKernel
from maxdiffusion.attention.options import LANES
from maxdiffusion.attention.tuned_blocks import SPLASH_FORWARD
from maxdiffusion.attention.tuned_sites import SEARCHED

QUERIES = (128, 256, 512, 1024, 2048, 4096, 6144, 8192)
KEYS = (128, 256, 512, 1024, 2048, 4096)
# How many of the largest that fit are tried: smaller tiles were never the best.
MOST_QUERIES, MOST_KEYS = 5, 3
Sizes = dict[str, int]


def candidates(plan: AttentionPlan, mode: str) -> list[Sizes]:
    """The sizes to try: those in force first, then a grid; `full` also cuts tiles up inside.

    The sizes in force are among them, so that a search never ends with worse ones.
    """
    sizes = plan.kernel.site.sizes
    grid = product(
        fitting(QUERIES, sizes.q_len, MOST_QUERIES), fitting(KEYS, sizes.kv_len, MOST_KEYS)
    )
    tried = [sizes_in_force(plan.kernel)]
    for block_q, block_kv in grid:
        tried += [
            candidate
            for candidate in _forms(plan.kernel, block_q, block_kv, mode)
            if candidate not in tried
        ]
    return tried


def kernel_name(kernel: DeviceKernel) -> str:
    """What the rows of a search call a kernel."""
    if isinstance(kernel, FlashKernel):
        return kernel.search_name
    return kernel.title


def sizes_in_force(kernel: DeviceKernel) -> Sizes:
    """The sizes that a kernel runs with now."""
    if isinstance(kernel, FlashKernel):
        return {name: getattr(kernel.blocks, name) for name in SEARCHED}
    assert isinstance(kernel, JaxSplashKernel | TokamaxKernel), kernel.title
    splash = kernel.blocks if isinstance(kernel, JaxSplashKernel) else kernel.settings.blocks
    return {name: getattr(splash, name) for name in SPLASH_FORWARD}


def fitting(table: Sequence[int], length: int, most: int) -> list[int]:
    """The largest sizes of a table that a length needs, up to the one that covers all of it."""
    whole = -(-length // LANES) * LANES
    below = [size for size in table if size < whole]
    return [*below, whole][-most:] if whole <= table[-1] else below[-most:]


def _forms(kernel: DeviceKernel, block_q: int, block_kv: int, mode: str) -> Iterator[Sizes]:
    """A tile, whole and, in `full`, with smaller score tiles and with two heads at once."""
    outer = {"block_q": block_q, "block_kv": block_kv}
    inner = [block_kv]
    if mode == "full":
        inner += [size for size in (block_kv // 2, block_kv // 4) if size and size % LANES == 0]
    if not isinstance(kernel, FlashKernel):
        yield from ({**outer, "block_kv_compute": compute} for compute in inner)
        return
    heads = (1, 2) if mode == "full" and max(kernel.site.sizes.heads) % 2 == 0 else (1,)
    for compute, per_tile in product(inner, heads):
        split = {"block_kv_compute": compute, "block_kv_compute_in": compute}
        yield {**outer, **split, "heads_per_tile": per_tile}
