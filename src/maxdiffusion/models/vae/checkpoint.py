"""Checkpoint map between diffusers' WAN autoencoders, 2.1 and 2.2, and `WanVae`."""

from collections.abc import Iterator

from maxdiffusion.models.checkpoint_map import CONV2D, CONV3D, CheckpointMap, DropUnitDims, Entry
from maxdiffusion.models.vae import WanVaeConfig

VIDEO_GAIN = DropUnitDims((-1, 1, 1, 1))
FRAME_GAIN = DropUnitDims((-1, 1, 1))


def vae_map(config: WanVaeConfig) -> CheckpointMap:
    """Returns the map of an autoencoder."""
    entries = (
        *_encoder(config),
        *_conv3d("quant_conv", "quant_conv"),
        *_conv3d("post_quant_conv", "post_quant_conv"),
        *_decoder(config),
    )
    return CheckpointMap(entries=entries)


def _encoder(config: WanVaeConfig) -> Iterator[Entry]:
    yield from _conv3d("encoder.conv_in", "encoder.conv_in")
    sources = _nested_blocks(config) if config.is_residual else _flat_blocks(config)
    for level, halve_time in enumerate((*config.temperal_downsample, None)):
        stage = f"encoder.stages.{level}"
        for block in range(config.num_res_blocks):
            widens = block == 0 and config.encoder_inputs[level] != config.encoder_dims[level]
            yield from _resnet(f"{stage}.resnets.{block}", next(sources), shortcut=widens)
        if halve_time is not None:
            yield from _resample(f"{stage}.resample", next(sources), time=halve_time)
    yield from _mid("encoder")
    yield from _head("encoder")


def _flat_blocks(config: WanVaeConfig) -> Iterator[str]:
    """Yields the names of the 2.1 encoder's blocks and downsamplers: one list for all stages."""
    levels = len(config.dim_mult)
    for position in range(levels * config.num_res_blocks + levels - 1):
        yield f"encoder.down_blocks.{position}"


def _nested_blocks(config: WanVaeConfig) -> Iterator[str]:
    """Yields the names of the 2.2 encoder's blocks and downsamplers: a list for every stage."""
    for level in range(len(config.dim_mult)):
        for block in range(config.num_res_blocks):
            yield f"encoder.down_blocks.{level}.resnets.{block}"
        if level < len(config.dim_mult) - 1:
            yield f"encoder.down_blocks.{level}.downsampler"


def _decoder(config: WanVaeConfig) -> Iterator[Entry]:
    yield from _conv3d("decoder.conv_in", "decoder.conv_in")
    yield from _mid("decoder")
    upsampler = "upsampler" if config.is_residual else "upsamplers.0"
    for level, double_time in enumerate((*reversed(config.temperal_downsample), None)):
        stage, source = f"decoder.stages.{level}", f"decoder.up_blocks.{level}"
        for block in range(config.num_res_blocks + 1):
            widens = block == 0 and config.decoder_inputs[level] != config.decoder_dims[level]
            resnet = f"resnets.{block}"
            yield from _resnet(f"{stage}.{resnet}", f"{source}.{resnet}", shortcut=widens)
        if double_time is not None:
            yield from _resample(f"{stage}.resample", f"{source}.{upsampler}", time=double_time)
    yield from _head("decoder")


def _mid(side: str) -> Iterator[Entry]:
    ours, theirs = f"{side}.mid", f"{side}.mid_block"
    yield from _resnet(f"{ours}.before", f"{theirs}.resnets.0", shortcut=False)
    attention = f"{theirs}.attentions.0"
    yield _gain(f"{ours}.attention.norm", f"{attention}.norm", FRAME_GAIN)
    yield from _conv2d(f"{ours}.attention.to_qkv", f"{attention}.to_qkv")
    yield from _conv2d(f"{ours}.attention.proj", f"{attention}.proj")
    yield from _resnet(f"{ours}.after", f"{theirs}.resnets.1", shortcut=False)


def _head(side: str) -> Iterator[Entry]:
    yield _gain(f"{side}.norm_out", f"{side}.norm_out", VIDEO_GAIN)
    yield from _conv3d(f"{side}.conv_out", f"{side}.conv_out")


def _resnet(ours: str, theirs: str, *, shortcut: bool) -> Iterator[Entry]:
    for index in (1, 2):
        yield _gain(f"{ours}.norm{index}", f"{theirs}.norm{index}", VIDEO_GAIN)
        yield from _conv3d(f"{ours}.conv{index}", f"{theirs}.conv{index}")
    if shortcut:
        yield from _conv3d(f"{ours}.shortcut", f"{theirs}.conv_shortcut")


def _resample(ours: str, theirs: str, *, time: bool) -> Iterator[Entry]:
    yield from _conv2d(f"{ours}.conv", f"{theirs}.resample.1")
    if time:
        yield from _conv3d(f"{ours}.time_conv", f"{theirs}.time_conv")


def _conv3d(ours: str, theirs: str) -> Iterator[Entry]:
    yield Entry(parameter=f"{ours}.kernel", source=f"{theirs}.weight", transform=CONV3D)
    yield Entry(parameter=f"{ours}.bias", source=f"{theirs}.bias")


def _conv2d(ours: str, theirs: str) -> Iterator[Entry]:
    yield Entry(parameter=f"{ours}.kernel", source=f"{theirs}.weight", transform=CONV2D)
    yield Entry(parameter=f"{ours}.bias", source=f"{theirs}.bias")


def _gain(ours: str, theirs: str, transform: DropUnitDims) -> Entry:
    return Entry(parameter=f"{ours}.gamma", source=f"{theirs}.gamma", transform=transform)
