"""TPU devices by the name of their topology, to compile for; nothing can run on them."""

import importlib.util
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from maxdiffusion.preflight.chips import CHIPS, Chip
from maxdiffusion.runtime.problems import Problem, ProblemsFound

_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")
_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
GRIDS: Mapping[str, tuple[str, ...]] = {
    "tpu7x": _CUBES,
    "v6e": _SQUARES,
    "v5p": _CUBES,
    "v5e": _SQUARES,
}
# What libtpu asks the machine about where there is no TPU, and its name for slices of each chip.
_ACCELERATORS = {"tpu7x": "tpu7x", "v6e": "v6e", "v5p": "v5p", "v5e": "v5litepod"}
_INSTALL = 'Install it: pip install "maxdiffusion[tpu]" (libtpu compiles on any x86 Linux machine)'
# The stages of a kernel's machine code that are read; all of them take gigabytes.
_STAGES = "final_(bundles|hlo-static-per-bundle-utilization)"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A slice of TPUs: the kind of chip and how many stand along each side of the grid."""

    chip: Chip
    sides: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name libtpu knows it by."""
        return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"

    @property
    def chips(self) -> int:
        """Number of chips."""
        product = 1
        for side in self.sides:
            product *= side
        return product

    @property
    def device_count(self) -> int:
        """Number of devices as jax counts them."""
        return self.chips * self.chip.devices_per_chip

    def describe(self) -> str:
        """One line for a report."""
        return f"{self.name}: {self.chips} chips, {self.device_count} devices"


def read_topology(name: str) -> Topology:
    """The topology of that name; an unknown one is refused with those that are known."""
    chip, _, grid = name.partition(":")
    if chip not in GRIDS:
        raise _unknown(name, f"the chips are {', '.join(GRIDS)}", _all_names())
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", grid) or grid not in GRIDS[chip]:
        known = ", ".join(f"{chip}:{sides}" for sides in GRIDS[chip])
        raise _unknown(name, f"{chip} comes in grids of {', '.join(GRIDS[chip])}", known)
    return Topology(chip=CHIPS[chip], sides=tuple(int(side) for side in grid.split("x")))


def topology_of_size(chip: Chip, devices: int) -> Topology | None:
    """The topology of this chip with so many devices; None where there is none."""
    for grid in GRIDS[chip.name]:
        topology = read_topology(f"{chip.name}:{grid}")
        if topology.device_count == devices:
            return topology
    return None


def topology_under(chip: Chip, devices: Sequence[Any]) -> Topology:
    """The grid of chips that real or described devices stand on."""
    furthest = [max(device.coords[axis] for device in devices) for axis in range(3)]
    return Topology(chip=chip, sides=tuple(coordinate + 1 for coordinate in furthest))


def _all_names() -> str:
    return "; ".join(f"{chip}:{{{','.join(grids)}}}" for chip, grids in GRIDS.items())


def _unknown(name: str, rule: str, known: str) -> ProblemsFound:
    problem = Problem(name="topology", value=name, rule=rule, remedy=f"Use one of {known}")
    return ProblemsFound([problem])


def prepare_environment(
    topology: Topology,
    *,
    dump: str | None = None,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Sets what libtpu and jax read when they start; call it before jax is used.

    `dump` is a folder for the machine code of kernels. Nothing runs on a TPU here, so libtpu is not
    asked to hold its lock, and a job beside this one is not disturbed.
    """
    kind = _ACCELERATORS[topology.chip.name]
    environment["JAX_PLATFORMS"] = "cpu"
    environment["TPU_SKIP_MDS_QUERY"] = "1"
    environment["TPU_ACCELERATOR_TYPE"] = f"{kind}-{topology.device_count}"
    environment["TPU_WORKER_HOSTNAMES"] = "localhost"
    environment["TPU_WORKER_ID"] = "0"
    environment.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if dump is not None:
        flags = (
            environment.get("LIBTPU_INIT_ARGS", ""),
            f"--xla_jf_dump_to={dump}",
            "--xla_jf_dump_llo_text=true",
            f"--xla_jf_dump_llo_pass_label_regex={_STAGES}",
        )
        environment["LIBTPU_INIT_ARGS"] = " ".join(flag for flag in flags if flag)


def check_libtpu() -> None:
    """Refuses to go on where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ProblemsFound(
            [
                Problem(
                    name="libtpu",
                    value=None,
                    rule="compiling for a TPU needs the package libtpu, which is not installed",
                    remedy=_INSTALL,
                )
            ]
        )


def describe_devices(topology: Topology) -> Sequence[Any]:
    """The devices of a topology, to build a mesh from; `prepare_environment` comes first."""
    check_libtpu()
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name)
    except Exception as error:  # libtpu's failures have no class of their own
        raise ProblemsFound([_refused(topology, str(error))]) from error
    return described.devices


def _refused(topology: Topology, message: str) -> Problem:
    first_line = message.strip().splitlines()[0] if message.strip() else "no reason given"
    if "lockfile" in message or "already in use" in message:
        return Problem(
            name="libtpu",
            value=topology.name,
            rule=f"another process holds libtpu's lock ({first_line})",
            remedy="End that process, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1",
        )
    return Problem(
        name="topology",
        value=topology.name,
        rule=f"libtpu refuses it ({first_line})",
        remedy=f"Use one of {_all_names()}, with the libtpu that jax asks for",
    )
