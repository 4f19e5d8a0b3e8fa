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
    """Bytes on one device: weights by part, what is kept between steps, and the peak of a run."""

    weights: Mapping[str, int]
    kept: int
    peak: int
    peak_program: str

    def as_json(self) -> dict[str, Any]:
        """Everything by name."""
        return {
            "weights": dict(self.weights),
            "kept_between_steps": self.kept,
            "peak_bytes": self.peak,
            "peak_program": self.peak_program,
        }


def residence(workshop: Workshop, programs: Sequence[CompiledProgram]) -> Residence:
    """The HBM of a run that keeps all weights on the devices, as a pipeline does.

    A program's arguments are not added: they are weights, of which the compiler lists only those
    that it reads, or what other programs leave for every step (text keys and values of each expert,
    the sampler's state), which is added once.
    """
    models, mesh = workshop.models, workshop.mesh
    transformer = state_bytes(models.transformer.on(mesh))
    weights = {
        **dict.fromkeys(workshop.spec.experts, transformer),
        "vae": state_bytes(models.vae.on(mesh)),
        "text_encoder": state_bytes(models.text_encoder.on(mesh)),
    }
    results = {program.name: program.memory.outputs for program in programs}
    kept = len(workshop.spec.experts) * results.get("read_text", 0) + results.get("start", 0)
    peaks = {
        program.name: sum(weights.values()) + kept + program.memory.beside_arguments
        for program in programs
    }
    largest = max(peaks, key=lambda name: peaks[name])
    return Residence(weights=weights, kept=kept, peak=peaks[largest], peak_program=largest)


def state_bytes(state: nnx.State) -> int:
    """Bytes of placed parameters on one device."""
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.ShapeDtypeStruct)]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
        if leaf.sharding is not None
    )
