"""Two processes serve one queue: the same jobs in the same order, a cancel on the same step."""

import base64
import json
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from maxdiffusion.serving.store import JobStore, Waiting, open_database
from tests.multihost.launching import TINY, Started, launched

COMMAND = ("-m", "maxdiffusion.serve_wan", TINY, "height=32", "width=32", "num_frames=5")
STOP_SECONDS = 25  # the default of serve_stop_seconds
OPTIONS = (
    *("num_inference_steps=4", "serve_port=0", "serve_free_bytes=0", "max_sequence_length=64"),
    *("ici_data_parallelism=2", "ici_context_parallelism=4", "serve_other_sizes=compile"),
    "jax_distributed_heartbeat_timeout_seconds=10",
)


def call(address: str, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        address + path, data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def wait_for(address: str, identifier: str, condition: Any) -> Any:
    ends = time.monotonic() + 120
    while not condition(video := call(address, "GET", f"/v1/videos/{identifier}")):
        assert time.monotonic() < ends, video
        time.sleep(0.02)
    return video


def shows_preview(address: str, identifier: str) -> bool:
    """Asks for a preview, which also has them drawn."""
    try:
        with urllib.request.urlopen(f"{address}/v1/videos/{identifier}/preview") as answer:
            return answer.read(4) == b"RIFF"
    except urllib.error.HTTPError:
        return False


def queued_jobs(state: Path) -> list[Waiting]:
    """Returns the jobs that a server has left in its queue."""
    store = JobStore(open_database("", state))
    try:
        return store.waiting()
    finally:
        store.close()


def address_of(first: Started) -> str:
    first.wait_for("answers; not ready yet")
    lines = [line for line in first.output.splitlines() if "answers" in line]
    return lines[0].split()[0]


@pytest.fixture
def command(tmp_path: Path) -> tuple[object, ...]:
    folders = (f"serve_dir={tmp_path / 'state'}", f"output_dir={tmp_path / 'videos'}")
    return (*COMMAND, *OPTIONS, *folders)


def test_two_processes_serve_cancel_and_stop(command: tuple[object, ...], tmp_path: Path) -> None:
    with launched(2, command) as (first, second):
        address = address_of(first)
        first.wait_for("ready on port")
        prompt = {"prompt": "a red circle moves right on a white background"}
        done = call(address, "POST", "/v1/videos", prompt)["id"]
        long = call(address, "POST", "/v1/videos", prompt | {"num_inference_steps": 200})["id"]
        after = call(address, "POST", "/v1/videos", prompt | {"seed": 1})["id"]
        wait_for(address, done, lambda video: video["status"] == "completed")
        # Another size, of a video: compiled on both while the long one runs.
        with urllib.request.urlopen(f"{address}/v1/videos/{done}/content") as answer:
            video = f"data:video/mp4;base64,{base64.b64encode(answer.read()).decode()}"
        changed = prompt | {"size": "64x32", "input_video": video}
        other = call(address, "POST", "/v1/videos", changed)["id"]
        wait_for(address, long, lambda video: (video["step"] or 0) >= 2)
        wait_for(address, long, lambda _: shows_preview(address, long))
        wait_for(address, other, lambda video: video["stage"] == "compiling")
        call(address, "POST", f"/v1/videos/{long}/cancel")
        cancelled = wait_for(address, long, lambda video: video["status"] == "failed")
        assert cancelled["error"]["code"] == "cancelled"
        wait_for(address, after, lambda video: video["status"] == "completed")
        made = wait_for(address, other, lambda video: video["status"] == "completed")
        assert made["size"] == "64x32"
        names = sorted(path.suffix for path in (tmp_path / "videos").glob("*.*"))
        assert names == [*[".jpg"] * 3, *[".mp4"] * 3, *[".webp"] * 3]
        # SIGTERM while both compile in the background: nothing interrupts a compilation.
        last = call(address, "POST", "/v1/videos", prompt | {"size": "96x64"})["id"]
        wait_for(address, last, lambda video: video["stage"] == "compiling")
        first.kill(signal.SIGTERM)
        stopped = time.monotonic()
        assert (first.end(), second.end()) == (0, 0), first.output + second.output
        assert time.monotonic() - stopped < STOP_SECONDS
        (job,) = queued_jobs(tmp_path / "state")
        assert job.id == last


def test_a_dead_process_ends_the_server_with_its_name(command: tuple[object, ...]) -> None:
    with launched(2, command) as (first, second):
        first.wait_for("ready on port")
        second.kill()
        assert first.end() != 0
        assert f"pid {second.process.pid}" in first.output
