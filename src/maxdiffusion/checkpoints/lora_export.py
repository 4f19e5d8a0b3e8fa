"""Writes adapters of a transformer as a LoRA file that diffusers, PEFT and `lora.py` read.

    transformer.M.lora_A.weight   [rank, in]        M is diffusers' name of a linear map
    transformer.M.lora_B.weight   [out, rank]
    header                        PEFT's settings: r, lora_alpha, target_modules

The prefix is `transformer.` for both experts: diffusers chooses the expert by the argument
`load_into_transformer_2`, and finds no tensor under any other prefix. Without the header diffusers
would take alpha for equal to the rank.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from maxdiffusion.checkpoints.export import fetched
from maxdiffusion.checkpoints.lora import METADATA
from maxdiffusion.checkpoints.lora_update import DOWN, UP
from maxdiffusion.checkpoints.safetensors_io import TensorToWrite, write_file
from maxdiffusion.models.checkpoint_map import LINEAR, CheckpointMap, Entry, Transform

PREFIX = "transformer"


@dataclass(frozen=True, kw_only=True)
class AdapterTensors:
    """The adapters of one transformer, before their scale alpha / rank."""

    values: Mapping[str, jax.Array]  # by the path of the parameter
    table: CheckpointMap
    entries: Sequence[Entry]  # the kernels that have an adapter
    alpha: float

    @property
    def rank(self) -> int:
        """The rank of the adapters."""
        (rank,) = {self._factors(entry)[0].shape[-1] for entry in self.entries}
        return rank

    @property
    def modules(self) -> list[str]:
        """Diffusers' names of the linear maps, layer by layer."""
        names = [name for entry in self.entries for name in self.table.sources(entry)]
        return [name.removesuffix(".weight") for name in names]

    def tensors(self) -> Iterator[TensorToWrite]:
        """Yields both factors of every linear map."""
        for entry in self.entries:
            down, up = self._factors(entry)
            for layer, name in enumerate(self.table.sources(entry)):
                module = f"{PREFIX}.{name.removesuffix('.weight')}"
                yield _tensor(f"{module}.lora_A.weight", down, layer, LINEAR)
                # Columns of `up` are features of the output: rearranged as the kernel's are.
                yield _tensor(f"{module}.lora_B.weight", up, layer, entry.transform)

    def write(self, file: Path) -> None:
        """Writes the file. The first process calls it, and all others `help_write`."""
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        settings: dict[str, object] = {
            "r": self.rank,
            "lora_alpha": alpha,
            "target_modules": self.modules,
            "rank_pattern": {},
            "alpha_pattern": {},
            "lora_bias": False,
            "use_dora": False,
        }
        named = {f"{PREFIX}.{key}": value for key, value in settings.items()}
        write_file(file, list(self.tensors()), {METADATA: json.dumps(named)})

    def help_write(self) -> None:
        """Sends this process's shards to the first process, which runs `write`."""
        for tensor in self.tensors():
            tensor.values()

    def _factors(self, entry: Entry) -> tuple[jax.Array, jax.Array]:
        module = entry.parameter.removesuffix(".kernel")
        return self.values[f"{module}.{DOWN}"], self.values[f"{module}.{UP}"]


def _tensor(name: str, factor: jax.Array, layer: int, transform: Transform) -> TensorToWrite:
    """Returns one layer of a factor, transposed and rearranged as torch stores it."""

    def values() -> np.ndarray:
        return transform.invert(fetched(factor[layer]))

    return TensorToWrite(
        name=name, dtype=np.dtype(factor.dtype), shape=factor.shape[:0:-1], values=values
    )
