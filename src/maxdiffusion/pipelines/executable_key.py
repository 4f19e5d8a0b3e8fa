"""Everything that a compiled program depends on, as values that compare and print."""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

import maxdiffusion

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# A Pallas kernel in a lowered program: bytecode that also names the files it was written in, so the
# same kernel differs between two machines. The package's source and the settings stand for it.
_KERNEL_BODY = re.compile(r"(\\22body\\22: \\22)[A-Za-z0-9+/=]+")


def surroundings(mesh: Mesh, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What all programs of a run share: settings, sources, versions, devices and flags."""
    device = mesh.devices.flat[0]
    return {
        **{name: str(value) for name, value in settings.items()},
        "package source": source_digest(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "libtpu": _version("libtpu") if device.platform == "tpu" else None,
        "device kind": device.device_kind,
        "platform": device.platform,
        "mesh": {str(axis): size for axis, size in mesh.shape.items()},
        "devices": [_place(one) for one in mesh.devices.flat],
        "processes": len({one.process_index for one in mesh.devices.flat}),
        "host": host_digest() if device.platform == "cpu" else None,
        **{name: os.environ.get(name, "") for name in FLAGS},
    }


def program_facts(name: str, lowered: jax.stages.Lowered) -> dict[str, Any]:
    """What is of one program: its name and its operations, with shapes, places and precision."""
    text = without_kernel_bodies(lowered.as_text())
    structure = f"{text}\n{lowered.in_tree}\n{lowered.out_tree}"
    return {"program": name, "operations": hashlib.sha256(structure.encode()).hexdigest()}


def without_kernel_bodies(text: str) -> str:
    """A lowered program with the bytecode of its Pallas kernels left out."""
    return _KERNEL_BODY.sub(r"\1", text)


def key_hash(key: Mapping[str, Any]) -> str:
    """A short name for a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def source_digest() -> str:
    """A hash of every Python file of the package."""
    root, digest = Path(maxdiffusion.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def host_digest() -> str:
    """What a program for CPUs depends on beside its device's name: the instructions there are."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else [platform.processor()]
    flags = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join([platform.machine(), *flags]).encode()).hexdigest()[:24]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _place(device: jax.Device) -> list[int]:
    """A device's number and, on a TPU, its place on the grid."""
    if device.platform != "tpu":
        return [device.id]
    return [device.id, *device.coords, device.core_on_chip]
