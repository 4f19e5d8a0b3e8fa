#!/usr/bin/env python
"""Stores reports of preflight_wan as the predictions that compare_prediction knows.

    python scripts/record_predictions.py NAME=REPORT.json ...

Writes src/maxdiffusion/assets/predictions.json with what a comparison reads of each report. Record
a prediction before its job is measured: docs/predictions.md publishes it.
"""

import json
import sys
from pathlib import Path
from typing import Any

from maxdiffusion.costs.predictions import STORED, Prediction

KEPT = (
    *("topology", "job", "libtpu_flags", "clock_hz", "peak_clock_hz", "unpinned_clock_hz"),
    *("hbm_bytes_per_device", "peak_clock_seconds", "unpinned_seconds", "seconds_of_programs"),
)


def main() -> int:
    """Writes the file; returns 0."""
    stored: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {}
    for argument in sys.argv[1:]:
        name, _, path = argument.partition("=")
        report = json.loads(Path(path).read_text())
        kernels = [{key: one[key] for key in ("name", "purpose")} for one in report["kernels"]]
        stored[name] = {key: report[key] for key in KEPT} | {"kernels": kernels}
        Prediction.of(name, stored[name])  # raises where a report has not what is read
    STORED.write_text(json.dumps(stored, indent=2) + "\n")
    print(f"wrote {len(stored)} predictions to {STORED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
