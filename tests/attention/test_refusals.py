"""The refusals of options, kernels and context-parallel schemes, with their whole text."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionProblem,
    BlockSizes,
    UnsupportedAttention,
    plan_attention,
)
from maxdiffusion.attention.backends import AnyBackend, Softmax
from maxdiffusion.attention.problem import LocalProblem
from maxdiffusion.attention.registry import ATTENTION_OPS
from maxdiffusion.errors import ProblemsFound
from tests.attention.cases import mesh_of

MESH = (1, 1, 2, 2, 1)


def problem(**changes) -> AttentionProblem:
    sizes = {"batch": 1, "q_len": 64, "kv_len": 64, "heads": 40, "head_dim": 128}
    return AttentionProblem(**({**sizes, "dtype": np.dtype("bfloat16")} | changes))


def reasons(name: str, *, options: AttentionOptions | None = None, **sizes) -> tuple[str, ...]:
    with pytest.raises(UnsupportedAttention) as refusal:
        plan_attention(name, problem(**sizes), mesh_of(MESH), options)
    return refusal.value.reasons


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ulysses_attention_chunks": 0}, "ulysses_attention_chunks=0: a whole number from 1"),
        ({"ulysses_attention_chunks": 1.5}, "ulysses_attention_chunks=1.5: a whole number from 1"),
        ({"flash_min_seq_length": -1}, "flash_min_seq_length=-1: a whole number from 0"),
        ({"fixed_m_gate": "open"}, r"fixed_m_gate='open': one of \('measured', 'forced'\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_options_name_what_they_take(wrong, message):
    with pytest.raises(ValueError, match=message):
        AttentionOptions(**wrong)


def test_block_sizes_name_what_they_take():
    with pytest.raises(ValueError, match=r"flash_block_sizes has \['block_z'\]: the keys are"):
        BlockSizes.from_mapping({"block_z": 1})
    with pytest.raises(ValueError, match=r"block_q=0: must be a positive integer"):
        BlockSizes.from_mapping({"block_q": 0})
    with pytest.raises(ValueError, match=r"block_q=-1: must be a positive integer"):
        BlockSizes(block_q=-1)


def test_splash_tiles_are_refused_all_at_once():
    sizes = BlockSizes(block_q=100, block_kv=384, block_kv_compute=256)
    assert reasons("ulysses_ring", options=AttentionOptions(block_sizes=sizes)) == (
        "flash_block_sizes.block_q=100: must be a positive multiple of 128. Use 128.",
        "flash_block_sizes.block_kv_compute=256: must divide block_kv=384. Use one of [128, 384].",
    )


def test_our_tiles_are_refused_with_their_rules():
    sizes = BlockSizes(block_q=100, block_kv=384, block_kv_compute=256)
    (first,) = reasons("ulysses_custom", options=AttentionOptions(block_sizes=sizes))
    assert first == "flash_block_sizes.block_q=100: must be a positive multiple of 128. Use 128."
    sizes = BlockSizes(block_q=128, block_kv=384, block_kv_compute=256)
    (second,) = reasons("ulysses_custom", options=AttentionOptions(block_sizes=sizes))
    assert second == (
        "flash_block_sizes.block_kv_compute=256: must divide block_kv=384. Use one of [128, 384]."
    )


def test_too_little_vmem_is_refused_with_figures():
    sizes = BlockSizes(block_q=128, block_kv=128, vmem_limit_bytes=1000)
    (reason,) = reasons("ulysses_custom", options=AttentionOptions(block_sizes=sizes))
    assert "MiB of VMEM, more than the 0.0 MiB it may use" in reason
    assert "or raise vmem_limit_bytes to" in reason


def test_heads_that_ulysses_does_not_divide_are_padded_and_the_plan_says_so():
    plan = plan_attention("ulysses_custom", problem(heads=7), mesh_of(MESH))
    assert "heads: 8 for 7 (12.5% padding)" in plan.describe()


def backend_of(name: str, **changes) -> AnyBackend:
    """Returns the backend of a mode on a TPU, for a long sequence."""
    sizes = {
        "batch": 1,
        "heads": (5,),
        "q_len": 75648,
        "kv_len": 75648,
        "head_dim": 128,
        "dtype": jnp.dtype("bfloat16"),
        "num_kv_shards": 1,
        "platform": "tpu",
        "device_kind": "TPU7x",
    }
    return ATTENTION_OPS[name].self_backend(LocalProblem(**(sizes | changes)), AttentionOptions())


def found(backend: AnyBackend) -> list[str]:
    with pytest.raises(ProblemsFound) as refusal:
        backend.check()
    return [str(problem) for problem in refusal.value.problems]


def test_fixed_m_counts_the_keys_of_a_whole_ring():
    backend_of("ulysses_ring_custom_fixed_m", num_kv_shards=8).check()
    assert found(backend_of("ulysses_ring_custom_fixed_m", num_kv_shards=16)) == [
        "kv_len=1210368: fixed-m softmax sums up to 1048576 keys. Use a name without fixed_m."
    ]
    (alone,) = found(backend_of("ulysses_custom_fixed_m", kv_len=2**21))
    assert alone.startswith("kv_len=2097152: fixed-m softmax sums up to 1048576 keys.")


def test_cudnn_says_what_it_needs():
    gpu = {"platform": "gpu", "device_kind": "NVIDIA H100"}
    backend_of("cudnn_flash_te", **gpu).check()
    wrong = {"dtype": jnp.dtype("float32"), "head_dim": 100}
    first, second = found(backend_of("cudnn_flash_te", **gpu, **wrong))
    assert "cuDNN attention computes in 16 bits. Use activations_dtype: bfloat16" in first
    assert "head_dim=100: a multiple of 8 up to" in second


def test_a_backend_refuses_a_softmax_that_it_lacks():
    with pytest.raises(ValueError, match="tokamax splash has no fixed-m softmax in native"):
        replace(backend_of("ring"), softmax=Softmax.FIXED_M)
