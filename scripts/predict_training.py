#!/usr/bin/env python
"""Predicts the trainings of docs/training.md: seconds, memory and chip-hours without a TPU.

    python scripts/predict_training.py FOLDER [ROW ...] [key=value ...]

Each row is one `preflight_train_wan` command; FOLDER keeps its report (`ROW.json`) and its text
(`ROW.txt`), and a row that is there already is not compiled again. Without names all rows run. The
step of A14B takes five to fifteen minutes and 10 GB on two cores that do nothing else.
`published_full` has the kernels of jax and recomputes attention, as the calibration needs it.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
CONFIGS = Path(__file__).parents[1] / "configs"
PUBLISHED = (
    *("global_batch_size=16", "ici_fsdp_parallelism=16", "ici_context_parallelism=4"),
    *("topology=tpu7x:2x4x4", "train_experts=high_noise"),
)
# `auto` takes our kernels for these; their outputs and log-sums are kept.
OURS = ("attention=auto", "remat_policy=ATTENTION")
ROWS: Mapping[str, tuple[str, ...]] = {
    "finetune_1_3b": (
        *("base_wan_1_3b.yml", "topology=v6e:2x4", "attention=flash", "remat_policy=FULL"),
        *("global_batch_size=8", "ici_fsdp_parallelism=8", "ici_context_parallelism=1"),
    ),
    "lora_a14b": (
        *("base_wan_27b.yml", "topology=tpu7x:2x2x1", *OURS),
        *("train_lora=true", "train_lora_rank=32", "global_batch_size=2"),
        *("ici_fsdp_parallelism=2", "ici_context_parallelism=4"),
    ),
    "full_a14b": (
        *("base_wan_27b.yml", "topology=tpu7x:4x4x4", *OURS),
        *("global_batch_size=32", "ici_fsdp_parallelism=32", "ici_context_parallelism=4"),
        *("idle_expert_memory=pinned_host", "expert_turn_steps=50"),
    ),
    "published_full": (
        *("base_wan_27b.yml", "attention=ulysses", "remat_policy=FULL", *PUBLISHED),
    ),
    "published_saved": ("base_wan_27b.yml", *OURS, *PUBLISHED),
}


def predict(name: str, folder: Path, keys: Sequence[str]) -> Mapping[str, Any]:
    """Returns the report of a row, from its file if there is one."""
    report = folder / f"{name}.json"
    if not report.exists():
        config, *own = ROWS[name]
        command = [sys.executable, "-m", "maxdiffusion.preflight_train_wan", str(CONFIGS / config)]
        with (folder / f"{name}.txt").open("w") as text:
            changes = [*own, *keys, f"report={report}"]
            subprocess.run([*command, *changes], check=True, stdout=text, stderr=text)
    found: Mapping[str, Any] = json.loads(report.read_text())
    return found


def table_row(name: str, report: Mapping[str, Any]) -> str:
    """Returns a line of the table in Markdown."""
    slower = report["unpinned_seconds_per_step"]
    cells = (
        name,
        report["topology"],
        str(report["clips"]),
        f"{report['predicted_seconds_per_step']:.2f}",
        f"{slower:.2f}" if slower else "",
        f"{report['mfu']:.1%}",
        f"{report['hbm_bytes_per_device'] / GIB:.1f}",
        f"{report['chip_hours_per_1000_steps']:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Writes the missing reports and prints the table; returns 0."""
    folder, *rest = sys.argv[1:]
    keys = [word for word in rest if "=" in word]
    names = [word for word in rest if "=" not in word] or list(ROWS)
    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = [table_row(name, predict(name, Path(folder), keys)) for name in names]
    print("| training | slice | clips | s/step | not pinned | MFU | GiB a device | chip-h/1000 |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
