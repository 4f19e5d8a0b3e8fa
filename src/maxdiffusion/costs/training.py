"""Costs of a training step: bounds, the choice of attention, and published measurements.

A step is a forward pass, for most policies of rematerialisation a second one of what was not saved,
and a backward pass. The backward pass of attention has five products for the two of the forward
pass: scores and the gradient of the weights have head_dim as depth, the other three any depth.

    forward    2 products, 1 of them of depth head_dim
    backward   5 products, 2 of them of depth head_dim

Model FLOPs, the numerator of MFU, count a backward pass as two forward ones, as everybody does, and
no second forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import Mesh

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionProblem,
    UnsupportedAttention,
    with_gradient,
)
from maxdiffusion.attention.registry import DOT_PRODUCT, differentiable_names
from maxdiffusion.costs.chips import CHIPS, Chip, topology_under
from maxdiffusion.costs.flops import ForwardFlops, forward_flops
from maxdiffusion.costs.planner import CANDIDATES, Choice, Task, choices, explain
from maxdiffusion.kernels.tpu import CHIP_NAMES
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.mesh.mesh import slice_index
from maxdiffusion.models.wan import WanTransformerConfig

BACKWARD_PRODUCTS, BACKWARD_SHALLOW = 5, 2
# Names to choose from where they have a gradient, the preferred one first.
TRAINING_CANDIDATES = (*CANDIDATES, "ulysses_ring")


@dataclass(frozen=True, kw_only=True)
class TrainingBounds:
    """Lower bounds of a training step in seconds, and the peak they assume.

    `spec` runs the model FLOPs at peak. `head_dim_aware` runs every product at the share of peak
    that the MXU reaches at its depth. Neither includes a second forward pass.
    """

    spec: float
    head_dim_aware: float
    model_flops: float
    peak_flops: float
    devices: int

    def mfu(self, seconds: float) -> float:
        """Returns the model FLOPs utilisation of a step, of bfloat16 peak."""
        return self.model_flops / (seconds * self.devices * self.peak_flops)


def backward_share(chip: Chip, head_dim: int) -> float:
    """Returns the share of peak that the backward pass of attention can reach."""
    filled = min(1.0, head_dim / chip.mxu_depth)
    deep = BACKWARD_PRODUCTS - BACKWARD_SHALLOW
    return BACKWARD_PRODUCTS / (BACKWARD_SHALLOW / filled + deep)


def backward_cycles(chip: Chip, head_dim: int) -> float:
    """Returns the least cycles of the backward pass of attention for one (query, key) pair."""
    flops = 2.0 * BACKWARD_PRODUCTS * head_dim
    return flops / (chip.flops_per_cycle * backward_share(chip, head_dim))


def training_bounds(
    forward: ForwardFlops, chip: Chip, *, backward: int, devices: int, head_dim: int
) -> TrainingBounds:
    """Returns the bounds of a step whose forward pass, over the whole batch, takes `forward`.

    `backward` is the cost of its backward pass in forward ones: 1 with frozen weights, else 2.
    """
    speed = devices * chip.bf16_flops
    attention = forward.attention
    products = attention / chip.score_share(head_dim)
    products += attention * (BACKWARD_PRODUCTS / 2) / backward_share(chip, head_dim)
    # Gradients of activations and, unless frozen, of weights.
    dense = forward.dense * (1 + backward)
    return TrainingBounds(
        spec=(1 + backward) * forward.total / speed,
        head_dim_aware=(products + dense) / speed,
        model_flops=(1 + backward) * forward.total,
        peak_flops=chip.bf16_flops,
        devices=devices,
    )


def choose_attention(
    problem: AttentionProblem,
    transformer: WanTransformerConfig,
    mesh: Mesh,
    *,
    options: AttentionOptions,
    text_length: int,
    keeps_split: bool = False,
) -> tuple[str, Mesh, str]:
    """Returns the best attention with a gradient, the mesh with its split, and the reason.

    Only names with a gradient are considered. Forward and backward passes send alike and run the
    same blocks, so the estimate of the forward pass ranks them. `keeps_split` keeps that of the
    mesh. Elsewhere than on one slice of known TPUs it is `dot_product`.
    """
    devices = mesh.devices.flatten().tolist()
    kind = CHIP_NAMES.get(devices[0].device_kind.lower())
    names = tuple(name for name in TRAINING_CANDIDATES if name in {*differentiable_names()})
    if kind is None or len({*map(slice_index, devices)}) > 1:
        reason = f"attention auto: {DOT_PRODUCT}, since only one slice of known TPUs is planned for"
        return DOT_PRODUCT, mesh, reason
    stated = _shape(mesh)
    task = Task(
        problem=problem,
        flops=forward_flops(
            transformer, tokens=problem.q_len, text_length=text_length, batch=problem.batch
        ),
        layers=transformer.block_count,
        topology=topology_under(CHIPS[kind], devices),
        devices=devices,
        options=options,
        text_length=text_length,
        names=names,
    )
    possible = choices(
        task, data=stated.data, context=stated.context, fsdp=stated.fsdp, tensor=stated.tensor
    )
    kept = [one for one in possible if not keeps_split or one.shape.ulysses == stated.ulysses]
    found = [one for one in kept if _trains(one)]
    if not found:
        return DOT_PRODUCT, mesh, f"attention auto: {DOT_PRODUCT}, since no other name can run"
    return found[0].name, build_mesh(found[0].shape, devices=devices), _reason(found, names)


def _trains(choice: Choice) -> bool:
    """Returns whether the backward kernel of a choice runs at its sizes too."""
    try:
        with_gradient(choice.plan)
    except UnsupportedAttention:
        return False
    return True


def _shape(mesh: Mesh) -> MeshShape:
    data, fsdp, ring, ulysses, tensor = mesh.devices.shape
    return MeshShape(data=data, fsdp=fsdp, ring=ring, ulysses=ulysses, tensor=tensor)


def _reason(found: Sequence[Choice], names: Sequence[str]) -> str:
    return f"{explain(found)} Of the names with a gradient: {', '.join(names)}; forward pass alone."


CLIP_TOKENS, PAIRS, LAYERS = 75_600, 10, 40
TILE = 1024  # queries, and keys
TOKAMAX_BACKWARD = 5397 + 327
"""Cycles of a tile and of its grid step; jax's two kernels take 8,997 in such blocks."""
CALIBRATION_CHIP = CHIPS["tpu7x"]
# XLA's cycles of our step outside of kernels, and seconds of its exposed collectives, as compiled
# for the published work on tpu7x:2x4x4 (docs/training.md) with libtpu 0.0.42.
OUTSIDE_CYCLES, EXPOSED_SECONDS = 7.373e9, 1.276


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A training step of the published work; kernels as cycles of a tile of 1024 x 1024.

    The work: WAN 2.2 T2V A14B, one expert a step, 1280x720, 81 frames (75,600 tokens), bfloat16
    activations, 16 clips on 64 devices. The pull requests state seconds, TFLOP/s and MFU; sizes and
    batch follow from 384.12 x 13.57 = 5,212 TFLOP a device, 0.27 of the 19,563 of a clip, and from
    the WAN 2.1 recipe of the same project, which has 0.25 clips a device. `measured` is None for a
    step of ours.
    """

    name: str
    source: str
    forward: float
    backward: float
    forward_passes: int
    measured: float | None

    def predicted(self, chip: Chip) -> float:
        """Returns the seconds at the clock of a chip."""
        tiles = LAYERS * PAIRS * (CLIP_TOKENS / TILE) ** 2
        kernels = tiles * (self.forward_passes * self.forward + self.backward)
        return chip.seconds(kernels + OUTSIDE_CYCLES) + EXPOSED_SECONDS

    def error(self, chip: Chip) -> float | None:
        """Returns the relative error of the prediction; None for a step that was not measured."""
        return None if self.measured is None else self.predicted(chip) / self.measured - 1.0


_PAIRS_OF_TILE = TILE * TILE
OURS = TrainingStep(
    name="our kernels, attention saved",
    source="bundle counts",
    forward=2
    * 2
    * 128
    * _PAIRS_OF_TILE
    / (CALIBRATION_CHIP.flops_per_cycle * CALIBRATION_CHIP.score_share(128) * 0.97),
    backward=_PAIRS_OF_TILE * backward_cycles(CALIBRATION_CHIP, 128) / 0.967,
    forward_passes=1,
    measured=None,
)
TRAINING_STEPS: Sequence[TrainingStep] = (
    # Blocks are those of the public config: 512, two backward kernels, padding masked by segments.
    TrainingStep(
        name="jax's splash kernels, blocks of 512, all recomputed",
        source="PR 470",
        forward=4 * (908 + 282),
        backward=4 * (985 + 362 + 1290 + 430),
        forward_passes=2,
        measured=39.70,
    ),
    TrainingStep(
        name="custom forward, fused backward, attention saved",
        source="PR 487",
        forward=14_104 * TILE / 8448,
        backward=TOKAMAX_BACKWARD,
        forward_passes=1,
        measured=13.57,
    ),
    OURS,
)


def training_calibration_table() -> str:
    """Returns predictions at both clocks and measurements as a Markdown table."""
    slower = CALIBRATION_CHIP.unpinned()
    assert slower is not None
    lines = [
        "| step | pinned | error | not pinned | error | measured |",
        "|---|---|---|---|---|---|",
    ]
    for step in TRAINING_STEPS:
        cells = []
        for chip in (CALIBRATION_CHIP, slower):
            error = step.error(chip)
            cells += [f"{step.predicted(chip):.2f}", "" if error is None else f"{error:+.1%}"]
        measured = "" if step.measured is None else f"{step.measured:.2f}"
        lines.append(f"| {step.name} ({step.source}) | {' | '.join(cells)} | {measured} |")
    return "\n".join(lines)
