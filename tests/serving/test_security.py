"""Keys, hosts, origins, bodies and paths; rows of the tables in docs/serving.md name tests."""

import logging
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.serving.library import Library
from maxdiffusion.serving.security import Access, host_name
from tests.serving.stand_in import StandIn, config_of, listening

ANNA, BEN = "anna-key-0123456789", "ben-key-0123456789"
CREATE = {"prompt": "a red circle"}


@pytest.fixture
def server(tmp_path):
    started = StandIn(tmp_path)
    yield started
    started.stop()


@pytest.fixture
def guarded(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# people\nanna:{ANNA}\nben:{BEN}\n")
    started = StandIn(tmp_path, serve_keys_file=str(keys))
    yield started
    started.stop()


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


# Addresses and keys


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_beyond_loopback_a_key_is_required(tmp_path, host):
    config = config_of(tmp_path, serve_host=host)
    with pytest.raises(ProblemsFound, match="keys are required"):
        Access.of(config)


@pytest.mark.parametrize("line", ["anna", "anna:short", ":0123456789abcdef", "a:b" * 2])
def test_bad_key_files_are_refused(tmp_path, line):
    (tmp_path / "keys").write_text(line)
    with pytest.raises(ProblemsFound, match="name:key"):
        Access.of(config_of(tmp_path, serve_keys_file=str(tmp_path / "keys")))


def test_every_route_needs_a_key_but_health_and_the_empty_page(guarded):
    client = guarded.client()
    app = guarded.app._app
    open_paths = {"/livez", "/readyz", "/", "/v1/session", "/page"}
    for route in app.routes:
        if route.path in open_paths:
            continue
        for method in sorted(route.methods - {"HEAD"}):
            path = route.path.replace("{model:path}", "m").replace("{identifier}", "video_x")
            answer = client.request(method, path.replace("{name}", "x"))
            assert code(answer) == (401, "invalid_api_key"), (method, path)
    assert client.get("/unknown").status_code == 401
    assert client.get("/livez").status_code == 200


def test_wrong_keys_are_refused(guarded):
    client = guarded.client()
    for key in ("", "x", ANNA[:-1], ANNA + "x", "é"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert client.get("/v1/videos", headers=headers).status_code == 401


def test_keys_are_compared_in_constant_time(guarded, monkeypatch):
    compared = []
    original = __import__("hmac").compare_digest

    def compare(one, other):
        compared.append(other)
        return original(one, other)

    monkeypatch.setattr("maxdiffusion.serving.security.hmac.compare_digest", compare)
    assert guarded.access.owner_of_key(ANNA) == "anna"
    assert compared == [ANNA.encode(), BEN.encode()]


def test_owners_do_not_see_each_other(guarded):
    client = guarded.client()
    identifier = client.post("/v1/videos", json=CREATE, headers=bearer(ANNA)).json()["id"]
    guarded.make_all()
    path = f"/v1/videos/{identifier}"
    assert client.get(path, headers=bearer(ANNA)).status_code == 200
    for method, where in (
        ("GET", path),
        ("DELETE", path),
        ("GET", f"{path}/content"),
        ("POST", f"{path}/cancel"),
        ("POST", f"{path}/remix"),
        ("GET", f"{path}/preview"),
    ):
        answer = client.request(method, where, headers=bearer(BEN))
        assert code(answer) == (404, "not_found")
    assert client.get("/v1/videos", headers=bearer(BEN)).json()["data"] == []


def test_a_login_sets_a_cookie_that_scripts_cannot_read(guarded):
    client = guarded.client()
    assert client.post("/v1/session", json={"key": "wrong"}).status_code == 401
    answer = client.post("/v1/session", json={"key": BEN})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/v1/videos").status_code == 200
    client.delete("/v1/session")
    client.cookies.clear()
    assert client.get("/v1/videos").status_code == 401


def test_a_changed_key_ends_its_sessions(guarded):
    session = guarded.access.session("anna")
    assert guarded.access.owner_of_session(session) == "anna"
    changed = replace(guarded.access, keys={"anna": "another-key-0123456789"})
    assert changed.owner_of_session(session) is None


# Other web pages


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", ""])
def test_other_host_names_are_refused(server, host):
    answer = server.client().get("/v1/videos", headers={"Host": host})
    assert code(answer) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_requests_of_other_pages_are_refused(server, headers):
    client = server.client()
    answer = client.post("/v1/videos", files={"prompt": (None, "x")}, headers=headers)
    assert code(answer) == (403, "origin_not_allowed")
    assert client.get("/v1/videos", headers=headers).status_code == 403
    assert server.queue.store.counts()["queued"] == 0


def test_own_requests_and_links_pass(server):
    client = server.client()
    own = {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/v1/videos", json=CREATE, headers=own).status_code == 200
    assert client.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200


def test_no_cross_origin_access_is_granted(server):
    answer = server.client().get("/v1/videos")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_answers_cannot_be_sniffed_framed_or_scripted(server):
    for path in ("/", "/v1/videos", "/nothing"):
        headers = server.client().get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_host_names():
    assert host_name("localhost:8000") == "localhost"
    assert host_name("[::1]:8000") == "::1"
    assert host_name("EXAMPLE.com") == "example.com"


# Paths, bodies, logs


@pytest.mark.parametrize(
    "identifier", ["..", "%2e%2e", "..%2F..%2Fetc", "video_x", "a%00b", "video_" + "0" * 33]
)
def test_ids_are_checked_before_they_meet_a_path(server, identifier):
    answer = server.client().get(f"/v1/videos/{identifier}/content")
    assert answer.status_code == 404


def test_the_library_refuses_other_names(tmp_path):
    with pytest.raises(ValueError, match="not an id"):
        Library(tmp_path).path("../x")


def test_the_static_files_stay_in_their_folder(server):
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py"):
        assert server.client().get(path).status_code == 404


def test_no_path_of_the_server_is_in_an_answer(server, tmp_path):
    client = server.client()
    identifier = client.post("/v1/videos", json=CREATE).json()["id"]
    server.make_all()
    for path in ("/v1/videos", f"/v1/videos/{identifier}", "/v1/server", "/openapi.json"):
        assert str(tmp_path) not in client.get(path).text


def test_large_bodies_are_refused(tmp_path):
    server = StandIn(tmp_path, serve_max_upload_bytes=2000)
    client = server.client()
    long = client.post("/v1/videos", json={"prompt": "x" * 3000})
    assert code(long) == (413, "body_too_large")
    chunks = client.post(
        "/v1/videos",
        content=(b"x" * 500 for _ in range(10)),
        headers={"Content-Type": "application/json"},
    )
    assert code(chunks) == (413, "body_too_large")
    server.stop()


def test_a_body_is_not_read_before_the_key_is_accepted(guarded):
    read = []

    def chunks():
        read.append(1)
        yield b"{}"

    answer = guarded.client().post("/v1/videos", content=chunks())
    assert answer.status_code == 401


def test_many_fields_and_files_are_refused(server):
    client = server.client()
    fields = [(f"f{number}", (None, "x")) for number in range(200)]
    assert client.post("/v1/videos", files=fields).status_code == 400
    files = [("a", ("a", b"x")), ("b", ("b", b"x"))]
    assert client.post("/v1/videos", files=files).status_code == 400


def test_urls_are_not_fetched(tmp_path, monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: asked.set())
    server = StandIn(tmp_path)
    fields = {"prompt": "x", "input_reference[image_url]": "http://169.254.169.254/"}
    answer = server.client().post("/v1/videos", data=fields)
    assert code(answer) == (400, "not_offered")
    assert not asked.is_set()
    server.stop()


def test_prompts_are_not_logged(server, caplog):
    caplog.set_level(logging.DEBUG)
    client = server.client()
    for prompt in ("a secret lighthouse", "fail"):
        client.post("/v1/videos", json={"prompt": prompt})
    client.post("/v1/videos", json={"prompt": "a secret lighthouse", "seed": -1})
    server.make_all()
    ours = [record.getMessage() for record in caplog.records if "maxdiffusion" in record.name]
    assert ours
    assert not [text for text in ours if "lighthouse" in text]


def test_vanishing_clients_end_no_job(tmp_path):
    with listening(tmp_path, step_seconds=0.01) as (server, address):
        import socket

        host, port = address.removeprefix("http://").split(":")
        body = b'{"prompt": "x"}'
        head = f"POST /v1/videos HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(head.encode() + b"Content-Length: 15\r\n\r\n" + body)
        with socket.create_connection((host, int(port))) as half:
            half.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
        ended = threading.Event()
        for _ in range(100):
            if server.queue.store.counts()["completed"] == 1:
                break
            ended.wait(0.05)
        assert server.queue.store.counts() == {
            "queued": 0,
            "in_progress": 0,
            "completed": 1,
            "failed": 0,
        }


@pytest.mark.parametrize(("title", "least"), [("Threats", 14), ("Faults", 12)])
def test_every_row_of_the_tables_names_a_test(title, least):
    docs = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    table = docs.split(f"## {title}")[1].split("\n## ")[0]
    named = [line.rsplit("`", 2)[1] for line in table.splitlines() if "| `test_" in line]
    assert len(named) >= least
    here, multihost = Path(__file__).parent, Path(__file__).parents[1] / "multihost"
    files = [*here.glob("test_*.py"), *multihost.glob("test_*.py")]
    written = "".join(file.read_text() for file in files)
    assert [name for name in named if f"def {name}(" not in written] == []
