"""What the compiler really says, as a sentence with the keys to change."""

import pytest

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.preflight.compile import explain, is_refusal

VMEM = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem "
    "while allocating on stack for %flash_online_1024_1024_partials.1 = (f32[1,2048,256]) "
    "custom-call(...). Scoped allocation with size 5.29M and limit 1.91M exceeded scoped vmem "
    "limit by 3.39M."
)
HBM = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(48.00G) exceeds available HBM (15.75G)."
)


def test_too_much_vmem_names_the_blocks():
    problem = str(explain("denoise_step", VMEM, CHIPS["tpu7x"]))
    assert "Scoped allocation with size 5.29M and limit 1.91M" in problem
    assert "has 64 MiB" in problem
    assert "flash_block_sizes.block_q" in problem


@pytest.mark.parametrize(
    ("program", "key"), [("denoise_step", "ici_fsdp_parallelism"), ("decode", "vae_decode_chunk")]
)
def test_too_much_hbm_names_the_split(program, key):
    problem = str(explain(program, HBM, CHIPS["v5e"]))
    assert "(48.00G) exceeds available HBM (15.75G)" in problem
    assert key in problem
    assert "16 GiB" in problem


def test_a_kernel_without_a_layout_names_the_blocks():
    problem = str(
        explain("denoise_step", "INTERNAL: Mosaic failed: odd layout\n trace", CHIPS["v6e"])
    )
    assert "has no form on TPU v6e (Trillium) at these sizes: INTERNAL: Mosaic failed" in problem
    assert "multiples of 128 for flash_block_sizes.block_q" in problem


def test_anything_else_is_quoted():
    problem = str(explain("denoise_step", "INTERNAL: a bug\n trace", CHIPS["v6e"]))
    assert "the TPU compiler refuses it: INTERNAL: a bug" in problem
    assert "attention" in problem
    assert "no reason given" in str(explain("start", "", CHIPS["v6e"]))


def test_mistakes_of_this_program_are_not_taken_for_refusals():
    from jax._src.pallas.mosaic.error_handling import MosaicError

    assert is_refusal(MosaicError("layout"))
    assert is_refusal(NotImplementedError("Pallas"))
    assert not is_refusal(KeyError("x"))
    assert not is_refusal(TypeError("x"))
