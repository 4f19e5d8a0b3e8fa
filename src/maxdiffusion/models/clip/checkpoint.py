"""Checkpoint map between transformers' CLIP vision model and `ClipVisionEncoder`."""

from collections.abc import Iterator

from maxdiffusion.models.checkpoint_map import CONV2D, CheckpointMap, Entry, linear
from maxdiffusion.models.clip import ClipVisionConfig

_LAYER = "encoder.layers.{layer}"
_PREFIX = r"(?:vision_model\.)?"


def clip_map(config: ClipVisionConfig) -> CheckpointMap:
    """Returns the map of a CLIP vision tower.

    Released files put `vision_model.` before every name, newer transformers do not. The last layer
    and what follows it are in the files and not needed.
    """
    return CheckpointMap(
        entries=(
            Entry(
                parameter="embedding.kernel",
                source="embeddings.patch_embedding.weight",
                transform=CONV2D,
            ),
            Entry(parameter="embedding.class_token", source="embeddings.class_embedding"),
            Entry(parameter="embedding.positions", source="embeddings.position_embedding.weight"),
            *_norm("first_norm", "pre_layrnorm"),
            *_norm("blocks.attention_norm", f"{_LAYER}.layer_norm1"),
            *linear("blocks.attention.q", f"{_LAYER}.self_attn.q_proj"),
            *linear("blocks.attention.k", f"{_LAYER}.self_attn.k_proj"),
            *linear("blocks.attention.v", f"{_LAYER}.self_attn.v_proj"),
            *linear("blocks.attention.out", f"{_LAYER}.self_attn.out_proj"),
            *_norm("blocks.mlp_norm", f"{_LAYER}.layer_norm2"),
            *linear("blocks.up", f"{_LAYER}.mlp.fc1"),
            *linear("blocks.down", f"{_LAYER}.mlp.fc2"),
        ),
        layers=config.used_layers,
        ignored=(
            rf"{_PREFIX}encoder\.layers\.{config.layers - 1}\..+",
            rf"{_PREFIX}post_layernorm\.(?:weight|bias)",
            rf"{_PREFIX}embeddings\.position_ids",
            r"visual_projection\.weight",
        ),
        aliases=((r"vision_model\.(.+)", r"\1"),),
    )


def _norm(parameter: str, source: str) -> Iterator[Entry]:
    yield Entry(parameter=f"{parameter}.scale", source=f"{source}.weight")
    yield Entry(parameter=f"{parameter}.bias", source=f"{source}.bias")
