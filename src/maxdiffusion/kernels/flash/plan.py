"""What the kernel's body and its pallas_call agree on: one frozen value per kernel call."""

from dataclasses import dataclass

import jax.numpy as jnp

from maxdiffusion.kernels.flash.config import (
    FixedM,
    FlashOptions,
    FlashShape,
    Product,
)
from maxdiffusion.kernels.flash.fp8 import FP8, KEYS_PER_INT32, TERMS_PER_KEY
from maxdiffusion.kernels.tpu import LANES, MXU_DEPTH, BlockSizes, round_up


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """Static description of one kernel call; `blocks` already fit the lengths."""

    shape: FlashShape
    blocks: BlockSizes
    options: FlashOptions
    masked: bool
    lengths: bool
    partials: bool
    carried: bool = False
    log_sum: bool = False

    @property
    def folded(self) -> bool:
        """Returns whether heads are columns of [B, S, N * H] or rows of [B, N, S, H]."""
        return self.shape.head_dim % LANES == 0

    @property
    def fixed_m(self) -> bool:
        """Returns whether some heads may use a fixed bound."""
        return isinstance(self.options.softmax, FixedM)

    @property
    def kv_heads_per_tile(self) -> int:
        """Key heads that the query heads of one tile use."""
        return max(1, self.blocks.heads_per_tile // self.shape.group)

    @property
    def q_blocks(self) -> int:
        """Blocks of queries; the last may be ragged."""
        return -(-self.shape.q_len // self.blocks.block_q)

    @property
    def kv_blocks(self) -> int:
        """Blocks of keys; the last may be ragged."""
        return -(-self.shape.kv_len // self.blocks.block_kv)

    @property
    def whole_blocks(self) -> int:
        """Blocks of keys without padding."""
        return self.shape.kv_len // self.blocks.block_kv

    @property
    def tail(self) -> int:
        """Keys of the ragged last block; 0 if there is none."""
        return self.shape.kv_len % self.blocks.block_kv

    @property
    def num_unmasked_tail_keys(self) -> int:
        """Keys of the ragged last block that are attended wherever its quick form is used.

        Padding that makes a sequence divisible ends in the 128 to 255 keys after them.
        """
        return max(0, self.tail - LANES) // LANES * LANES

    @property
    def one_form(self) -> bool:
        """Returns whether the last keys take as many rows as a whole block, up to a lane tile.

        Whole blocks then run as the last one does, so that there is half the code; what hides the
        keys past the end finds none in them.
        """
        even = self.tail > 0 and round_up(self.tail, LANES) == self.blocks.block_kv
        return even and self.whole_blocks > 0 and not self.masked

    @property
    def selective(self) -> bool:
        """Returns whether the attended keys are known only at run time."""
        return self.masked or self.lengths

    @property
    def dtype(self) -> jnp.dtype:
        """Type of q, k, v and of the probabilities that multiply v."""
        return jnp.dtype(self.shape.dtype)

    @property
    def fp8(self) -> bool:
        """Returns whether Q.K^T multiplies float8 parts."""
        return self.options.product is Product.FP8

    @property
    def shift_in_product(self) -> bool:
        """Returns whether K Q^T of the main loop subtracts the shift (see `free_depth`).

        It does where whole lanes of the MXU's depth are free next to a head. The weights of a tile
        are then kept in VMEM, in the type of the values.
        """
        free = -self.shape.head_dim % MXU_DEPTH.get(self.options.chip, LANES)
        native = self.dtype == jnp.bfloat16 and not self.fp8
        return native and self.folded and free >= LANES

    @property
    def product_dtype(self) -> jnp.dtype:
        """Type of the keys and of the transposed queries."""
        return jnp.dtype(FP8) if self.fp8 else self.dtype

    @property
    def product_depth(self) -> int:
        """Contraction length of a score."""
        return self.shape.head_dim * (TERMS_PER_KEY if self.fp8 else 1)

    @property
    def keys_per_row(self) -> int:
        """Keys in a row of the array of keys: float8 keys are packed into int32."""
        return KEYS_PER_INT32 if self.fp8 else 1

    @property
    def score_scale(self) -> float:
        """Scale of q: 1/sqrt(H), in units of the exponent."""
        inverse_root: float = self.shape.head_dim**-0.5
        return self.options.exponent.per_nat * inverse_root

    def kv_head(self, head: int) -> int:
        """Returns the key head, within a tile, of query head `head` of that tile."""
        return head * self.kv_heads_per_tile // self.blocks.heads_per_tile
