"""Compiled programs that a later run starts from: loaded if nothing has changed, else compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jaxlib import xla_client

from maxdiffusion.pipelines.executable_files import (
    UnusableFile,
    differences,
    read_executable,
    read_key,
    write_executable,
)
from maxdiffusion.pipelines.executable_key import key_hash, program_facts

Compile = Callable[[str, jax.stages.Lowered], jax.stages.Compiled]
SUFFIX = ".executable"


def compile_now(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The program, compiled; `name` is only for those that keep programs."""
    del name
    return lowered.compile()


@dataclass(frozen=True, kw_only=True)
class ExecutableStore:
    """A folder of compiled programs; `surroundings` is what all of them depend on.

    `say` is told of every program that is loaded, and of every one that is not, with the reason.
    """

    folder: Path
    surroundings: Mapping[str, Any]
    say: Callable[[str], None]

    def __call__(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The program from its file if there is one that may be used, else compiled and kept."""
        key = self.key(name, lowered)
        path = self.path(key)
        try:
            if not path.exists():
                raise UnusableFile(self._why_none(key))
            payload = read_executable(path, key)
            loaded = load(lowered, payload)
        except UnusableFile as reason:
            self.say(f"aot_cache_dir: {name} is NOT loaded but compiled: {path.name}: {reason}")
            return self._compiled(name, lowered, key)
        self.say(f"aot_cache_dir: {name} is loaded from {path.name}, nothing was compiled for it")
        return loaded

    def fill(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The program, compiled and kept, whatever the folder holds."""
        return self._compiled(name, lowered, self.key(name, lowered))

    def key(self, name: str, lowered: jax.stages.Lowered) -> dict[str, Any]:
        """Everything that the compiled program depends on."""
        return {**program_facts(name, lowered), **self.surroundings}

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a key."""
        return self.folder / f"{key['program']}-{key_hash(key)}{SUFFIX}"

    def _compiled(
        self, name: str, lowered: jax.stages.Lowered, key: Mapping[str, Any]
    ) -> jax.stages.Compiled:
        compiled = lowered.compile()
        if jax.process_index() == 0:  # the others would write the same
            path = self.path(key)
            write_executable(path, key, payload_of(compiled))
            self.say(f"aot_cache_dir: kept {name} as {path.name}")
        return compiled

    def _why_none(self, key: Mapping[str, Any]) -> str:
        """Why there is no file: what keeps the nearest program of this name from being it."""
        others = sorted(self.folder.glob(f"{key['program']}-*{SUFFIX}"))
        reasons = []
        for other in others:
            try:
                reasons.append((other.name, differences(read_key(other), key)))
            except UnusableFile as reason:
                reasons.append((other.name, [str(reason)]))
        if not reasons:
            return "there is no such file"
        name, changed = min(reasons, key=lambda reason: len(reason[1]))
        return f"there is no such file; {name} differs: {'; '.join(changed)}"


def payload_of(compiled: jax.stages.Compiled) -> bytes:
    """The machine code of a compiled program, as its runtime writes it."""
    executable: Any = compiled.runtime_executable()
    if isinstance(executable, xla_client.LoadedExecutable):
        return executable.client.serialize_executable(executable)
    return executable.serialize()  # compiled for devices that are not there


def load(lowered: jax.stages.Lowered, payload: bytes) -> jax.stages.Compiled:
    """The lowered program with `payload` in place of what its compiler would make.

    jax's own loading unpickles the program's argument and result trees. Here they are those of the
    program as it is lowered now, and jax holds its shardings against the loaded code's.
    """
    arguments = lowered._lowering.compile_args
    client = arguments["backend"]
    arguments["backend"] = _Loading(client, payload)
    try:
        return lowered.compile()
    except (jax.errors.JaxRuntimeError, ValueError, AssertionError) as error:
        first_line = str(error).strip().splitlines()[:1]
        raise UnusableFile(f"the runtime refuses it: {''.join(first_line)}") from error
    finally:
        arguments["backend"] = client


class _Loading:
    """A runtime client whose compiler returns what was compiled before."""

    def __init__(self, client: Any, payload: bytes):
        self._client = client
        self._payload = payload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def compile_and_load(self, module: Any, *, executable_devices: Any, **_: Any) -> Any:
        """The stored program on these devices."""
        del module
        return self._client.deserialize_executable(
            self._payload, executable_devices=executable_devices
        )
