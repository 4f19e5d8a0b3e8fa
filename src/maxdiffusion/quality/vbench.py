"""VBench scores of clips, by the package `vbench` and the weights that a person names.

The package runs in a process of its own, which gets the clips as files and `VBENCH_CACHE_DIR`: its
libraries and this program's do not meet. Its dimensions for videos of any prompt are measured. Six
of them judge a clip by itself; the exact run has scores as well as every mode.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from maxdiffusion.errors import Problem, ProblemsFound, RunFailed
from maxdiffusion.runtime.video import write_video

FIELD = "vbench_weights"
DIMENSIONS = (
    *("subject_consistency", "background_consistency", "motion_smoothness"),
    *("dynamic_degree", "aesthetic_quality", "imaging_quality"),
)
NAME = "clips"
# Arguments: folder of videos, folder of results, dimensions as JSON.
PROGRAM = f"""
import json, sys, torch
from vbench import VBench
videos, results, dimensions = sys.argv[1:]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VBench(device, "", results).evaluate(
    videos_path=videos,
    name="{NAME}",
    dimension_list=json.loads(dimensions),
    mode="custom_input",
)
"""


@dataclass(frozen=True, kw_only=True)
class Vbench:
    """The package with its folder of weights."""

    weights: Path
    fps: int

    @classmethod
    def find(cls, weights: Path, fps: int) -> "Vbench":
        """Returns the package; raises if it or its weights are missing."""
        if not weights.is_dir():
            rule, remedy = "must be a folder with VBench's weights", "Leave it out for no VBench"
            value = str(weights)
            raise ProblemsFound([Problem(name=FIELD, value=value, rule=rule, remedy=remedy)])
        if importlib.util.find_spec("vbench") is None:
            rule = "needs the package vbench, which is not installed"
            remedy = "pip install vbench, or leave it out"
            value = str(weights)
            raise ProblemsFound([Problem(name=FIELD, value=value, rule=rule, remedy=remedy)])
        return cls(weights=weights, fps=fps)

    def __call__(self, clips: Sequence[UInt8[np.ndarray, "F Y X 3"]]) -> dict[str, float]:
        """Returns the mean score of each dimension over clips."""
        with tempfile.TemporaryDirectory(prefix="vbench_") as folder:
            videos, results = Path(folder) / "videos", Path(folder) / "results"
            videos.mkdir()
            for index, clip in enumerate(clips):
                write_video(videos / f"{index}.mp4", clip, fps=self.fps)
            self._run(videos, results)
            found = json.loads((results / f"{NAME}_eval_results.json").read_text())
        return {name: float(found[name][0]) for name in DIMENSIONS}

    def _run(self, videos: Path, results: Path) -> None:
        command = [sys.executable, "-c", PROGRAM, str(videos), str(results), json.dumps(DIMENSIONS)]
        environment = os.environ | {"VBENCH_CACHE_DIR": str(self.weights)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RunFailed(f"vbench ended with exit code {done.returncode}: {last}")
