"""Describes the devices of a TPU slice that is not there, to compile for; nothing runs on them.

Sets the environment before jax is imported, so this file imports jax only inside functions.
"""

import importlib.util
import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from maxdiffusion.costs.chips import Topology, topology_names
from maxdiffusion.errors import Problem, ProblemsFound

# TPU_ACCELERATOR_TYPE by chip: libtpu asks the metadata server for it unless it is set.
_ACCELERATORS = {"tpu7x": "tpu7x", "v6e": "v6e", "v5p": "v5p", "v5e": "v5litepod"}
_INSTALL = 'Install it: pip install "maxdiffusion[tpu]" (libtpu compiles on any x86 Linux machine)'
# Only these stages of a kernel's machine code are read; dumping all of them takes gigabytes.
_STAGES = "final_(bundles|hlo-static-per-bundle-utilization)"


def prepare_environment(
    topology: Topology,
    *,
    dump: str | None = None,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Sets the variables that libtpu and jax read when they start; call it before importing jax.

    `dump` is a folder for the machine code of kernels. Nothing runs on a TPU here, so libtpu need
    not hold its lock, and jobs on the same machine are not disturbed.
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
    """Raises ProblemsFound if libtpu is not installed."""
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
    """Returns the devices of a topology, to build a mesh from; call `prepare_environment` first."""
    check_libtpu()
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology.name)
    except Exception as error:  # libtpu raises no class of its own
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
        remedy=f"Use one of {topology_names()}, with the libtpu that jax asks for",
    )
