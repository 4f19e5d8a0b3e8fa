"""Tables between the tensors of a diffusers checkpoint and the parameters of a model."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

LAYER = "{layer}"


class Transform(ABC):
    """An invertible rearrangement of one tensor, which never changes values.

    `apply` also works on a part of the tensor if the last dimension of the parameter is cut at
    multiples of `unit`, so that a process can read only the slices that it holds.
    """

    @property
    def unit(self) -> int:
        """The number of neighbours in the last dimension that are rearranged together."""
        return 1

    @abstractmethod
    def dimensions(self, rank: int) -> tuple[int | None, ...]:
        """Returns the parameter's dimension (of `rank`) of each tensor dimension; None: dropped."""

    @abstractmethod
    def apply(self, source: np.ndarray) -> np.ndarray:
        """Returns the parameter made from a checkpoint tensor."""

    @abstractmethod
    def invert(self, parameter: np.ndarray) -> np.ndarray:
        """Returns the checkpoint tensor that a parameter came from."""


@dataclass(frozen=True)
class Identity(Transform):
    """Leaves the tensor unchanged."""

    def dimensions(self, rank: int) -> tuple[int | None, ...]:
        return tuple(range(rank))

    def apply(self, source: np.ndarray) -> np.ndarray:
        return source

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        return parameter


@dataclass(frozen=True)
class Permute(Transform):
    """Reorders dimensions: a torch Linear [out, in] becomes [in, out] with order (1, 0)."""

    order: tuple[int, ...]

    def dimensions(self, rank: int) -> tuple[int | None, ...]:
        assert rank == len(self.order), (rank, self.order)
        return tuple(self.order.index(dimension) for dimension in range(rank))

    def apply(self, source: np.ndarray) -> np.ndarray:
        return source.transpose(self.order)

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        return parameter.transpose(np.argsort(self.order))


@dataclass(frozen=True)
class DropUnitDims(Transform):
    """Drops dimensions of size one: a gain [C, 1, 1, 1] becomes [C]."""

    shape: tuple[int, ...]  # of the checkpoint tensor, with -1 for the one free dimension

    @property
    def dropped(self) -> tuple[int, ...]:
        """The dimensions of the checkpoint tensor that the parameter lacks."""
        return tuple(dimension for dimension, size in enumerate(self.shape) if size == 1)

    def dimensions(self, rank: int) -> tuple[int | None, ...]:
        kept = iter(range(rank))
        return tuple(None if size == 1 else next(kept) for size in self.shape)

    def apply(self, source: np.ndarray) -> np.ndarray:
        return source.squeeze(self.dropped)

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        return np.expand_dims(parameter, self.dropped)


@dataclass(frozen=True)
class RopeHalves(Transform):
    """Puts the even features of every head before the odd ones, along the last dimension.

    Rotary pairs (2i, 2i+1) of the checkpoint become (i, i + H/2), so that a rotation works on two
    contiguous halves. `before` rearranges the tensor first (a Linear is transposed).
    """

    head_dim: int
    before: Transform = field(default_factory=Identity)

    @property
    def unit(self) -> int:
        return self.head_dim

    def dimensions(self, rank: int) -> tuple[int | None, ...]:
        return self.before.dimensions(rank)

    def apply(self, source: np.ndarray) -> np.ndarray:
        return self._swap(self.before.apply(source), (self.head_dim // 2, 2))

    def invert(self, parameter: np.ndarray) -> np.ndarray:
        return self.before.invert(self._swap(parameter, (2, self.head_dim // 2)))

    def _swap(self, array: np.ndarray, split: tuple[int, int]) -> np.ndarray:
        """Returns `array` with each head transposed as a matrix of shape `split`."""
        heads = (*array.shape[:-1], array.shape[-1] // self.head_dim)
        # Same memory order as `array`, so that a transposed Linear is copied row by row.
        swapped = np.empty_like(array)
        swapped.reshape(*heads, *split[::-1])[...] = array.reshape(*heads, *split).swapaxes(-1, -2)
        return swapped


LINEAR = Permute((1, 0))
CONV1D = Permute((2, 1, 0))
CONV2D = Permute((2, 3, 1, 0))
CONV3D = Permute((2, 3, 4, 1, 0))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One parameter (dotted path), its checkpoint name, and the rearrangement between them.

    A name with `{layer}` stands for one tensor per layer, stacked in front of the parameter;
    `layers` is their number where it is not that of the whole map.
    """

    parameter: str
    source: str
    transform: Transform = field(default_factory=Identity)
    layers: int | None = None

    @property
    def stacked(self) -> bool:
        """True if the parameter holds all layers."""
        return LAYER in self.source

    def source_shape(self, parameter_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each checkpoint tensor of a parameter of `parameter_shape`."""
        shape = parameter_shape[1:] if self.stacked else parameter_shape
        dimensions = self.transform.dimensions(len(shape))
        return tuple(1 if dimension is None else shape[dimension] for dimension in dimensions)


@dataclass(frozen=True, kw_only=True)
class CheckpointMap:
    """Every parameter of a model, the number of stacked layers, and names that may be ignored."""

    entries: tuple[Entry, ...]
    layers: int = 0
    ignored: tuple[str, ...] = ()  # regular expressions of names that no parameter needs
    aliases: tuple[
        tuple[str, str], ...
    ] = ()  # (other spelling, name in the entries), regex -> text

    def __post_init__(self) -> None:
        for names in (self.parameters, [entry.source for entry in self.entries]):
            twice = sorted({name for name in names if names.count(name) > 1})
            assert not twice, f"listed twice: {twice}"

    @property
    def parameters(self) -> list[str]:
        """The dotted paths of all parameters."""
        return [entry.parameter for entry in self.entries]

    def sources(self, entry: Entry) -> tuple[str, ...]:
        """Returns the checkpoint names of the tensors of one parameter, in order."""
        if not entry.stacked:
            return (entry.source,)
        count = self.layers if entry.layers is None else entry.layers
        return tuple(entry.source.replace(LAYER, str(layer)) for layer in range(count))

    def canonical(self, name: str) -> str:
        """Returns the name that the entries use for the checkpoint tensor `name`."""
        for pattern, text in self.aliases:
            name = re.sub(rf"\A(?:{pattern})\Z", text, name)
        return name

    def ignores(self, name: str) -> bool:
        """Returns whether a checkpoint tensor of this name may be ignored."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


def linear(parameter: str, source: str, *, bias: bool = True) -> Iterable[Entry]:
    """Yields the entries of a Linear: kernel, and bias if it has one."""
    yield Entry(parameter=f"{parameter}.kernel", source=f"{source}.weight", transform=LINEAR)
    if bias:
        yield Entry(parameter=f"{parameter}.bias", source=f"{source}.bias")
