"""Servers that a load needs, by simulating their queue event by event.

    arrivals (Poisson) --> one queue, first come first served --> R replicas, one video each

A video takes the seconds that preflight predicts, or that were measured, for its size. The waits of
such a queue have no closed form for a mix of sizes; the simulation costs microseconds per video.
"""

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from maxdiffusion.errors import Collector, Problem, ProblemsFound

SIMULATED = 40_000  # videos; the first tenth only fills the queue
WARM_UP = 0.1
MOST_REPLICAS = 100_000
SEED = 0
HOUR = 3600.0
NUMBERS = ("rate", "wait", "chips", "replicas")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Videos of one size: seconds that a replica needs for one, and their share of all."""

    name: str
    seconds: float
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """Videos per hour, and what they are."""

    per_hour: float
    works: tuple[Work, ...]

    @property
    def mean_seconds(self) -> float:
        """Seconds of an average video."""
        total = sum(work.share for work in self.works)
        return sum(work.seconds * work.share for work in self.works) / total

    @property
    def busy_replicas(self) -> float:
        """Replicas that are busy on average; fewer cannot keep up."""
        return self.per_hour / HOUR * self.mean_seconds

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns times of arrival and seconds of work of `count` videos."""
        random = np.random.default_rng(SEED)
        gaps = random.exponential(HOUR / self.per_hour, count)
        shares = np.array([work.share for work in self.works])
        kinds = random.choice(len(self.works), count, p=shares / shares.sum())
        return np.cumsum(gaps), np.array([work.seconds for work in self.works])[kinds]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One number of replicas: waits before the start, in seconds, and how busy they are."""

    replicas: int
    p50: float
    p95: float
    mean: float
    utilisation: float
    chip_hours_per_1000: float


def waits(arrivals: np.ndarray, seconds: np.ndarray, replicas: int) -> np.ndarray:
    """Returns how long each video waits for one of the replicas."""
    free = [0.0] * replicas
    found = np.empty(len(arrivals))
    for index, (arrival, work) in enumerate(zip(arrivals, seconds, strict=True)):
        begins = max(arrival, free[0])
        heapq.heapreplace(free, begins + work)
        found[index] = begins - arrival
    return found


def simulate(load: Load, replicas: int, chips: int = 1) -> Outcome:
    """Returns waits and use of a number of replicas with `chips` chips each."""
    arrivals, seconds = load.draw(SIMULATED)
    found = waits(arrivals, seconds, replicas)[int(SIMULATED * WARM_UP) :]
    return Outcome(
        replicas=replicas,
        p50=float(np.quantile(found, 0.5)),
        p95=float(np.quantile(found, 0.95)),
        mean=float(found.mean()),
        utilisation=load.busy_replicas / replicas,
        chip_hours_per_1000=1000 * replicas * chips / load.per_hour,
    )


def least_replicas(load: Load, wait_seconds: float, chips: int = 1) -> Outcome:
    """Returns the smallest number of replicas whose p95 of waits is at most `wait_seconds`.

    Waits fall as replicas are added, so the number is found by bisection.
    """
    low = max(1, math.floor(load.busy_replicas) + 1)
    high = low
    while (found := simulate(load, high, chips)).p95 > wait_seconds:
        low, high = high + 1, high * 2
        if high > MOST_REPLICAS:
            rule = f"is not reached with {MOST_REPLICAS} replicas"
            raise ProblemsFound([Problem(name="wait", value=wait_seconds, rule=rule)])
    while low < high:
        middle = (low + high) // 2
        tried = simulate(load, middle, chips)
        if tried.p95 <= wait_seconds:
            high, found = middle, tried
        else:
            low = middle + 1
    return found


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """Arguments of the command."""

    load: Load
    wait: float
    chips: int
    replicas: int | None
    plot: str


def parse_arguments(arguments: Sequence[str]) -> FleetRequest:
    """Returns the request of `rate=... mix=NAME:SECONDS[:SHARE] ...`; raises all problems."""
    values: dict[str, str] = {}
    works: list[Work] = []
    chips: set[int] = set()
    problems = Collector()
    for argument in arguments:
        name, _, text = argument.partition("=")
        with problems:
            if name == "mix":
                work, devices = parse_work(text)
                works.append(work)
                chips |= {devices} if devices else set()
            elif name in (*NUMBERS, "plot"):
                values[name] = text
            else:
                rule = f"must be one of mix, plot, {', '.join(NUMBERS)}"
                raise ProblemsFound([Problem(name="argument", value=argument, rule=rule)])
    numbers: Mapping[str, float] = {}
    with problems:
        numbers = read_numbers(values)
    if not works:
        rule, remedy = "is needed at least once", "Use mix=720p:95 or mix=720p:report.json"
        problems.problems.append(Problem(name="mix", value="", rule=rule, remedy=remedy))
    problems.raise_if_any()
    return FleetRequest(
        load=Load(per_hour=numbers["rate"], works=tuple(works)),
        wait=numbers.get("wait", 60.0),
        chips=int(numbers.get("chips", max(chips, default=1))),
        replicas=int(numbers["replicas"]) if "replicas" in numbers else None,
        plot=values.get("plot", ""),
    )


def read_numbers(values: Mapping[str, str]) -> dict[str, float]:
    """Returns the numbers of the command; raises those that are missing or not positive."""
    found: dict[str, float] = {}
    problems: list[Problem] = []
    for name in NUMBERS:
        text = values.get(name)
        if text is None:
            continue
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = math.nan
        if not (found[name] > 0 and math.isfinite(found[name])):
            problems.append(Problem(name=name, value=text, rule="must be a number above 0"))
    if "rate" not in values:
        rule, remedy = "is needed: videos per hour", "Use rate=120"
        problems.append(Problem(name="rate", value="", rule=rule, remedy=remedy))
    Collector(problems).raise_if_any()
    return found


def parse_work(text: str) -> tuple[Work, int | None]:
    """Returns the work of NAME:SECONDS[:SHARE], or of NAME:REPORT[:SHARE] with its chips."""
    name, _, rest = text.partition(":")
    source, _, share = rest.partition(":")
    chips = None
    try:
        if source.endswith(".json"):
            report = json.loads(Path(source).expanduser().read_text())
            seconds, chips = float(report["predicted_seconds_per_video"]), int(report["devices"])
        else:
            seconds = float(source)
        work = Work(name=name, seconds=seconds, share=float(share) if share else 1.0)
    except (OSError, ValueError, KeyError) as error:
        rule = f"must be NAME:SECONDS or NAME:REPORT of preflight_wan, then :SHARE ({error})"
        raise ProblemsFound([Problem(name="mix", value=text, rule=rule)]) from None
    if not (work.seconds > 0 and work.share > 0):
        rule = "seconds and share must be above 0"
        raise ProblemsFound([Problem(name="mix", value=text, rule=rule)])
    return work, chips


def plan(request: FleetRequest) -> list[Outcome]:
    """Returns the answer first, then fewer and more replicas for comparison."""
    load, chips = request.load, request.chips
    if request.replicas is not None:
        return [simulate(load, request.replicas, chips)]
    best = least_replicas(load, request.wait, chips)
    enough = math.floor(load.busy_replicas) + 1
    near = {
        max(enough, best.replicas - 1),
        best.replicas + 1,
        math.ceil(best.replicas * 1.25),
        math.ceil(best.replicas * 1.5),
    } - {best.replicas}
    return [best, *(simulate(load, count, chips) for count in sorted(near))]


def describe(request: FleetRequest, outcomes: Sequence[Outcome]) -> str:
    """Returns the answer and the table."""
    load, best = request.load, outcomes[0]
    kinds = ", ".join(f"{work.name} {work.seconds:g} s (x{work.share:g})" for work in load.works)
    title = f"{load.per_hour:g} videos per hour: {kinds}; {request.chips} chips per replica"
    answer = (
        f"{best.replicas} replicas, {best.replicas * request.chips} chips: p95 of waits "
        f"{best.p95:.1f} s, busy {best.utilisation:.0%}"
    )
    lines = [
        title,
        answer,
        "",
        "| replicas | chips | wait p50, s | wait p95, s | busy | chip hours per 1,000 videos |",
        "|---|---|---|---|---|---|",
    ]
    for one in sorted(outcomes, key=lambda outcome: outcome.replicas):
        lines.append(
            f"| {one.replicas} | {one.replicas * request.chips} | {one.p50:.1f} | {one.p95:.1f} | "
            f"{one.utilisation:.0%} | {one.chip_hours_per_1000:.1f} |"
        )
    return "\n".join(lines)


def draw_plan(request: FleetRequest, path: Path) -> None:
    """Draws the p95 of waits over the number of replicas, as SVG or PNG."""
    from matplotlib.figure import Figure  # the extra `plots`

    start = math.floor(request.load.busy_replicas) + 1
    best = least_replicas(request.load, request.wait, request.chips).replicas
    counts = sorted({*np.linspace(start, max(start + 4, best * 1.5), 12).round().astype(int)})
    outcomes = [simulate(request.load, int(count), request.chips) for count in counts]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(counts, [one.p95 for one in outcomes], marker="o", label="p95")
    axes.plot(counts, [one.p50 for one in outcomes], marker="o", label="p50")
    axes.axhline(request.wait, linestyle=":", color="gray", label="asked for")
    axes.set_xlabel("replicas")
    axes.set_ylabel("wait, s")
    axes.set_yscale("symlog")
    axes.legend()
    figure.savefig(path)
