"""Sets the flags of the TPU compiler: overlap of collectives with compute, and VMEM limits.

libtpu reads LIBTPU_INIT_ARGS when it starts, and ends the process at a flag that it does not know
or does not support on the chip. `apply_flags` must therefore run before jax starts its devices.
This module does not import jax.
"""

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from maxdiffusion.errors import Problem, ProblemsFound

VARIABLE = "LIBTPU_INIT_ARGS"
KEY = "libtpu_init_args"
AUTO, NONE = "auto", "none"
PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# Device ids on the PCI bus, and the names of slices on Cloud TPU.
_PCI_NAMES = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
_SLICE_NAMES = {"tpu7x": "tpu7x", "v6e": "v6e", "v5p": "v5p", "v5litepod": "v5e", "v5e": "v5e"}
_FLAG = re.compile(r"--([A-Za-z]\w*)(?:=(\S*))?")
ALL_CHIPS = frozenset({"tpu7x", "v6e", "v5p", "v5e"})


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One compiler flag, its purpose, and the chips on which it is known to work."""

    name: str
    value: str
    why: str
    chips: frozenset[str] = ALL_CHIPS

    def __post_init__(self) -> None:
        unknown = self.chips - ALL_CHIPS
        if unknown:
            raise ValueError(f"flag {self.name}: unknown chips {', '.join(sorted(unknown))}")
        if not _FLAG.fullmatch(str(self)):
            raise ValueError(f"flag {self}: must be of the form --name=value, without spaces")

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The flags for one kind of chip, each of them known to work on it."""

    chip: str
    flags: tuple[Flag, ...]

    def __post_init__(self) -> None:
        names = [flag.name for flag in self.flags]
        if len({*names}) != len(names):
            raise ValueError(f"preset {self.chip}: duplicate flag in {', '.join(names)}")
        unsafe = [flag.name for flag in self.flags if self.chip not in flag.chips]
        if unsafe:
            raise ValueError(f"preset {self.chip}: not known to work there: {', '.join(unsafe)}")

    @property
    def values(self) -> dict[str, str]:
        """Returns flag values by name."""
        return {flag.name: flag.value for flag in self.flags}


def _on(name: str, why: str, *, chips: frozenset[str] = ALL_CHIPS) -> Flag:
    return Flag(name=name, value="true", why=why, chips=chips)


ULYSSES = (
    _on("xla_tpu_enable_async_all_to_all", "overlaps all-to-alls with the kernel of other heads"),
)
RING = (
    Flag(
        name="xla_max_concurrent_async_collective_permutes",
        value="16",
        why="keeps keys and values of both ring directions in flight",
    ),
)
# libtpu 0.0.42 prints that continuation fusion is "not supported/recommended on platforms other
# than Viperlite", the v5e, and that it may give wrong results or hang. Other builds end the process
# on v6e and tpu7x. Elsewhere libtpu keeps its own default.
CONTINUATION_FUSION_CHIPS = frozenset({"v5e"})
SHARDED_WEIGHTS = (
    _on(
        "xla_tpu_enable_async_collective_fusion",
        "gathers weights during the layer before",
        chips=CONTINUATION_FUSION_CHIPS,
    ),
    _on(
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "applies the fusion to all-gathers",
        chips=CONTINUATION_FUSION_CHIPS,
    ),
    _on(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "spreads one fused collective over several matmuls",
        chips=CONTINUATION_FUSION_CHIPS,
    ),
    _on("xla_tpu_overlap_compute_collective_tc", "overlaps collectives that a TensorCore drives"),
    _on("xla_enable_async_all_gather", "starts all-gathers of fsdp early"),
    # Compiled for v6e, never run there by this project. Public v6e recipes run all-reduces on the
    # SparseCores in this way; on tpu7x libtpu does it for all-gathers by itself.
    _on(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        "gathers weights on the SparseCores, under products and kernels",
        chips=frozenset({"v6e"}),
    ),
)
TRAINING = (
    _on("xla_tpu_enable_data_parallel_all_reduce_opt", "overlaps gradient sums over the data axis"),
    _on("xla_tpu_data_parallel_opt_different_sized_ops", "applies this to operations of any size"),
)
SCHEDULER = (
    Flag(
        name="xla_latency_hiding_scheduler_rerun",
        value="2",
        why="retries with less memory before it gives up overlap",
    ),
)
# KiB of VMEM that one operation may use, for chips that a layer was compiled for: 21 % and 30 %
# fewer cycles than with the compiler's own limit (docs/performance.md). A tpu7x has 64 MiB, a v6e
# 128; the rest is left for values that stay in VMEM between operations.
VMEM = tuple(
    Flag(
        name="xla_tpu_scoped_vmem_limit_kib",
        value=str(mebibytes * 1024),
        why="allows larger matmul blocks, which read rows and weights less often",
        chips=frozenset({chip}),
    )
    for chip, mebibytes in (("tpu7x", 60), ("v6e", 96))
)
# Not in any preset: `tpu_pin_clock` adds it. The public maxdiffusion measured 99.4 s with it and
# 112.8 s without it for the same 40 steps on tpu7x; its launcher, too, leaves it to the user.
PINNED_CLOCK = Flag(
    name="xla_tpu_dvfs_p_state",
    value="7",
    why="keeps the chip at its highest clock",
    chips=frozenset({"tpu7x"}),
)
CLOCK_WARNING = (
    f"WARNING: {PINNED_CLOCK} turns off power management of the chips; do not use it on a host "
    "that is shared with other jobs"
)
FLAGS = (*ULYSSES, *RING, *SHARDED_WEIGHTS, *TRAINING, *SCHEDULER, *VMEM)


