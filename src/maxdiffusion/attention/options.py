"""How the user wants attention run: block sizes, exponent, scheduler, chunks, thresholds."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from maxdiffusion.attention.tuned_sites import TunedSite

# Scores of fewer tokens than a lane tile gain nothing from a block, and Mosaic wants whole tiles.
LANES = 128
# Queries that our flash kernel computes at once: others of a tile are computed for nothing.
QUERIES_AT_ONCE = 512
FixedMGate = Literal["measured", "forced"]


@dataclass(frozen=True, kw_only=True)
class FlashBlockSizes:
    """The public `flash_block_sizes`; a size left as None is picked from the tuned table."""

    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    block_kv_compute_in: int | None = None
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_kv_dkv_compute: int | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None
    use_fused_bwd_kernel: bool | None = None
    heads_per_tile: int | None = None
    vmem_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name == "use_fused_bwd_kernel" or size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"flash_block_sizes.{field.name}={size!r}: a whole number from 1")

    @classmethod
    def from_mapping(cls, sizes: Mapping[str, int | bool | None]) -> "FlashBlockSizes":
        """The sizes of a YAML mapping; a key that nobody reads is refused."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(sizes) - known)
        if unknown:
            raise ValueError(f"flash_block_sizes has {unknown}: the keys are {sorted(known)}")
        return cls(**sizes)  # type: ignore[arg-type]

    def changed(self, sizes: Mapping[str, int | None]) -> "FlashBlockSizes":
        """The same with some sizes in place of those it has."""
        return self.from_mapping({**vars(self), **sizes})


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Everything about an attention that is not its name, its sizes or its mesh.

    `flash_min_seq_length`: with fewer queries or keys, so for text as well, the names that are
    held to it run `dot_product`; 0 holds none. The plan says what runs.
    `use_experimental_scheduler`: the linear-programming scheduler of the TPU compiler, which helps
    kernels of one big tile and hurts ours, whose tiles already overlap.
    `fixed_m_gate`: "measured" gives fixed-m softmax to heads whose norms allow it; "forced", for
    tests, gives it to every head, and outlier heads then lose what the gate would have kept.
    `tuned_sites`: tiles that a search found; they hold where `block_sizes` gives none.
    `interpret`: None interprets Pallas kernels on CPU devices and compiles elsewhere.
    """

    block_sizes: FlashBlockSizes = FlashBlockSizes()
    use_base2_exp: bool = True
    use_experimental_scheduler: bool = False
    ulysses_attention_chunks: int = 1
    flash_min_seq_length: int = 0
    fixed_m_gate: FixedMGate = "measured"
    tuned_sites: tuple[TunedSite, ...] = ()
    interpret: bool | None = None

    def __post_init__(self) -> None:
        chunks, shortest = self.ulysses_attention_chunks, self.flash_min_seq_length
        if not isinstance(chunks, int) or chunks < 1:
            raise ValueError(f"ulysses_attention_chunks={chunks!r}: a whole number from 1")
        if not isinstance(shortest, int) or shortest < 0:
            raise ValueError(f"flash_min_seq_length={shortest!r}: a whole number from 0")
        if self.fixed_m_gate not in get_args(FixedMGate):
            raise ValueError(f"fixed_m_gate={self.fixed_m_gate!r}: one of {get_args(FixedMGate)}")
