"""Event streams: a snapshot at once, then the state after every change; previews by URL."""

import http.client
import json
import threading

from tests.serving.stand_in import listening


def read_event(stream):
    """Returns the data of the next event."""
    for line in stream:
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended")


def test_a_stream_begins_with_a_snapshot_and_follows_the_steps(tmp_path):
    with listening(tmp_path, step_seconds=0.1) as (_, address):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
        body = json.dumps({"prompt": "x", "num_inference_steps": 15})
        connection.request("POST", "/v1/videos", body, {"Content-Type": "application/json"})
        identifier = json.loads(connection.getresponse().read())["id"]
        connection.request("GET", "/v1/events")
        stream = connection.getresponse()
        assert stream.headers["content-type"].startswith("text/event-stream")
        first = read_event(stream)
        assert [video["id"] for video in first["active"]] == [identifier]
        steps = []
        while (state := read_event(stream))["active"]:
            steps.append(state["active"][0]["step"] or 0)
        assert sorted(set(steps)) == sorted(steps, key=steps.index) or steps == sorted(steps)
        assert len(set(steps)) > 3
        assert state["recent"][0]["status"] == "completed"
        connection.close()


def test_an_open_stream_does_not_hold_up_the_end(tmp_path):
    with listening(tmp_path) as (_, address):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
        connection.request("GET", "/v1/events")
        stream = connection.getresponse()
        read_event(stream)
        ended = threading.Event()

        def read() -> None:
            while stream.readline():
                pass
            ended.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
    assert ended.wait(8)
    connection.close()


def test_a_preview_is_there_while_a_video_is_made(tmp_path):
    with listening(tmp_path, step_seconds=0.05) as (server, address):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
        connection.request("POST", "/v1/videos", b'{"prompt": "x"}', {})
        identifier = json.loads(connection.getresponse().read())["id"]
        while server.queue.live(identifier) is None:
            threading.Event().wait(0.01)
        server.queue.preview(identifier, 3, b"RIFF")
        connection.request("GET", f"/v1/videos/{identifier}/preview")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["x-step"], answer.read()) == (200, "3", b"RIFF")
        assert server.queue.is_watched
        connection.close()
