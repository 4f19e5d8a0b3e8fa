"""VMEM by arithmetic: the compiler's own figures, chips, limits and refusals."""

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.kernels.flash import FlashOptions, FlashShape, KernelPlan, Online, plan_kernel
from maxdiffusion.kernels.flash.vmem import vmem_bytes, vmem_limit
from maxdiffusion.kernels.tpu import MIB, VMEM_BYTES, BlockSizes
from tests.kernels.flash import compiled
from tests.kernels.flash.compiled import Figure, figures
from tests.processes import output_of


def planned(q: int, kv: int, **changes: object) -> KernelPlan:
    shape = {"head_dim": 128, "dtype": "bfloat16", "heads": 8, "kv_heads": 8}
    extra = {"heads_per_tile": 1, "vmem_limit_bytes": 0, "block_q_compute": 0}
    kinds = {"masked": False, "partials": False}
    options = {"softmax": Online(), "chip": "tpu7x"}
    for group in (shape, extra, kinds, options):
        group.update({key: changes.pop(key) for key in tuple(changes) if key in group})
    assert not changes
    sizes = {"block_q": q, "block_kv": kv, "block_kv_compute": kv, "block_kv_compute_in": kv}
    return plan_kernel(
        FlashShape(batch=1, q_len=75600, kv_len=75600, **shape),
        BlockSizes(**sizes, **extra),
        FlashOptions(**options),
        **kinds,
    )


FIGURES = figures()


@pytest.mark.parametrize("figure", FIGURES, ids=str)
def test_arithmetic_agrees_with_the_compiler(figure: Figure) -> None:
    assert vmem_bytes(figure.plan) / MIB == pytest.approx(figure.mib, rel=0.05)


def test_the_limit_given_to_the_compiler_is_enough() -> None:
    for figure in FIGURES:
        assert vmem_limit(figure.plan) >= figure.mib * MIB, str(figure)


# Tiles that compile in seconds; the compiler is asked again, so that a change of the kernel or of
# libtpu is seen.
LIVE = {"tpu7x": [(384, 512), (1152, 512)], "v6e": [(640, 1024)]}


def row_of(chip: str, tile: tuple[int, int]) -> int:
    """Returns the first row of the table with this block of queries and keys."""
    tiles = [(f.chip, (f.plan.blocks.block_q, f.plan.blocks.block_kv)) for f in FIGURES]
    return tiles.index((chip, tile))


@pytest.mark.libtpu
@pytest.mark.parametrize("chip", LIVE)
def test_the_compiler_still_says_so(chip: str) -> None:
    wanted = [row_of(chip, tile) for tile in LIVE[chip]]
    compiler_bytes = output_of(compiled.__file__, chip, *wanted).split()
    for index, said in zip(wanted, compiler_bytes, strict=True):
        assert vmem_bytes(FIGURES[index].plan) == pytest.approx(int(said), rel=0.05)


def test_default_limit_is_a_little_more_than_the_need() -> None:
    plan = planned(2048, 1024)
    assert vmem_bytes(plan) < vmem_limit(plan) < 1.2 * vmem_bytes(plan)
    assert vmem_limit(planned(2048, 1024, vmem_limit_bytes=20 * MIB)) == 20 * MIB


def test_too_large_for_the_chip_is_refused_with_figures() -> None:
    sizes = {"q": 32768, "kv": 2048}
    with pytest.raises(ProblemsFound, match=r"needs \d+\.\d MiB of VMEM, more than the 64.0 MiB"):
        planned(**sizes)
    assert vmem_bytes(planned(**sizes, chip="v6e")) > VMEM_BYTES["tpu7x"]


def test_limits_are_held_against_need_and_chip() -> None:
    with pytest.raises(ProblemsFound, match="or raise vmem_limit_bytes to"):
        planned(2048, 1024, vmem_limit_bytes=4 * MIB)
    with pytest.raises(ProblemsFound, match="must not exceed the 67108864 bytes of VMEM"):
        planned(2048, 1024, vmem_limit_bytes=100 * MIB)
    with pytest.raises(ProblemsFound, match="must be one of tpu7x, v6e, v5p, v5e"):
        planned(2048, 1024, chip="v9")
