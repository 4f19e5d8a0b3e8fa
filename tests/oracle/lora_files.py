"""Random LoRA files in every dialect that WAN users have, with the change of every tensor.

The changes are computed here from the drawn numbers, in float64, and not by reading a file.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from maxdiffusion.models.wan.original import original_module

Shapes = Mapping[str, tuple[int, ...]]
Deltas = dict[str, np.ndarray]
LOADED_BY_DIFFUSERS = (
    "diffusers",
    "diffusers_alpha",
    "original",
    "lightx2v",
    "causvid",
    "musubi",
)
OTHERS = ("peft", "peft_config", "diffsynth", "bare", "norms", "ai_toolkit", "kohya_diffusers")
DIALECTS = (*LOADED_BY_DIFFUSERS, *OTHERS)
TOPS = (
    "condition_embedder.time_embedder.linear_1",
    "condition_embedder.time_embedder.linear_2",
    "condition_embedder.text_embedder.linear_1",
    "condition_embedder.text_embedder.linear_2",
    "condition_embedder.time_proj",
    "proj_out",
)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The spelling of keys, and what a file of this kind holds."""

    prefix: str = "diffusion_model."
    suffixes: tuple[str, str] = ("lora_down.weight", "lora_up.weight")
    original: bool = True  # names of modules
    underscores: bool = False
    alpha: bool = False  # a tensor for each module
    biases: bool = False  # diff_b of every linear layer
    tops: tuple[str, ...] = ()  # pairs outside the blocks
    head: bool = False  # head.head.diff and .diff_b
    norms: float | None = None  # size of differences of norms
    tables: bool = False  # diff_m, and differences of the patch embedding
    attention_only: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)  # PEFT's, in the header
    beside: Mapping[str, object] = field(default_factory=dict)  # PEFT's, in adapter_config.json


PEFT_SUFFIXES = ("lora_A.weight", "lora_B.weight")
LIGHTX2V = Dialect(alpha=True, biases=True, head=True, norms=0.0)
SPELLINGS: Mapping[str, Dialect] = {
    "diffusers": Dialect(prefix="transformer.", suffixes=PEFT_SUFFIXES, original=False),
    "diffusers_alpha": Dialect(
        prefix="transformer.",
        suffixes=PEFT_SUFFIXES,
        original=False,
        settings={"r": 4, "lora_alpha": 2.0},
    ),
    "original": Dialect(suffixes=PEFT_SUFFIXES, attention_only=True),
    "lightx2v": LIGHTX2V,
    "causvid": Dialect(biases=True, tops=TOPS, norms=0.0),
    "musubi": Dialect(prefix="lora_unet_", underscores=True, alpha=True),
    "kohya_diffusers": Dialect(prefix="lora_unet_", underscores=True, alpha=True, original=False),
    "peft": Dialect(prefix="base_model.model.", suffixes=PEFT_SUFFIXES, original=False),
    "peft_config": Dialect(
        prefix="base_model.model.",
        suffixes=PEFT_SUFFIXES,
        beside={"r": 4, "lora_alpha": 6, "alpha_pattern": {"to_v": 1}},
    ),
    "diffsynth": Dialect(prefix="", suffixes=("lora_A.default.weight", "lora_B.default.weight")),
    "bare": Dialect(prefix="", alpha=True),
    "norms": Dialect(alpha=True, biases=True, head=True, norms=0.1, tables=True),
    "ai_toolkit": Dialect(suffixes=("lora.down.weight", "lora.up.weight"), alpha=True),
}


def write_lora(file: Path, shapes: Shapes, dialect: str, *, seed: int = 0, rank: int = 4) -> Deltas:
    """Writes a file for a model with these tensors; returns the change of each at strength 1."""
    made = _Made(shapes, SPELLINGS[dialect], np.random.default_rng(seed), rank)
    made.pairs()
    made.differences()
    settings = {f"transformer.{key}": value for key, value in made.settings().items()}
    header = {"lora_adapter_metadata": json.dumps(settings), "format": "pt"} if settings else None
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(made.tensors, file, metadata=header)
    if made.dialect.beside:
        (file.parent / "adapter_config.json").write_text(json.dumps(made.dialect.beside))
    return made.deltas


