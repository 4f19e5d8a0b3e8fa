"""Bounds of a training step, its calibration, and the attention that `auto` takes."""

from itertools import product
from pathlib import Path

import jax.numpy as jnp
import pytest

from maxdiffusion.attention import AttentionOptions, AttentionProblem
from maxdiffusion.attention.registry import differentiable_names
from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.costs.flops import forward_flops
from maxdiffusion.costs.training import (
    OURS,
    TRAINING_STEPS,
    backward_share,
    choose_attention,
    training_bounds,
    training_calibration_table,
)
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.models.wan import config as sizes
from tests.described_tpus import DescribedCore

DOCS = Path(__file__).parents[2] / "docs/training.md"
A14B = sizes.wan_14b()
TOKENS = 75_600


def test_bounds_count_five_products_backward():
    """Heads of 128 fill half of an MXU of 256: 2 of 2 + 1, then 5 of 4 + 3 units of time."""
    chip = CHIPS["tpu7x"]
    assert backward_share(chip, 128) == pytest.approx(5 / 7)
    assert backward_share(CHIPS["v5p"], 128) == 1
    flops = forward_flops(sizes.wan_14b(), tokens=75_600, text_length=512, batch=16)
    bounds = training_bounds(flops, chip, backward=2, devices=64, head_dim=128)
    assert bounds.model_flops == 3 * flops.total
    speed = 64 * chip.bf16_flops
    units = flops.attention / 2 * (3 + 7) + 3 * flops.dense
    assert bounds.head_dim_aware == pytest.approx(units / speed)
    assert bounds.mfu(bounds.spec) == pytest.approx(1)
    frozen = training_bounds(flops, chip, backward=1, devices=64, head_dim=128)
    assert frozen.head_dim_aware < bounds.head_dim_aware


def test_the_published_step_is_predicted():
    """The second step is the one whose kernels are known; its clock is not stated."""
    _, fused, _ = TRAINING_STEPS
    chip = CHIPS["tpu7x"]
    slower = chip.unpinned()
    assert slower is not None
    assert abs(fused.error(slower)) < 0.02
    assert abs(fused.error(chip)) < 0.12
    assert OURS.predicted(chip) < OURS.predicted(slower) < 12
    assert OURS.error(chip) is None


def test_the_docs_show_the_table():
    assert training_calibration_table() in DOCS.read_text(encoding="utf-8")


def described_mesh(kind, **shape):
    chips = [tuple(reversed(chip)) for chip in product(range(1), range(2), range(2))]
    devices = [
        DescribedCore(coords=chip, core_on_chip=core, device_kind=kind, id=index)
        for index, (chip, core) in enumerate(product(chips, range(2)))
    ]
    return build_mesh(MeshShape(**shape), devices=devices)


def chosen(mesh, **settings):
    problem = AttentionProblem(
        batch=2, q_len=TOKENS, kv_len=TOKENS, heads=40, head_dim=128, dtype=jnp.dtype("bfloat16")
    )
    options = {"options": AttentionOptions(), "text_length": 512, **settings}
    return choose_attention(problem, A14B, mesh, **options)


def test_auto_takes_a_name_with_a_gradient():
    name, mesh, reason = chosen(described_mesh("TPU7x", fsdp=2, ring=4))
    assert name in {*differentiable_names()}
    assert mesh.shape["fsdp"] == 2
    assert mesh.shape["ring"] * mesh.shape["ulysses"] == 4
    assert "gradient" in reason
    kept = chosen(described_mesh("TPU7x", fsdp=2, ring=4), keeps_split=True)[1]
    assert kept.shape["ring"] == 4


def test_auto_on_unknown_devices_is_dense():
    name, mesh, reason = chosen(described_mesh("toy", fsdp=2, ring=4))
    assert name == "dot_product"
    assert mesh.shape["ring"] == 4
    assert "known TPUs" in reason
