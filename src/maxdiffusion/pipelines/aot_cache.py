"""Caches compiled programs across runs: loads one if nothing that it depends on has changed.

    <program>-<digest of the key>.executable
        magic | 8 bytes: length of the header | header | payload
        header, JSON: the key, and length and SHA-256 of the payload

The key holds everything that a program depends on: its operations, settings, package source,
versions, devices and flags. Nothing is unpickled, and the payload is used only after key, length
and digest agree.
"""

import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jaxlib
from jax.sharding import Mesh
from jaxlib import xla_client

import maxdiffusion
from maxdiffusion.pipelines.programs import ProgramBuilder, compile_lowered, compiler_options
from maxdiffusion.runtime.files import CacheKey, FilePath, open_binary, replacing

logger = logging.getLogger(__name__)

MAGIC = b"maxdiffusion executable 1\n"
LONGEST_HEADER = 2**24
SUFFIX = ".executable"
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# A Pallas kernel in a lowered program is bytecode that also names the files it was written in, so
# it differs between two machines. The package's source and the settings stand for it in a key.
_KERNEL_BODY = re.compile(r"(\\22body\\22: \\22)[A-Za-z0-9+/=]+")


class UnusableFile(ValueError):
    """A file without a program that may run here; the message says why."""


def write_executable(path: FilePath, key: CacheKey, payload: bytes) -> None:
    """Writes a program under its key, atomically."""
    sha256 = hashlib.sha256(payload).hexdigest()
    facts = {"key": json.loads(key.text), "bytes": len(payload), "sha256": sha256}
    header = json.dumps(facts, sort_keys=True).encode()
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "big") + header)
        file.write(payload)


def read_executable(path: FilePath, key: CacheKey) -> bytes:
    """Returns the payload of a file that was written under exactly this key."""
    try:
        with open_binary(path) as file:
            header = _header(file)
            payload = file.read()
    except OSError as error:
        raise UnusableFile(f"it cannot be read: {error.strerror}") from error
    changed = key.differences(header["key"])
    if changed:
        raise UnusableFile(f"it is of another key: {'; '.join(changed)}")
    if len(payload) != header["bytes"]:
        raise UnusableFile(f"it has {len(payload)} bytes of program, not {header['bytes']}")
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise UnusableFile("its program is not the one that was written (SHA-256 differs)")
    return payload


def read_key(path: FilePath) -> Mapping[str, Any]:
    """Returns the facts of the key that a file was written under."""
    try:
        with open_binary(path) as file:
            return _header(file)["key"]
    except OSError as error:
        raise UnusableFile(f"it cannot be read: {error.strerror}") from error


def _header(file: BinaryIO) -> dict[str, Any]:
    if file.read(len(MAGIC)) != MAGIC:
        raise UnusableFile("it is not a program that maxdiffusion wrote")
    size = int.from_bytes(file.read(8), "big")
    try:
        header = json.loads(file.read(size) if size <= LONGEST_HEADER else b"")
    except ValueError as error:
        raise UnusableFile("its header is damaged") from error
    kinds = {"key": dict, "bytes": int, "sha256": str}
    if not isinstance(header, dict) or any(
        not isinstance(header.get(name), kind) for name, kind in kinds.items()
    ):
        raise UnusableFile("its header is damaged")
    return header


def surroundings(mesh: Mesh, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that all programs of a run share: settings, source, versions, devices."""
    device = mesh.devices.flat[0]
    return {
        **{name: str(value) for name, value in settings.items()},
        "package source": source_digest(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "libtpu": _version("libtpu") if device.platform == "tpu" else None,
        "device kind": device.device_kind,
        "platform": device.platform,
        "compiler options": compiler_options(device.platform),
        "mesh": {str(axis): size for axis, size in mesh.shape.items()},
        "devices": [_coordinates(one) for one in mesh.devices.flat],
        "processes": len({one.process_index for one in mesh.devices.flat}),
        "host": host_digest() if device.platform == "cpu" else None,
        **{name: os.environ.get(name, "") for name in FLAGS},
    }


def program_facts(name: str, lowered: jax.stages.Lowered) -> dict[str, Any]:
    """Returns the facts of one program: its name and a digest of its operations and shardings."""
    text = without_kernel_bodies(lowered.as_text())
    structure = f"{text}\n{lowered.in_tree}\n{lowered.out_tree}"
    return {"program": name, "operations": hashlib.sha256(structure.encode()).hexdigest()}


def without_kernel_bodies(text: str) -> str:
    """Returns a lowered program without the bytecode of its Pallas kernels."""
    return _KERNEL_BODY.sub(r"\1", text)


@functools.cache
def source_digest() -> str:
    """Returns a digest of every Python file of the package."""
    root, digest = Path(maxdiffusion.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def host_digest() -> str:
    """Returns a digest of the CPU's instruction set, which programs for CPUs depend on."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else [platform.processor()]
    flags = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join([platform.machine(), *flags]).encode()).hexdigest()[:24]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _coordinates(device: jax.Device) -> list[int]:
    """Returns a device's id and, on a TPU, its coordinates."""
    if device.platform != "tpu":
        return [device.id]
    return [device.id, *device.coords, device.core_on_chip]


