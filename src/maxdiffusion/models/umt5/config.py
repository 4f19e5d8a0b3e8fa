"""The sizes of a UMT5 encoder, read from the config.json of its checkpoint folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxdiffusion.errors import Problem, ProblemsFound

# Our field, its name in config.json, and what a config.json without that name means.
_KEYS: tuple[tuple[str, str, int | float], ...] = (
    ("vocab", "vocab_size", 250112),
    ("width", "d_model", 512),
    ("head_dim", "d_kv", 64),
    ("mlp_width", "d_ff", 1024),
    ("layers", "num_layers", 8),
    ("heads", "num_heads", 6),
    ("buckets", "relative_attention_num_buckets", 32),
    ("max_distance", "relative_attention_max_distance", 128),
    ("eps", "layer_norm_epsilon", 1e-6),
)


@dataclass(frozen=True, kw_only=True)
class Umt5Config:
    """The sizes of a UMT5 encoder with gated tanh-gelu layers; the defaults are UMT5-XXL's."""

    vocab: int = 256384
    width: int = 4096
    head_dim: int = 64
    mlp_width: int = 10240
    layers: int = 24
    heads: int = 64
    buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6

    def __post_init__(self) -> None:
        problems = [
            _problem(key, getattr(self, field), "must be a whole number, 1 or more")
            for field, key, _ in _KEYS
            if field != "eps" and not _is_count(getattr(self, field))
        ]
        if not isinstance(self.eps, float) or not 0 < self.eps < 1:
            problems.append(_problem("layer_norm_epsilon", self.eps, "must be between 0 and 1"))
        if not problems and (self.buckets % 4 or self.max_distance <= self.buckets // 4):
            rule = "must be a multiple of 4, and less than 4 times relative_attention_max_distance"
            problems.append(_problem("relative_attention_num_buckets", self.buckets, rule))
        if problems:
            raise ProblemsFound(problems)

    @classmethod
    def from_transformers(cls, config: Mapping[str, Any]) -> "Umt5Config":
        """The sizes in a transformers config.json; a missing one has transformers' default."""
        kind = config.get("model_type", "umt5")
        if kind != "umt5":
            raise ProblemsFound([_problem("model_type", kind, "only 'umt5' is supported")])
        feed_forward = config.get("feed_forward_proj", "gated-gelu")
        if feed_forward != "gated-gelu":
            rule = "only 'gated-gelu' is supported"
            raise ProblemsFound([_problem("feed_forward_proj", feed_forward, rule)])
        return cls(**{field: config.get(key, default) for field, key, default in _KEYS})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _problem(key: str, value: object, rule: str) -> Problem:
    return Problem(
        name=f"text_encoder/config.json {key}",
        value=value,
        rule=rule,
        remedy="Use the text_encoder folder of a released WAN model",
    )
