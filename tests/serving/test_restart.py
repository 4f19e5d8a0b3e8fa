"""kill -9 in every state and SIGTERM: nothing is lost, nothing is made twice, no half files."""

import signal
import time

import pytest

from maxdiffusion.runtime.video import read_video
from tests.serving.real_server import POINTS, RealServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPT = {"prompt": "a red circle moves right on a white background", "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose programs are compiled, with the video that an undisturbed server makes."""
    folder = tmp_path_factory.mktemp("server")
    server = RealServer(folder)
    server.wait_ready()
    identifier = server.call("POST", "/v1/videos", PROMPT)["id"]
    server.wait(f"/v1/videos/{identifier}", lambda video: video["status"] == "completed")
    (folder / "expected.mp4").write_bytes(server.fetch(f"/v1/videos/{identifier}/content"))
    server.call("DELETE", f"/v1/videos/{identifier}")
    assert server.end() == 0
    return folder


def test_kill_9_at_every_point_of_one_job(folder):
    """Once latents are stored no start denoises again: a step there would end the process."""
    identifier = None
    arguments = ("serve_attempts=20",)
    for point in POINTS:
        server = RealServer(folder, *arguments, point=point)
        try:
            if identifier is None:
                identifier = server.call("POST", "/v1/videos", PROMPT)["id"]
            assert server.killed(), point
        finally:
            server.process.kill()
    server = RealServer(folder, *arguments)
    try:
        server.wait_ready()
        found = server.call("GET", f"/v1/videos/{identifier}")
        assert found["status"] == "completed"
        assert server.steps_done() == 0
        content = server.fetch(f"/v1/videos/{identifier}/content")
        assert content == (folder / "expected.mp4").read_bytes()
        assert server.call("GET", "/v1/videos")["data"] == [found]
        names = sorted(path.name for path in (folder / "videos").iterdir())
        assert names == [f"{identifier}.{suffix}" for suffix in ("jpg", "mp4", "webp")]
        server.call("DELETE", f"/v1/videos/{identifier}")
    finally:
        assert server.end() == 0


def test_a_running_server_cancels_fails_and_stops(folder):
    """One server: warm start, cancel at the next step, a lock, SIGTERM, and back in the queue."""
    server = RealServer(folder)
    try:
        assert server.wait_ready() < 60
        long = server.call("POST", "/v1/videos", PROMPT | {"num_inference_steps": 200})["id"]
        quick = server.call("POST", "/v1/videos", PROMPT | {"seed": 4})["id"]
        running = server.wait(f"/v1/videos/{long}", lambda video: (video["step"] or 0) >= 2)
        assert running["status"] == "in_progress"
        server.call("POST", f"/v1/videos/{long}/cancel")
        ended = server.wait(f"/v1/videos/{long}", lambda video: video["status"] == "failed")
        assert ended["error"]["code"] == "cancelled"
        assert server.steps_done() < 150
        server.wait(f"/v1/videos/{quick}", lambda video: video["status"] == "completed")
        again = server.call("POST", "/v1/videos", PROMPT | {"num_inference_steps": 200})["id"]
        waiting = server.call("POST", "/v1/videos", PROMPT)["id"]
        server.wait(f"/v1/videos/{again}", lambda video: (video["step"] or 0) >= 2)
        began = time.monotonic()
        assert server.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < 10
    finally:
        server.process.kill()
    server = RealServer(folder)
    try:
        listed = {video["id"]: video for video in server.call("GET", "/v1/videos")["data"]}
        assert listed[waiting]["status"] == "queued"
        assert listed[again]["status"] in ("queued", "in_progress")
        assert listed[quick]["status"] == "completed"
        server.call("DELETE", f"/v1/videos/{again}")
        server.wait(f"/v1/videos/{waiting}", lambda video: video["status"] == "completed")
        frames, rate = read_video(folder / "videos" / f"{waiting}.mp4")
        assert (frames.shape, rate) == ((9, 64, 64, 3), 8)
    finally:
        server.end()
