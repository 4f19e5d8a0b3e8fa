"""Reads xprof traces: seconds of every named scope, on every host, without xprof.

A trace is a protobuf of planes of timed events. Events of device work name an operation of a
compiled program; the program is in the trace too, and knows the scopes of its operations.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxdiffusion.runtime.problems import Problem, ProblemsFound

# Operations that only hold others, whose time is theirs.
_HOLDERS = frozenset(["while", "conditional", "call", "async-start", "async-done"])
# What jax itself puts into the path of an operation.
_PLUMBING = re.compile(
    r"while|body|cond|closed_call|shard_map|checkpoint|rematted_computation|remat\d*|branch_\d+_fun"
)
# Around a scope in a derivative: jvp(qkv), transpose(jvp(qkv)); around a function: jit(silu).
_WRAPPED = re.compile(r"((?:\w+\()*)(\w*)\)*")
UNNAMED = "(no scope)"
STEPS = ("denoise", "train")
HOST = "/host:CPU"

Operations = Mapping[str, Mapping[str, tuple[str, str]]]  # program -> operation -> opcode, path


@dataclass(frozen=True, kw_only=True)
class HostProfile:
    """What one process spent per step, in seconds of one device, by the path of its scopes."""

    host: str
    steps: int
    devices: int
    step_seconds: float
    scopes: Mapping[str, float]

    @property
    def busy(self) -> float:
        """Seconds of a step in which a device worked, operations beside each other counted each."""
        return sum(self.scopes.values())


def read_profiles(folder: Path) -> tuple[HostProfile, ...]:
    """The newest trace of every `host_N` folder, in the order of N."""
    hosts = sorted(folder.glob("host_*"), key=lambda path: (len(path.name), path.name))
    found = [(host.name, max(host.rglob("*.xplane.pb"), default=None)) for host in hosts]
    traces = [(name, trace) for name, trace in found if trace is not None]
    if not traces:
        rule = "holds no host_N folders with traces"
        remedy = "Name the folder that a run with enable_profiler=true wrote: OUTPUT_DIR/profile"
        raise ProblemsFound([Problem(name="folder", value=str(folder), rule=rule, remedy=remedy)])
    return tuple(read_profile(name, trace) for name, trace in traces)


def read_profile(host: str, trace: Path) -> HostProfile:
    """The profile in one trace file."""
    data = jax.profiler.ProfileData.from_file(str(trace))
    operations = programs_in(trace.read_bytes())
    seconds: defaultdict[str, float] = defaultdict(float)
    devices: set[object] = set()
    steps: dict[object, float] = {}
    for plane, line, event in events_in(data):
        stats = dict(event.stats)
        if event.name in STEPS and "step_num" in stats:
            steps[stats["step_num"]] = event.duration_ns * 1e-9
        work = _on_host(stats, operations) if plane == HOST else _on_device(line, event.name, stats)
        if work is not None:
            devices.add((plane, stats.get("device_ordinal")))
            seconds[scope_of(work)] += event.duration_ns * 1e-9
    count, width = max(1, len(steps)), max(1, len(devices))
    return HostProfile(
        host=host,
        steps=len(steps),
        devices=len(devices),
        step_seconds=sum(steps.values()) / count,
        scopes={scope: total / count / width for scope, total in sorted(seconds.items())},
    )


def events_in(data: jax.profiler.ProfileData) -> Iterator[tuple[str, str, Any]]:
    """Events that may be steps or operations, each after the names of its plane and line."""
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                # Of the runtime itself there are many, and their details are slow to read.
                if "::" not in event.name and not event.name.startswith("end: "):
                    yield plane.name, line.name, event


def _on_host(stats: Mapping[str, object], operations: Operations) -> str | None:
    """The path of an operation on a CPU, which names it and its program; None if it is none."""
    program = operations.get(str(stats.get("hlo_module")), {})
    opcode, path = program.get(str(stats.get("hlo_op")), ("while", ""))
    return None if opcode in _HOLDERS else path


def _on_device(line: str, name: str, stats: Mapping[str, object]) -> str | None:
    """The path of an operation on a TPU, which gives it as text, and the path; None if none."""
    found = re.search(r" ([\w-]+)\(", name)
    if line != "XLA Ops" or (found and found[1] in _HOLDERS):
        return None
    return str(stats.get("tf_op", ""))


def scope_of(path: str) -> str:
    """The named scopes in the path of an operation, such as blocks/self_attention/qkv."""
    *parts, _ = path.rstrip(":").split("/")
    found = [part for part in map(_WRAPPED.fullmatch, parts) if part]
    kept = [word for around, word in (part.groups() for part in found) if _is_scope(around, word)]
    if not kept:
        return UNNAMED
    backward = any(part[1].startswith("transpose(") for part in found)
    return "/".join((["backward"] if backward else []) + kept)


def _is_scope(around: str, word: str) -> bool:
    return bool(word) and "jit(" not in around and not _PLUMBING.fullmatch(word)


def programs_in(trace: bytes) -> Operations:
    """The operations of every program in a trace, with their opcodes and paths.

    Numbers are those of the fields in xplane.proto and hlo.proto.
    """
    programs: defaultdict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for plane in fields(trace, 1):
        if b"/host:metadata" not in fields(plane, 2):
            continue
        for entry in fields(plane, 4):
            for metadata in fields(entry, 2):
                for stat in fields(metadata, 5):
                    for proto in fields(stat, 6):
                        for module in fields(proto, 1):
                            name = fields(module, 1)[0].decode()
                            programs[name].update(_instructions(module))
    return programs


def _instructions(module: bytes) -> Iterator[tuple[str, tuple[str, str]]]:
    for computation in fields(module, 3):
        for instruction in fields(computation, 2):
            paths = [path for metadata in fields(instruction, 7) for path in fields(metadata, 2)]
            name, opcode = (fields(instruction, number)[0].decode() for number in (1, 2))
            yield name, (opcode, paths[0].decode() if paths else "")


def fields(message: bytes, wanted: int) -> list[bytes]:
    """The byte strings with one number in a protobuf message, in its wire format."""
    found, at = [], 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if kind == 2 and tag >> 3 == wanted:
            found.append(message[at : at + size])
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
