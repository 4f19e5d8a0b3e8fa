"""The HTTP layer: contract of /v1/videos, ranges, paging, idempotency, health, metrics."""

import io
import json
import subprocess
import sys

import pytest
from PIL import Image

from tests.serving.stand_in import StandIn

CREATE = {"prompt": "a red circle"}


@pytest.fixture
def server(tmp_path):
    started = StandIn(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def client(server):
    return server.client()


def create(client, **fields):
    answer = client.post("/v1/videos", json=CREATE | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_video_from_request_to_file(server, client):
    queued = create(client)
    assert (queued["status"], queued["progress"], queued["queue_position"]) == ("queued", 0, 0)
    assert type(queued["progress"]) is int
    assert queued["seconds"] == "1.125"
    assert (queued["size"], queued["object"]) == ("64x64", "video")
    early = client.get(f"/v1/videos/{queued['id']}/content")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "not_ready")
    assert early.headers["x-should-retry"] == "false"
    server.make_all()
    done = client.get(f"/v1/videos/{queued['id']}").json()
    assert (done["status"], done["progress"], done["error"]) == ("completed", 100, None)
    assert done["expires_at"] > done["completed_at"] >= done["created_at"]
    video = client.get(f"/v1/videos/{queued['id']}/content")
    assert video.headers["content-type"] == "video/mp4"
    assert len(video.content) == int(video.headers["content-length"])


def test_ranges(server, client):
    identifier = create(client)["id"]
    server.make_all()
    path = f"/v1/videos/{identifier}/content"
    whole = client.get(path).content
    part = client.get(path, headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole[10:20])
    assert part.headers["content-range"] == f"bytes 10-19/{len(whole)}"
    assert client.get(path, headers={"Range": "bytes=-5"}).content == whole[-5:]
    beyond = client.get(path, headers={"Range": f"bytes={len(whole)}-"})
    assert beyond.status_code == 416


@pytest.mark.parametrize(("variant", "kind"), [("thumbnail", "WEBP"), ("spritesheet", "JPEG")])
def test_variants_are_pictures(server, client, variant, kind):
    identifier = create(client)["id"]
    server.make_all()
    answer = client.get(f"/v1/videos/{identifier}/content", params={"variant": variant})
    assert Image.open(io.BytesIO(answer.content)).format == kind
    other = client.get(f"/v1/videos/{identifier}/content", params={"variant": "audio"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "variant")


def test_forms_and_json_are_the_same(client):
    form = client.post("/v1/videos", files={"prompt": (None, "x"), "seed": (None, "7")}).json()
    body = client.post("/v1/videos", json={"prompt": "x", "seed": 7}).json()
    assert form["settings"] == body["settings"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"prompt": NaN}', "application/json", 400),
        (b'{"prompt": 7}', "application/json", 400),
        (b'{"prompt": null}', "application/json", 400),
        (b"--x\r\n", "multipart/form-data; boundary=y", 400),
        (b"x", "multipart/form-data", 400),
        (b"prompt", "text/plain", 415),
    ],
)
def test_broken_bodies_are_error_objects(client, content, kind, status):
    answer = client.post("/v1/videos", content=content, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_repeated_fields_and_files_are_refused(client):
    twice = [("prompt", (None, "x")), ("prompt", (None, "y"))]
    assert client.post("/v1/videos", files=twice).json()["error"]["code"] == "repeated_field"
    image = {"prompt": (None, "x"), "input_reference": ("../a.svg", b"<svg/>")}
    error = client.post("/v1/videos", files=image).json()["error"]
    assert (error["code"], error["param"]) == ("not_offered", "input_reference")


def test_paging_reaches_every_job_once(client):
    made = [create(client)["id"] for _ in range(7)]
    seen, after = [], None
    while True:
        page = client.get("/v1/videos", params={"limit": 3, **({"after": after} if after else {})})
        listed = page.json()
        seen += [video["id"] for video in listed["data"]]
        assert listed["first_id"] == listed["data"][0]["id"]
        after = listed["last_id"]
        if not listed["has_more"]:
            break
    assert seen == made[::-1]
    ascending = client.get("/v1/videos", params={"order": "asc"}).json()["data"]
    assert [video["id"] for video in ascending] == made


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")]
)
def test_paging_refuses_other_values(client, query, param):
    assert client.get(f"/v1/videos?{query}").json()["error"]["param"] == param
    assert client.get("/v1/videos?after=video_x").json()["error"]["param"] == "after"


