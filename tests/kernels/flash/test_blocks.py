"""Every rule about sizes is checked before anything is traced, all at once and in words."""

import jax.numpy as jnp
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.kernels.flash import FixedM, FlashOptions, FlashShape, plan_kernel
from maxdiffusion.kernels.tpu import BlockSizes


def blocks(**changes: object) -> BlockSizes:
    sizes = {"block_q": 1024, "block_kv": 1024, "block_kv_compute": 512, "block_kv_compute_in": 256}
    return BlockSizes(**(sizes | changes))


def shape(**changes: object) -> FlashShape:
    sizes = {"batch": 1, "q_len": 9450, "kv_len": 75600, "heads": 40, "kv_heads": 40}
    return FlashShape(**({**sizes, "head_dim": 128, "dtype": "bfloat16"} | changes))


def reasons(**changes: object) -> tuple[str, ...]:
    with pytest.raises(ProblemsFound) as refusal:
        blocks(**changes).check_flash()
    assert isinstance(refusal.value, ValueError)
    return tuple(map(str, refusal.value.problems))


def test_sizes_come_in_lanes_and_all_offenders_are_named() -> None:
    found = reasons(block_q=1000, block_kv=0, block_kv_compute_in=100)
    assert [r.split("=")[0] for r in found] == [
        "flash_block_sizes.block_q",
        "flash_block_sizes.block_kv",
        "flash_block_sizes.block_kv_compute_in",
    ]
    assert (
        found[0] == "flash_block_sizes.block_q=1000: must be a positive multiple of 128. Use 1024."
    )


def test_compute_blocks_divide() -> None:
    first, second = reasons(block_kv=1024, block_kv_compute=768, block_kv_compute_in=512)
    assert first.startswith(
        "flash_block_sizes.block_kv_compute_in=512: must divide block_kv_compute=768."
    )
    assert first.endswith("Use one of [128, 256, 384, 768].")
    assert second.startswith("flash_block_sizes.block_kv_compute=768: must divide block_kv=1024.")


@pytest.mark.usefixtures("unchecked_types")
def test_other_sizes_are_positive() -> None:
    found = reasons(vmem_limit_bytes=-1, block_q=2.0, heads_per_tile=True)
    assert [r.split(": ")[1] for r in found] == ["must be a positive integer."] * 3
    assert "vmem_limit_bytes=-1" in reasons(vmem_limit_bytes=-1)[0]
    assert "block_q_compute=100" in reasons(block_q_compute=100)[0]
    assert "heads_per_tile=True" in reasons(heads_per_tile=True)[0]


@pytest.mark.parametrize("q_len", [1, 77, 128, 300, 5000])
@pytest.mark.parametrize("kv_len", [1, 130, 512, 700, 5000])
def test_fitted_blocks_obey_the_rules_and_waste_little(q_len: int, kv_len: int) -> None:
    fitted = blocks().fit(q_len, kv_len)
    assert fitted.block_q < q_len + 128
    assert fitted.block_kv < kv_len + fitted.block_kv_compute
    assert fitted.block_q <= 1024
    assert fitted.block_kv <= 1024


def refused(shape: FlashShape, blocks: BlockSizes, **options: object) -> tuple[str, ...]:
    with pytest.raises(ProblemsFound) as refusal:
        plan_kernel(shape, blocks, FlashOptions(**options))
    return tuple(map(str, refusal.value.problems))


def test_shapes_are_refused_with_every_reason() -> None:
    found = refused(shape(head_dim=100, dtype="float16", kv_len=0), blocks())
    assert [r.split("=")[0] for r in found] == ["dtype", "kv_len", "head_dim"]


def test_heads_must_share_evenly() -> None:
    assert "must be a multiple of kv_heads=7" in refused(shape(kv_heads=7), blocks())[0]
    (found,) = refused(shape(), blocks(heads_per_tile=3))
    assert "must divide heads=40. Use one of [1, 2, 4, 5, 8, 10, 20, 40]" in found
    (found,) = refused(shape(kv_heads=8), blocks(heads_per_tile=4))
    assert "must divide, or be a multiple of, the 5 heads per key head. Use 1 or 5" in found


def test_fixed_m_counts_keys() -> None:
    (found,) = refused(shape(kv_len=2**21), blocks(), softmax=FixedM())
    assert "must be at most 1048576 for fixed-m softmax. Use Online()" in found


def test_arrays_that_do_not_go_together_are_refused() -> None:
    q, k = jnp.zeros((2, 8, 4, 16)), jnp.zeros((2, 8, 4, 16))
    for changed, messages in (
        ((q[0], k, k), ["must be [B, S, N, H]"]),
        ((q, k, k[:, :4]), ["must be [B, S, N, H]"]),
        ((q, k[:1], k[:1]), ["must share the batch and the head features"]),
        ((q, k, k.astype(jnp.bfloat16)), ["must have one dtype"]),
        (
            (q, k[..., :8], k[..., :8].astype(jnp.bfloat16)),
            ["must share the batch and the head features", "must have one dtype"],
        ),
    ):
        with pytest.raises(ProblemsFound) as refused:
            FlashShape.of(*changed)
        assert len(refused.value.problems) == len(messages)
        for reason, message in zip(refused.value.problems, messages, strict=True):
            assert message in str(reason)
