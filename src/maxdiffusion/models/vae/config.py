"""The sizes of the WAN 2.1 video autoencoder and the statistics of its latents."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from maxdiffusion.errors import Problem, ProblemsFound

# Per-channel mean and standard deviation of the latents that the released WAN 2.1 weights produce.
LATENTS_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
LATENTS_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916),
)
# Keys of a diffusers config.json that do not change what is computed here: dropout is for training
# only, and the two factors follow from the stages.
WITHOUT_EFFECT = frozenset({"dropout", "scale_factor_spatial", "scale_factor_temporal"})
# Keys that must keep the given values: anything else is another architecture (WAN 2.2 TI2V, z 48).
REQUIRED = {"is_residual": (False,), "patch_size": (None, 1), "attn_scales": ((),)}


@dataclass(frozen=True, kw_only=True)
class WanVaeConfig:
    """Widths, stages and latent statistics; `temperal_downsample` is spelled as in diffusers."""

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    in_channels: int = 3
    out_channels: int = 3
    latents_mean: tuple[float, ...] = LATENTS_MEAN
    latents_std: tuple[float, ...] = LATENTS_STD

    def __post_init__(self) -> None:
        problems = [*self._size_problems(), *self._length_problems()]
        if problems:
            raise ProblemsFound(problems)

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "WanVaeConfig":
        """The config of a diffusers `vae/config.json`; missing keys take the defaults."""
        known = {field.name for field in fields(cls)}
        given = {key: _frozen(value) for key, value in config.items() if not key.startswith("_")}
        other = {
            key: given[key]
            for key, allowed in REQUIRED.items()
            if key in given and given[key] not in allowed
        }
        problems = [_other_architecture(other)] if other else []
        problems += [
            _unknown(key, value)
            for key, value in given.items()
            if key not in known | WITHOUT_EFFECT | REQUIRED.keys()
        ]
        if problems:
            raise ProblemsFound(problems)
        return cls(**{key: value for key, value in given.items() if key in known})

    @property
    def encoder_dims(self) -> tuple[int, ...]:
        """Channels of the encoder at each level, full resolution first."""
        return tuple(self.base_dim * mult for mult in self.dim_mult)

    @property
    def decoder_dims(self) -> tuple[int, ...]:
        """Channels of the decoder at each level, lowest resolution first."""
        base = self.decoder_base_dim or self.base_dim
        return tuple(base * mult for mult in reversed(self.dim_mult))

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent, along height and along width."""
        return 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal_factor(self) -> int:
        """Video frames per latent frame, apart from the first."""
        return 2 ** sum(self.temperal_downsample)

    def latent_frames(self, frames: int) -> int:
        """The number of latent frames of a clip; other lengths than 4n+1 are refused."""
        factor = self.temporal_factor
        if frames < 1 or (frames - 1) % factor:
            nearest = 1 + max(0, frames - 1) // factor * factor
            problem = Problem(
                name="frames",
                value=frames,
                rule=f"the video autoencoder takes 1 frame and then whole groups of {factor}",
                remedy=f"Use {nearest} or {nearest + factor} frames",
            )
            raise ProblemsFound([problem])
        return 1 + (frames - 1) // factor

    def video_frames(self, latent_frames: int) -> int:
        """The number of video frames that `latent_frames` decode to."""
        return 1 + (latent_frames - 1) * self.temporal_factor

    def _size_problems(self) -> list[Problem]:
        """Returns the problems of sizes that are not positive integers."""
        sizes = {
            name: getattr(self, name)
            for name in ("base_dim", "z_dim", "num_res_blocks", "in_channels", "out_channels")
        }
        sizes["decoder_base_dim"] = self.decoder_base_dim or self.base_dim
        sizes |= {f"dim_mult[{level}]": mult for level, mult in enumerate(self.dim_mult)}
        problems = [
            Problem(name=name, value=size, rule="must be a positive integer")
            for name, size in sizes.items()
            if not isinstance(size, int) or size < 1
        ]
        if not problems and any(dim % 2 for dim in self.decoder_dims[:-1]):
            rule = "every level but the last must have an even width, which upsampling halves"
            remedy = "Use an even base_dim"
            problems.append(
                Problem(name="decoder widths", value=self.decoder_dims, rule=rule, remedy=remedy)
            )
        return problems

    def _length_problems(self) -> list[Problem]:
        """Returns the problems of lists with a wrong length."""
        expected = {
            "temperal_downsample": len(self.dim_mult) - 1,
            "latents_mean": self.z_dim,
            "latents_std": self.z_dim,
        }
        return [
            Problem(
                name=name,
                value=getattr(self, name),
                rule=f"needs {length} values for dim_mult={self.dim_mult} and z_dim={self.z_dim}",
            )
            for name, length in expected.items()
            if len(getattr(self, name)) != length
        ]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _other_architecture(found: Mapping[str, object]) -> Problem:
    return Problem(
        name="vae/config.json",
        value=dict(found),
        rule="only the WAN 2.1 autoencoder runs here, and these keys describe another one "
        "(is_residual and patch_size: that of WAN 2.2 TI2V-5B)",
        remedy="Use a checkpoint with the WAN 2.1 autoencoder, such as WAN 2.1 or WAN 2.2 A14B",
    )


def _unknown(name: str, value: object) -> Problem:
    return Problem(
        name=name,
        value=value,
        rule="not a key of the video autoencoder's config.json that is understood here",
        remedy="Remove it if it does not change what is computed",
    )
