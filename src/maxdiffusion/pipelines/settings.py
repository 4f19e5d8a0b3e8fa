"""Settings of a pipeline that its checkpoint does not fix: precision, attention, decoding."""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp

from maxdiffusion.attention import AttentionOptions
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.vae import Tiling

if TYPE_CHECKING:
    from maxdiffusion.models.wan.eight_bit import WeightFormat

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

MatmulPrecision = Literal["default", "high", "highest"]


def dtype_named(name: str, *, key: str = "dtype") -> jnp.dtype:
    """Returns the dtype of that name; raises for an unknown one."""
    if name not in DTYPES:
        raise ProblemsFound(
            [
                Problem(
                    name=key,
                    value=name,
                    rule=f"must be one of {', '.join(DTYPES)}",
                    remedy=f"Use {key}=float32 on CPU, {key}=bfloat16 on TPU",
                )
            ]
        )
    return jnp.dtype(DTYPES[name])


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of weights and arithmetic by component, and the precision of matrix products.

    The VAE defaults to float32: in bfloat16 its frames differ visibly. `weight_format` is the 8-bit
    format of the linear maps of the transformer's blocks (lossy); None keeps them in `weights`.
    """

    weights: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    activations: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    text_encoder: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    vae: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    vae_weights: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    matmul: MatmulPrecision = "default"
    weight_format: "WeightFormat | None" = None

    @classmethod
    def of(cls, dtype: str) -> "Precision":
        """Returns transformer and text encoder in `dtype`, the VAE in float32."""
        chosen = dtype_named(dtype)
        return cls(weights=chosen, activations=chosen, text_encoder=chosen)

    @property
    def product_dtype(self) -> str:
        """The dtype of both operands of the linear maps of the transformer's blocks."""
        eight_bit = self.weight_format
        rounds = eight_bit is not None and eight_bit.rounds_activations
        return str(eight_bit.dtype if eight_bit is not None and rounds else self.activations)

    def describe(self) -> str:
        """Returns a line that names every dtype, and one on what is lossy."""
        dtypes = [part.name for part in fields(self) if part.name != "weight_format"]
        named = ", ".join(f"{name} {vars(self)[name]}" for name in dtypes)
        lossy = "" if self.weight_format is None else f"\nlossy: {self.weight_format.describe()}"
        return f"precision: {named}{lossy}"


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoder settings: latent frames per chunk, tiles, devices that split a frame.

    A chunk of 0 has as many frames as `fitting_chunk` says, one of -1 has all.
    """

    chunk: int = 1
    tiling: Tiling | None = None
    spatial_devices: int = -1


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Everything about a pipeline that is not in its checkpoint.

    `lora_rank` is the room for LoRA adapters that change between videos; 0 fuses them.
    """

    precision: Precision = field(default_factory=Precision)
    attention: str = "flash"
    attention_options: AttentionOptions = field(default_factory=AttentionOptions)
    scan_layers: bool = True
    decoding: Decoding = field(default_factory=Decoding)
    text_length: int = 512
    lora_rank: int = 0
