"""Compares measured runs with predictions, and names the parts of the model that are wrong.

    timing file of generate_wan   --+
    results of bench_attention.py --+--> measurements --match by job--> predictions --> differences
    run.json of validate_on_tpu   --+

A prediction is a report of `preflight_wan`; `assets/predictions.json` has those that
docs/predictions.md publishes. A measurement is compared only with the prediction of its own job:
the same model sizes, tokens, batch, chip, mesh and attention, at the clock that its flags give.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from maxdiffusion.costs.step_time import EXPOSED, format_seconds
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.tpu import CHIP_NAMES
from maxdiffusion.runtime.tpu_flags import PINNED_CLOCK, read_flags

STORED = Path(__file__).parents[1] / "assets" / "predictions.json"
# A step takes as long as its job says; the other facts of a run do not change it.
JOB = (
    *("device_kind", "devices", "mesh", "attention"),
    *("tokens", "model_batch", "layers", "model_dim"),
)
# Published steps were met within this, but for programs that the inputs do not tell apart.
TOLERANCE = 0.10
STEP, DECODE = "denoise step", "decode"
SELF, TEXT, COLLECTIVES, REST = (
    *("self-attention kernel", "text-attention kernel"),
    *("exposed collectives", "everything else"),
)
_PURPOSES = {"self-attention": SELF, "cross-attention": TEXT}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The seconds that a report predicts for one job, by figure and by part of a step.

    Each is a pair: with the clock pinned, and not pinned. The second equals the first on chips of
    which no unpinned measurement is known.
    """

    name: str
    job: Mapping[str, Any]
    seconds: Mapping[str, tuple[float, float]]
    parts: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, name: str, report: Mapping[str, Any]) -> "Prediction":
        """Returns the prediction of a report of `preflight_wan`."""
        peak, slower = report["peak_clock_seconds"], report["unpinned_seconds"]
        pair = (peak, slower or peak)
        steps = tuple(sum(parts.values()) for parts in pair)
        seconds = {STEP: (steps[0], steps[1])}
        decode = report["seconds_of_programs"].get(DECODE)
        if decode is not None:
            # Decoding is work of the core, so its cycles are the same at any clock.
            cycles = decode["seconds_per_run"] * report["clock_hz"]
            clocks = report["peak_clock_hz"], report["unpinned_clock_hz"] or report["peak_clock_hz"]
            seconds[DECODE] = (cycles / clocks[0], cycles / clocks[1])
        grouped = [_grouped(parts, report["kernels"]) for parts in pair]
        parts = {part: (grouped[0][part], grouped[1][part]) for part in grouped[0]}
        return cls(name=name, job=report["job"], seconds=seconds, parts=parts)


