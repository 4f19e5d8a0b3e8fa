"""Boxes: the part of an array between a start and a stop in every dimension."""

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def box_of_slices(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box that basic slices (without steps) cut out of an array of `shape`."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def extents(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """How many elements a box holds."""
    return math.prod(extents(box))


def intersect(first: Box, second: Box) -> Box | None:
    """The part that two boxes share, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def bounding(boxes: Sequence[Box]) -> Box:
    """The smallest box around all of `boxes`."""
    return tuple(
        (min(start for start, _ in spans), max(stop for _, stop in spans))
        for spans in zip(*boxes, strict=True)
    )


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that cut `box` out of an array that holds `outer`."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(box, outer, strict=True)
    )
