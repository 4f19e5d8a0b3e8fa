"""A recorded denoise step: its layers, its cycles by purpose, and its collectives."""

import ast
from pathlib import Path

import pytest

import maxdiffusion
from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.preflight.readers.collectives import find_collectives
from maxdiffusion.preflight.readers.cycles import (
    SOURCES,
    VECTOR_OPERATIONS,
    Purpose,
    count_cycles,
    find_unestimated,
    purpose_of,
    visits,
    weight_copies,
)
from maxdiffusion.preflight.readers.hlo import read_program
from tests.preflight.recorded import recorded

MESH = {"data": 2, "fsdp": 1, "ring": 2, "ulysses": 2, "tensor": 1}
LAYERS = 2
TPU7X = CHIPS["tpu7x"]
# Queries of the kernels on a device: 7,800 tokens over a ring of two, twenty heads of 128.
SHARD = 3900 * 20 * 128 * 2


@pytest.fixture(scope="module")
def step():
    return read_program(recorded("denoise_step_two_layers.txt"))


def test_kernels_run_once_a_layer_and_hop(step):
    kernels = [visit for visit in visits(step) if visit.instruction.is_kernel]
    names = sorted(visit.instruction.name.rsplit(".", 1)[0] for visit in kernels)
    assert names == ["flash_online_1024_1024_partials"] * 2 + ["flash_online_1024_512"]
    assert {visit.times for visit in kernels} == {LAYERS}
    assert {visit.instruction.vmem_bytes for visit in kernels} == {5_550_080, 4_141_056}


def test_cycles_by_purpose(step):
    cycles = count_cycles(step, LAYERS, TPU7X)
    assert cycles.all == sum(cycles.total.values()) == 12_330_235
    assert cycles.layer == pytest.approx(5_599_706, abs=4)
    layer = cycles.per_layer
    assert layer[Purpose.PROJECTIONS] == 3_031_636
    assert layer[Purpose.ROPE] == 543_328
    assert layer[Purpose.NORMS] == 278_697
    assert layer[Purpose.COPIES] > 5 * layer[Purpose.LAYOUT]
    # The eight products of a layer at peak: XLA's estimate must be above what is possible.
    tokens, width, ffn = 1950, 5120, 13824
    at_peak = 2 * tokens * (6 * width**2 + 2 * width * ffn) / 524_288
    assert at_peak < layer[Purpose.PROJECTIONS] < 2 * at_peak


def test_operations_know_their_source(step):
    by_name = {visit.instruction.name: visit.instruction for visit in visits(step)}
    stack = step.stack(by_name["fusion.235"])
    functions = [source.function for source in stack[:3]]
    assert functions == ["affine", "Linear.__call__", "FeedForward.__call__"]
    assert purpose_of(step, by_name["fusion.235"]) is Purpose.PROJECTIONS
    assert purpose_of(step, by_name["copy.252"]) is Purpose.COPIES
    assert purpose_of(step, by_name["fusion.233"]) is Purpose.NORMS


def test_collectives_of_a_layer(step):
    found = [c for c in find_collectives(step, MESH, TPU7X) if c.times == LAYERS]
    assert [(c.kind, c.axes, c.bytes) for c in found] == [
        *[("all-to-all", ("ulysses",), SHARD)] * 3,
        *[("collective-permute", ("ring",), SHARD)] * 2,
        ("all-to-all", ("ulysses",), SHARD),
    ]
    assert [c.asynchronous for c in found] == [False] * 3 + [True] * 2 + [False]
    assert found[0].sent == SHARD // 2
    assert found[3].sent == SHARD
    assert {(0, 2), (2, 0)} <= {*found[3].pairs}
    assert found[3].overlap.cycles > 0


def test_collectives_outside_of_layers_are_small(step):
    outside = [c for c in find_collectives(step, MESH, TPU7X) if c.times == 1]
    assert outside
    # The velocity is gathered over the sequence by a SparseCore, the rest is the guidance's.
    assert {c.axes for c in outside} == {("data",), ("ring", "ulysses")}
    assert all(c.bytes < SHARD for c in outside)


