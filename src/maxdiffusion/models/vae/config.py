"""The sizes of the WAN video autoencoders, 2.1 and 2.2, and the statistics of their latents."""

from collections.abc import Iterator, Mapping
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
LATENTS_MEAN_22 = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557),
    *(-0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825),
    *(-0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230),
    *(-0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748),
    *(0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
LATENTS_STD_22 = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013),
    *(0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978),
    *(0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093),
    *(0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887),
    *(0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)
# Keys of a diffusers config.json that do not change what is computed here: dropout is for training
# only. The two factors follow from the stages and must agree with them.
WITHOUT_EFFECT = frozenset({"dropout"})
FACTORS = {"scale_factor_spatial": "spatial_factor", "scale_factor_temporal": "temporal_factor"}
# Keys that must keep the given values: anything else is another architecture.
REQUIRED = {"attn_scales": ((),)}


@dataclass(frozen=True, kw_only=True)
class WanVaeConfig:
    """Widths, stages and latent statistics; `temperal_downsample` is spelled as in diffusers.

    The defaults are those of WAN 2.1. The autoencoder of WAN 2.2 TI2V-5B (`wan_2_2_vae`) has
    shortcuts around its stages (`is_residual`) and squares of pixels as channels (`patch_size`).
    """

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
    is_residual: bool = False
    patch_size: int | None = None

    def __post_init__(self) -> None:
        problems = [*self._size_problems(), *self._length_problems()]
        problems = problems or [*self._width_problems()]
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
            if key not in known | WITHOUT_EFFECT | REQUIRED.keys() | FACTORS.keys()
        ]
        if problems:
            raise ProblemsFound(problems)
        made = cls(**{key: value for key, value in given.items() if key in known})
        problems = [
            _other_factor(key, given[key], getattr(made, name))
            for key, name in FACTORS.items()
            if given.get(key) not in (None, getattr(made, name))
        ]
        if problems:
            raise ProblemsFound(problems)
        return made

    @property
    def fold_size(self) -> int:
        """Height and width of the squares of pixels that are folded into channels."""
        return self.patch_size or 1

    @property
    def video_channels(self) -> int:
        """Channels of a video, before its pixels are folded."""
        return self.in_channels // self.fold_size**2

    @property
    def encoder_inputs(self) -> tuple[int, ...]:
        """Channels that each level of the encoder takes, full resolution first."""
        return (self.base_dim, *self.encoder_dims[:-1])

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
    def decoder_inputs(self) -> tuple[int, ...]:
        """Channels that each level of the decoder takes; that of WAN 2.1 halves them in between."""
        dims = self.decoder_dims
        between = dims[:-1] if self.is_residual else tuple(dim // 2 for dim in dims[:-1])
        return (dims[0], *between)

    @property
    def spatial_factor(self) -> int:
        """Pixels per latent, along height and along width."""
        return self.fold_size * 2 ** (len(self.dim_mult) - 1)

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
        sizes["patch_size"] = 1 if self.patch_size is None else self.patch_size
        sizes |= {f"dim_mult[{level}]": mult for level, mult in enumerate(self.dim_mult)}
        return [
            Problem(name=name, value=size, rule="must be a positive integer")
            for name, size in sizes.items()
            if not isinstance(size, int) or size < 1
        ]

    def _width_problems(self) -> Iterator[Problem]:
        """Yields the problems of channels that do not fit together."""
        squares = self.fold_size**2
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % squares:
                rule = f"must be a multiple of {squares}, the pixels of a patch"
                yield Problem(name=name, value=getattr(self, name), rule=rule)
        if not self.is_residual and any(dim % 2 for dim in self.decoder_dims[:-1]):
            rule = "every level but the last must have an even width, which upsampling halves"
            yield Problem(
                name="decoder widths",
                value=self.decoder_dims,
                rule=rule,
                remedy="Use an even base_dim",
            )
        if self.is_residual and not self._shortcuts_fit:
            rule = (
                f"with base_dim={self.base_dim} and decoder_base_dim={self.decoder_base_dim} the "
                "shortcut of a stage cannot share its channels out equally"
            )
            remedy = "Let no multiplier grow by more than 4 (the last one: not at all)"
            yield Problem(name="dim_mult", value=self.dim_mult, rule=rule, remedy=remedy)

    @property
    def _shortcuts_fit(self) -> bool:
        """True if every shortcut takes means, or makes copies, of a whole number of channels."""
        cells = [4 * (1 + halves) for halves in self.temperal_downsample]
        down = zip(self.encoder_inputs, self.encoder_dims, [*cells, 1], strict=True)
        up = zip(self.decoder_inputs[:-1], self.decoder_dims[:-1], reversed(cells), strict=True)
        return all(taken * cell % given == 0 for taken, given, cell in down) and all(
            given * cell % taken == 0 for taken, given, cell in up
        )

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


def wan_2_2_vae() -> WanVaeConfig:
    """Returns the config of WAN 2.2 TI2V-5B's autoencoder."""
    return WanVaeConfig(
        base_dim=160,
        decoder_base_dim=256,
        z_dim=48,
        in_channels=12,
        out_channels=12,
        latents_mean=LATENTS_MEAN_22,
        latents_std=LATENTS_STD_22,
        is_residual=True,
        patch_size=2,
    )


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _other_architecture(found: Mapping[str, object]) -> Problem:
    return Problem(
        name="vae/config.json",
        value=dict(found),
        rule="only the autoencoders of WAN 2.1 and 2.2 run here, and these keys describe another",
        remedy="Use the vae folder of a released WAN model",
    )


def _other_factor(key: str, value: object, expected: int) -> Problem:
    return Problem(
        name=f"vae/config.json {key}",
        value=value,
        rule=f"must be {expected}, which dim_mult, temperal_downsample and patch_size give",
        remedy=f"Write {expected}, or remove the key",
    )


def _unknown(name: str, value: object) -> Problem:
    return Problem(
        name=name,
        value=value,
        rule="not a key of the video autoencoder's config.json that is understood here",
        remedy="Remove it if it does not change what is computed",
    )
