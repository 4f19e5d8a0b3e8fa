"""A table of what the steps of a profile were spent on, scope by scope and host by host."""

from collections import defaultdict
from collections.abc import Sequence

from maxdiffusion.runtime.traces import HostProfile

DEPTH = 3  # blocks/self_attention/kernel
WAITING = "exchange"


def table(profiles: Sequence[HostProfile], depth: int = DEPTH) -> str:
    """Milliseconds of a step on one device, the largest scopes first, a column for each host."""
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
    return "\n".join([*lines, verdict(profiles)])


def row(name: str, width: int, seconds: Sequence[float]) -> str:
    """One line of the table."""
    return f"{name:{width}}" + "".join(f"{1e3 * second:10.3f}" for second in seconds)


def rolled_up(profile: HostProfile, depth: int) -> dict[str, float]:
    """Seconds by the first `depth` parts of the scopes."""
    totals: defaultdict[str, float] = defaultdict(float)
    for scope, seconds in profile.scopes.items():
        totals["/".join(scope.split("/")[:depth])] += seconds
    return dict(totals)


def verdict(profiles: Sequence[HostProfile]) -> str:
    """Which host had most to do; one that waits in an exchange is not it."""
    work = {
        profile.host: sum(
            seconds for scope, seconds in profile.scopes.items() if WAITING not in scope.split("/")
        )
        for profile in profiles
    }
    slowest = max(work, key=lambda host: work[host])
    steps, devices = profiles[0].steps, sum(profile.devices for profile in profiles)
    return (
        f"{steps} steps on {devices} devices; slowest host: {slowest}, "
        f"{1e3 * work[slowest]:.3f} ms of a step outside exchanges"
    )
