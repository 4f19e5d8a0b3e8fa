"""Names of tensors in Wan-AI's own transformer files, and the sizes that tensors reveal.

    diffusers_name("blocks.0.self_attn.q.weight")      "blocks.0.attn1.to_q.weight"
    original_name("blocks.0.attn1.to_q.weight")        "blocks.0.self_attn.q.weight"
    diffusers_module, original_module                  the same without `.weight` or `.bias`

They are functions of a name alone, so they serve every member of the family (text, image, VACE, 5B)
and every checkpoint map. `TensorSizes` tells the members apart by names and shapes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
_IN_BLOCK = re.compile(r"(?P<blocks>blocks|vace_blocks)\.(?P<number>0|[1-9]\d*)\.(?P<rest>.+)")
# Modules that are one parameter themselves, without `.weight`.
_PARAMETERS = ("modulation", "emb_pos", "scale_shift_table", "pos_embed")
_LEAVES = (".weight", ".bias")


def _inverse(table: Mapping[str, str]) -> dict[str, str]:
    back = {ours: theirs for theirs, ours in table.items()}
    assert len(back) == len(table)
    return back


_BACK_OUTER = _inverse(_OUTER)
_BACK_BLOCKS = {"blocks": _inverse(_BLOCK), "vace_blocks": _inverse(_CONTROL_BLOCK)}
_BLOCKS = {"blocks": _BLOCK, "vace_blocks": _CONTROL_BLOCK}


def diffusers_module(original: str) -> str | None:
    """Returns diffusers' name of a module of the original model, or None if it has none."""
    return _renamed(original, _OUTER, _BLOCKS)


def original_module(diffusers: str) -> str | None:
    """Returns the original name of a module of diffusers' model, or None if it has none."""
    return _renamed(diffusers, _BACK_OUTER, _BACK_BLOCKS)


def diffusers_name(original: str) -> str | None:
    """Returns diffusers' name of a tensor of the original model, or None if it has none."""
    module, leaf = split_leaf(original)
    return _with_leaf(diffusers_module(module), leaf)


def original_name(diffusers: str) -> str | None:
    """Returns the original name of a tensor of diffusers' model, or None if it has none."""
    module, leaf = split_leaf(diffusers)
    return _with_leaf(original_module(module), leaf)


def split_leaf(name: str) -> tuple[str, str]:
    """Returns the module of a tensor and the rest of its name: `.weight`, `.bias` or nothing."""
    for leaf in _LEAVES:
        if name.endswith(leaf):
            return name.removesuffix(leaf), leaf
    return name, ""


def _renamed(
    name: str, outer: Mapping[str, str], blocks: Mapping[str, Mapping[str, str]]
) -> str | None:
    found = _IN_BLOCK.fullmatch(name)
    if found is None:
        return outer.get(name)
    inner = blocks[found["blocks"]].get(found["rest"])
    return None if inner is None else f"{found['blocks']}.{found['number']}.{inner}"


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
}
# A config that lacks one of these means a model without that part.
_OPTIONAL = ("image_dim", "pos_embed_seq_len", "added_kv_proj_dim", "vace_in_channels")


@dataclass(frozen=True, kw_only=True)
class TensorSizes:
    """Sizes of a transformer that its tensors reveal, by diffusers' config keys.

    `width` stands for num_attention_heads x attention_head_dim: tensors do not show the heads.
    `control_blocks` is the number of vace_layers.
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
                "control_blocks": _count(shapes, "vace_blocks"),
            }
        )

    @property
    def kind(self) -> str:
        """The member of the family, in words."""
        get = self.values.get
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
    found = [_IN_BLOCK.fullmatch(name) for name in shapes]
    return 1 + max(
        (int(match["number"]) for match in found if match and match["blocks"] == blocks), default=-1
    )
