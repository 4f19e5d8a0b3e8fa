"""Names of tensors in Wan-AI's own transformer files, and the sizes that tensors reveal.

    diffusers_name("blocks.0.self_attn.q.weight")      "blocks.0.attn1.to_q.weight"
    original_name("blocks.0.attn1.to_q.weight")        "blocks.0.self_attn.q.weight"
    diffusers_module, original_module                  the same without `.weight` or `.bias`

They are functions of a name alone, so they serve every member of the family (text, image, VACE, 5B,
Animate) and every checkpoint map. `TensorSizes` tells the members apart by names and shapes.

A few tensors of Animate are not stored as diffusers has them: `pieces_of` returns those that an
original one holds, `fixed_values` what original files keep although it is the same in every model.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from maxdiffusion.models.wan.config import LAST_FACE_PIXELS, MOTION_LINEARS

Shape = tuple[int, ...]

_EMBEDDER = "condition_embedder"
# Original -> diffusers, outside the blocks.
_OUTER = {
    "patch_embedding": "patch_embedding",
    "vace_patch_embedding": "vace_patch_embedding",
    "time_embedding.0": f"{_EMBEDDER}.time_embedder.linear_1",
    "time_embedding.2": f"{_EMBEDDER}.time_embedder.linear_2",
    "time_projection.1": f"{_EMBEDDER}.time_proj",
    "text_embedding.0": f"{_EMBEDDER}.text_embedder.linear_1",
    "text_embedding.2": f"{_EMBEDDER}.text_embedder.linear_2",
    "img_emb.proj.0": f"{_EMBEDDER}.image_embedder.norm1",
    "img_emb.proj.1": f"{_EMBEDDER}.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": f"{_EMBEDDER}.image_embedder.ff.net.2",
    "img_emb.proj.4": f"{_EMBEDDER}.image_embedder.norm2",
    "img_emb.emb_pos": f"{_EMBEDDER}.image_embedder.pos_embed",  # first-and-last-frame models
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_MOTION = "motion_encoder"
_CONVOLUTIONS = f"{_MOTION}.enc.net_app.convs"
_LAST_CONVOLUTION = f"{_MOTION}.conv_out"
# Outside the blocks, Animate alone. A convolution of the motion encoder is a list: [blur,]
# convolution, bias. Its last one has a number after the blocks, of which the released model has 7.
_ANIMATE = {
    "pose_patch_embedding": "pose_patch_embedding",
    f"{_CONVOLUTIONS}.0.0": f"{_MOTION}.conv_in",
    f"{_CONVOLUTIONS}.0.1": f"{_MOTION}.conv_in.act_fn",
    f"{_CONVOLUTIONS}.8": _LAST_CONVOLUTION,
    **{f"{_MOTION}.enc.fc.{n}": f"{_MOTION}.motion_network.{n}" for n in range(MOTION_LINEARS)},
    "face_encoder.conv1_local.conv": "face_encoder.conv1_local",
    "face_encoder.conv2.conv": "face_encoder.conv2",
    "face_encoder.conv3.conv": "face_encoder.conv3",
    "face_encoder.out_proj": "face_encoder.out_proj",
    "face_encoder.padding_tokens": "face_encoder.padding_tokens",
}
_ATTENTION = {
    "q": "to_q",
    "k": "to_k",
    "v": "to_v",
    "o": "to_out.0",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
}
_IMAGE_ATTENTION = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
# Inside `blocks.N` and `vace_blocks.N`.
_BLOCK = {
    **{f"self_attn.{theirs}": f"attn1.{ours}" for theirs, ours in _ATTENTION.items()},
    **{
        f"cross_attn.{theirs}": f"attn2.{ours}"
        for theirs, ours in (_ATTENTION | _IMAGE_ATTENTION).items()
    },
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm3": "norm2",
    "modulation": "scale_shift_table",
}
_CONTROL_BLOCK = {**_BLOCK, "before_proj": "proj_in", "after_proj": "proj_out"}
_MOTION_BLOCK = {
    "conv1.0": "conv1",
    "conv1.1": "conv1.act_fn",
    "conv2.1": "conv2",
    "conv2.2": "conv2.act_fn",
    "skip.1": "conv_skip",
}
_FACE_ADAPTER = {"linear1_q": "to_q", "linear2": "to_out", "q_norm": "norm_q", "k_norm": "norm_k"}
_FUSED, _FUSED_PARTS = "linear1_kv", ("to_k", "to_v")  # in one tensor, the rows of keys first
# Names that differ with their leaf.
_TENSORS = {f"{_MOTION}.dec.direction.weight": f"{_MOTION}.motion_synthesis_weight"}
# Modules that are one parameter themselves, without `.weight`.
_PARAMETERS = ("modulation", "emb_pos", "scale_shift_table", "pos_embed", "padding_tokens")
_LEAVES = (".weight", ".bias")
_NUMBER = r"(?P<number>0|[1-9]\d*)"
_LEAF = r"(?P<leaf>\.weight|\.bias)"


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    back = {ours: theirs for theirs, ours in table.items()}
    assert len(back) == len(table)
    return back


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Modules under `source.N`, which become those under `target.N + shift`."""

    source: str
    target: str
    modules: Mapping[str, str]
    shift: int = 0

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The names of these modules."""
        return re.compile(rf"{re.escape(self.source)}\.{_NUMBER}\.(?P<module>.+)")

    @property
    def back(self) -> "_Blocks":
        """The blocks in the other direction."""
        return _Blocks(
            source=self.target,
            target=self.source,
            modules=_inverse(self.modules),
            shift=-self.shift,
        )

    def renamed(self, name: str) -> str | None:
        """Returns the new name of a module of these blocks, or None if it is not one."""
        found = self.pattern.fullmatch(name)
        module = self.modules.get(found["module"]) if found else None
        if found is None or module is None or int(found["number"]) + self.shift < 0:
            return None
        return f"{self.target}.{int(found['number']) + self.shift}.{module}"


_CONTROL = "vace_blocks"
_ADAPTERS = "face_adapter"
_MOTION_BLOCKS = f"{_MOTION}.res_blocks"
_BLOCKS = (
    _Blocks(source="blocks", target="blocks", modules=_BLOCK),
    _Blocks(source=_CONTROL, target=_CONTROL, modules=_CONTROL_BLOCK),
    _Blocks(source=f"{_ADAPTERS}.fuser_blocks", target=_ADAPTERS, modules=_FACE_ADAPTER),
    _Blocks(source=_CONVOLUTIONS, target=_MOTION_BLOCKS, modules=_MOTION_BLOCK, shift=-1),
)
_BACK_BLOCKS = tuple(blocks.back for blocks in _BLOCKS)
_NAMES = _OUTER | _ANIMATE
_BACK_NAMES, _BACK_TENSORS = _inverse(_NAMES), _inverse(_TENSORS)
_ANY_LAST_CONVOLUTION = re.compile(rf"{re.escape(_CONVOLUTIONS)}\.[1-9]\d*")
_FUSED_TENSOR = re.compile(rf"{_ADAPTERS}\.fuser_blocks\.{_NUMBER}\.{_FUSED}{_LEAF}")
_PART_OF_FUSED = re.compile(rf"{_ADAPTERS}\.{_NUMBER}\.(?:{'|'.join(_FUSED_PARTS)}){_LEAF}")
_BLUR_KERNEL = re.compile(rf"{re.escape(_CONVOLUTIONS)}\.[1-9]\d*\.(?:conv2|skip)\.0\.kernel")


def diffusers_module(original: str) -> str | None:
    """Returns diffusers' name of a module of the original model, or None if it has none."""
    if _ANY_LAST_CONVOLUTION.fullmatch(original):
        return _LAST_CONVOLUTION
    return _renamed(original, _NAMES, _BLOCKS)


