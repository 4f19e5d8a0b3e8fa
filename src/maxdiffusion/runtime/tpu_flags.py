"""The flags of the TPU compiler that decide what runs beside what, for each chip, in one place.

libtpu reads them from LIBTPU_INIT_ARGS when it starts, and ends the process at a flag that it does
not know; `apply_flags` comes before jax is used. This file does not import jax.
"""

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from maxdiffusion.runtime.problems import Problem, ProblemsFound

VARIABLE = "LIBTPU_INIT_ARGS"
KEY = "libtpu_init_args"
AUTO, NONE = "auto", "none"
PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# What a chip calls itself on the PCI bus, and what Cloud calls slices of it.
_PCI_NAMES = {"0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "tpu7x"}
_SLICE_NAMES = {"tpu7x": "tpu7x", "v6e": "v6e", "v5p": "v5p", "v5litepod": "v5e", "v5e": "v5e"}
_FLAG = re.compile(r"--([A-Za-z]\w*)(?:=(\S*))?")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag and what it is good for."""

    name: str
    value: str
    why: str

    def __post_init__(self) -> None:
        if not _FLAG.fullmatch(str(self)):
            raise ValueError(f"flag {self}: must read like --name=value, without spaces")

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The flags for one kind of chip."""

    chip: str
    flags: tuple[Flag, ...]

    def __post_init__(self) -> None:
        names = [flag.name for flag in self.flags]
        if len({*names}) != len(names):
            raise ValueError(f"preset {self.chip}: a flag stands twice in {', '.join(names)}")

    @property
    def values(self) -> dict[str, str]:
        """The flags by name."""
        return {flag.name: flag.value for flag in self.flags}


def _on(name: str, why: str) -> Flag:
    return Flag(name=name, value="true", why=why)


ULYSSES = (
    _on("xla_tpu_enable_async_all_to_all", "the next head group's exchange beside this kernel"),
)
RING = (
    Flag(
        name="xla_max_concurrent_async_collective_permutes",
        value="16",
        why="keys and values of both directions in flight at once",
    ),
)
SHARDED_WEIGHTS = (
    _on("xla_tpu_enable_async_collective_fusion", "weights gathered beside the layer before"),
    _on("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "with the line above"),
    _on("xla_tpu_enable_async_collective_fusion_multiple_steps", "over more than one matmul"),
    _on("xla_tpu_overlap_compute_collective_tc", "exchanges that a TensorCore drives itself"),
    _on("xla_enable_async_all_gather", "fsdp's all-gathers started early"),
)
TRAINING = (
    _on("xla_tpu_enable_data_parallel_all_reduce_opt", "gradients summed across the data axis"),
    _on("xla_tpu_data_parallel_opt_different_sized_ops", "with the line above, for any sizes"),
)
SCHEDULER = (
    Flag(
        name="xla_latency_hiding_scheduler_rerun",
        value="2",
        why="tries again with less memory before it gives overlap up",
    ),
)
OVERLAP = (*ULYSSES, *RING, *SHARDED_WEIGHTS, *TRAINING, *SCHEDULER)
# KiB of VMEM that one operation may use, for chips that a layer was compiled for: 21 % and 30 %
# fewer cycles than with the compiler's own limit (docs/performance.md). A tpu7x has 64 MiB, a v6e
# 128: the rest is left for what waits between operations.
VMEM = {"tpu7x": 60 * 1024, "v6e": 96 * 1024}


def _preset(chip: str) -> Preset:
    vmem = Flag(
        name="xla_tpu_scoped_vmem_limit_kib",
        value=str(VMEM.get(chip, "")),
        why="products in larger pieces, which read rows and weights less often",
    )
    return Preset(chip=chip, flags=(*OVERLAP, *[vmem] * (chip in VMEM)))


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {chip: _preset(chip) for chip in ("tpu7x", "v6e", "v5p", "v5e")}
)


def find_chip(
    environment: Mapping[str, str] = os.environ, devices: Path = PCI_DEVICES
) -> str | None:
    """The kind of TPU that jax will use in this process; None if it will use none."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms.split(","):
        return None
    slice_name = environment.get("TPU_ACCELERATOR_TYPE", "").partition("-")[0]
    return _SLICE_NAMES.get(slice_name) or next(_chips_on_bus(devices), None)


def _chips_on_bus(devices: Path) -> Iterator[str]:
    for vendor in sorted(devices.glob("*/vendor")):
        if vendor.read_text().strip() == _GOOGLE:
            name = (vendor.parent / "device").read_text().strip()
            if name in _PCI_NAMES:
                yield _PCI_NAMES[name]


def read_flags(text: str, source: str) -> dict[str, str]:
    """The flags in a text by name; what is no flag is refused, since libtpu would end the run."""
    flags = {}
    for word in text.split():
        found = _FLAG.fullmatch(word)
        if found is None:
            rule = f"holds {word!r}, which does not read like --name=value"
            remedy = f"Write flags apart by spaces, or {AUTO} or {NONE} for {KEY}"
            raise ProblemsFound([Problem(name=source, value=text, rule=rule, remedy=remedy)])
        flags[found[1]] = "true" if found[2] is None else found[2]
    return flags


def chosen_flags(asked: str, chip: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The flags of a run by name: those asked for, then those of the environment, which win."""
    if asked == AUTO:
        base = PRESETS[chip].values
    else:
        base = {} if asked == NONE else read_flags(asked, KEY)
    return base | read_flags(environment.get(VARIABLE, ""), VARIABLE)


def apply_flags(
    asked: str, chip: str | None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Sets the flags for a chip, before libtpu reads them; without a TPU nothing is set."""
    if chip is None:
        return
    flags = chosen_flags(asked, chip, environment)
    environment[VARIABLE] = " ".join(f"--{name}={value}" for name, value in flags.items())


def describe_flags(
    chip: str | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """What a start-up plan says of the flags in force; nothing without a TPU."""
    if chip is None:
        return ()
    flags = read_flags(environment.get(VARIABLE, ""), VARIABLE)
    preset = PRESETS[chip].values
    ours = [name for name, value in flags.items() if preset.get(name) == value]
    own = [f"--{name}={value}" for name, value in flags.items() if name not in ours]
    lines = [f"libtpu flags: {len(ours)} of the {len(preset)} of the preset for {chip}"]
    lines += [f"  --{name}={preset[name]}" for name in ours]
    return (*lines, *(f"  {flag} (not of the preset)" for flag in own))
