"""Two versions of the openai package, unchanged, against the real HTTP layer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maxdiffusion.runtime.video import read_video
from tests.serving.stand_in import listening

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("client_script.py")
# scripts/test.sh installs the older version here: both cannot be in one environment.
OLDER = Path(sys.prefix) / "openai-2.54"
REQUIRED = "MAXDIFFUSION_REQUIRE_PARITY"


def run_client(address, folder=None):
    variables = {**os.environ, "PYTHONPATH": str(folder)} if folder else {**os.environ}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["version"]


@pytest.mark.parametrize("version", ["3.49", "2.54"])
def test_the_client_does_everything(tmp_path, version):
    folder = OLDER if version == "2.54" else None
    if folder is not None and not folder.exists() and REQUIRED not in os.environ:
        pytest.skip("openai 2.54 is not installed; scripts/test.sh installs it")
    with listening(tmp_path, step_seconds=0.02) as (_, address):
        assert run_client(address, folder).startswith(version)


def test_the_example_of_the_docs_runs(tmp_path):
    docs = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    lines = docs.split("with the `openai` package, unchanged:\n\n")[1].split("\n\n## ")[0]
    example = "\n".join(line.removeprefix("    ") for line in lines.splitlines())
    assert len(example.splitlines()) == 10
    with listening(tmp_path) as (_, address):
        subprocess.run(
            [sys.executable, "-c", example.replace("http://127.0.0.1:8000", address)],
            cwd=tmp_path,
            timeout=60,
            check=True,
        )
    assert read_video(tmp_path / "circle.mp4")[0].shape == (9, 64, 64, 3)
