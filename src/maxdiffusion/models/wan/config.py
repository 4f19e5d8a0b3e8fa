"""Sizes of a WAN transformer, read from diffusers' config and checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh.mesh import FSDP_CONTEXT

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


@dataclass(frozen=True, kw_only=True)
class WanTransformerConfig:
    """Sizes of the transformer; the defaults are those of WAN 2.1 14B and of both 2.2 experts.

    `image_dim` is the width of image tokens that blocks attend to (WAN 2.1 image-to-video), with
    `image_positions` learned positions over them (first and last frame). `control_layers` are the
    blocks that take a hint of a control block (VACE), whose input has `control_channels`.
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
    scan_layers: bool = True  # one compiled block in a loop, or every block written out
    spread_weights: bool = False  # the blocks' weights over all devices that share a sequence

    def __post_init__(self) -> None:
        problems = [*self._wrong_sizes(), *self._wrong_parities(), *self._wrong_control_layers()]
        if problems:
            raise ProblemsFound(problems)

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "WanTransformerConfig":
        """Returns the config of a diffusers `transformer/config.json`."""
        given = {key: value for key, value in config.items() if not key.startswith("_")}
        known = {*_SIZES, *_FIXED, _IMAGE_WIDTH}
        problems = [_unknown(key, given[key]) for key in given if key not in known]
        problems += [
            _not_run(key, given[key], only)
            for key, only in _FIXED.items()
            if given.get(key, only) != only
        ]
        if problems:
            raise ProblemsFound(problems)
        sizes = {ours: given[theirs] for theirs, ours in _SIZES.items() if theirs in given}
        for name in {"patch", "control_layers"} & {*sizes}:
            sizes[name] = tuple(sizes[name] or ())
        built = cls(**sizes)
        built._check_image_width(given.get(_IMAGE_WIDTH))
        return built

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
            if name not in ("patch", "eps", "scan_layers", "spread_weights", "control_layers")
            and not (name in _OPTIONAL and value is None)
        }
        whole |= {f"patch[{index}]": size for index, size in enumerate(self.patch)}
        return [
            Problem(
                name=name,
                value=value,
                rule="sizes are whole numbers from 1",
                remedy="Correct the transformer's config.json",
            )
            for name, value in whole.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]

    def _wrong_parities(self) -> list[Problem]:
        return [
            Problem(
                name=name,
                value=value,
                rule="must be even: it holds pairs of cosine and sine",
                remedy="Correct the transformer's config.json",
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
                remedy="Correct the transformer's config.json",
            )
        ]

    def _check_image_width(self, width: object) -> None:
        expected = None if self.image_dim is None else self.model_dim
        if width != expected:
            problem = Problem(
                name=_IMAGE_WIDTH,
                value=width,
                rule=f"must be {expected}: keys and values of an image are as wide as the model, "
                "and only a model with image_dim has them",
                remedy="Correct the transformer's config.json",
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
