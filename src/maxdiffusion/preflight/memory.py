"""HBM of a whole run: weights that stay, and the program that needs most beside them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from maxdiffusion.pipelines.programs import Workshop
from maxdiffusion.preflight.programs import CompiledProgram


@dataclass(frozen=True, kw_only=True)
class Residence:
    """Bytes on one device: weights by part, and the peak with the program that reaches it."""

    weights: Mapping[str, int]
    peak: int
    peak_program: str

    def as_json(self) -> dict[str, Any]:
        """Everything by name."""
        return {
            "weights": dict(self.weights),
            "peak_bytes": self.peak,
            "peak_program": self.peak_program,
        }


# Which weights are among a program's arguments.
_READS = {
    "denoise_step": "transformer",
    "read_text": "transformer",
    "decode": "vae",
    "text_encoder": "text_encoder",
    "start": "",
}


def residence(workshop: Workshop, programs: Sequence[CompiledProgram]) -> Residence:
    """The HBM of a run that keeps all weights on the devices, as a pipeline does."""
    models, mesh = workshop.models, workshop.mesh
    one = {
        "transformer": state_bytes(models.transformer.on(mesh)),
        "vae": state_bytes(models.vae.on(mesh)),
        "text_encoder": state_bytes(models.text_encoder.on(mesh)),
    }
    experts = dict.fromkeys(workshop.spec.experts, one["transformer"])
    weights = {**experts, "vae": one["vae"], "text_encoder": one["text_encoder"]}
    resident = sum(weights.values())
    peaks = {
        program.name: resident + program.memory.peak - one.get(_READS[program.name], 0)
        for program in programs
    }
    largest = max(peaks, key=lambda name: peaks[name])
    return Residence(weights=weights, peak=peaks[largest], peak_program=largest)


def state_bytes(state: nnx.State) -> int:
    """Bytes of placed parameters on one device."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.ShapeDtypeStruct)]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
        if leaf.sharding is not None
    )