def original_module(diffusers: str) -> str | None:
    """Returns the original name of a module of diffusers' model, or None if it has none."""
    return _renamed(diffusers, _BACK_NAMES, _BACK_BLOCKS)


def diffusers_name(original: str) -> str | None:
    """Returns diffusers' name of a tensor of the original model, or None if it has none."""
    module, leaf = split_leaf(original)
    return _TENSORS.get(original) or _with_leaf(diffusers_module(module), leaf)


def original_name(diffusers: str) -> str | None:
    """Returns the original tensor that holds one of diffusers' model, or None if there is none."""
    part = _PART_OF_FUSED.fullmatch(diffusers)
    if part is not None:
        return f"{_ADAPTERS}.fuser_blocks.{part['number']}.{_FUSED}{part['leaf']}"
    module, leaf = split_leaf(diffusers)
    return _BACK_TENSORS.get(diffusers) or _with_leaf(original_module(module), leaf)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of diffusers' model inside a tensor of another."""

    name: str
    shape: Shape


def pieces_of(original: str, shape: Shape) -> tuple[Piece, ...]:
    """Returns diffusers' tensors that an original one of this shape holds, one after the other.

    They are one tensor of the same shape, but for two kinds of Animate: keys and values of a face
    adapter are the halves of one tensor, and biases of the motion encoder are [1, C, 1, 1]. None
    are returned for an unknown name.
    """
    fused = _FUSED_TENSOR.fullmatch(original)
    if fused is not None:
        return _fused_pieces(f"{_ADAPTERS}.{fused['number']}", fused["leaf"], shape)
    name = diffusers_name(original)
    if name is None:
        return ()
    is_bias = name.endswith(".act_fn.bias") and shape == (1, *shape[1:2], 1, 1)
    return (Piece(name=name, shape=shape[1:2] if is_bias else shape),)


