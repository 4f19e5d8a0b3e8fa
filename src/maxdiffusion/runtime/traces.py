"""Reads xprof traces without xprof, and tabulates the time of each named scope on each host.

    host_N/**/*.xplane.pb -> events and programs -> HostProfile (seconds per scope) -> table

A trace is a protobuf of planes of timed events. An event of device work names an operation of a
compiled program. The program is in the trace too, and gives the scopes of its operations.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.runtime.timing import COLLECTIVE_SCOPE

# Operations that contain others; their time would be counted twice.
_CONTAINERS = frozenset(["while", "conditional", "call", "async-start", "async-done"])
# Parts of an operation's path that jax adds itself.
_ADDED_BY_JAX = re.compile(
    r"while|body|cond|closed_call|shard_map|checkpoint|rematted_computation|remat\d*|branch_\d+_fun"
)
# Derivatives wrap scopes: jvp(qkv), transpose(jvp(qkv)). So do functions: jit(silu).
_WRAPPED = re.compile(r"((?:\w+\()*)(\w*)\)*")
UNNAMED = "(no scope)"
STEPS = ("denoise", "train")
HOST = "/host:CPU"

Operations = Mapping[str, Mapping[str, tuple[str, str]]]  # program -> operation -> opcode, path


@dataclass(frozen=True, kw_only=True)
class HostProfile:
    """Seconds that one process spent per step and device, by the path of the named scope."""

    host: str
    steps: int
    devices: int
    step_seconds: float
    scopes: Mapping[str, float]

    @property
    def busy(self) -> float:
        """Returns the busy seconds of a step; concurrent operations count each."""
        return sum(self.scopes.values())


def read_profiles(folder: Path) -> tuple[HostProfile, ...]:
    """Reads the newest trace of every `host_N` folder, in the order of N."""
    hosts = sorted(folder.glob("host_*"), key=lambda path: (len(path.name), path.name))
    found = [(host.name, max(host.rglob("*.xplane.pb"), default=None)) for host in hosts]
    traces = [(name, trace) for name, trace in found if trace is not None]
    if not traces:
        rule = "contains no host_N folders with traces"
        remedy = "Name the folder that a run with enable_profiler=true wrote: OUTPUT_DIR/profile"
        raise ProblemsFound([Problem(name="folder", value=str(folder), rule=rule, remedy=remedy)])
    return tuple(read_profile(name, trace) for name, trace in traces)


def read_profile(host: str, trace: Path) -> HostProfile:
    """Reads the profile in one trace file."""
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
    """Yields events that may be steps or operations, with the names of their plane and line."""
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                # Events of the runtime itself are many, and their details are slow to read.
                if "::" not in event.name and not event.name.startswith("end: "):
                    yield plane.name, line.name, event


def _on_host(stats: Mapping[str, object], operations: Operations) -> str | None:
    """Returns the path of an operation on a CPU, or None if the event is not one."""
    program = operations.get(str(stats.get("hlo_module")), {})
    opcode, path = program.get(str(stats.get("hlo_op")), ("while", ""))
    return None if opcode in _CONTAINERS else path


def _on_device(line: str, name: str, stats: Mapping[str, object]) -> str | None:
    """Returns the path of an operation on a TPU, or None if the event is not one."""
    found = re.search(r" ([\w-]+)\(", name)
    if line != "XLA Ops" or (found and found[1] in _CONTAINERS):
        return None
    return str(stats.get("tf_op", ""))


def scope_of(path: str) -> str:
    """Returns the named scopes in the path of an operation, as in blocks/self_attention/qkv."""
    *parts, _ = path.rstrip(":").split("/")
    found = [part for part in map(_WRAPPED.fullmatch, parts) if part]
    kept = [word for around, word in (part.groups() for part in found) if _is_scope(around, word)]
    if not kept:
        return UNNAMED
    backward = any(part[1].startswith("transpose(") for part in found)
    return "/".join((["backward"] if backward else []) + kept)


def _is_scope(around: str, word: str) -> bool:
    return bool(word) and "jit(" not in around and not _ADDED_BY_JAX.fullmatch(word)


def programs_in(trace: bytes) -> Operations:
    """Returns the opcode and path of every operation, by program and operation name.

    The numbers are field numbers of xplane.proto and hlo.proto.
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
    """Returns the byte strings with one field number in an encoded protobuf message."""
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


DEPTH = 3  # blocks/self_attention/kernel


def table(profiles: Sequence[HostProfile], depth: int = DEPTH) -> str:
    """Returns milliseconds per step and device: largest scopes first, a column for each host."""
    columns = [rolled_up(profile, depth) for profile in profiles]
    scopes = sorted(
        {scope for column in columns for scope in column},
        key=lambda scope: -max(column.get(scope, 0.0) for column in columns),
    )
    width = max(len(scope) for scope in (*scopes, "ms of a step on one device"))
    head = f"{'ms of a step on one device':{width}}" + "".join(
        f"{profile.host:>10}" for profile in profiles
    )
    lines = [head, "-" * len(head)]
    for scope in scopes:
        lines.append(row(scope, width, [column.get(scope, 0.0) for column in columns]))
    lines += ["-" * len(head), row("all of these", width, [one.busy for one in profiles])]
    lines.append(row("step, by the clock", width, [one.step_seconds for one in profiles]))
    return "\n".join([*lines, describe_slowest(profiles)])


def row(name: str, width: int, seconds: Sequence[float]) -> str:
    """Returns one line of the table."""
    return f"{name:{width}}" + "".join(f"{1e3 * second:10.3f}" for second in seconds)


def rolled_up(profile: HostProfile, depth: int) -> dict[str, float]:
    """Returns the seconds by the first `depth` parts of the scopes."""
    totals: defaultdict[str, float] = defaultdict(float)
    for scope, seconds in profile.scopes.items():
        totals["/".join(scope.split("/")[:depth])] += seconds
    return dict(totals)


def describe_slowest(profiles: Sequence[HostProfile]) -> str:
    """Names the host with the most work. Time in collectives is waiting, not work."""
    work = {
        profile.host: sum(
            seconds
            for scope, seconds in profile.scopes.items()
            if COLLECTIVE_SCOPE not in scope.split("/")
        )
        for profile in profiles
    }
    slowest = max(work, key=lambda host: work[host])
    steps, devices = profiles[0].steps, sum(profile.devices for profile in profiles)
    return (
        f"{steps} steps on {devices} devices; slowest host: {slowest}, "
        f"{1e3 * work[slowest]:.3f} ms of a step outside collectives"
    )
