"""The real model: batches, one cancelled among two, other sizes, failures and a full disk."""

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


def test_another_size_and_another_sampler_are_compiled(server):
    size = server.call("POST", "/v1/videos", PROMPT | {"size": "48x32"})
    sampler = server.call("POST", "/v1/videos", PROMPT | {"scheduler": "euler"})
    assert ended(server, size["id"])["size"] == "48x32"
    assert ended(server, sampler["id"])["status"] == "completed"


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
