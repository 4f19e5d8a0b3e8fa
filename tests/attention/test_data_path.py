"""From a transformer block to the matrix product of its kernel: few frames, few files."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxdiffusion
from maxdiffusion.attention import (
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan import TextKeysValues, WanTransformerConfig
from maxdiffusion.models.wan.block import StepContext, WanBlock
from maxdiffusion.models.wan.layers import FLOAT32
from tests.attention.cases import mesh_of

PACKAGE = str(Path(maxdiffusion.__file__).parent)
ABOVE_KERNELS_FRAMES, ABOVE_KERNELS_FILES = 8, 6
KERNEL_FRAMES, KERNEL_FILES = 4, 3
TOKENS, TEXT, HEADS, HEAD_DIM = 64, 16, 2, 128
CONFIG = WanTransformerConfig(layers=1, heads=HEADS, head_dim=HEAD_DIM, ffn_dim=32)


def stack_below(function: str) -> list[str]:
    """Returns the files of our frames from `function` (first) to the caller, one per frame."""
    frame, files = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)
            if frame.f_code.co_qualname == function:
                return files[::-1]
        frame = frame.f_back
    return []


@pytest.fixture
def paths(monkeypatch) -> list[list[str]]:
    """Collects the stack of every product that is traced inside a flash kernel."""
    found: list[list[str]] = []
    product = jax.lax.dot_general

    def recorded(*args, **kwargs):
        files = stack_below("WanBlock.__call__")
        if any("/kernels/flash/" in file for file in files):
            found.append(files)
        return product(*args, **kwargs)

    monkeypatch.setattr(jax.lax, "dot_general", recorded)
    return found


def trace_block(shape: tuple[int, ...], *, fused: bool) -> None:
    """Traces one block whose attentions run the flash kernel."""
    mesh = mesh_of(shape)
    sizes = {
        "batch": 1,
        "q_len": TOKENS,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": jnp.dtype("float32"),
    }
    name = "ulysses_ring_custom"
    plan = plan_attention(name, AttentionProblem(kv_len=TOKENS, **sizes), mesh)
    cross = plan_cross_attention(name, AttentionProblem(kv_len=TEXT, **sizes), mesh)
    attention = BlockAttention(
        self_attention=replace(plan, fused=fused), cross_attention=replace(cross, fused=fused)
    )

    def run(x, step, text):
        block = WanBlock(CONFIG, FLOAT32, rngs=nnx.Rngs(0))
        return block(x, step, text, attention=attention, layout=ActivationLayout(mesh=mesh))

    keys = jnp.zeros((1, TEXT, HEADS, HEAD_DIM))
    tables = {name: jnp.zeros((TOKENS, HEAD_DIM // 2)) for name in ("cosines", "sines")}
    with jax.set_mesh(mesh):
        jax.make_jaxpr(run)(
            jnp.zeros((1, TOKENS, CONFIG.model_dim)),
            StepContext(modulation=jnp.zeros((1, 6, CONFIG.model_dim)), **tables),
            TextKeysValues(keys=keys, values=keys),
        )


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 2, 2, 1), (1, 1, 1, 2, 1), (1, 1, 2, 1, 1), (1, 1, 1, 1, 1)], ids=str
)
def test_few_frames_lead_from_the_block_to_the_product(paths, shape, fused):
    trace_block(shape, fused=fused)
    assert paths, "no product of a flash kernel was traced"
    above = [[file for file in files if "/kernels/" not in file] for files in paths]
    assert max(len(files) for files in above) <= ABOVE_KERNELS_FRAMES, above[0]
    assert max(len(set(files)) for files in above) <= ABOVE_KERNELS_FILES, above[0]
    inside = [[file for file in files if "/kernels/" in file] for files in paths]
    assert max(len(files) for files in inside) <= KERNEL_FRAMES, max(inside, key=len)
    assert max(len(set(files)) for files in inside) <= KERNEL_FILES, max(inside, key=len)