class _Made:
    """Tensors of a file and the changes that they mean."""

    def __init__(self, shapes: Shapes, dialect: Dialect, rng: np.random.Generator, rank: int):
        self.shapes, self.dialect, self.rng, self.rank = shapes, dialect, rng, rank
        self.tensors: dict[str, np.ndarray] = {}
        self.deltas: Deltas = {}

    def settings(self) -> dict[str, object]:
        """Returns PEFT's settings as diffusers writes them to the header; none without an alpha."""
        if not self.dialect.settings:
            return {}
        rest = {"rank_pattern": {}, "alpha_pattern": {}, "lora_bias": False}
        modules = [name.removesuffix(".weight") for name in self.deltas]
        return {**self.dialect.settings, "target_modules": modules, **rest}

    def pairs(self) -> None:
        linear = [n[:-7] for n, s in self.shapes.items() if n.endswith(".weight") and len(s) == 2]
        blocks = sorted(m for m in linear if "blocks." in m)
        if self.dialect.attention_only:
            blocks = [module for module in blocks if ".attn" in module]
        for index, module in enumerate([*blocks, *self.dialect.tops]):
            # Ranks need not be equal; nor need alphas.
            rank = self.rank + 2 if index == 1 and not self._settings else self.rank
            self.pair(module, rank, 2.0 * (1 + index % 3))

    @property
    def _settings(self) -> Mapping[str, object]:
        return {**self.dialect.settings, **self.dialect.beside}

    def pair(self, module: str, rank: int, alpha: float) -> None:
        out, into = self.shapes[f"{module}.weight"]
        down = self.draw(rank, into) / np.float32(math.sqrt(into))
        up = self.draw(out, rank) * np.float32(0.15)
        key = self.key(module)
        for suffix, value in zip(self.dialect.suffixes, (down, up), strict=True):
            self.tensors[f"{key}.{suffix}"] = value
        scale = 1.0
        if self.dialect.alpha:
            self.tensors[f"{key}.alpha"] = np.asarray(alpha, np.float32)
            scale = alpha / rank
        elif self._settings:
            pattern = self._settings.get("alpha_pattern", {})
            chosen = pattern.get(module.rpartition(".")[2], self._settings["lora_alpha"])
            scale = chosen / rank
        self.add(f"{module}.weight", scale * up.astype(np.float64) @ down.astype(np.float64))
        if self.dialect.biases:
            self.difference(f"{module}.bias", f"{key}.diff_b", 0.05)

    def differences(self) -> None:
        if self.dialect.head:
            self.difference("proj_out.weight", f"{self.key('proj_out')}.diff", 0.02)
            self.difference("proj_out.bias", f"{self.key('proj_out')}.diff_b", 0.05)
        if self.dialect.norms is not None:
            for name, shape in sorted(self.shapes.items()):
                if "blocks." in name and len(shape) == 1 and ".norm" in name:
                    module, leaf = name.rsplit(".", 1)
                    end = "diff" if leaf == "weight" else "diff_b"
                    self.difference(name, f"{self.key(module)}.{end}", self.dialect.norms)
        if self.dialect.tables:
            key = self.key("patch_embedding")
            self.difference("patch_embedding.weight", f"{key}.diff", 0.02)
            self.difference("patch_embedding.bias", f"{key}.diff_b", 0.05)
            for name in sorted(self.shapes):
                if name.endswith(".scale_shift_table"):
                    block = name.removesuffix(".scale_shift_table")
                    self.difference(name, f"{self.dialect.prefix}{block}.diff_m", 0.02)

    def difference(self, name: str, key: str, size: float) -> None:
        value = self.draw(*self.shapes[name]) * np.float32(size)
        self.tensors[key] = value
        self.add(name, value.astype(np.float64))

    def draw(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, dtype=np.float32)

    def add(self, name: str, delta: np.ndarray) -> None:
        self.deltas[name] = self.deltas.get(name, 0.0) + delta

    def key(self, module: str) -> str:
        spelled = (original_module(module) or module) if self.dialect.original else module
        return self.dialect.prefix + (
            spelled.replace(".", "_") if self.dialect.underscores else spelled
        )