def _grouped(parts: Mapping[str, float], kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the parts of a predicted step by what a profile can tell apart."""
    purposes = {f"kernel: {one['name']}": _PURPOSES[one["purpose"]] for one in kernels}
    groups = dict.fromkeys((SELF, TEXT, COLLECTIVES, REST), 0.0)
    for name, seconds in parts.items():
        groups[purposes.get(name, COLLECTIVES if name == EXPOSED else REST)] += seconds
    return groups


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured run: facts of its job, seconds by figure, parts of a step if it was profiled."""

    name: str
    job: Mapping[str, Any]
    seconds: Mapping[str, float]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def pinned(self) -> bool:
        """Returns whether the flags of the run pin the clock of its chip."""
        chip = CHIP_NAMES.get(str(self.job["device_kind"]).lower())
        flags = read_flags(str(self.job["libtpu_flags"]), "libtpu_flags")
        return chip in PINNED_CLOCK.chips and flags.get(PINNED_CLOCK.name) == PINNED_CLOCK.value


def read_measurements(path: Path) -> list[Measurement]:
    """Returns the measurements of a timing file, of benchmark results or of a validation run."""
    try:
        text = path.read_text(encoding="utf-8")
        content: dict[str, Any] = (
            {"bench": [json.loads(line) for line in text.splitlines() if line.strip()]}
            if path.suffix == ".jsonl"
            else json.loads(text)
        )
        runs = {path.name: content} if "steps" in content else content.get("runs", {})
        found = [_timed(name, run) for name, run in runs.items()]
        found += [_benched(line) for line in content.get("bench", ()) if not line["refusal"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no timing file, no results of bench_attention.py and no run.json ({error!r})"
        raise ProblemsFound([_problem("RUN", path, rule)]) from None
    if not found:
        raise ProblemsFound([_problem("RUN", path, "has no measured run")])
    return found


def _problem(name: str, value: object, rule: str) -> Problem:
    remedy = "Give timing_file=RUN.json to generate_wan, or use scripts/validate_on_tpu.sh"
    return Problem(name=name, value=str(value), rule=rule, remedy=remedy)


def _timed(name: str, run: Mapping[str, Any]) -> Measurement:
    """Returns the measurement of a timing file; the first step of a run may wait for transfers."""
    steps = [step["seconds"] for step in run["steps"]]
    decode = run["seconds"]["vae_decode_device"] / run["run"]["videos"]
    seconds = {STEP: median(steps[1:] or steps)} | ({DECODE: decode} if decode else {})
    return Measurement(name=name, job=run["run"], seconds=seconds)


def _benched(line: Mapping[str, Any]) -> Measurement:
    """Returns the measurement of a line of benchmark results, with its profile if it has one."""
    return Measurement(
        name=f"{line['attention']}, {line['videos']} at once",
        job={**line, "attention": line["attention"].partition(":")[0]},  # without its split
        seconds={STEP: line["seconds_per_step"]},
        parts=parts_of(line["scopes"]) if "scopes" in line else {},
    )


def parts_of(scopes: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of the named scopes of a profile, grouped as a prediction is."""
    groups = dict.fromkeys((SELF, TEXT, COLLECTIVES, REST), 0.0)
    for scope, seconds in scopes.items():
        words = scope.split("/")
        if "collective" in words:
            part = COLLECTIVES
        elif "kernel" in words:
            part = SELF if "self_attention" in words else TEXT
        else:
            part = REST
        groups[part] += seconds
    return groups


def read_predictions(path: Path | None) -> list[Prediction]:
    """Returns the prediction of a report, or those that are published if there is no path."""
    try:
        reports = json.loads((path or STORED).read_text(encoding="utf-8"))
        if path is not None:
            return [Prediction.of(path.name, reports)]
        return [Prediction.of(name, report) for name, report in reports.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no report of preflight_wan ({error!r})"
        raise ProblemsFound(
            [Problem(name="PREDICTION", value=str(path or STORED), rule=rule)]
        ) from None


def differing(run: Measurement, prediction: Prediction) -> list[str]:
    """Returns the facts in which the job of a run is not the predicted one."""
    return [
        f"{name} is {run.job.get(name)!r}, predicted for {prediction.job[name]!r}"
        for name in JOB
        if run.job.get(name) != prediction.job[name]
    ]


def prediction_of(run: Measurement, predictions: Sequence[Prediction]) -> Prediction:
    """Returns the prediction of the job of a run; says how the nearest differs if there is none."""
    nearest = min(predictions, key=lambda one: len(differing(run, one)))
    reasons = differing(run, nearest)
    if reasons:
        rule = f"is not a predicted job; next to {nearest.name}: {'; '.join(reasons)}"
        remedy = "Give the report of preflight_wan for this job as a second argument"
        raise ProblemsFound([Problem(name="RUN", value=run.name, rule=rule, remedy=remedy)])
    return nearest


def compare(run: Measurement, prediction: Prediction) -> str:
    """Returns the table of a run, and where the model is wrong."""
    clock = 0 if run.pinned else 1
    lines = [
        f"{run.name}: {run.job['devices']} x {run.job['device_kind']}, {run.job['attention']}, "
        f"clock {'pinned' if run.pinned else 'not pinned'}; prediction: {prediction.name}",
        f"  {'':24}{'predicted':>12}{'measured':>12}{'measured is':>14}",
    ]
    for name, measured in run.seconds.items():
        if name in prediction.seconds:
            lines.append(_row(name, prediction.seconds[name][clock], measured))
    predicted = {part: pair[clock] for part, pair in prediction.parts.items()}
    lines += [_row(f"  {part}", predicted[part], run.parts[part]) for part in run.parts]
    return "\n".join([*lines, *_verdict(run, prediction, clock)])


def _row(name: str, predicted: float, measured: float) -> str:
    change = f"{measured / predicted - 1:+.1%}" if predicted else "not predicted"
    return (
        f"  {name:24}{format_seconds(predicted):>12}{format_seconds(measured):>12}{change:>14}"
        + ("" if predicted and abs(measured / predicted - 1) <= TOLERANCE else "  <--")
    )


def _verdict(run: Measurement, prediction: Prediction, clock: int) -> list[str]:
    """Returns the sentences under a table."""
    predicted, measured = prediction.seconds[STEP][clock], run.seconds[STEP]
    error = predicted / measured - 1
    if abs(error) <= TOLERANCE:
        lines = [f"  The step is predicted within {TOLERANCE:.0%} ({error:+.1%})."]
    else:
        lines = [f"  The model is WRONG for this step: its prediction is off by {error:+.1%}."]
    if not run.parts:
        return [*lines, "  Without a profile the parts of the step are not known."]
    gaps = {part: run.parts[part] - prediction.parts[part][clock] for part in run.parts}
    worst = max(gaps, key=lambda part: abs(gaps[part]))
    idle = measured - sum(run.parts.values())
    return [
        *lines,
        f"  Largest difference of a part: {worst}, {1e3 * gaps[worst]:+.1f} ms of a step.",
        f"  Time of a step in which the device ran nothing: {1e3 * idle:.1f} ms (negative: "
        "operations that overlap are counted each).",
    ]


def describe(arguments: Sequence[str]) -> str:
    """Returns the comparison of RUN [PREDICTION]; raises if no run has a prediction."""
    run, *given = arguments
    if len(given) > 1:
        rule = "takes RUN and at most one PREDICTION"
        raise ProblemsFound([Problem(name="arguments", value=" ".join(arguments), rule=rule)])
    predictions = read_predictions(Path(given[0]).expanduser() if given else None)
    tables: list[str] = []
    problems: list[Problem] = []
    for measured in read_measurements(Path(run).expanduser()):
        try:
            tables.append(compare(measured, prediction_of(measured, predictions)))
        except ProblemsFound as error:
            problems += error.problems
    if not tables:
        raise ProblemsFound(problems)
    return "\n\n".join([*tables, *(f"not compared: {problem}" for problem in problems)])
