"""Checkpoint map between diffusers' WAN transformer and `WanTransformer`."""

from collections.abc import Iterable
from dataclasses import replace

from maxdiffusion.models.checkpoint_map import (
    CONV1D,
    CONV2D,
    CONV3D,
    LINEAR,
    CheckpointMap,
    DropUnitDims,
    Entry,
    RopeHalves,
    linear,
)
from maxdiffusion.models.wan.config import MOTION_LINEARS, FaceConfig, WanTransformerConfig

_BLOCK = "blocks.{layer}"
_CONTROL = "vace_blocks.{layer}"


def transformer_map(config: WanTransformerConfig) -> CheckpointMap:
    """Returns the map of a transformer."""
    has_image = config.image_dim is not None
    entries = [*_outer(), *_block("blocks", _BLOCK, config)]
    if has_image:
        entries += _image_embedding(positions=config.image_positions is not None)
    if config.control_layers:
        entries += _control(config)
    if config.face is not None:
        entries += _animation(config, config.face)
    return CheckpointMap(
        entries=tuple(entries),
        layers=config.layers,
        # Released I2V folders carry gains of a query norm that no computation reads.
        ignored=(r"blocks\.\d+\.attn2\.norm_added_q\.weight",),
    )


def _outer() -> Iterable[Entry]:
    embedder = "condition_embedder"
    yield from _patches("patch_embedding", "patch_embedding")
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


def _patches(parameter: str, source: str) -> Iterable[Entry]:
    yield Entry(parameter=f"{parameter}.kernel", source=f"{source}.weight", transform=CONV3D)
    yield Entry(parameter=f"{parameter}.bias", source=f"{source}.bias")


def _norm(parameter: str, source: str) -> Iterable[Entry]:
    yield Entry(parameter=f"{parameter}.scale", source=f"{source}.weight")
    yield Entry(parameter=f"{parameter}.bias", source=f"{source}.bias")


def _image_embedding(*, positions: bool) -> Iterable[Entry]:
    ours, theirs = "image_embedding", "condition_embedder.image_embedder"
    yield from _norm(f"{ours}.norm1", f"{theirs}.norm1")
    yield from linear(f"{ours}.linear_1", f"{theirs}.ff.net.0.proj")
    yield from linear(f"{ours}.linear_2", f"{theirs}.ff.net.2")
    yield from _norm(f"{ours}.norm2", f"{theirs}.norm2")
    if positions:
        yield Entry(
            parameter=f"{ours}.positions",
            source=f"{theirs}.pos_embed",
            transform=DropUnitDims((1, -1, -1)),
        )


def _control(config: WanTransformerConfig) -> Iterable[Entry]:
    """Yields the entries of control blocks; only the first has an input projection."""
    yield from _patches("control.patch_embedding", "vace_patch_embedding")
    yield from linear("control.proj_in", "vace_blocks.0.proj_in")
    stacked = (
        *linear("control.blocks.proj_out", f"{_CONTROL}.proj_out"),
        *_block("control.blocks.block", _CONTROL, config),
    )
    for entry in stacked:
        yield replace(entry, layers=len(config.control_layers))