def preset_for(chip: str, flags: Sequence[Flag] = FLAGS) -> Preset:
    """Returns the flags that are known to work on a chip."""
    return Preset(chip=chip, flags=tuple(flag for flag in flags if chip in flag.chips))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {chip: preset_for(chip) for chip in ("tpu7x", "v6e", "v5p", "v5e")}
)


def find_chip(
    environment: Mapping[str, str] = os.environ, devices: Path = PCI_DEVICES
) -> str | None:
    """Returns the kind of TPU that jax will use in this process, or None if it uses none."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return None
    slice_name = environment.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    return _SLICE_NAMES.get(slice_name) or next(_chips_on_bus(devices), None)


def target_chip(topology: str) -> str | None:
    """Returns the kind of TPU that programs are compiled for: of `topology`, or of this machine."""
    described = topology.partition(":")[0]
    return described if described in PRESETS else find_chip()


def _chips_on_bus(devices: Path) -> Iterator[str]:
    for vendor in sorted(devices.glob("*/vendor")):
        if vendor.read_text().strip() == _GOOGLE:
            name = (vendor.parent / "device").read_text().strip()
            if name in _PCI_NAMES:
                yield _PCI_NAMES[name]


def read_flags(text: str, source: str) -> dict[str, str]:
    """Parses flags by name. Raises ProblemsFound for other words, at which libtpu would exit."""
    flags = {}
    for word in text.split():
        found = _FLAG.fullmatch(word)
        if found is None:
            rule = f"contains {word!r}, which is not of the form --name=value"
            remedy = f"Separate flags by spaces, or set {KEY} to {AUTO} or {NONE}"
            raise ProblemsFound([Problem(name=source, value=text, rule=rule, remedy=remedy)])
        flags[found[1]] = "true" if found[2] is None else found[2]
    return flags


def pins_clock(chip: str | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the flags in force pin the clock of this chip."""
    flags = read_flags(environment.get(VARIABLE, ""), VARIABLE)
    return chip in PINNED_CLOCK.chips and flags.get(PINNED_CLOCK.name) == PINNED_CLOCK.value


def clock_flags(asked: bool, chip: str) -> dict[str, str]:
    """Returns the flag that `tpu_pin_clock` adds on a chip; refuses chips it is not known for."""
    if not asked:
        return {}
    if chip not in PINNED_CLOCK.chips:
        rule = f"{PINNED_CLOCK} is known to work on {', '.join(PINNED_CLOCK.chips)} only"
        problem = Problem(
            name="tpu_pin_clock", value=asked, rule=f"{rule}, not on {chip}", remedy="Use false"
        )
        raise ProblemsFound([problem])
    return {PINNED_CLOCK.name: PINNED_CLOCK.value}


def chosen_flags(asked: str, chip: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the flags of a run by name. Flags of the environment override the config's."""
    if asked == AUTO:
        base = PRESETS[chip].values
    else:
        base = {} if asked == NONE else read_flags(asked, KEY)
    return base | read_flags(environment.get(VARIABLE, ""), VARIABLE)


def apply_flags(
    asked: str,
    chip: str | None,
    environment: MutableMapping[str, str] = os.environ,
    *,
    pin_clock: bool = False,
) -> None:
    """Sets the flags for a chip in the environment. Does nothing without a TPU."""
    if chip is None:
        return
    flags = clock_flags(pin_clock, chip) | chosen_flags(asked, chip, environment)
    environment[VARIABLE] = " ".join(f"--{name}={value}" for name, value in flags.items())


def describe_flags(
    chip: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Returns the lines of the start-up plan about flags; none without a TPU."""
    if chip is None:
        return ()
    flags = read_flags(environment.get(VARIABLE, ""), VARIABLE)
    preset = PRESETS[chip].values
    ours = [name for name, value in flags.items() if preset.get(name) == value]
    own = [f"--{name}={value}" for name, value in flags.items() if name not in ours]
    lines = [f"libtpu flags: {len(ours)} of the {len(preset)} of the preset for {chip}"]
    lines += [f"  --{name}={preset[name]}" for name in ours]
    lines += [f"  {flag} (not of the preset)" for flag in own]
    if pins_clock(chip, environment):
        lines.append(CLOCK_WARNING)
    return tuple(lines)
