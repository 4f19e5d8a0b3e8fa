"""The plan of a load: which boxes of which stored tensors become which boxes of the parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

from maxdiffusion.weights.boxes import Box, extents, intersect, slices_within, volume
from maxdiffusion.weights.checkpoint_map import Transform
from maxdiffusion.weights.matching import Match
from maxdiffusion.weights.placing import ParameterBuffers
from maxdiffusion.weights.reading import FileReader
from maxdiffusion.weights.safetensors_file import StoredTensor


@dataclass(frozen=True, kw_only=True)
class Read:
    """One read: a box of a stored tensor, and the box of the parameter that it becomes."""

    tensor: StoredTensor
    tensor_box: Box
    transform: Transform
    stacked: bool
    target: ParameterBuffers
    target_box: Box
    region: Box  # what of the target box is wanted

    @property
    def size(self) -> int:
        """How many bytes are read."""
        return volume(self.tensor_box) * self.tensor.float_dtype.itemsize

    def run(self, reader: FileReader) -> int:
        """Reads, rearranges and places the values; returns their bytes."""
        source = reader.read(self.tensor, self.tensor_box)
        values = self.transform.apply(source)
        values = values[None] if self.stacked else values
        wanted = intersect(self.target_box, self.region)
        assert wanted is not None, (self.target_box, self.region)
        self.target.put(wanted, values[slices_within(wanted, self.target_box)])
        return self.size


def parameter_reads(match: Match, target: ParameterBuffers, read_bytes: int) -> Iterator[Read]:
    """Every read that a parameter needs in this process."""
    transform, stacked = match.entry.transform, match.entry.stacked
    for region in target.regions():
        layers, box = (region[0], region[1:]) if stacked else ((0, 1), region)
        for layer in range(*layers):
            tensor = match.sources[layer]
            lead = ((layer, layer + 1),) if stacked else ()
            for part in _parts(transform, box, tensor, read_bytes):
                yield Read(
                    tensor=tensor,
                    tensor_box=_tensor_box(transform, part),
                    transform=transform,
                    stacked=stacked,
                    target=target,
                    target_box=(*lead, *part),
                    region=region,
                )


def _tensor_box(transform: Transform, box: Box) -> Box:
    """The box of the stored tensor that becomes `box` of the parameter (or of one layer of it)."""
    dimensions = transform.dimensions(len(box))
    return tuple((0, 1) if dimension is None else box[dimension] for dimension in dimensions)


def _parts(transform: Transform, box: Box, tensor: StoredTensor, read_bytes: int) -> Iterator[Box]:
    """`box`, widened to whole units and cut along the slowest dimension of the file into reads."""
    if not box:
        yield box
        return
    unit, (start, stop) = transform.unit, box[-1]
    box = (*box[:-1], (start // unit * unit, -(-stop // unit) * unit))
    dimensions = [d for d in transform.dimensions(len(box)) if d is not None]
    cut = next((d for d in dimensions if extents(box)[d] > 1), dimensions[0])
    start, stop = box[cut]
    row_bytes = volume(box) // (stop - start) * tensor.float_dtype.itemsize
    grain = unit if cut == len(box) - 1 else 1
    step = max(grain, read_bytes // row_bytes // grain * grain)
    for first in range(start, stop, step):
        yield (*box[:cut], (first, min(first + step, stop)), *box[cut + 1 :])