def _animation(config: WanTransformerConfig, face: FaceConfig) -> Iterable[Entry]:
    """Yields the entries that only Animate has: poses, both encoders, adapters."""
    yield from _patches("animation.pose_embedding", "pose_patch_embedding")
    yield from _motion_encoder("animation.motion_encoder", "motion_encoder", len(face.widths) - 1)
    ours, theirs = "animation.face_encoder", "face_encoder"
    for part, source in (("conv1", "conv1_local"), ("conv2", "conv2"), ("conv3", "conv3")):
        yield Entry(
            parameter=f"{ours}.{part}.kernel", source=f"{theirs}.{source}.weight", transform=CONV1D
        )
        yield Entry(parameter=f"{ours}.{part}.bias", source=f"{theirs}.{source}.bias")
    yield from linear(f"{ours}.out_proj", f"{theirs}.out_proj")
    yield Entry(
        parameter=f"{ours}.padding_token",
        source=f"{theirs}.padding_tokens",
        transform=DropUnitDims((1, 1, 1, -1)),
    )
    for entry in _adapters("animation.adapters", "face_adapter.{layer}"):
        yield replace(entry, layers=config.layers // face.every)


def _motion_encoder(ours: str, theirs: str, blocks: int) -> Iterable[Entry]:
    yield from _scaled_conv(f"{ours}.conv_in", f"{theirs}.conv_in")
    for block in range(blocks):
        for part in ("conv1", "conv2"):
            yield from _scaled_conv(
                f"{ours}.blocks.{block}.{part}", f"{theirs}.res_blocks.{block}.{part}"
            )
        part = "conv_skip"
        yield from _scaled_conv(
            f"{ours}.blocks.{block}.{part}", f"{theirs}.res_blocks.{block}.{part}", activated=False
        )
    yield from _scaled_conv(f"{ours}.conv_out", f"{theirs}.conv_out", activated=False)
    for index in range(MOTION_LINEARS):
        yield from linear(f"{ours}.linears.{index}", f"{theirs}.motion_network.{index}")
    yield Entry(parameter=f"{ours}.directions", source=f"{theirs}.motion_synthesis_weight")


def _scaled_conv(ours: str, theirs: str, *, activated: bool = True) -> Iterable[Entry]:
    yield Entry(parameter=f"{ours}.kernel", source=f"{theirs}.weight", transform=CONV2D)
    if activated:
        yield Entry(parameter=f"{ours}.bias", source=f"{theirs}.act_fn.bias")


def _adapters(ours: str, theirs: str) -> Iterable[Entry]:
    for part in ("to_q", "to_k", "to_v", "to_out"):
        yield from linear(f"{ours}.{part}", f"{theirs}.{part}")
    for part in ("norm_q", "norm_k"):
        yield Entry(parameter=f"{ours}.{part}", source=f"{theirs}.{part}.weight")


def _block(ours: str, theirs: str, config: WanTransformerConfig) -> Iterable[Entry]:
    yield from _self_attention(f"{ours}.attn1", f"{theirs}.attn1", config.head_dim)
    yield from _cross_attention(
        f"{ours}.attn2", f"{theirs}.attn2", has_image=config.image_dim is not None
    )
    yield from linear(f"{ours}.ffn.up", f"{theirs}.ffn.net.0.proj")
    yield from linear(f"{ours}.ffn.down", f"{theirs}.ffn.net.2")
    yield from _norm(f"{ours}.norm2", f"{theirs}.norm2")
    yield Entry(
        parameter=f"{ours}.scale_shift_table",
        source=f"{theirs}.scale_shift_table",
        transform=DropUnitDims((1, 6, -1)),
    )


def _self_attention(ours: str, theirs: str, head_dim: int) -> Iterable[Entry]:
    """Yields the entries of self-attention; features of q and k are regrouped for RoPE."""
    for part in ("q", "k"):
        yield Entry(
            parameter=f"{ours}.to_{part}.kernel",
            source=f"{theirs}.to_{part}.weight",
            transform=RopeHalves(head_dim, before=LINEAR),
        )
        for parameter, source in (
            (f"to_{part}.bias",) * 2,
            (f"norm_{part}.scale", f"norm_{part}.weight"),
        ):
            yield Entry(
                parameter=f"{ours}.{parameter}",
                source=f"{theirs}.{source}",
                transform=RopeHalves(head_dim),
            )
    yield from _values_and_output(ours, theirs)


def _cross_attention(ours: str, theirs: str, *, has_image: bool) -> Iterable[Entry]:
    for part in ("q", "k"):
        yield from linear(f"{ours}.to_{part}", f"{theirs}.to_{part}")
        yield Entry(parameter=f"{ours}.norm_{part}.scale", source=f"{theirs}.norm_{part}.weight")
    yield from _values_and_output(ours, theirs)
    if has_image:
        for part in ("add_k_proj", "add_v_proj"):
            yield from linear(f"{ours}.{part}", f"{theirs}.{part}")
        yield Entry(parameter=f"{ours}.norm_added_k.scale", source=f"{theirs}.norm_added_k.weight")


def _values_and_output(ours: str, theirs: str) -> Iterable[Entry]:
    yield from linear(f"{ours}.to_v", f"{theirs}.to_v")
    yield from linear(f"{ours}.to_out", f"{theirs}.to_out.0")
