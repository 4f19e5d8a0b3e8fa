"""The static sizes of one attention: everything a plan needs to know about the arrays."""

from dataclasses import dataclass, fields

import numpy as np
from jax import dtypes

SUPPORTED_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """True sizes of q [batch, q_len, heads, head_dim] and k, v [batch, kv_len, kv_heads, head_dim].

    `kv_heads` None means as many as `heads`; of fewer, each serves a run of query heads.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    head_dim: int
    dtype: np.dtype
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(dtypes.canonicalize_dtype(self.dtype)))
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name == "dtype" or (field.name == "kv_heads" and size is None):
                continue
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{field.name}={size!r}: sizes are whole numbers from 1")
        if self.dtype.name not in SUPPORTED_DTYPES:
            raise ValueError(f"dtype={self.dtype.name}: attention runs in {SUPPORTED_DTYPES}")

    @property
    def key_heads(self) -> int:
        """Heads of k and v."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def heads_per_key_head(self) -> int:
        """Query heads that share a head of k and v."""
        return self.heads // self.key_heads

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.head_dim) ** -0.5