def _fused_pieces(adapter: str, leaf: str, shape: Shape) -> tuple[Piece, ...]:
    """Returns keys and values of an adapter; none if the rows cannot be shared out."""
    if not shape or shape[0] % len(_FUSED_PARTS):
        return ()
    part = (shape[0] // len(_FUSED_PARTS), *shape[1:])
    return tuple(Piece(name=f"{adapter}.{name}{leaf}", shape=part) for name in _FUSED_PARTS)


def fixed_values(original: str) -> np.ndarray | None:
    """Returns the values of a tensor that is the same in every model; None for all others.

    These are the blurs of the motion encoder, which the model here has as constants.
    """
    from maxdiffusion.models.wan.motion import BLUR  # other models do not need it

    return np.outer(BLUR, BLUR) if _BLUR_KERNEL.fullmatch(original) else None


def split_leaf(name: str) -> tuple[str, str]:
    """Returns the module of a tensor and the rest of its name: `.weight`, `.bias` or nothing."""
    for leaf in _LEAVES:
        if name.endswith(leaf):
            return name.removesuffix(leaf), leaf
    return name, ""


def _renamed(name: str, outer: Mapping[str, str], blocks: Iterable[_Blocks]) -> str | None:
    candidates = (outer.get(name), *(one.renamed(name) for one in blocks))
    return next((found for found in candidates if found is not None), None)


def _with_leaf(module: str | None, leaf: str) -> str | None:
    """Returns the tensor of a module; a module that is a parameter itself has no leaf."""
    if module is None or (module.rpartition(".")[2] in _PARAMETERS) == bool(leaf):
        return None
    return module + leaf


# Tensors and the config fields that their dimensions hold.
_DIMENSIONS: Mapping[str, Mapping[int, str]] = {
    "patch_embedding.weight": {0: "width", 1: "in_channels"},
    "blocks.0.ffn.net.0.proj.weight": {0: "ffn_dim"},
    f"{_EMBEDDER}.text_embedder.linear_1.weight": {1: "text_dim"},
    f"{_EMBEDDER}.time_embedder.linear_1.weight": {1: "freq_dim"},
    f"{_EMBEDDER}.image_embedder.norm1.weight": {0: "image_dim"},
    f"{_EMBEDDER}.image_embedder.pos_embed": {1: "pos_embed_seq_len"},
    "blocks.0.attn2.add_k_proj.weight": {1: "added_kv_proj_dim"},
    "vace_patch_embedding.weight": {1: "vace_in_channels"},
    "pose_patch_embedding.weight": {1: "latent_channels"},
    f"{_MOTION}.motion_synthesis_weight": {0: "motion_encoder_dim", 1: "motion_dim"},
    f"{_MOTION}.motion_network.0.weight": {0: "motion_style_dim"},
    "face_encoder.conv2.weight": {0: "face_encoder_hidden_dim"},
}
# A config that lacks one of these means a model without that part.
_OPTIONAL = ("image_dim", "pos_embed_seq_len", "added_kv_proj_dim", "vace_in_channels")


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """Sizes of a transformer that its tensors reveal, by diffusers' config keys.

    `width` stands for num_attention_heads x attention_head_dim: tensors do not show the heads.
    `control_blocks` is the number of vace_layers, `face_adapters` that of the blocks with one.
    """

    values: Mapping[str, int | Shape | None]

    @classmethod
    def of(cls, shapes: Mapping[str, Shape]) -> "TensorSizes":
        """Returns the sizes of tensors under diffusers' names; those without a tensor are None."""
        values: dict[str, int | Shape | None] = {}
        for name, dimensions in _DIMENSIONS.items():
            for dimension, key in dimensions.items():
                shape = shapes.get(name, ())
                values[key] = shape[dimension] if dimension < len(shape) else None
        patch = shapes.get("patch_embedding.weight", ())[2:]
        rows = shapes.get("proj_out.weight", ())[:1]
        return cls(
            values={
                **values,
                "patch_size": patch or None,
                "out_channels": rows[0] // math.prod(patch) if rows and all(patch) else None,
                "num_layers": _count(shapes, "blocks"),
                "control_blocks": _count(shapes, _CONTROL),
                "face_adapters": _count(shapes, _ADAPTERS),
                "motion_encoder_size": _face_size(_count(shapes, _MOTION_BLOCKS)),
            }
        )

    @property
    def kind(self) -> str:
        """The member of the family, in words."""
        get = self.values.get
        if get("face_adapters"):
            return "an Animate model"
        if get("control_blocks"):
            return "a VACE model"
        if get("image_dim"):
            frames = "first-and-last-frame" if get("pos_embed_seq_len") else "image"
            return f"a WAN 2.1 {frames}-to-video model (it reads CLIP's image tokens)"
        if get("in_channels") == get("out_channels"):
            return "a text-to-video model" if get("in_channels") == 16 else "a TI2V model (5B)"
        return "a WAN 2.2 image-to-video model (no image tokens)"

    def differences(self, config: Mapping[str, Any]) -> dict[str, tuple[object, object]]:
        """Returns (here, in the config) of every size that a diffusers config.json contradicts."""
        wanted: dict[str, object] = {key: config[key] for key in self.values if key in config}
        wanted |= {key: config.get(key) for key in _OPTIONAL}
        wanted["control_blocks"] = len(config.get("vace_layers") or ())
        every = config.get("inject_face_latents_blocks")
        wanted["face_adapters"] = config.get("num_layers", 0) // every if every else 0
        if "patch_size" in wanted:
            wanted["patch_size"] = tuple(config["patch_size"])
        if {"num_attention_heads", "attention_head_dim"} <= set(config):
            wanted["width"] = config["num_attention_heads"] * config["attention_head_dim"]
        return {
            key: (self.values[key], value)
            for key, value in wanted.items()
            if self.values[key] != value
        }


def _count(shapes: Mapping[str, Shape], blocks: str) -> int:
    """Returns the number of blocks: one more than the highest number in a name."""
    pattern = re.compile(rf"{re.escape(blocks)}\.{_NUMBER}\..+")
    found = [pattern.fullmatch(name) for name in shapes]
    return 1 + max((int(match["number"]) for match in found if match), default=-1)


def _face_size(blocks: int) -> int | None:
    """Returns the pixels of a face whose size these blocks halve; None without blocks."""
    return LAST_FACE_PIXELS << blocks if blocks else None
