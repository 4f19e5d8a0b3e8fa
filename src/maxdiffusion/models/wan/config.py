"""Sizes of a WAN transformer, read from diffusers' config and checked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.mesh.mesh import FSDP_CONTEXT

MASK_CHANNELS = 4
"""Channels of the mask of given frames, one per video frame of a latent frame."""
# diffusers' key -> ours, for the keys that carry a size.
_SIZES = {
    "patch_size": "patch",
    "num_attention_heads": "heads",
    "attention_head_dim": "head_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "text_dim": "text_dim",
    "freq_dim": "freq_dim",
    "ffn_dim": "ffn_dim",
    "num_layers": "layers",
    "eps": "eps",
    "rope_max_seq_len": "rope_max_seq_len",
    "image_dim": "image_dim",
    "pos_embed_seq_len": "image_positions",
    "vace_layers": "control_layers",
    "vace_in_channels": "control_channels",
}
# diffusers' key -> the only value with a meaning here, which is also what a missing key means.
_FIXED = {"qk_norm": "rms_norm_across_heads", "cross_attn_norm": True}
_IMAGE_WIDTH = "added_kv_proj_dim"  # the width of image keys and values: always the model's
# Sizes of parts that a model may lack: None or () stands for "has no such part".
_OPTIONAL = ("image_dim", "image_positions", "control_layers", "control_channels")
_NOT_SIZES = (
    *("patch", "eps", "scan_layers", "spread_weights", "control_layers", "face", "adapter_rank"),
)
# The same two tables for the parts that only Animate has.
_ANIMATE = "WanAnimateTransformer3DModel"
_FACE_SIZES = {
    "latent_channels": "pose_channels",
    "motion_encoder_channel_sizes": "widths",
    "motion_encoder_size": "size",
    "motion_style_dim": "style_dim",
    "motion_dim": "motion_dim",
    "motion_encoder_dim": "feature_dim",
    "face_encoder_hidden_dim": "hidden_dim",
    "face_encoder_num_heads": "heads",
    "inject_face_latents_blocks": "every",
    "motion_encoder_batch_size": "batch",
}
_ANIMATE_DEFAULTS = {"in_channels": 36, "image_dim": 1280, "latent_channels": 16}
_REMEDY = "Correct the transformer's config.json"
MOTION_LINEARS = 5
"""Linear maps that follow the motion encoder's convolutions."""
LAST_FACE_PIXELS = 4  # rows and columns that the motion encoder ends with


@dataclass(frozen=True, kw_only=True)
class FaceConfig:
    """Sizes of the parts that only Animate has; the defaults are those of WAN 2.2 Animate 14B.

    Faces are squares of `size` pixels. The motion encoder halves them down to 4 pixels; `widths`
    are its channels at each size. The face encoder makes `heads` tokens of every latent frame, and
    an adapter attends to them after every `every`-th block. `batch` faces are encoded at once.
    Poses are latents of `pose_channels`.
    """

    size: int = 512
    widths: tuple[int, ...] = (32, 64, 128, 256, 512, 512, 512, 512)
    style_dim: int = 512
    motion_dim: int = 20
    feature_dim: int = 512
    hidden_dim: int = 1024
    heads: int = 4
    every: int = 5
    batch: int = 8
    pose_channels: int = 16

    def __post_init__(self) -> None:
        Collector(
            [
                Problem(name=name, value=value, rule=rule, remedy=_REMEDY)
                for name, value, rule in self._problems()
            ]
        ).raise_if_any()

    @classmethod
    def from_diffusers(cls, given: Mapping[str, Any]) -> "FaceConfig":
        """Returns the sizes stated in an Animate transformer's config."""
        sizes = {
            ours: given[theirs]
            for theirs, ours in _FACE_SIZES.items()
            if given.get(theirs) is not None
        }
        if "widths" in sizes:
            size = sizes.get("size", cls.size)
            by_pixels = {int(pixels): width for pixels, width in sizes["widths"].items()}
            sizes["widths"] = tuple(by_pixels.get(pixels, 0) for pixels in _halvings(size))
        return cls(**sizes)

    @property
    def tokens(self) -> int:
        """Tokens of a latent frame: those of the face encoder and a learned one."""
        return self.heads + 1

    def _problems(self) -> Iterator[tuple[str, object, str]]:
        names = {ours: theirs for theirs, ours in _FACE_SIZES.items()}
        for name, value in vars(self).items():
            values = value if isinstance(value, tuple) else (value,)
            if any(not _is_size(one) for one in values):
                yield names[name], value, "sizes are whole numbers from 1"
        if _is_size(self.size) and len(self.widths) != len(_halvings(self.size)):
            yield (
                names["widths"],
                self.widths,
                f"there must be one for each of the sizes {_halvings(self.size)}",
            )
        if _is_size(self.size) and _halvings(self.size)[-1] != LAST_FACE_PIXELS:
            yield names["size"], self.size, "must be a power of 2 from 4"


