"""LPIPS: distance of deep features of two pictures, with the weights that a person names.

    picture in -1..1 -> scaling -> AlexNet, five stages -> features of unit length at every place
    distance = sum over stages of the mean over places of  weights . (difference)^2

The file holds the tensors of `lpips.LPIPS(net="alex")` under their own names, as safetensors:
`net.slice1.0.weight`, ..., `lin0.model.1.weight`, ... Nothing is downloaded.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8
from safetensors import SafetensorError
from safetensors.numpy import load_file

from maxdiffusion.errors import Problem, ProblemsFound

FIELD = "lpips_weights"
# Mean and deviation of pictures in -1..1 that the network was trained on.
SHIFT = np.asarray([-0.030, -0.088, -0.188], np.float32)
SCALE = np.asarray([0.458, 0.448, 0.450], np.float32)
SMALL = 1e-10


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One convolution of AlexNet; `pooled` stages halve their input first."""

    name: str
    size: tuple[int, int, int]  # output and input channels, taps of a side
    stride: int = 1
    padding: int = 1
    pooled: bool = False


STAGES = (
    Stage(name="net.slice1.0", size=(64, 3, 11), stride=4, padding=2),
    Stage(name="net.slice2.3", size=(192, 64, 5), padding=2, pooled=True),
    Stage(name="net.slice3.6", size=(384, 192, 3), pooled=True),
    Stage(name="net.slice4.8", size=(256, 384, 3)),
    Stage(name="net.slice5.10", size=(256, 256, 3)),
)


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every tensor that is used."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, stage in enumerate(STAGES):
        outputs, inputs, taps = stage.size
        shapes[f"{stage.name}.weight"] = (outputs, inputs, taps, taps)
        shapes[f"{stage.name}.bias"] = (outputs,)
        shapes[f"lin{index}.model.1.weight"] = (1, outputs, 1, 1)
    return shapes


@dataclass(frozen=True, kw_only=True)
class Lpips:
    """The network with its weights."""

    tensors: dict[str, np.ndarray]

    @classmethod
    def read(cls, file: Path) -> "Lpips":
        """Returns the network of a file; raises if the file lacks a tensor."""
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0]
            raise ProblemsFound([_problem(file, f"cannot be read ({reason})")]) from error
        for name, shape in expected_shapes().items():
            if name not in found or found[name].shape != shape:
                rule = f"must have {name} of shape {list(shape)}"
                raise ProblemsFound([_problem(file, rule)])
        return cls(tensors={name: found[name].astype(np.float32) for name in expected_shapes()})

    def __call__(self, clip: UInt8[np.ndarray, "F Y X 3"], other: np.ndarray) -> float:
        """Returns the mean distance of the frames of two clips."""
        pairs = zip(clip, other, strict=True)
        return float(np.mean([float(_distance(self.tensors, one, two)) for one, two in pairs]))


@jax.jit
def _distance(
    tensors: dict[str, Array], one: UInt8[Array, "Y X 3"], two: UInt8[Array, "Y X 3"]
) -> Float[Array, ""]:
    """Returns the distance of two pictures."""
    both = jnp.stack([one, two]).astype(jnp.float32) / 127.5 - 1
    both = (both - SHIFT[None, None, None]) / SCALE[None, None, None]
    total = jnp.zeros((), jnp.float32)
    for index, stage in enumerate(STAGES):
        both = _stage(stage, both, tensors)
        length = jnp.sqrt(jnp.sum(jnp.square(both), axis=-1, keepdims=True))
        unit = both / (length + SMALL)
        weights = tensors[f"lin{index}.model.1.weight"].reshape(-1)
        total = total + jnp.mean(jnp.square(unit[0] - unit[1]) @ weights)
    return total


def _stage(
    stage: Stage, pictures: Float[Array, "B Y X C"], tensors: dict[str, Array]
) -> Float[Array, "B y x O"]:
    """Returns the features of one stage."""
    if stage.pooled:
        window = (1, 3, 3, 1)
        pictures = jax.lax.reduce_window(
            pictures, -jnp.inf, jax.lax.max, window, (1, 2, 2, 1), "VALID"
        )
    edge = (stage.padding, stage.padding)
    features = jax.lax.conv_general_dilated(
        pictures,
        tensors[f"{stage.name}.weight"],
        window_strides=(stage.stride, stage.stride),
        padding=(edge, edge),
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
        precision=jax.lax.Precision.HIGHEST,
    )
    bias = tensors[f"{stage.name}.bias"][None, None, None]
    return jnp.maximum(features + bias, 0)


def _problem(file: Path, rule: str) -> Problem:
    remedy = "Save the tensors of lpips.LPIPS(net='alex') as .safetensors (docs/quality.md)"
    return Problem(name=FIELD, value=str(file), rule=rule, remedy=remedy)
