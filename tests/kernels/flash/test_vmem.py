"""VMEM by arithmetic: the compiler's own figures, chips, limits and refusals."""

import pytest

from maxdiffusion.kernels.flash import (
    FixedM,
    FlashBlocks,
    FlashOptions,
    FlashShape,
    KernelPlan,
    Online,
    UnsupportedFlash,
    plan_kernel,
)
from maxdiffusion.kernels.flash.vmem import CHIPS, MIB, vmem_bytes, vmem_limit


def planned(q: int, kv: int, **changes: object) -> KernelPlan:
    shape = {"head_dim": 128, "dtype": "bfloat16", "heads": 8, "kv_heads": 8}
    extra = {"heads_per_tile": 1, "vmem_limit_bytes": None, "block_q_compute": None}
    kinds = {"masked": False, "partials": False}
    options = {"softmax": Online(), "chip": "tpu7x"}
    for group in (shape, extra, kinds, options):
        group.update({key: changes.pop(key) for key in tuple(changes) if key in group})
    assert not changes
    sizes = {"block_q": q, "block_kv": kv, "block_kv_compute": kv, "block_kv_compute_in": kv}
    return plan_kernel(
        FlashShape(batch=1, q_len=75600, kv_len=75600, **shape),
        FlashBlocks(**sizes, **extra),
        FlashOptions(**options),
        **kinds,
    )


# What libtpu 0.0.42.1 says for tpu7x ("Scoped allocation with size") if the limit is too small.
COMPILER_MIB = [
    (4.10, planned(1024, 512)),
    (4.60, planned(1024, 1024, block_q_compute=512)),
    (6.06, planned(1024, 1024)),
    (6.06, planned(1024, 1024, softmax=FixedM())),
    (9.29, planned(1536, 1024)),
    (8.31, planned(1536, 1024, head_dim=64)),
    (12.54, planned(2048, 1024)),
    (17.18, planned(4096, 1024)),
    (17.41, planned(4096, 2048)),
    (22.38, planned(4736, 2048, softmax=FixedM())),
    (25.79, planned(8448, 1024)),
    (26.87, planned(6400, 2048, softmax=FixedM(), partials=True)),
    (37.60, planned(9472, 1024, partials=True)),
    (9.59, planned(1536, 1536)),
    (11.43, planned(2560, 1024)),
    (25.43, planned(5632, 1024)),
    (4.49, planned(512, 512, dtype="float32")),
    (7.40, planned(1024, 512, dtype="float32")),
    (11.05, planned(1024, 1024, dtype="float32")),
    (2.61, planned(512, 512, head_dim=80)),
    (3.79, planned(512, 256, heads_per_tile=2, masked=True, partials=True, block_q_compute=256)),
    (11.05, planned(1024, 2048)),
]


@pytest.mark.parametrize(("mib", "plan"), COMPILER_MIB)
def test_arithmetic_agrees_with_the_compiler(mib: float, plan: KernelPlan) -> None:
    assert vmem_bytes(plan) / MIB == pytest.approx(mib, rel=0.05)


def test_default_limit_is_a_little_more_than_the_need() -> None:
    plan = planned(2048, 1024)
    assert vmem_bytes(plan) < vmem_limit(plan) < 1.2 * vmem_bytes(plan)
    assert vmem_limit(planned(2048, 1024, vmem_limit_bytes=20 * MIB)) == 20 * MIB


def test_too_large_for_the_chip_is_refused_with_figures() -> None:
    sizes = {"q": 32768, "kv": 2048}
    with pytest.raises(
        UnsupportedFlash, match=r"needs \d+\.\d MiB of VMEM, more than the 64.0 MiB"
    ):
        planned(**sizes)
    assert vmem_bytes(planned(**sizes, chip="v6e")) > CHIPS["tpu7x"]


def test_limits_are_held_against_need_and_chip() -> None:
    with pytest.raises(UnsupportedFlash, match="or raise vmem_limit_bytes to"):
        planned(2048, 1024, vmem_limit_bytes=4 * MIB)
    with pytest.raises(UnsupportedFlash, match="must not exceed the 67108864 bytes of VMEM"):
        planned(2048, 1024, vmem_limit_bytes=100 * MIB)
    with pytest.raises(UnsupportedFlash, match="must be one of tpu7x, v6e, v5p, v5e"):
        planned(2048, 1024, chip="v9")