def line(text):
    return f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {text}\n}}\n"


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("ulysses",), 2),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", ("ring",), 2),
        ("replica_groups=[2,4]<=[8]", ("ring", "ulysses"), 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("data",), 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", ("data", "ring", "ulysses"), 8),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
            ("ring", "ulysses"),
            4,
        ),
    ],
)
def test_groups_in_every_spelling(groups, axes, size):
    program = read_program(line(f"%a = f32[8]{{0}} all-gather(%p), {groups}, dimensions={{0}}"))
    (collective,) = find_collectives(program, MESH, TPU7X)
    assert (collective.axes, collective.group_size) == (axes, size)
    assert collective.sent == round(32 * (size - 1) / size)


def test_what_runs_between_start_and_done():
    text = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %s = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %t = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %d.1 = f32[8]{0} collective-permute-done(%t)
  %k = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call"
  %c = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"70"}
  %d = f32[8]{0} collective-permute-done(%s)
}
"""
    first, second = find_collectives(read_program(text), MESH, TPU7X)
    assert (first.overlap.cycles, first.overlap.kernels) == (70, ("k",))
    assert (second.overlap.cycles, second.overlap.kernels) == (0, ())
    assert first.bytes == first.sent == 32
    assert (first.scheduled.start, first.scheduled.done) == (0, 5)
    assert (second.scheduled.start, second.scheduled.done) == (1, 2)


def test_a_kernel_that_states_its_costs_hides_a_collective():
    cost = '"cost_estimate":{"flops":"0","transcendentals":"0","bytes_accessed":"3690000000"}'
    text = f"""
ENTRY %main (p: f32[8]) -> f32[8] {{
  %c = f32[8]{{0}} copy(%p), backend_config={{"estimated_cycles":"70"}}
  %s = (f32[8]{{0}}, f32[8]{{0}}, u32[]) collective-permute-start(%p), source_target_pairs={{{{0,1}},{{1,0}}}}
  %k = f32[8]{{0}} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={{{cost}}}
  %d = f32[8]{{0}} collective-permute-done(%s)
}}
"""  # noqa: E501
    (hop,) = find_collectives(read_program(text), MESH, TPU7X)
    assert hop.scheduled.before.cycles == 70
    assert hop.overlap.cycles == round(TPU7X.clock_hz * 1e-3), "3.69 GB through HBM take 1 ms"


def test_the_costlier_branch_of_a_choice_counts():
    text = """
%cheap (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"1"}
}

%dear (p: f32[8]) -> f32[8] {
  %b = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"10"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%cheap, %dear}
}
"""
    assert count_cycles(read_program(text), 1, TPU7X).all == 10


def test_weights_that_a_step_copies_to_other_tiles_are_found(step):
    """The recorded step was compiled for weights in default tiles: all eight matrices."""
    copied = weight_copies(step)
    assert len(copied) == 8
    assert all("['kernel']" in name and name.startswith("inputs[0]['blocks']") for name in copied)
    width, mlp, layers = 5120, 13824, 2
    assert sum(copied.values()) == 2 * layers * (6 * width**2 + 2 * width * mlp)


def test_reads_of_weights_are_no_copies():
    """Prefetches, slices of a layer, products and small tables stay where they are."""
    weight = 'bf16[4,2048,2048]{2,1,0} parameter(0), metadata={op_name="inputs[0].a"}'
    table = 'bf16[4,2048]{1,0} parameter(1), metadata={op_name="inputs[0].b"}'
    text = f"""
