#!/usr/bin/env python
"""Makes one table of the preflight reports of scripts/bench_static.sh.

    python scripts/bench_static.py FOLDER

FOLDER has online.json, ring.json, fixed_m.json and fp8.json (guidance on, data 2 x context 4),
cp8.json and cp8_fixed_m.json (guidance off, context 8) and scan.json (contexts 4, 8, 16); a report
that is not there leaves its rows empty. The last line is the table as one JSON object.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

CLOCK = 1153.5e12 / 524_288
LAYERS, TOKENS, HEADS, DEVICES = 40, 75_600, 40, 8
# Cycles of a score on two MXUs of 256 x 256 with head_dim 128: Q.K^T fills half of the depth.
CYCLES_PER_SCORE = 1.5 / 1024


class Row(NamedTuple):
    """A figure with its format, its limit and its target."""

    name: str
    value: float | None
    form: str
    must: str
    aim: str


def main() -> int:
    """Prints the table; returns 0."""
    folder = Path(sys.argv[1])
    rows = [*rows_of({path.stem: read(path) for path in sorted(folder.glob("*.json"))})]
    width = max(len(row.name) for row in rows)
    print(f"{'figure':{width}}  {'value':>12}  {'must reach':>12}  {'aim':>12}")
    for row in rows:
        value = "missing" if row.value is None else format(row.value, row.form)
        print(f"{row.name:{width}}  {value:>12}  {row.must:>12}  {row.aim:>12}")
    print(json.dumps({row.name: row.value for row in rows}))
    return 0


def read(path: Path) -> Any:
    """Returns the report of the only entry of `compare`, or the rows of a scan."""
    rows = json.loads(path.read_text())
    return rows[0].get("report", rows)


def rows_of(reports: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of the table; a missing report leaves its rows empty."""
    online, fixed_m, cp8 = (reports.get(name) for name in ("online", "fixed_m", "cp8"))
    bounded, ring = reports.get("cp8_fixed_m"), reports.get("ring")
    yield Row("online main loop, of the MXU bound", main_loop(online), ".1%", "95 %", "99 %")
    yield Row("online main loop, one call of 75,600", main_loop(cp8), ".1%", "95 %", "99 %")
    yield Row("fixed-m main loop, of the MXU bound", main_loop(fixed_m), ".1%", "99 %", "100 %")
    yield Row("online whole call, S = 75,600", whole_call(cp8, 1), ".1%", "91 %", "96 %")
    yield Row("fixed-m whole call, S = 75,600", whole_call(bounded, 1), ".1%", "95 %", "98 %")
    yield Row("online two calls of a ring of 2", whole_call(online, 2), ".1%", "", "")
    yield Row("fixed-m two calls of a ring of 2", whole_call(fixed_m, 2), ".1%", "", "")
    yield Row("cycles outside kernels, CP8, CFG off", outside(cp8), ",.0f", "19 M", "17.5 M")
    yield Row("cycles outside kernels, dp2-cp4, CFG on", outside(online), ",.0f", "38 M", "35 M")
    yield Row("exposed collectives of a layer, U2R2", exposed(online), ".0f", "1", "1")
    yield Row("exposed collectives of a layer, U1R4", exposed(ring), ".0f", "1", "1")
    yield Row("seconds per step, dp2-cp4, online, U2R2", seconds(online), ".3f", "2.3", "2.15")
    yield Row("seconds per step, dp2-cp4, online, U1R4", seconds(ring), ".3f", "2.3", "2.15")
    yield Row("seconds per step, dp2-cp4, fixed-m", seconds(fixed_m), ".3f", "2.3", "2.15")
    yield Row("seconds per step, dp2-cp4, fp8 (lossy)", seconds(reports.get("fp8")), ".3f", "", "")
    yield Row("seconds per step, CP8, CFG off", seconds(cp8), ".3f", "", "")
    for before, after in ((4, 8), (8, 16)):
        name = f"scaling efficiency CP{before} -> CP{after}"
        yield Row(name, scaling(reports.get("scan"), before, after), ".1%", "93 %", "97 %")


def self_attention(report: Any) -> Any:
    """Returns the figures of the self-attention kernel."""
    return next(one for one in report["kernels"] if one["purpose"] == "self-attention")


def main_loop(report: Any) -> float | None:
    """Returns the share of MXU peak that the main loop reaches, at most 1."""
    return None if report is None else min(1.0, self_attention(report)["mxu_share"])


def whole_call(report: Any, batch: int) -> float | None:
    """Returns the MXU cycles of the unpadded scores over all cycles of the attention kernels."""
    if report is None:
        return None
    name = self_attention(report)["name"]
    cycles = report["seconds"][f"kernel: {name}"] * CLOCK / LAYERS
    return batch * HEADS * TOKENS**2 * CYCLES_PER_SCORE / DEVICES / cycles


def outside(report: Any) -> float | None:
    """Returns the estimated cycles of a layer outside attention kernels."""
    return None if report is None else report["cycles_per_layer_outside_kernels"]


def exposed(report: Any) -> float | None:
    """Returns the number of collectives of a layer that no other work overlaps."""
    if report is None:
        return None
    inside = [one for one in report["collectives"] if one["times"] % LAYERS == 0]
    return sum(not (one["cycles_between"] or one["kernels_between"]) for one in inside)


def seconds(report: Any) -> float | None:
    """Returns the predicted seconds of a step."""
    return None if report is None else report["predicted_seconds_per_step"]


def scaling(scan: Any, before: int, after: int) -> float | None:
    """Returns the device-seconds of the smaller context over those of the larger."""
    times = {row["context"]: row["seconds_per_step"] for row in scan or ()}
    if not {before, after} <= set(times):
        return None
    return times[before] * before / (times[after] * after)


if __name__ == "__main__":
    sys.exit(main())
