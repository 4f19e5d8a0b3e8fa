"""Writes models to train from.

write_random_model     sizes, a tokenizer for the synthetic captions, random weights
write_one_transformer  a two-expert model as one for text and image, as TI2V-5B is
"""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from maxdiffusion.checkpoints.diffusers_folder import TOKENIZER, listed_components
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.umt5.checkpoint import umt5_map
from maxdiffusion.models.vae import WanVae, WanVaeConfig
from maxdiffusion.models.vae.checkpoint import vae_map
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.runtime.files import new_folder
from maxdiffusion.training.data.synthetic import every_word
from maxdiffusion.training.loss import HIGH_NOISE, LOW_NOISE
from maxdiffusion.training.results import NewPart, config_of, export_model
from maxdiffusion.training.vae import as_pictures, first_bias

LATENT_CHANNELS = 16
TEXT_WIDTH = 64
WORD_START = "▁"
_SIGNS = "".join(map(chr, range(33, 127)))
_LIKELY, _UNLIKELY = -4.0, -10.0  # log probabilities: a known word beats any spelling of it


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of the small model for moving shapes."""

    transformer: WanTransformerConfig = field(
        default_factory=lambda: WanTransformerConfig(
            layers=6,
            heads=4,
            head_dim=32,
            ffn_dim=384,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_WIDTH,
        )
    )
    vae: WanVaeConfig = field(
        default_factory=lambda: WanVaeConfig(
            base_dim=16,
            z_dim=LATENT_CHANNELS,
            dim_mult=(1, 2, 2, 2),
            num_res_blocks=1,
            latents_mean=(0.0,) * LATENT_CHANNELS,
            latents_std=(1.0,) * LATENT_CHANNELS,
        )
    )
    text: Umt5Config = field(
        default_factory=lambda: Umt5Config(
            vocab=1, width=TEXT_WIDTH, head_dim=16, mlp_width=128, layers=2, heads=4
        )
    )


def write_random_model(
    template: Path, folder: Path, *, seed: int, sizes: ModelSizes | None = None
) -> None:
    """Writes a diffusers folder with random weights; scheduler and index come from `template`."""
    sizes = sizes or ModelSizes()
    staging = folder.with_name(f"{folder.name}-template")
    shutil.copytree(template, staging, dirs_exist_ok=True)
    try:
        vocabulary = write_tokenizer(staging / "tokenizer")
        text = replace(sizes.text, vocab=vocabulary)
        export_model(staging, folder, _parts(template, replace(sizes, text=text), seed))
    finally:
        shutil.rmtree(staging)


def write_one_transformer(source: Path, folder: Path) -> None:
    """Writes a two-expert model as one whose only transformer has a time for every token.

    That is its low-noise expert, which has seen most levels; training has to teach it the rest, and
    that the first frame may be known.
    """
    index = json.loads((source / "model_index.json").read_text())
    index |= {"boundary_ratio": None, "expand_timesteps": True, LOW_NOISE: [None, None]}
    with new_folder(folder) as unfinished:
        for part in listed_components(index):
            held = LOW_NOISE if part == HIGH_NOISE else part
            shutil.copytree(source / held, unfinished / part)
        (unfinished / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tokenizer(folder: Path) -> int:
    """Gives a T5 tokenizer one piece for every word of the captions; returns its size."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(WORD_START + word, _LIKELY) for word in every_word()]
    signs = [(sign, _UNLIKELY) for sign in (WORD_START, *_SIGNS)]
    pieces = special + words + signs
    file = folder / TOKENIZER
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"] = pieces
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
    return len(pieces)


def _parts(template: Path, sizes: ModelSizes, seed: int) -> dict[str, NewPart]:
    size, text, vae = sizes.transformer, sizes.text, sizes.vae
    float32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    transformer = NewPart(
        state=nnx.split(WanTransformer(size, rngs=nnx.Rngs(seed), **float32))[1],
        table=transformer_map(size),
        config=config_of(template, "transformer", **transformer_json(size)),
    )
    encoder = Umt5Encoder(text, rngs=nnx.Rngs(seed + 1))
    return {
        "transformer": transformer,
        "transformer_2": transformer,
        "text_encoder": NewPart(
            state=nnx.split(encoder)[1],
            table=umt5_map(text),
            config=config_of(template, "text_encoder", **text_json(text)),
        ),
        "vae": NewPart(
            state=_fresh_vae(vae, seed + 2),
            table=vae_map(vae),
            config=config_of(template, "vae", **vae_json(vae)),
        ),
    }


def _fresh_vae(config: WanVaeConfig, seed: int) -> nnx.State:
    _, state = nnx.split(WanVae(config, rngs=nnx.Rngs(seed)))
    flat = nnx.to_flat_state(state)
    changed = []
    for path, variable in flat:
        name = ".".join(map(str, path))
        value = as_pictures(name, variable.get_value())
        changed.append((path, variable.replace(first_bias(name, value))))
    return nnx.from_flat_state(changed)


def transformer_json(config: WanTransformerConfig) -> dict[str, object]:
    """Returns the sizes of a transformer by diffusers' names."""
    return {
        "num_layers": config.layers,
        "num_attention_heads": config.heads,
        "attention_head_dim": config.head_dim,
        "ffn_dim": config.ffn_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "text_dim": config.text_dim,
        "freq_dim": config.freq_dim,
        "patch_size": config.patch,
    }


def text_json(config: Umt5Config) -> dict[str, object]:
    """Returns the sizes of a text encoder by transformers' names."""
    return {
        "vocab_size": config.vocab,
        "d_model": config.width,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_width,
        "num_layers": config.layers,
        "num_heads": config.heads,
        "dtype": "float32",
    }


def vae_json(config: WanVaeConfig) -> dict[str, object]:
    """Returns the sizes and statistics of an autoencoder by diffusers' names."""
    return {
        "base_dim": config.base_dim,
        "decoder_base_dim": config.decoder_base_dim,
        "z_dim": config.z_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "is_residual": config.is_residual,
        "patch_size": config.patch_size,
        "scale_factor_spatial": config.spatial_factor,
        "scale_factor_temporal": config.temporal_factor,
        "dim_mult": config.dim_mult,
        "num_res_blocks": config.num_res_blocks,
        "temperal_downsample": config.temperal_downsample,
        "latents_mean": config.latents_mean,
        "latents_std": config.latents_std,
    }
