"""What options, kernels and exchanges refuse, word by word."""

import numpy as np
import pytest
from attention.cases import mesh_of

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionProblem,
    FlashBlockSizes,
    UnsupportedAttention,
    plan_attention,
)
from maxdiffusion.attention.on_device import KernelSite, KernelSizes
from maxdiffusion.attention.on_device.cudnn import CudnnKernel
from maxdiffusion.attention.on_device.flash import FixedMFlashKernel

MESH = (1, 1, 2, 2, 1)


def problem(**changes) -> AttentionProblem:
    sizes = {"batch": 1, "q_len": 64, "kv_len": 64, "heads": 40, "head_dim": 128}
    return AttentionProblem(**({**sizes, "dtype": "bfloat16"} | changes))


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
def test_options_name_what_they_take(wrong, message):
    with pytest.raises(ValueError, match=message):
        AttentionOptions(**wrong)


def test_block_sizes_name_what_they_take():
    with pytest.raises(ValueError, match=r"flash_block_sizes has \['block_z'\]: the keys are"):
        FlashBlockSizes.from_mapping({"block_z": 1})
    with pytest.raises(ValueError, match=r"flash_block_sizes\.block_q=0: a whole number from 1"):
        FlashBlockSizes(block_q=0)


def test_splash_tiles_are_refused_all_at_once():
    sizes = FlashBlockSizes(block_q=100, block_kv=384, block_kv_compute=256)
    assert reasons("ulysses_ring", options=AttentionOptions(block_sizes=sizes)) == (
        "flash_block_sizes.block_q=100: splash tiles are multiples of 128. Use 128.",
        "flash_block_sizes.block_kv_compute=256: it must divide block_kv=384. "
        "Use block_kv or one of its divisors.",
    )


def test_our_tiles_are_refused_with_their_rules():
    sizes = FlashBlockSizes(block_q=100, block_kv=384, block_kv_compute=256)
    (first,) = reasons("ulysses_custom", options=AttentionOptions(block_sizes=sizes))
    assert first == "block_q=100: must be a positive multiple of 128. Use 128."
    sizes = FlashBlockSizes(block_q=128, block_kv=384, block_kv_compute=256)
    (second,) = reasons("ulysses_custom", options=AttentionOptions(block_sizes=sizes))
    assert second.startswith("block_kv_compute=256: must divide block_kv=384. Use one of [128,")


def test_too_little_vmem_is_refused_with_figures():
    sizes = FlashBlockSizes(block_q=128, block_kv=128, vmem_limit_bytes=1000)
    (reason,) = reasons("ulysses_custom", options=AttentionOptions(block_sizes=sizes))
    assert "MiB of VMEM, more than the 0.0 MiB it may use" in reason
    assert "or raise vmem_limit_bytes to" in reason


def test_heads_that_ulysses_does_not_divide_are_padded_and_the_plan_says_so():
    plan = plan_attention("ulysses_custom", problem(heads=7), mesh_of(MESH))
    assert "heads: 8 for 7 (12.5% padding)" in plan.describe()


def kernel_site(**changes) -> KernelSite:
    sizes = KernelSizes(batch=1, heads=(5,), q_len=75648, kv_len=75648)
    values = {
        "sizes": sizes,
        "head_dim": 128,
        "dtype": np.dtype("bfloat16"),
        "scale": 128**-0.5,
        "ring": 1,
        "platform": "tpu",
        "device_kind": "TPU7x",
        "options": AttentionOptions(),
    }
    return KernelSite(**(values | changes))


def test_fixed_m_counts_the_keys_of_a_whole_ring():
    assert FixedMFlashKernel(kernel_site(ring=8)).limits() == []
    (found,) = FixedMFlashKernel(kernel_site(ring=16)).limits()
    assert str(found) == (
        "kv_len=1210368: fixed-m softmax sums up to 1048576 keys. Use a name without fixed_m."
    )
    too_many = KernelSizes(batch=1, heads=(5,), q_len=75648, kv_len=2**21)
    (alone,) = FixedMFlashKernel(kernel_site(sizes=too_many)).limits()
    assert str(alone).startswith("kv_len=2097152: fixed-m softmax sums up to 1048576 keys.")


def test_cudnn_says_what_it_needs():
    gpu = {"platform": "gpu", "device_kind": "NVIDIA H100"}
    assert CudnnKernel(kernel_site(**gpu)).limits() == []
    found = CudnnKernel(kernel_site(**gpu, dtype=np.dtype("float32"), head_dim=100)).limits()
    first, second = map(str, found)
    assert "cuDNN attention computes in 16 bits. Use activations_dtype: bfloat16" in first
    assert "head_dim=100: a multiple of 8 up to" in second
