"""Tiny WAN checkpoint folders in diffusers' own layout, any seed and any size.

Every parameter is drawn anew, gains, biases and tables too, so that code which forgets to load one
of them cannot agree with diffusers.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import UMT5Config, UMT5EncoderModel

from tests.oracle.vocabulary import Pieces, unigram_pieces, write_tokenizer


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """The sizes of a WAN transformer."""

    heads: int = 4
    head_dim: int = 32
    layers: int = 2
    ffn: int = 192


@dataclass(frozen=True, kw_only=True)
class VaeSize:
    """The sizes of a WAN 2.1 VAE; the released one has base 96."""

    base: int = 6
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    res_blocks: int = 2


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """The sizes of a UMT5 encoder."""

    width: int = 64
    heads: int = 4
    head_dim: int = 16
    layers: int = 2
    ffn: int = 96


@dataclass(frozen=True, kw_only=True)
class TinyCheckpoint:
    """What a checkpoint folder shall hold; one expert (2.1) or two (2.2)."""

    seed: int
    transformer: TransformerSize = field(default_factory=TransformerSize)
    vae: VaeSize = field(default_factory=VaeSize)
    text: TextSize = field(default_factory=TextSize)
    boundary_ratio: float | None = 0.875
    flow_shift: float = 3.0
    dtype: torch.dtype = torch.float32
    shard_size: str = "10GB"


def wan22_t2v(seed: int, **changes: object) -> TinyCheckpoint:
    """Returns a text-to-video checkpoint with two experts, as WAN 2.2 A14B has."""
    return TinyCheckpoint(seed=seed, **changes)


def wan21_t2v(seed: int, **changes: object) -> TinyCheckpoint:
    """Returns a text-to-video checkpoint with one transformer of head width 128, as WAN 2.1 has."""
    size = TransformerSize(heads=1, head_dim=128, layers=1, ffn=160)
    settings = {"transformer": size, "boundary_ratio": None, "vae": VaeSize(base=4), **changes}
    return TinyCheckpoint(seed=seed, **settings)


def draw_parameters(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Overwrites every parameter with numpy draws of a sensible scale and returns the model."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            normal = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
            mean, spread = _mean_and_spread(name, parameter.shape)
            parameter.copy_(torch.from_numpy(mean + spread * normal))
    return model.eval()


def _mean_and_spread(name: str, shape: torch.Size) -> tuple[float, float]:
    """Returns the distribution of one parameter: gains near 1, kernels by 1/sqrt(inputs)."""
    if name.endswith("gamma") or (name.endswith("weight") and len(shape) == 1):
        return 1.0, 0.2
    if name.endswith("bias"):
        return 0.0, 0.1
    if "scale_shift_table" in name:
        return 0.0, 0.3
    if "relative_attention_bias" in name:
        return 0.0, 0.5
    if any(part in name for part in ("pos_embed", "position_embedding", "padding_tokens")):
        return 0.0, 0.3
    if name.startswith("motion_encoder."):  # its layers divide by the root of the inputs themselves
        return 0.0, 1.0
    if "shared" in name or "embed_tokens" in name:
        return 0.0, 1.0
    spread = 1.0 / math.sqrt(math.prod(shape[1:]))
    # UMT5 does not divide its logits by sqrt(head width), so its queries have to be small.
    return 0.0, spread / 4 if "SelfAttention.q" in name else spread


def make_transformer(size: TransformerSize, text_width: int, seed: int) -> WanTransformer3DModel:
    """Returns a WAN transformer of the given size with drawn parameters."""
    model = WanTransformer3DModel(
        num_attention_heads=size.heads,
        attention_head_dim=size.head_dim,
        num_layers=size.layers,
        ffn_dim=size.ffn,
        text_dim=text_width,
    )
    return draw_parameters(model, seed)


def make_vae(size: VaeSize, seed: int) -> AutoencoderKLWan:
    """Returns a WAN 2.1 VAE of the given size with drawn parameters."""
    model = AutoencoderKLWan(
        base_dim=size.base, dim_mult=list(size.multipliers), num_res_blocks=size.res_blocks
    )
    return draw_parameters(model, seed)


def make_text_encoder(size: TextSize, vocabulary: int, seed: int) -> UMT5EncoderModel:
    """Returns a UMT5 encoder of the given size with drawn parameters."""
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=size.width,
        d_kv=size.head_dim,
        d_ff=size.ffn,
        num_layers=size.layers,
        num_heads=size.heads,
    )
    return draw_parameters(UMT5EncoderModel(config), seed)


def make_scheduler(flow_shift: float) -> UniPCMultistepScheduler:
    """Returns the scheduler that the released WAN checkpoints name."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )


def write_checkpoint(folder: Path, tiny: TinyCheckpoint, pieces: Pieces | None = None) -> Path:
    """Writes the checkpoint folder as diffusers saves it and returns the folder."""
    tokenizer = write_tokenizer(folder / "tokenizer", pieces or unigram_pieces())
    width, seed = tiny.text.width, 10 * tiny.seed
    experts = {"transformer": make_transformer(tiny.transformer, width, seed + 1)}
    if tiny.boundary_ratio is not None:
        experts["transformer_2"] = make_transformer(tiny.transformer, width, seed + 2)
    pipeline = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=make_text_encoder(tiny.text, len(tokenizer), seed + 3).to(tiny.dtype),
        vae=make_vae(tiny.vae, seed + 4).to(tiny.dtype),
        scheduler=make_scheduler(tiny.flow_shift),
        boundary_ratio=tiny.boundary_ratio,
        **{name: model.to(tiny.dtype) for name, model in experts.items()},
    )
    pipeline.save_pretrained(folder, max_shard_size=tiny.shard_size)
    _name_tokenizer_as_released(folder / "model_index.json")
    return folder


def _name_tokenizer_as_released(index_file: Path) -> None:
    """The released folders were saved by an older transformers, which had a class per speed."""
    index = json.loads(index_file.read_text())
    index["tokenizer"] = ["transformers", "T5TokenizerFast"]
    index_file.write_text(json.dumps(index, indent=2) + "\n")