def _halvings(size: int) -> tuple[int, ...]:
    """Returns the face sizes inside the motion encoder, from `size` to 4."""
    sizes = [size]
    while sizes[-1] > LAST_FACE_PIXELS:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class WanTransformerConfig:
    """Sizes of the transformer; the defaults are those of WAN 2.1 14B and of both 2.2 experts.

    `image_dim` is the width of image tokens that blocks attend to (WAN 2.1 image-to-video), with
    `image_positions` learned positions over them (first and last frame). `control_layers` are the
    blocks that take a hint of a control block (VACE), whose input has `control_channels`. `face`
    belongs to Animate.
    """

    layers: int = 40
    heads: int = 40
    head_dim: int = 128
    ffn_dim: int = 13824
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    patch: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6
    rope_max_seq_len: int = 1024
    image_dim: int | None = None
    image_positions: int | None = None
    control_layers: tuple[int, ...] = ()
    control_channels: int | None = None
    face: FaceConfig | None = None
    scan_layers: bool = True  # one compiled block in a loop, or every block written out
    spread_weights: bool = False  # the blocks' weights over all devices that share a sequence
    adapter_rank: int = 0  # room for LoRA adapters that change without a new program; 0 = none

    def __post_init__(self) -> None:
        problems = [
            *self._wrong_sizes(),
            *self._wrong_parities(),
            *self._wrong_control_layers(),
            *self._wrong_face(),
        ]
        if problems:
            raise ProblemsFound(problems)

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "WanTransformerConfig":
        """Returns the config of a diffusers `transformer/config.json`."""
        given = {key: value for key, value in config.items() if not key.startswith("_")}
        animates = config.get("_class_name") == _ANIMATE or bool({*_FACE_SIZES} & {*given})
        known = {*_SIZES, *_FIXED, _IMAGE_WIDTH, *(_FACE_SIZES if animates else ())}
        problems = [_unknown(key, given[key]) for key in given if key not in known]
        problems += [
            _not_run(key, given[key], only)
            for key, only in _FIXED.items()
            if given.get(key, only) != only
        ]
        if problems:
            raise ProblemsFound(problems)
        if animates:
            given = {**_ANIMATE_DEFAULTS, **given}
        sizes = {ours: given[theirs] for theirs, ours in _SIZES.items() if theirs in given}
        if animates:
            sizes["face"] = FaceConfig.from_diffusers(given)
        for name in {"patch", "control_layers"} & {*sizes}:
            sizes[name] = tuple(sizes[name] or ())
        built = cls(**sizes)
        built._check_image_width(given.get(_IMAGE_WIDTH))
        return built

    @property
    def block_count(self) -> int:
        """Blocks that a forward runs: those of the layers, and the control blocks of VACE."""
        return self.layers + len(self.control_layers)

    @property
    def model_dim(self) -> int:
        """The width of a token: all heads side by side."""
        return self.heads * self.head_dim

    @property
    def model_dim_axis(self) -> str:
        """Name of the model width in the weights of blocks; the mesh shards by it."""
        return FSDP_CONTEXT if self.spread_weights else "model"

    @property
    def unroll(self) -> int | bool:
        """Returns the layers that a scan over them writes out: one, or (True) all."""
        return 1 if self.scan_layers else True

    def grid(self, latent_FYX: tuple[int, int, int]) -> tuple[int, int, int]:
        """Returns the number of patches along frames, rows and columns of a latent video."""
        rest = [size % patch for size, patch in zip(latent_FYX, self.patch, strict=True)]
        if any(rest):
            raise ValueError(
                f"latent frames, rows, columns = {latent_FYX}: each must be a multiple of the "
                f"patch {self.patch}; choose another height, width or number of frames"
            )
        frames, rows, columns = (
            size // patch for size, patch in zip(latent_FYX, self.patch, strict=True)
        )
        if max(frames, rows, columns) > self.rope_max_seq_len:
            raise ValueError(
                f"patches along frames, rows, columns = {(frames, rows, columns)}: positions go up "
                f"to rope_max_seq_len={self.rope_max_seq_len}; choose a smaller video"
            )
        return frames, rows, columns

    def tokens(self, latent_FYX: tuple[int, int, int]) -> int:
        """Returns the number of tokens of a latent video."""
        frames, rows, columns = self.grid(latent_FYX)
        return frames * rows * columns

    def _wrong_sizes(self) -> list[Problem]:
        whole = {
            name: value
            for name, value in vars(self).items()
            if name not in _NOT_SIZES and not (name in _OPTIONAL and value is None)
        }
        whole |= {f"patch[{index}]": size for index, size in enumerate(self.patch)}
        return [
            Problem(
                name=name,
                value=value,
                rule="sizes are whole numbers from 1",
                remedy=_REMEDY,
            )
            for name, value in whole.items()
            if not _is_size(value)
        ]

    def _wrong_parities(self) -> list[Problem]:
        return [
            Problem(
                name=name,
                value=value,
                rule="must be even: it holds pairs of cosine and sine",
                remedy=_REMEDY,
            )
            for name, value in (("head_dim", self.head_dim), ("freq_dim", self.freq_dim))
            if isinstance(value, int) and value % 2
        ]

    def _wrong_control_layers(self) -> list[Problem]:
        layers = self.control_layers
        if bool(layers) != (self.control_channels is not None):
            rule = "control layers and the channels of their input belong together"
        elif not layers or (
            layers[0] == 0 and list(layers) == sorted({*layers}) and layers[-1] < self.layers
        ):
            return []
        else:
            rule = f"must rise from layer 0 and stay below num_layers={self.layers}"
        return [
            Problem(
                name="vace_layers",
                value=layers,
                rule=rule,
                remedy=_REMEDY,
            )
        ]

    def _wrong_face(self) -> list[Problem]:
        if self.face is None:
            return []
        found: list[tuple[str, object, str]] = []
        if _is_size(self.layers) and self.layers % self.face.every:
            rule = f"must divide num_layers={self.layers}: every such block has an adapter"
            found.append(("inject_face_latents_blocks", self.face.every, rule))
        channels = 2 * self.face.pose_channels + MASK_CHANNELS
        if self.in_channels != channels:
            rule = f"must be {channels}: noise, a mask and a condition of latent_channels"
            found.append(("in_channels", self.in_channels, rule))
        if self.image_dim is None:
            found.append(("image_dim", None, "Animate attends to the tokens of its character"))
        if self.control_layers:
            found.append(("vace_layers", self.control_layers, "Animate has no control blocks"))
        return [
            Problem(name=name, value=value, rule=rule, remedy=_REMEDY)
            for name, value, rule in found
        ]

    def _check_image_width(self, width: object) -> None:
        expected = None if self.image_dim is None else self.model_dim
        if width != expected:
            problem = Problem(
                name=_IMAGE_WIDTH,
                value=width,
                rule=f"must be {expected}: keys and values of an image are as wide as the model, "
                "and only a model with image_dim has them",
                remedy=_REMEDY,
            )
            raise ProblemsFound([problem])


