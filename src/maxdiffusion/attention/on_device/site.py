"""Where a kernel runs, and what every kernel on a device can be asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Array, Float

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.runtime.problems import Problem


@dataclass(frozen=True, kw_only=True)
class KernelSite:
    """The sizes of one kernel call and the chip it runs on."""

    problems: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: np.dtype
    scale: float
    context: int
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

    def total(self, value: Array) -> Array:
        """The sum over these devices."""

    def largest(self, value: Array) -> Array:
        """The maximum over these devices."""


@dataclass(frozen=True)
class Alone:
    """All keys are on this device: reductions over devices change nothing."""

    def total(self, value: Array) -> Array:
        """`value` itself."""
        return value

    def largest(self, value: Array) -> Array:
        """`value` itself."""
        return value


class DeviceKernel(Protocol):
    """Attention on one device over [B, S, N, H] arrays; values are frozen and hashable."""

    @property
    def title(self) -> str:
        """The kernel's name in a plan."""

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site."""

    def details(self) -> Sequence[str]:
        """Blocks, memory and settings, for a plan's description."""

    def prepare(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        keys: KeyShard,
        others: Shards,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """The keys to use in every call of one attention, and what the calls share."""

    def attend(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: KeyShard,
        shared: Any,
    ) -> Float[Array, "B S N H"]:
        """Attention over all keys."""

    def partials(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        keys: KeyShard,
        shared: Any,
    ) -> Partials:
        """Unnormalised attention over some of the keys."""


class UnpreparedKernel:
    """The part of a kernel that needs nothing before its first call."""

    def prepare(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        keys: KeyShard,
        others: Shards,
    ) -> tuple[Float[Array, "B T N H"], None]:
        """k as it is, and nothing to share."""
        del q, keys, others
        return k, None
