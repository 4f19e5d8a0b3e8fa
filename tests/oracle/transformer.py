"""What diffusers' WAN transformer computes, with the inside of its first block."""

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import WanTransformer3DModel

from tests.oracle.arrays import Record, as_numpy, normal, outputs_of

LATENT_SHAPE = (3, 6, 4)
TIMESTEPS = (999, 437)


def run_transformer(
    folder: Path,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    text: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Returns the velocity that the transformer in `folder` predicts when loaded in `dtype`."""
    model = WanTransformer3DModel.from_pretrained(folder, dtype=dtype).eval()
    return model(latents.to(dtype), timestep, text.to(dtype), return_dict=False)[0]


def record_transformer(folder: Path, part: str, text: torch.Tensor, seed: int) -> Record:
    """Returns inputs, intermediate values and outputs of one expert, keys under `part/`."""
    model = WanTransformer3DModel.from_pretrained(folder / part, dtype=torch.float32).eval()
    latents = normal(seed, text.shape[0], model.config.in_channels, *LATENT_SHAPE)
    timestep = torch.tensor(TIMESTEPS[: text.shape[0]])
    with outputs_of(_watched_modules(model)) as seen:
        out = model(latents, timestep, text, return_dict=False)[0]
    halved = run_transformer(folder / part, latents, timestep, text, torch.bfloat16)
    temb, timestep_proj, context, _ = seen.pop("condition")
    cosine, sine = seen.pop("rope")
    values = {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": text,
        "rope_cos": cosine[0, :, 0],
        "rope_sin": sine[0, :, 0],
        "temb": temb,
        "timestep_proj": timestep_proj,
        "context_first24": context[:, :24],
        "context_pad_row": context[0, -1],
        "out": out,
        "out_bf16": halved,
        **seen,
    }
    record = {f"{part}/{name}": as_numpy(value) for name, value in values.items()}
    record[f"{part}/fp32_islands_json"] = np.asarray(json.dumps(_float32_islands(folder / part)))
    return record


def _watched_modules(model: WanTransformer3DModel) -> dict[str, torch.nn.Module]:
    block = model.blocks[0]
    return {
        "rope": model.rope,
        "patch_embed": model.patch_embedding,
        "condition": model.condition_embedder,
        "t_sinusoid": model.condition_embedder.timesteps_proj,
        "b0_norm1": block.norm1,
        "b0_norm_q": block.attn1.norm_q,
        "b0_attn1": block.attn1,
        "b0_norm2": block.norm2,
        "b0_attn2": block.attn2,
        "b0_ffn": block.ffn,
        **{f"block{at}": module for at, module in enumerate(model.blocks)},
    }


def _float32_islands(folder: Path) -> list[str]:
    """Returns the parameters that stay in float32 when the rest is loaded in bfloat16."""
    model = WanTransformer3DModel.from_pretrained(folder, dtype=torch.bfloat16)
    kept = [name for name, value in model.named_parameters() if value.dtype == torch.float32]
    return sorted(kept)
