"""Kernels' machine code, read from a recorded dump and from hand-made lines."""

import pytest

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.preflight.readers.bundles import read_code, read_kernels, read_slots
from tests.preflight.recorded import unpack

TPU7X = CHIPS["tpu7x"]


@pytest.fixture
def flash(tmp_path):
    unpack("77-*", tmp_path)
    (code,) = read_kernels(tmp_path)
    return code


def test_the_main_loop_of_the_flash_kernel(flash):
    assert flash.name == "flash_online_1024_1024_partials"
    assert flash.bundles == 3477
    main = flash.main_loop
    assert (main.start, main.bundles, main.matmuls, main.depth) == (0x247, 1676, 384, 1)
    # 1024 x 1024 scores with heads of 128: 1024 * 1024 / 1024 * 1.5.
    assert main.mxu_bound(TPU7X) == 1536
    assert main.cycles(TPU7X) == 1676
    assert (main.spill_stores, main.spill_loads) == (1321, 1318)


def test_what_runs_around_the_main_loop(flash):
    assert sum(region.bundles for region in flash.regions) == flash.bundles
    # 410 bundles load queries, 269 store results; the masked path has its own loops.
    assert flash.every_q_block == 410 + 269
    assert flash.ragged_cycles(TPU7X) == 4 * 840
    assert flash.every_step == 150 + 23


def test_the_mxu_sets_the_time_of_a_schedule_that_is_shorter():
    lines = [f"   {address:#x}   : > {{ vmatmul.mubr.bf16.gmra.mrb }}" for address in range(1, 11)]
    code = read_code("dense", ["     0   :  { %s0 = entry }", *lines, "   0xb   : > { sbr.rel }"])
    assert code.main_loop.bundles == 11
    assert code.main_loop.mxu_bound(TPU7X) == 40
    assert code.main_loop.cycles(TPU7X) == 40


def test_of_two_bodies_the_shorter_is_the_main_loop():
    body = ["vmatmul.mubr.bf16.gmra.mrb"] * 2
    lines = [*body, "vadd", "vadd", "sbr.rel", *body, "sbr.rel"]
    text = [f" {address:#x}   : > {{ {words} }}" for address, words in enumerate(lines)]
    code = read_code("two", [line.replace("0x0", "0", 1) for line in text])
    assert [region.matmuls for region in code.regions] == [2, 2, 0]
    assert code.main_loop.start == 4


def test_last_keys_that_are_as_many_have_a_loop_as_long():
    body = ["vmatmul.mubr.bf16.gmra.mrb"] * 2
    lines = [*body, "sbr.rel", *body, *["vadd"] * 10, "sbr.rel"]
    text = [f" {address:#x}   : >> {{ {words} }}" for address, words in enumerate(lines)]
    code = read_code("tied", [line.replace("0x0", "0", 1) for line in text])
    assert code.main_loop.cycles(TPU7X) == 8
    assert code.ragged_cycles(TPU7X) == code.regions[1].bundles == 13


def test_a_dump_without_bundles_is_refused():
    with pytest.raises(ValueError, match="kernel nothing: the dump contains no bundles"):
        read_code("nothing", ["= control target key start"])


def test_slots_need_ten_numbers():
    rows = read_slots(["2 2 4 2 1 3 3 2 2 2", "== UTILIZATION:", "0 1 2 3 4 5 6 7 8 9", "1 2"])
    assert rows == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]


def test_small_mxus_have_a_form_with_half_the_rows():
    whole, half = "vmatmul.bf16.gmra.mxu0", "vmatmul.lmr.bf16.gmra.16.mxu0"
    # A tile of 512 x 512 with heads of 128 on v5e: 128 + 256 instructions, 1024 bundles at least.
    lines = [f" {index:#x}   : > {{ {whole} }}" for index in range(1, 129)]
    lines += [f" {index:#x}   : > {{ {half} }}" for index in range(129, 385)]
    code = read_code("flash", ["     0   :  { entry }", *lines])
    assert code.main_loop.mxu_bound(CHIPS["v5e"]) == 4 * 512 * 512 * 128 // (4 * 128 * 128 * 2)
