"""Checkpoint map between diffusers' WAN transformer and `WanTransformer`."""

from collections.abc import Iterable

from maxdiffusion.models.checkpoint_map import (
    CONV3D,
    LINEAR,
    CheckpointMap,
    DropUnitDims,
    Entry,
    RopeHalves,
    linear,
)
from maxdiffusion.models.wan import WanTransformerConfig

_BLOCK = "blocks.{layer}"


def transformer_map(config: WanTransformerConfig) -> CheckpointMap:
    """Returns the map of a transformer."""
    return CheckpointMap(
        entries=(*_outer(), *_self_attention(config.head_dim), *_cross_attention(), *_rest()),
        layers=config.layers,
        # Released I2V folders carry gains of a query norm that no computation reads.
        ignored=(r"blocks\.\d+\.attn2\.norm_added_q\.weight",),
    )


def _outer() -> Iterable[Entry]:
    embedder = "condition_embedder"
    yield Entry(
        parameter="patch_embedding.kernel", source="patch_embedding.weight", transform=CONV3D
    )
    yield Entry(parameter="patch_embedding.bias", source="patch_embedding.bias")
    for part in ("linear_1", "linear_2"):
        yield from linear(f"time_embedding.{part}", f"{embedder}.time_embedder.{part}")
        yield from linear(f"text_embedding.{part}", f"{embedder}.text_embedder.{part}")
    yield from linear("time_embedding.projection", f"{embedder}.time_proj")
    yield from linear("proj_out", "proj_out")
    yield Entry(
        parameter="scale_shift_table",
        source="scale_shift_table",
        transform=DropUnitDims((1, 2, -1)),
    )


def _self_attention(head_dim: int) -> Iterable[Entry]:
    """Yields the entries of self-attention; features of q and k are regrouped for RoPE."""
    for part in ("q", "k"):
        yield Entry(
            parameter=f"blocks.attn1.to_{part}.kernel",
            source=f"{_BLOCK}.attn1.to_{part}.weight",
            transform=RopeHalves(head_dim, before=LINEAR),
        )
        for parameter, source in (
            (f"to_{part}.bias",) * 2,
            (f"norm_{part}.scale", f"norm_{part}.weight"),
        ):
            yield Entry(
                parameter=f"blocks.attn1.{parameter}",
                source=f"{_BLOCK}.attn1.{source}",
                transform=RopeHalves(head_dim),
            )
    yield from _values_and_output("attn1")


def _cross_attention() -> Iterable[Entry]:
    for part in ("q", "k"):
        yield from linear(f"blocks.attn2.to_{part}", f"{_BLOCK}.attn2.to_{part}")
        yield Entry(
            parameter=f"blocks.attn2.norm_{part}.scale",
            source=f"{_BLOCK}.attn2.norm_{part}.weight",
        )
    yield from _values_and_output("attn2")


def _values_and_output(attention: str) -> Iterable[Entry]:
    yield from linear(f"blocks.{attention}.to_v", f"{_BLOCK}.{attention}.to_v")
    yield from linear(f"blocks.{attention}.to_out", f"{_BLOCK}.{attention}.to_out.0")


def _rest() -> Iterable[Entry]:
    yield from linear("blocks.ffn.up", f"{_BLOCK}.ffn.net.0.proj")
    yield from linear("blocks.ffn.down", f"{_BLOCK}.ffn.net.2")
    yield Entry(parameter="blocks.norm2.scale", source=f"{_BLOCK}.norm2.weight")
    yield Entry(parameter="blocks.norm2.bias", source=f"{_BLOCK}.norm2.bias")
    yield Entry(
        parameter="blocks.scale_shift_table",
        source=f"{_BLOCK}.scale_shift_table",
        transform=DropUnitDims((1, 6, -1)),
    )