%slice (p: bf16[4,2048,2048]) -> bf16[1,2048,2048] {{
  %p = bf16[4,2048,2048]{{2,1,0}} parameter(0)
  ROOT %s = bf16[1,2048,2048]{{2,1,0}} dynamic-slice(%p)
}}
ENTRY %main (a: bf16[4,2048,2048], b: bf16[4,2048]) -> bf16[1,2048,2048] {{
  %a = {weight}
  %b = {table}
  %copy-start = (bf16[4,2048,2048]{{2,1,0:S(1)}}, u32[]) copy-start(%a)
  %small = bf16[4,2048]{{0,1}} copy(%b)
  ROOT %f = bf16[1,2048,2048]{{2,1,0}} fusion(%a), calls=%slice
}}
"""
    assert weight_copies(read_program(text)) == {}
    whole = text.replace("ROOT %f = bf16[1,", "ROOT %f = bf16[4,")
    assert weight_copies(read_program(whole)) == {"inputs[0].a": 4 * 2048 * 2048 * 2}


def test_operations_without_an_estimate_are_found(step):
    """Unknown, missing and asynchronous ones; what is counted elsewhere is not among them."""
    unknown = 'backend_config={"estimated_cycles":"9223372036854775807"}'
    text = f"""
%product (p: f32[1024,256]) -> f32[1024,256] {{
  %p = f32[1024,256]{{1,0}} parameter(0)
  ROOT %c = f32[1024,256]{{1,0}} convolution(%p, %p)
}}
%body (p: f32[1024,256]) -> f32[1024,256] {{
  %p = f32[1024,256]{{1,0}} parameter(0)
  %known = f32[1024,256]{{1,0}} copy(%p), backend_config={{"estimated_cycles":"7"}}
  %hop = f32[1024,256]{{1,0}} collective-permute(%p)
  %call-start = ((f32[1024,256]), f32[1024,256]) call-start(%p), async_thread="sparsecore"
  %done = f32[1024,256]{{1,0}} call-done(%call-start)
  ROOT %cut = f32[1024,128]{{1,0}} slice(%known)
}}
ENTRY %main (p: f32[1024,256]) -> f32[1024,256] {{
  %p = f32[1024,256]{{1,0}} parameter(0)
  %small = f32[8,256]{{1,0}} slice(%p)
  %w = f32[1024,256]{{1,0}} while(%p), body=%body, known_trip_count":{{"n":"3"}}
  ROOT %f = f32[1024,256]{{1,0}} fusion(%w), calls=%product, {unknown}
}}
"""
    found = find_unestimated(read_program(text))
    assert found.kinds == {"slice": 1, "SparseCore call": 1, "convolution or product": 1}
    # Three slices read and write half of a MiB, three calls move one each way.
    assert found.bytes == 3 * 2**20 + 3 * 2**21 + 2**20
    assert found.seconds(TPU7X) == pytest.approx(10 * 2**20 / 3690e9)
    # The recorded step copies eight weights on the SparseCore.
    assert find_unestimated(step).kinds["SparseCore call"] >= 8


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="marked ENTRY"):
        read_program("HloModule nothing")


@pytest.mark.parametrize("operations", [0, 10**12], ids=["moves", "computes"])
def test_kernels_that_are_no_attention_take_what_they_state(operations):
    cost = f'"flops":"{operations}","transcendentals":"0","bytes_accessed":"387000000"'
    text = f"""
ENTRY %main (p: bf16[8]) -> bf16[8] {{
  %qk_norm_rope_scatter.1 = bf16[8]{{0}} custom-call(%p), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{"cost_estimate":{{{cost}}}}}}}
}}
"""
    cycles = count_cycles(read_program(text), 1, TPU7X)
    by_memory = 387e6 / TPU7X.hbm_bandwidth * TPU7X.clock_hz
    assert cycles.total == {
        Purpose.HEAD_LAYOUT: round(max(by_memory, operations / VECTOR_OPERATIONS))
    }


@pytest.mark.parametrize(("file", "function"), [row[:2] for row in SOURCES], ids=str)
def test_cycles_are_attributed_to_sources_that_exist(file, function):
    package = Path(maxdiffusion.__file__).parent
    paths = [package / file] if file.endswith(".py") else [*(package / file).rglob("*.py")]
    assert paths
    assert function in {"", *(name for path in paths for name in functions_of(path))}


def functions_of(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
