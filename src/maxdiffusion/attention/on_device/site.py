"""Where a kernel runs: its sizes, its chip, and the devices that hold the other keys."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Array

from maxdiffusion.attention.options import AttentionOptions


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """What the kernel calls of one attention see; `heads` has the heads of each call in a row.

    Where batch rows with different masks were folded into heads, a call has those heads as its
    batch.
    """

    batch: int
    heads: tuple[int, ...]
    q_len: int
    kv_len: int


@dataclass(frozen=True, kw_only=True)
class KernelSite:
    """The sizes of the kernel calls and the chip they run on."""

    sizes: KernelSizes
    head_dim: int
    dtype: np.dtype
    scale: float
    ring: int
    platform: str
    device_kind: str
    options: AttentionOptions

    @property
    def interpret(self) -> bool:
        """Whether Pallas kernels are interpreted: where told, otherwise on CPU devices."""
        told = self.options.interpret
        return self.platform == "cpu" if told is None else told


class Shards(Protocol):
    """The devices that hold the other keys of the same problem, for small reductions over them."""

    def total(self, *values: Array) -> tuple[Array, ...]:
        """The sum of each over these devices, in one reduction."""

    def largest(self, *values: Array) -> tuple[Array, ...]:
        """The maximum of each over these devices, in one reduction."""


@dataclass(frozen=True)
class Alone:
    """All keys are on this device: reductions over devices change nothing."""

    def total(self, *values: Array) -> tuple[Array, ...]:
        """The values themselves."""
        return values

    def largest(self, *values: Array) -> tuple[Array, ...]:
        """The values themselves."""
        return values
