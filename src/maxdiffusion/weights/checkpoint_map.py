"""A table from the tensors of a diffusers checkpoint to the parameters of a model, and back."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

LAYER = "{layer}"


class Transform(Protocol):
    """An invertible rearrangement of one tensor; it moves values and never changes them."""

    def apply(self, source: np.ndarray) -> np.ndarray:
        """The parameter made from a checkpoint tensor."""
        ...

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        """The checkpoint tensor that a parameter came from."""
        ...


@dataclass(frozen=True)
class Keep:
    """Leaves the tensor as it is."""

    def apply(self, source: np.ndarray) -> np.ndarray:
        return source

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        return parameter


@dataclass(frozen=True)
class Permute:
    """Reorders dimensions: a torch Linear [out, in] becomes [in, out] with order (1, 0)."""

    order: tuple[int, ...]

    def apply(self, source: np.ndarray) -> np.ndarray:
        return source.transpose(self.order)

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        return parameter.transpose(np.argsort(self.order))


@dataclass(frozen=True)
class DropOnes:
    """Drops dimensions of size one: a gain [C, 1, 1, 1] becomes [C]."""

    shape: tuple[int, ...]  # of the checkpoint tensor, with -1 for the one free dimension

    def apply(self, source: np.ndarray) -> np.ndarray:
        return source.reshape([size for size in source.shape if size != 1] or [1])

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        return parameter.reshape(self.shape)


@dataclass(frozen=True)
class RopeHalves:
    """Puts the even features of every head before the odd ones, along the last dimension.

    Rotary pairs (2i, 2i+1) of the checkpoint become (i, i + H/2), so that a rotation works on two
    contiguous halves. `before` rearranges the tensor first (a Linear is transposed).
    """

    head_dim: int
    before: Transform = field(default_factory=Keep)

    def apply(self, source: np.ndarray) -> np.ndarray:
        rearranged = self.before.apply(source)
        *lead, features = rearranged.shape
        pairs = rearranged.reshape(*lead, features // self.head_dim, self.head_dim // 2, 2)
        return np.ascontiguousarray(pairs.swapaxes(-1, -2)).reshape(rearranged.shape)

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        *lead, features = parameter.shape
        halves = parameter.reshape(*lead, features // self.head_dim, 2, self.head_dim // 2)
        pairs = np.ascontiguousarray(halves.swapaxes(-1, -2)).reshape(parameter.shape)
        return self.before.invert(pairs)


LINEAR = Permute((1, 0))
CONV2D = Permute((2, 3, 1, 0))
CONV3D = Permute((2, 3, 4, 1, 0))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter (dotted path), the checkpoint name it comes from, and how it is rearranged.

    A name with `{layer}` stands for one tensor per layer, stacked in front of the parameter.
    """

    parameter: str
    source: str
    transform: Transform = field(default_factory=Keep)

    @property
    def stacked(self) -> bool:
        """Whether the parameter holds all layers."""
        return LAYER in self.source

    def sources(self, layers: int) -> tuple[str, ...]:
        """The checkpoint names that make up the parameter, in order."""
        if not self.stacked:
            return (self.source,)
        return tuple(self.source.replace(LAYER, str(layer)) for layer in range(layers))


@dataclass(frozen=True, kw_only=True)
class CheckpointMap:
    """Every parameter of a model, the number of stacked layers, and names that may be ignored."""

    entries: tuple[Entry, ...]
    layers: int = 0
    ignored: tuple[str, ...] = ()  # regular expressions of checkpoint names without a meaning here
    aliases: tuple[tuple[str, str], ...] = ()  # (other spelling, name in the entries), regex -> text

    def __post_init__(self) -> None:
        for kind in ("parameter", "source"):
            seen = [getattr(entry, kind) for entry in self.entries]
            twice = sorted({name for name in seen if seen.count(name) > 1})
            assert not twice, f"{kind} listed twice: {twice}"


def linear(parameter: str, source: str, *, bias: bool = True) -> Iterable[Entry]:
    """The entries of a Linear: kernel, and bias where it has one."""
    yield Entry(parameter=f"{parameter}.kernel", source=f"{source}.weight", transform=LINEAR)
    if bias:
        yield Entry(parameter=f"{parameter}.bias", source=f"{source}.bias")


def parameter_count(shape: tuple[int, ...]) -> int:
    """How many numbers a tensor of `shape` holds."""
    return math.prod(shape)
