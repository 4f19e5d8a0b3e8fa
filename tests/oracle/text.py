"""What transformers and diffusers compute from prompts."""

import json
from pathlib import Path

import numpy as np
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from transformers import AutoTokenizer, UMT5EncoderModel

from tests.oracle.arrays import Record, as_numpy, outputs_of

PROMPT = "A red fox runs through deep snow while the camera moves slowly."
NEGATIVE = "blurred, static, worst quality"
SECOND_PROMPT = (
    "  A small  robot &amp;amp; a dog,\n\treading &lt;books&gt; ‘on’ the moon â€” cafÃ© "
)
PROMPTS = [PROMPT, SECOND_PROMPT, "", NEGATIVE, "Two children fly a kite. " * 120]
TEXT_LENGTH = 512


def tokenise(folder: Path, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ids and mask of the cleaned prompts, padded to the length that WAN uses."""
    tokens = AutoTokenizer.from_pretrained(folder / "tokenizer")(
        [prompt_clean(prompt) for prompt in prompts],
        padding="max_length",
        max_length=TEXT_LENGTH,
        truncation=True,
        return_tensors="pt",
    )
    return tokens.input_ids, tokens.attention_mask


def embed(
    folder: Path, ids: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns the UMT5 embeddings, zero where the mask is, as the WAN pipeline pads them."""
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype).eval()
    return encoder(ids, mask).last_hidden_state * mask[..., None]


def record_text(folder: Path) -> Record:
    """Returns ids, embeddings and the inside of the first block for a handful of prompts."""
    ids, mask = tokenise(folder, PROMPTS)
    short_ids, short_mask = ids[:4], mask[:4]
    encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()
    first, second = encoder.encoder.block[:2]
    with outputs_of({"attention": first.layer[0], "block": first}) as seen:
        encoder(short_ids, short_mask)
    block = seen["block"][0] if isinstance(seen["block"], tuple) else seen["block"]
    zeroed = short_mask[..., None]
    relative = torch.arange(-600, 601)
    bucket = first.layer[0].SelfAttention._relative_position_bucket(relative)
    return {
        "prompts_json": np.asarray(json.dumps(PROMPTS)),
        "clean_json": np.asarray(json.dumps([prompt_clean(prompt) for prompt in PROMPTS])),
        "input_ids": as_numpy(ids).astype(np.int32),
        "attention_mask": as_numpy(mask).astype(np.int32),
        "lens": as_numpy(mask.sum(1)),
        "block0_attn": as_numpy(seen["attention"][0] * zeroed),
        "block0": as_numpy(block * zeroed),
        "prompt_embeds": as_numpy(embed(folder, short_ids, short_mask)),
        "prompt_embeds_truncated": as_numpy(embed(folder, ids[4:], mask[4:])),
        "prompt_embeds_bf16": as_numpy(embed(folder, short_ids, short_mask, torch.bfloat16)),
        "position_bias_16": as_numpy(second.layer[0].SelfAttention.compute_bias(16, 16)),
        "bucket_rel": as_numpy(relative),
        "bucket": as_numpy(bucket),
    }
