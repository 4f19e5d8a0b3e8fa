"""Checkpoint map between transformers' UMT5 encoder and `Umt5Encoder`."""

from maxdiffusion.models.checkpoint_map import CheckpointMap, Entry, linear
from maxdiffusion.models.umt5 import Umt5Config

_ATTENTION = "encoder.block.{layer}.layer.0"
_MLP = "encoder.block.{layer}.layer.1"


def umt5_map(config: Umt5Config) -> CheckpointMap:
    """Returns the map of a UMT5 encoder.

    The embedding is tied: `shared.weight` and `encoder.embed_tokens.weight` are one tensor, and a
    checkpoint may hold either name or both.
    """
    return CheckpointMap(
        entries=(
            Entry(parameter="embedding", source="shared.weight"),
            Entry(
                parameter="blocks.attention_norm.scale", source=f"{_ATTENTION}.layer_norm.weight"
            ),
            *_projections("blocks.attention", f"{_ATTENTION}.SelfAttention", "q", "k", "v", "o"),
            Entry(
                parameter="blocks.attention.position_table",
                source=f"{_ATTENTION}.SelfAttention.relative_attention_bias.weight",
            ),
            Entry(parameter="blocks.mlp_norm.scale", source=f"{_MLP}.layer_norm.weight"),
            *linear("blocks.mlp.gate", f"{_MLP}.DenseReluDense.wi_0", bias=False),
            *linear("blocks.mlp.up", f"{_MLP}.DenseReluDense.wi_1", bias=False),
            *linear("blocks.mlp.down", f"{_MLP}.DenseReluDense.wo", bias=False),
            Entry(parameter="final_norm.scale", source="encoder.final_layer_norm.weight"),
        ),
        layers=config.layers,
        aliases=((r"encoder\.embed_tokens\.weight", "shared.weight"),),
    )


def _projections(parameter: str, source: str, *names: str) -> tuple[Entry, ...]:
    return tuple(
        entry
        for name in names
        for entry in linear(f"{parameter}.{name}", f"{source}.{name}", bias=False)
    )