def test_idempotency(client):
    headers = {"Idempotency-Key": "abc"}
    first = client.post("/v1/videos", json=CREATE, headers=headers).json()
    again = client.post("/v1/videos", json=CREATE, headers=headers).json()
    assert first["id"] == again["id"]
    other = client.post("/v1/videos", json=CREATE | {"seed": 1}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert len(client.get("/v1/videos").json()["data"]) == 1


def test_cancel_and_delete(server, client):
    identifier = create(client)["id"]
    cancelled = client.post(f"/v1/videos/{identifier}/cancel").json()
    assert (cancelled["status"], cancelled["error"]["code"]) == ("failed", "cancelled")
    assert client.post(f"/v1/videos/{identifier}/cancel").status_code == 409
    gone = client.delete(f"/v1/videos/{identifier}")
    assert gone.json() == {"id": identifier, "object": "video.deleted", "deleted": True}
    assert client.delete(f"/v1/videos/{identifier}").status_code == 404
    assert client.get(f"/v1/videos/{identifier}").json()["error"]["code"] == "not_found"


def test_deleting_removes_the_files(server, client):
    identifier = create(client)["id"]
    server.make_all()
    assert len([*server.queue.library.folder.iterdir()]) == 3
    client.delete(f"/v1/videos/{identifier}")
    assert [*server.queue.library.folder.iterdir()] == []


def test_remix_keeps_the_settings(client):
    first = create(client, seed=5, num_inference_steps=3, size="96x64")
    remixed = client.post(f"/v1/videos/{first['id']}/remix", json={"prompt": "a square"}).json()
    assert remixed["remixed_from_video_id"] == first["id"]
    assert remixed["settings"] == first["settings"]
    assert remixed["prompt"] == "a square"
    empty = client.post(f"/v1/videos/{first['id']}/remix", json={})
    assert empty.json()["error"]["param"] == "prompt"


def test_a_full_queue_refuses_and_still_cancels(tmp_path):
    server = StandIn(tmp_path, serve_max_queue=1)
    client = server.client()
    identifier = create(client)["id"]
    full = client.post("/v1/videos", json=CREATE)
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert int(full.headers["retry-after"]) <= 120
    assert client.post(f"/v1/videos/{identifier}/cancel").status_code == 200
    create(client)
    server.stop()


def test_a_full_disk_refuses_new_jobs_and_serves_the_rest(tmp_path):
    server = StandIn(tmp_path)
    client = server.client()
    identifier = create(client)["id"]
    server.make_all()
    server.stop()
    full = StandIn(tmp_path, serve_free_bytes=1 << 60)
    client = full.client()
    refused = client.post("/v1/videos", json=CREATE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
    assert client.get(f"/v1/videos/{identifier}/content").status_code == 200
    assert client.delete(f"/v1/videos/{identifier}").status_code == 200
    full.stop()


def test_models_and_what_is_not_offered(client):
    model = client.get("/v1/models").json()["data"][0]
    assert model["id"] == "embedded"
    assert client.get("/v1/models/embedded").json() == model
    assert client.get("/v1/models/a%2Fb").json()["error"]["code"] == "model_not_found"
    for path in ("edits", "extensions", "characters"):
        answer = client.post(f"/v1/videos/{path}", files={"prompt": (None, "x")})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_offered")


def test_health(server, client):
    assert client.get("/readyz").status_code == 200
    server.queue.ready = False
    assert client.get("/readyz").status_code == 503
    assert client.get("/livez").status_code == 200
    server.api.hang_seconds = -1
    assert client.get("/livez").status_code == 503


def test_a_stopping_server_takes_no_jobs(server, client):
    server.queue.stop()
    assert client.post("/v1/videos", json=CREATE).status_code == 503
    assert client.get("/readyz").headers["retry-after"]


def test_metrics(server, client):
    create(client, prompt="fail")
    create(client)
    server.make_all()
    create(client)
    text = client.get("/metrics").text
    assert 'maxdiffusion_jobs{status="queued"} 1.0' in text
    assert 'maxdiffusion_jobs_finished_total{outcome="completed"} 1.0' in text
    assert 'maxdiffusion_jobs_finished_total{outcome="internal_error"} 1.0' in text
    assert 'maxdiffusion_http_request_seconds_bucket{le="0.001",route="/v1/videos"' in text


def test_position_and_estimate(server, client):
    create(client)
    server.make_all()
    server.queue.times.add("64x64x9", step=0.5, finish=1.0)
    waiting = [create(client, num_inference_steps=10) for _ in range(3)]
    assert [video["queue_position"] for video in waiting] == [0, 1, 2]
    estimates = [video["eta_seconds"] for video in waiting]
    assert estimates[1] == pytest.approx(2 * estimates[0], abs=0.2)
    urgent = create(client, priority=3)
    assert urgent["queue_position"] == 0


def test_jobs_that_wait_for_programs_are_passed_and_batches_start_together(server, client):
    held, one, other, two = (
        create(client, num_inference_steps=steps)["id"] for steps in (8, 10, 12, 10)
    )

    def positions():
        videos = [client.get(f"/v1/videos/{name}").json() for name in (held, one, other, two)]
        return [video["queue_position"] for video in videos]

    assert positions() == [0, 1, 2, 3]
    server.queue.hold(held, "Its programs are compiled.")
    assert positions() == [0, 0, 1, 2]
    assert client.get(f"/v1/videos/{held}").json()["eta_seconds"] is None
    server.queue.take(2, wait_seconds=0.01, held=lambda job: True)  # states the batch size
    server.queue.hold(held, "Its programs are still compiled.")
    assert positions() == [0, 0, 2, 0]
    server.queue.release(held)
    assert positions() == [0, 1, 3, 1]
    (taken,) = server.queue.take(2, wait_seconds=0.01)
    assert taken.id == held
    assert positions() == [None, 0, 2, 0]
    client.delete(f"/v1/videos/{one}")
    assert client.get(f"/v1/videos/{other}").json()["queue_position"] == 0


def test_unknown_paths_and_methods_are_error_objects(client):
    for answer in (client.get("/v1/nothing"), client.put("/v1/videos")):
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("req_")


def test_retention_by_age_and_by_size(tmp_path):
    server = StandIn(tmp_path, serve_keep_bytes=1)
    client = server.client()
    for _ in range(2):
        create(client)
    server.make_all()
    server.queue.tidy()
    assert client.get("/v1/videos").json()["data"] == []
    assert [*server.queue.library.folder.iterdir()] == []
    server.stop()


def test_the_http_layer_does_not_load_jax():
    code = "import sys, maxdiffusion.serving.server; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_openapi_document_is_served(client):
    document = client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert json.dumps(document).count("operationId") >= 10
