"""Keys about attention: how devices exchange, which kernel runs, and its blocks."""

from maxdiffusion.config.kinds import Boolean, Choice, Integer, Text
from maxdiffusion.config.schema import Frozen, Table, unused, used

# Queries lie on sublanes (8) or lanes (128) depending on the kernel, keys always on lanes; the
# attention plan holds each kernel to its own rule.
QUERIES = Integer(minimum=8, step=8)
KEYS_VALUES = Integer(minimum=128, step=128)

BLOCK_SIZES = Table(
    {
        "block_q": QUERIES,
        "block_kv": KEYS_VALUES,
        "block_kv_compute": KEYS_VALUES,
        "block_kv_compute_in": KEYS_VALUES,
        "heads_per_tile": Integer(minimum=1),
        "vmem_limit_bytes": Integer(minimum=1),
        "block_q_dkv": QUERIES,
        "block_kv_dkv": KEYS_VALUES,
        "block_kv_dkv_compute": KEYS_VALUES,
        "block_q_dq": QUERIES,
        "block_kv_dq": KEYS_VALUES,
        "use_fused_bwd_kernel": Boolean(),
    }
)

KEYS = (
    used(
        "attention",
        Text(),
        "flash",
        "How self-attention runs across and on devices; auto = the quickest by estimate.",
    ),
    used(
        "flash_block_sizes",
        BLOCK_SIZES,
        Frozen(),
        "Blocks of the attention kernel; what is left out comes from the table of tuned sizes.",
    ),
    used(
        "flash_min_seq_length",
        Integer(minimum=0),
        4096,
        "With fewer queries or keys (text has 512) flash, tokamax_flash, ulysses, ulysses_custom, "
        "ulysses_custom_fixed_m and ulysses_ring run dot_product; 0 = never.",
    ),
    used(
        "ulysses_shards",
        Integer(minimum=1, special=(-1,)),
        -1,
        "How much of the context is split by heads; the rest is a ring. -1 = as heads allow.",
    ),
    used(
        "ulysses_attention_chunks",
        Integer(minimum=1),
        1,
        "Groups of heads around the all-to-all, so that exchange and compute overlap.",
    ),
    used("use_base2_exp", Boolean(), True, "Softmax with powers of two in kernels that can."),
    used(
        "use_experimental_scheduler",
        Boolean(),
        False,
        "Compile our kernels with the LP instruction scheduler of the TPU compiler.",
    ),
    used(
        "report_fast_heads",
        Boolean(),
        False,
        "Count the heads on fixed-m softmax's fast path at the first and last step, and print it.",
    ),
    unused("mask_padding_tokens", Boolean(), True, "Mask padded tokens; always done, it is exact."),
    unused(
        "attention_sharding_uniform",
        Boolean(),
        True,
        "Split the sequence in self- and cross-attention alike; always done.",
    ),
    used(
        "enable_tile_search",
        Boolean(),
        False,
        "Before the run, time tiles of every kernel and use the best, unless tuned_blocks_file has "
        "them already.",
    ),
    used(
        "tile_search_mode",
        Choice(("smart", "full")),
        "smart",
        "Tiles that are tried: a grid of blocks, or also smaller score tiles and pairs of heads.",
    ),
    used("tile_search_iters", Integer(minimum=1), 10, "Timed runs of every tile."),
    used(
        "tile_search_out",
        Text(),
        "",
        "Folder for the table of a search, from which it goes on, and its pictures; empty = none.",
    ),
    used(
        "tuned_blocks_file",
        Text(),
        "",
        "JSON file of tiles that a search found: written by it, and read by every run; they hold "
        "where flash_block_sizes gives none. Empty = none.",
    ),
)