@dataclass(frozen=True, kw_only=True)
class AotCache:
    """A folder of compiled programs; `surroundings` holds the facts that all of them depend on.

    Every hit and every miss is logged, a miss with its reason.
    """

    folder: FilePath
    surroundings: Mapping[str, Any]

    @classmethod
    def of(cls, folder: FilePath, builder: ProgramBuilder) -> "AotCache":
        """Returns the cache in a folder for the programs of a builder."""
        spec = builder.spec
        settings = {
            "transformer": spec.transformer,
            "vae": spec.vae,
            "text encoder": spec.text_encoder,
            "settings": builder.settings,
        }
        return cls(folder=folder, surroundings=surroundings(builder.mesh, settings))

    def __call__(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Returns the program from its file, if it may be used; else compiles and stores it."""
        key = self.key(name, lowered)
        path = self.path(name, key)
        try:
            if not path.exists():
                raise UnusableFile(self._why_missing(name, key))
            payload = read_executable(path, key)
            loaded = load(lowered, payload)
        except UnusableFile as reason:
            logger.info(
                "aot_cache_dir: %s is NOT loaded but compiled: %s: %s", name, path.name, reason
            )
            return self._compiled(name, lowered, key)
        logger.info(
            "aot_cache_dir: %s is loaded from %s, nothing was compiled for it", name, path.name
        )
        return loaded

    def fill(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles and stores the program, whatever the folder holds."""
        return self._compiled(name, lowered, self.key(name, lowered))

    def key(self, name: str, lowered: jax.stages.Lowered) -> CacheKey:
        """Returns everything that the compiled program depends on."""
        return CacheKey({**program_facts(name, lowered), **self.surroundings})

    def path(self, name: str, key: CacheKey) -> FilePath:
        """Returns the file of a program with this key."""
        return self.folder / f"{name}-{key.file_stem}{SUFFIX}"

    def _compiled(
        self, name: str, lowered: jax.stages.Lowered, key: CacheKey
    ) -> jax.stages.Compiled:
        compiled = compile_lowered(lowered, name)
        if jax.process_index() == 0:  # the others would write the same
            path = self.path(name, key)
            write_executable(path, key, payload_of(compiled))
            logger.info("aot_cache_dir: stored %s as %s", name, path.name)
        return compiled

    def _why_missing(self, name: str, key: CacheKey) -> str:
        """Returns why there is no file: how the nearest program of this name differs."""
        reasons = []
        for other in self.folder.glob(f"{name}-*{SUFFIX}"):
            try:
                reasons.append((other.name, key.differences(read_key(other))))
            except UnusableFile as reason:
                reasons.append((other.name, [str(reason)]))
        if not reasons:
            return "there is no such file"
        nearest, changed = min(sorted(reasons), key=lambda reason: len(reason[1]))
        return f"there is no such file; {nearest} differs: {'; '.join(changed)}"


def payload_of(compiled: jax.stages.Compiled) -> bytes:
    """Returns the machine code of a compiled program, as its runtime serialises it."""
    executable: Any = compiled.runtime_executable()
    if isinstance(executable, xla_client.LoadedExecutable):
        return executable.client.serialize_executable(executable)
    return executable.serialize()  # compiled for described devices


def load(lowered: jax.stages.Lowered, payload: bytes) -> jax.stages.Compiled:
    """Returns the lowered program, with `payload` as its compiled code.

    jax's own loader unpickles argument and result trees. Here they are those of the program as it
    is lowered now, and jax compares its shardings with those of the loaded code.
    """
    from jax._src import config

    arguments = lowered._lowering.compile_args
    client = arguments["backend"]
    arguments["backend"] = _Loading(client, payload)
    try:
        # jax's own cache gets no second copy of it.
        with config.persistent_cache_min_compile_time_secs(math.inf):
            return lowered.compile()
    except (jax.errors.JaxRuntimeError, ValueError, AssertionError) as error:
        first_line = str(error).strip().splitlines()[:1]
        raise UnusableFile(f"the runtime refuses it: {''.join(first_line)}") from error
    finally:
        arguments["backend"] = client


class _Loading:
    """A runtime client whose compiler returns stored code."""

    def __init__(self, client: Any, payload: bytes):
        self._client = client
        self._payload = payload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(self, module: Any, *, executable_devices: Any, **_: Any) -> Any:
        """Loads the stored program on these devices."""
        del module
        return self._client.deserialize_executable(
            self._payload, executable_devices=executable_devices
        )

    def deserialize_executable(self, other: bytes, executable_devices: Any, *_: Any) -> Any:
        """Loads the stored program in place of another one that jax's own cache has."""
        del other
        return self.compile_and_load(None, executable_devices=executable_devices)
