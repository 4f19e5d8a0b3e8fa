"""The real model: batches, one cancelled among two, other sizes, failures and a full disk."""

import base64

import pytest

from tests.serving.real_server import RealServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROMPT = {"prompt": "a red circle moves right on a white background"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    started = RealServer(
        folder,
        *("per_device_batch_size=2", "serve_other_sizes=compile", "height=32", "width=32"),
        point="failures",
    )
    # These wait before the server is ready, so that they are taken together.
    started.early = [
        started.call("POST", "/v1/videos", PROMPT | {"seed": seed, "num_inference_steps": 100})
        for seed in (1, 2)
    ]
    yield started
    started.end()


def ended(server, identifier):
    done = ("completed", "failed")
    return server.wait(f"/v1/videos/{identifier}", lambda video: video["status"] in done)


def test_one_of_a_batch_is_cancelled_and_the_other_goes_on(server):
    one, other = (video["id"] for video in server.early)
    server.wait(f"/v1/videos/{one}", lambda video: (video["step"] or 0) >= 2)
    assert server.call("GET", f"/v1/videos/{other}")["status"] == "in_progress"
    server.call("POST", f"/v1/videos/{one}/cancel")
    assert ended(server, one)["error"]["code"] == "cancelled"
    assert server.call("GET", f"/v1/videos/{other}")["status"] == "in_progress"
    assert ended(server, other)["status"] == "completed"
    assert server.steps_done() == 100


def test_another_size_is_compiled_while_others_run(server):
    """real_server.py makes this width wait in the compiler, until a file exists."""
    size = server.call("POST", "/v1/videos", PROMPT | {"size": "48x32"})["id"]
    held = server.wait(f"/v1/videos/{size}", lambda video: video["stage"] == "compiling")
    assert held["status"] == "queued"
    assert "48x32" in held["reason"]
    passing = server.call("POST", "/v1/videos", PROMPT | {"seed": 9})["id"]
    assert ended(server, passing)["status"] == "completed"
    assert server.call("GET", f"/v1/videos/{size}")["status"] == "queued"
    (server.log.parent / "compile").touch()
    made = ended(server, size)
    assert (made["status"], made["size"], made["reason"]) == ("completed", "48x32", None)


def test_another_sampler_and_a_video_are_compiled(server):
    sampler = server.call("POST", "/v1/videos", PROMPT | {"scheduler": "euler"})["id"]
    assert ended(server, sampler)["status"] == "completed"
    content = server.fetch(f"/v1/videos/{sampler}/content")
    url = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    body = PROMPT | {"input_video": url, "strength": 0.5}
    changed = ended(server, server.call("POST", "/v1/videos", body)["id"])
    assert (changed["status"], changed["steps"]) == ("completed", 3), changed


def test_a_size_that_cannot_be_compiled_fails_alone(server):
    """real_server.py refuses to compile this width."""
    broken = server.call("POST", "/v1/videos", PROMPT | {"size": "64x32"})["id"]
    assert ended(server, broken)["error"]["code"] == "out_of_memory"


@pytest.mark.parametrize(
    ("seed", "code"), [(666, "internal_error"), (667, "disk_full"), (668, "not_finite")]
)
def test_a_failure_ends_its_own_job_alone(server, seed, code):
    """real_server.py breaks jobs of these seeds: in decoding, writing and denoising."""
    broken = server.call("POST", "/v1/videos", PROMPT | {"seed": seed})["id"]
    after = server.call("POST", "/v1/videos", PROMPT | {"seed": 5, "flow_shift": 4.0})["id"]
    failed = ended(server, broken)
    assert (failed["status"], failed["error"]["code"]) == ("failed", code)
    assert ended(server, after)["status"] == "completed"
    log = server.log.read_text()
    assert PROMPT["prompt"] not in log


def test_nothing_is_left_of_failed_jobs(server):
    listed = server.call("GET", "/v1/videos?limit=100")["data"]
    completed = {video["id"] for video in listed if video["status"] == "completed"}
    folder = server.log.parent / "videos"
    assert {path.name.split(".")[0] for path in folder.iterdir()} == completed
