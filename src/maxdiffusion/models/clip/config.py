"""The sizes of a CLIP vision tower, read from the config.json of its checkpoint folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxdiffusion.errors import Problem, ProblemsFound

# Our field, its name in config.json, and what a config.json without that name means.
_KEYS: tuple[tuple[str, str, int | float | str], ...] = (
    ("width", "hidden_size", 768),
    ("mlp_width", "intermediate_size", 3072),
    ("layers", "num_hidden_layers", 12),
    ("heads", "num_attention_heads", 12),
    ("channels", "num_channels", 3),
    ("image_size", "image_size", 224),
    ("patch", "patch_size", 32),
    ("activation", "hidden_act", "quick_gelu"),
    ("eps", "layer_norm_eps", 1e-5),
)
ACTIVATIONS = ("gelu", "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class ClipVisionConfig:
    """The sizes of a CLIP vision tower; the defaults are those of ViT-H/14, which WAN 2.1 uses."""

    width: int = 1280
    mlp_width: int = 5120
    layers: int = 32  # of the checkpoint; WAN reads the tokens before the last one
    heads: int = 16
    channels: int = 3
    image_size: int = 224
    patch: int = 14
    activation: str = "gelu"
    eps: float = 1e-5

    def __post_init__(self) -> None:
        problems = [
            _problem(key, getattr(self, field), "must be a whole number, 1 or more")
            for field, key, _ in _KEYS
            if field not in ("eps", "activation") and not _is_count(getattr(self, field))
        ]
        if not isinstance(self.eps, float) or not 0 < self.eps < 1:
            problems.append(_problem("layer_norm_eps", self.eps, "must be between 0 and 1"))
        if self.activation not in ACTIVATIONS:
            rule = f"must be one of {', '.join(ACTIVATIONS)}"
            problems.append(_problem("hidden_act", self.activation, rule))
        problems = problems or self._relation_problems()
        if problems:
            raise ProblemsFound(problems)

    @classmethod
    def from_transformers(cls, config: Mapping[str, Any]) -> "ClipVisionConfig":
        """The sizes in a transformers config.json; a missing one has transformers' default."""
        kind = config.get("model_type", "clip_vision_model")
        if kind != "clip_vision_model":
            rule = "only 'clip_vision_model' is supported"
            raise ProblemsFound([_problem("model_type", kind, rule)])
        return cls(**{field: config.get(key, default) for field, key, default in _KEYS})

    @property
    def used_layers(self) -> int:
        """The number of layers that are run: all but the last."""
        return self.layers - 1

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of an image: the class token, then one for every patch."""
        return 1 + (self.image_size // self.patch) ** 2

    def _relation_problems(self) -> list[Problem]:
        """Returns the problems of sizes that do not fit together."""
        problems = []
        if self.layers < 2:
            rule = "must be 2 or more, since the tokens before the last layer are read"
            problems.append(_problem("num_hidden_layers", self.layers, rule))
        if self.width % self.heads:
            rule = f"must be a multiple of num_attention_heads={self.heads}"
            problems.append(_problem("hidden_size", self.width, rule))
        if self.image_size < self.patch:
            rule = f"must be at least patch_size={self.patch}"
            problems.append(_problem("image_size", self.image_size, rule))
        return problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _problem(key: str, value: object, rule: str) -> Problem:
    return Problem(
        name=f"image_encoder/config.json {key}",
        value=value,
        rule=rule,
        remedy="Use the image_encoder folder of a released WAN 2.1 image-to-video model",
    )
