#!/usr/bin/env python
"""Predicts seconds and memory of every released model on a TPU slice (docs/preflight.md).

    python scripts/predict_family.py TOPOLOGY FOLDER [key=value ...]

Each row is what `preflight_wan` reports for its config; FOLDER keeps the reports, and a row that is
there already is not compiled again. A program that several models share (the autoencoder's, the
text encoder's) is compiled once. Takes about half an hour per topology on an idle core.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GIB = 2**30
CONFIGS = Path(__file__).parents[1] / "configs"
MESH = (
    *("ici_data_parallelism=2", "ici_context_parallelism=4"),
    *("attention=ulysses_ring_custom", "ulysses_shards=2"),
)
FLF2V = "pretrained_model_name_or_path=Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model with its config and the keys that differ from it."""

    title: str
    config: str
    keys: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Returns the name of its report."""
        return "".join(c if c.isalnum() else "_" for c in self.title.lower()) + ".json"


ROWS = (
    Row(title="2.2 T2V A14B", config="base_wan_27b"),
    Row(title="2.2 T2V A14B, video to video", config="base_wan_27b", keys=("video_path=x.mp4",)),
    Row(title="2.2 I2V A14B", config="base_wan_i2v_27b", keys=("image_url=x.png",)),
    Row(title="2.1 I2V 14B", config="base_wan_i2v_14b", keys=("image_url=x.png",)),
    Row(
        title="2.1 FLF2V 14B",
        config="base_wan_i2v_14b",
        keys=(FLF2V, "flow_shift=16.0", "image_url=x.png", "last_image_path=x.png"),
    ),
    Row(title="2.2 TI2V-5B, text", config="base_wan_ti2v_5b"),
    Row(title="2.2 TI2V-5B, image", config="base_wan_ti2v_5b", keys=("image_url=x.png",)),
    Row(title="2.1 VACE 14B", config="base_wan_vace_14b", keys=("video_path=x.mp4",)),
    Row(title="2.1 VACE 1.3B", config="base_wan_vace_1_3b", keys=("video_path=x.mp4",)),
    Row(
        title="2.2 Animate 14B, a segment",
        config="base_wan_animate",  # without guidance: nothing to share over data
        keys=("ici_data_parallelism=1", "ici_context_parallelism=8", "ulysses_shards=4"),
    ),
)


class SharedPrograms:
    """Compiles every distinct program once."""

    def __init__(self) -> None:
        self.compiled: dict[str, Any] = {}

    def __call__(self, name: str, lowered: Any) -> Any:
        from maxdiffusion.pipelines.programs import compile_now

        key = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if key not in self.compiled:
            self.compiled[key] = compile_now(name, lowered)
        return self.compiled[key]


def predict(row: Row, topology: str, keys: Sequence[str], shared: SharedPrograms) -> dict[str, Any]:
    """Returns the report on a model."""
    from maxdiffusion.config.load import read_config
    from maxdiffusion.preflight.command import TopologyJob, compiled_report, plan_for_topology

    config = str(CONFIGS / f"{row.config}.yml")
    arguments = [config, f"topology={topology}", *MESH, *row.keys, *keys]
    job = plan_for_topology(read_config(arguments))
    builder = replace(job.planned.builder, compile=shared)
    shared_job = TopologyJob(topology=job.topology, planned=replace(job.planned, builder=builder))
    return compiled_report(shared_job, arguments).as_json()


def prepare(topology: str) -> None:
    """Sets flags and environment of libtpu, which it reads when jax starts."""
    from maxdiffusion.costs.chips import read_topology
    from maxdiffusion.preflight.devices import prepare_environment
    from maxdiffusion.runtime.tpu_flags import AUTO, PINNED_CLOCK, apply_flags, target_chip

    chip = target_chip(topology)
    apply_flags(AUTO, chip, pin_clock=chip in PINNED_CLOCK.chips)
    prepare_environment(read_topology(topology))


def table_row(title: str, report: Mapping[str, Any]) -> str:
    """Returns a line of the table in Markdown."""
    programs = report["seconds_of_programs"]
    total = sum(run["seconds"] for run in programs.values())
    steps = sum(run["runs"] for name, run in programs.items() if name.startswith("denoise"))
    encoders = sum(
        run["seconds"]
        for name, run in programs.items()
        if name.startswith("encode") or name == "text_encoder"
    )
    decode = programs["decode"]["seconds"]
    steps_per_clock = (report["peak_clock_seconds_per_step"], report["unpinned_seconds_per_step"])
    step = " / ".join(f"{seconds:.3f}" for seconds in steps_per_clock if seconds)
    memory = report["hbm_bytes_per_device"] / GIB
    cells = (title, str(steps), step, f"{encoders:.2f}", f"{decode:.2f}", f"{total:.1f}")
    return f"| {' | '.join(cells)} | {memory:.1f} |"


def main() -> int:
    """Writes the missing reports and prints the table; returns 0."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    topology, folder, keys = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    prepare(topology)
    shared = SharedPrograms()
    lines = []
    for row in ROWS:
        path = folder / row.file
        if not path.exists():
            logging.info(f"{topology}, {row.title}")
            path.write_text(json.dumps(predict(row, topology, keys, shared), indent=2) + "\n")
        lines.append(table_row(row.title, json.loads(path.read_text())))
    print("| model | steps | s/step | encoders, s | decode, s | video, s | GiB a device |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
