"""Hours of mixed use in seconds: many clients submit, look, cancel and delete at once."""

import random
import threading
import time

import pytest

from tests.serving.stand_in import listening

pytestmark = pytest.mark.slow
CLIENTS, ROUNDS = 6, 40
SIZES = ("64x64", "96x64")


def visit(server, number, errors):
    """Does what a person might do, in an order of its own."""
    choice = random.Random(number)
    client = server.client()
    mine = []
    for _ in range(ROUNDS):
        action = choice.choice(("create", "create", "look", "list", "cancel", "delete", "content"))
        if action == "create" or not mine:
            fields = {"prompt": "x", "size": choice.choice(SIZES), "num_inference_steps": 3}
            fields["prompt"] = choice.choice(("x", "x", "fail"))
            answer = client.post("/v1/videos", json=fields | {"priority": choice.randint(-2, 2)})
            mine += [answer.json()["id"]] if answer.status_code == 200 else []
        else:
            path = f"/v1/videos/{choice.choice(mine)}"
            answer = {
                "look": lambda path=path: client.get(path),
                "list": lambda: client.get("/v1/videos?limit=5"),
                "cancel": lambda path=path: client.post(f"{path}/cancel"),
                "delete": lambda path=path: client.delete(path),
                "content": lambda path=path: client.get(f"{path}/content"),
            }[action]()
        if answer.status_code not in (200, 404, 409, 429):
            errors.append((action, answer.status_code, answer.text))


def test_many_clients_leave_the_queue_in_order(tmp_path):
    errors: list[object] = []
    with listening(tmp_path, step_seconds=0.001, serve_max_queue=50) as (server, _):
        threads = [
            threading.Thread(target=visit, args=(server, number, errors))
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ends = time.monotonic() + 30
        store = server.queue.store
        while store.unfinished():
            assert time.monotonic() < ends, store.counts()
            time.sleep(0.05)
        time.sleep(0.3)
        assert errors == []
        jobs, _ = store.page("local", limit=10_000)
        # Every job ended, nothing is remembered that is gone, every file has its job.
        assert {job.status for job in jobs} <= {"completed", "failed"}
        assert server.queue._running == {}
        assert server.queue._cancelled == set()
        completed = {job.id for job in jobs if job.status == "completed"}
        found = {path.name.split(".")[0] for path in server.queue.library.folder.iterdir()}
        assert found == completed
