"""Flags of the TPU compiler: which are chosen, and which source overrides which."""

import pytest

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.runtime.tpu_flags import (
    CONTINUATION_FUSION_CHIPS,
    FLAGS,
    PRESETS,
    Flag,
    Preset,
    apply_flags,
    chosen_flags,
    describe_flags,
    find_chip,
    pins_clock,
    preset_for,
    read_flags,
)


def test_there_is_a_preset_for_every_chip():
    assert set(PRESETS) == set(CHIPS)


def test_the_environment_wins_over_the_preset_and_keeps_its_own():
    flag, *_ = PRESETS["v6e"].flags
    flags = chosen_flags("auto", "v6e", {"LIBTPU_INIT_ARGS": f"--{flag.name}=false --xla_own=3"})
    assert flags[flag.name] == "false"
    assert flags["xla_own"] == "3"
    assert len(flags) == len(PRESETS["v6e"].flags) + 1


def test_a_key_takes_the_place_of_the_preset():
    assert chosen_flags("none", "v6e", {}) == {}
    assert chosen_flags("--a=1 --b", "v6e", {"LIBTPU_INIT_ARGS": "--a=2"}) == {
        "a": "2",
        "b": "true",
    }


def test_applying_twice_changes_nothing():
    once = {"LIBTPU_INIT_ARGS": "--xla_own=3"}
    apply_flags("auto", "tpu7x", once)
    twice = dict(once)
    apply_flags("auto", "tpu7x", twice)
    assert twice == once


def test_nothing_is_set_without_a_tpu():
    environment = {}
    apply_flags("auto", None, environment)
    assert environment == {}
    assert describe_flags(None, environment) == ()


def test_what_is_no_flag_is_refused_before_libtpu_ends_the_run():
    with pytest.raises(ProblemsFound, match="contains 'xla_tpu_a=1', which is not of the form"):
        read_flags("--xla_b=1 xla_tpu_a=1", "libtpu_init_args")


def test_the_plan_names_every_flag_and_tells_own_ones_apart():
    environment = {"LIBTPU_INIT_ARGS": "--xla_own=3"}
    apply_flags("auto", "v5p", environment)
    first, *lines = describe_flags("v5p", environment)
    count = len(PRESETS["v5p"].flags)
    assert first == f"libtpu flags: {count} of the {count} of the preset for v5p"
    assert lines[0] == f"  {PRESETS['v5p'].flags[0]}"
    assert lines[-1] == "  --xla_own=3 (not of the preset)"


@pytest.mark.parametrize(
    ("environment", "chip"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-16"}, "v5e"),
        ({"TPU_ACCELERATOR_TYPE": "tpu7x-16", "JAX_PLATFORMS": "tpu,cpu"}, "tpu7x"),
        ({"TPU_ACCELERATOR_TYPE": "v6e-8", "JAX_PLATFORMS": "cpu"}, None),
        ({}, None),
    ],
)
def test_the_chip_is_read_from_the_environment(tmp_path, environment, chip):
    assert find_chip(environment, tmp_path) == chip


def test_the_chip_is_read_from_the_bus(tmp_path):
    for name, vendor, device in (("a", "0x8086", "0x0076"), ("b", "0x1ae0", "0x006f")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "device").write_text(device + "\n")
    assert find_chip({}, tmp_path) == "v6e"
    assert find_chip({"JAX_PLATFORMS": "cpu"}, tmp_path) is None


def test_a_preset_holds_a_flag_once():
    flag = Flag(name="xla_a", value="1", why="because")
    with pytest.raises(ValueError, match="duplicate flag"):
        Preset(chip="v6e", flags=(flag, flag))
    with pytest.raises(ValueError, match="must be of the form --name=value"):
        Flag(name="xla a", value="1", why="because")


def test_continuation_fusion_is_set_only_where_libtpu_supports_it():
    fused = {
        chip
        for chip, preset in PRESETS.items()
        for name in preset.values
        if name.startswith("xla_tpu_enable_async_collective_fusion")
    }
    assert fused == CONTINUATION_FUSION_CHIPS == {"v5e"}


@pytest.mark.parametrize("chip", PRESETS)
def test_a_preset_has_every_flag_that_is_known_for_its_chip_and_no_other(chip):
    assert set(PRESETS[chip].flags) == {flag for flag in FLAGS if chip in flag.chips}


def test_a_flag_for_other_chips_is_left_out_or_refused():
    flag = Flag(name="xla_a", value="1", why="because", chips=frozenset({"v5e"}))
    assert preset_for("v6e", [flag]).flags == ()
    assert preset_for("v5e", [flag]).flags == (flag,)
    with pytest.raises(ValueError, match="not known to work there: xla_a"):
        Preset(chip="v6e", flags=(flag,))
    with pytest.raises(ValueError, match="unknown chips v9"):
        Flag(name="xla_a", value="1", why="because", chips=frozenset({"v9"}))


def test_the_clock_is_pinned_only_if_asked_for_with_a_warning():
    plain, pinned = {}, {}
    apply_flags("auto", "tpu7x", plain)
    apply_flags("auto", "tpu7x", pinned, pin_clock=True)
    assert not pins_clock("tpu7x", plain)
    assert pins_clock("tpu7x", pinned)
    assert "shared with other jobs" in describe_flags("tpu7x", pinned)[-1]
    assert not any("shared with" in line for line in describe_flags("tpu7x", plain))


def test_the_environment_wins_over_a_pinned_clock_and_other_chips_refuse_it():
    environment = {"LIBTPU_INIT_ARGS": "--xla_tpu_dvfs_p_state=3"}
    apply_flags("auto", "tpu7x", environment, pin_clock=True)
    assert not pins_clock("tpu7x", environment)
    with pytest.raises(ProblemsFound, match=r"tpu_pin_clock=True.* not on v6e"):
        apply_flags("auto", "v6e", {}, pin_clock=True)