def _unknown(key: str, value: object) -> Problem:
    return Problem(
        name=key,
        value=value,
        rule="a WAN transformer has no such setting",
        remedy="Check that the folder holds a WanTransformer3DModel",
    )


def _not_run(key: str, value: object, only: object) -> Problem:
    return Problem(
        name=key,
        value=value,
        rule=f"only {only!r} can be run",
        remedy="Use a WAN 2.1 or 2.2 checkpoint",
    )


def wan_2_1_t2v_1_3b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 T2V 1.3B."""
    return WanTransformerConfig(layers=30, heads=12, ffn_dim=8960)


def wan_14b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 T2V 14B, and of each expert of WAN 2.2 T2V A14B."""
    return WanTransformerConfig()


def wan_2_2_i2v_a14b() -> WanTransformerConfig:
    """Returns the sizes of each expert of WAN 2.2 I2V A14B.

    Its input has 16 latent, 4 mask and 16 image channels.
    """
    return WanTransformerConfig(in_channels=36)


def wan_2_1_i2v_14b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 I2V 14B, which also attends to the image's CLIP tokens."""
    return WanTransformerConfig(in_channels=36, image_dim=1280)


def wan_2_1_flf2v_14b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 FLF2V 14B: positions over the tokens of two images."""
    return WanTransformerConfig(in_channels=36, image_dim=1280, image_positions=514)


def wan_2_2_ti2v_5b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.2 TI2V 5B."""
    return WanTransformerConfig(layers=30, heads=24, ffn_dim=14336, in_channels=48, out_channels=48)


def wan_2_1_vace_1_3b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 VACE 1.3B: a control block for every second layer."""
    return WanTransformerConfig(
        layers=30,
        heads=12,
        ffn_dim=8960,
        control_layers=tuple(range(0, 30, 2)),
        control_channels=96,
    )


def wan_vace_14b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 VACE 14B, and of each expert of WAN 2.2 VACE-Fun A14B."""
    return WanTransformerConfig(control_layers=tuple(range(0, 40, 5)), control_channels=96)


def wan_2_2_animate_14b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.2 Animate 14B."""
    return WanTransformerConfig(in_channels=36, image_dim=1280, face=FaceConfig())
