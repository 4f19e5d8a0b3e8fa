"""Our flash kernel with Q.K^T in float8: lossy, and only by name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.on_device.flash import FlashKernel
from maxdiffusion.attention.on_device.kernel import Tokens
from maxdiffusion.attention.on_device.site import Shards
from maxdiffusion.attention.tuned_blocks import flash_blocks

if TYPE_CHECKING:
    from maxdiffusion.kernels.flash import FlashBlocks, FlashOptions

FEWER_QUERIES_AT_ONCE = 256


class Fp8FlashKernel(FlashKernel):
    """Our Pallas kernel over float8 pieces of q and of smoothed k; P.V stays as it is."""

    search_name = "flash fp8"

    @property
    def flash_options(self) -> "FlashOptions":
        """The kernel's form of the user's options."""
        from maxdiffusion.kernels.flash import Product

        return replace(super().flash_options, product=Product.FP8)

    def wished_blocks(self) -> "FlashBlocks":
        """Tile sizes, with no more queries at once than leave their scores in registers."""
        blocks = flash_blocks(self.site, self.search_name, fp8=True)
        return replace(blocks, block_q_compute=blocks.block_q_compute or FEWER_QUERIES_AT_ONCE)

    def prepare_keys(
        self, k: Tokens, v: Tokens, keys: KeyShard, others: Shards
    ) -> tuple[Tokens, Float[Array, "B N"]]:
        """Pieces of the keys without the mean of all devices' keys, and the scale of each head."""
        from maxdiffusion.kernels import flash

        attended = keys.valid(k.shape[0], k.shape[1])
        mean = flash.KeyTotal(*others.total(*flash.key_total(k, attended))).mean()
        reach = flash.KeyRange(*others.largest(*flash.key_range(k, attended)))
        return flash.split_keys(k, mean, reach.scale(mean), interpret=self.site.interpret)

    def _call(self, q: Tokens, k: Tokens, keys: KeyShard, shared: Any) -> dict[str, Any]:
        return {**super()._call(q, k, keys, None), "key_scale": shared}

    def details(self) -> Sequence[str]:
        """What every call of our kernel says, and that this one loses bits."""
        return (*super().details(), "lossy: Q.K^T in fp8")
