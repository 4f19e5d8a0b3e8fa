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
}
# diffusers' key -> the only value with a meaning here, which is also what a missing key means.
_FIXED = {
    "qk_norm": "rms_norm_across_heads",
    "cross_attn_norm": True,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
}


@dataclass(frozen=True, kw_only=True)
class WanTransformerConfig:
    """Sizes of the transformer; the defaults are those of WAN 2.1 14B and of both 2.2 experts."""

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
    scan_layers: bool = True  # one compiled block in a loop, or every block written out
    spread_weights: bool = False  # the blocks' weights over all devices that share a sequence

    def __post_init__(self) -> None:
        problems = [*self._wrong_sizes(), *self._wrong_parities()]
        if problems:
            raise ProblemsFound(problems)

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "WanTransformerConfig":
        """Returns the config of a diffusers `transformer/config.json`."""
        given = {key: value for key, value in config.items() if not key.startswith("_")}
        problems = [_unknown(key, given[key]) for key in given if key not in _SIZES | _FIXED]
        problems += [
            _not_run(key, given[key], only)
            for key, only in _FIXED.items()
            if given.get(key, only) != only
        ]
        if problems:
            raise ProblemsFound(problems)
        sizes = {ours: given[theirs] for theirs, ours in _SIZES.items() if theirs in given}
        if "patch" in sizes:
            sizes["patch"] = tuple(sizes["patch"])
        return cls(**sizes)

    @property
    def model_dim(self) -> int:
        """The width of a token: all heads side by side."""
        return self.heads * self.head_dim

    @property
    def model_dim_axis(self) -> str:
        """Name of the model width in the weights of blocks; the mesh shards by it."""
        return FSDP_CONTEXT if self.spread_weights else "model"

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
            if name not in ("patch", "eps", "scan_layers", "spread_weights")
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
        remedy="Use a WAN 2.1 text-to-video or a WAN 2.2 checkpoint",
    )


def wan_2_1_t2v_1_3b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 T2V 1.3B."""
    return WanTransformerConfig(layers=30, heads=12, ffn_dim=8960)


def wan_2_1_t2v_14b() -> WanTransformerConfig:
    """Returns the sizes of WAN 2.1 T2V 14B."""
    return WanTransformerConfig()


def wan_2_2_t2v_a14b() -> WanTransformerConfig:
    """Returns the sizes of each of the two experts of WAN 2.2 T2V A14B."""
    return WanTransformerConfig()


def wan_2_2_i2v_a14b() -> WanTransformerConfig:
    """Returns the sizes of each expert of WAN 2.2 I2V A14B.

    Its input has 16 latent, 4 mask and 16 image channels.
    """
    return WanTransformerConfig(in_channels=36)
