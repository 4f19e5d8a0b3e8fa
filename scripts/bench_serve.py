"""Measures the server while its device loop is busy: python scripts/bench_serve.py [SECONDS|fleet]

Starts serve_wan with the embedded model on this machine's CPU, fills its queue and calls it:

    status      GET /v1/videos/{id}, one call after the other, while videos are made
    idle        the same with nothing to make: the HTTP layer and the queue alone
    queue       jobs accepted, held at once, completed; lost = accepted but never finished
    memory      growth of the process over the second half of the run

The last lines are the table of docs/serving.md. `fleet` compares the simulation of plan_fleet with
the server under the same arrivals.
"""

import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROMPT = "a red circle moves right on a white background"
HELD = 200  # jobs in the queue during the run
LONG = 1000  # requests for the depth that is held


class Client:
    """One connection that is kept open."""

    def __init__(self, address: str):
        self._connection = http.client.HTTPConnection(address, timeout=60)

    def call(self, method: str, path: str, body: object = None) -> dict:
        """Returns the JSON of an answer."""
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        content = json.loads(answer.read())
        if answer.status >= 400 and path != "/readyz":
            raise SystemExit(f"{method} {path}: {answer.status} {content}")
        return content


def start(folder: Path) -> tuple[subprocess.Popen, str]:
    """Returns the server process and its address, once it is ready."""
    log = folder / "log"
    arguments = [
        *("serve_port=0", f"serve_dir={folder / 'state'}", f"output_dir={folder / 'videos'}"),
        *(f"aot_cache_dir={folder / 'programs'}", "serve_free_bytes=0", "serve_max_queue=2000"),
        "serve_max_jobs_per_key=2000",
    ]
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "maxdiffusion.serve_wan"),
                *(str(ROOT / "configs/wan_tiny.yml"), *arguments),
            ],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=variables,
        )
    while "answers; not ready yet" not in log.read_text():
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    lines = [line for line in log.read_text().splitlines() if "answers" in line]
    address = lines[0].split()[0].removeprefix("http://")
    client = Client(address)
    while not client.call("GET", "/readyz")["ready"]:
        time.sleep(0.05)
    return process, address


def latencies(client: Client, identifier: str, seconds: float) -> list[float]:
    """Returns the milliseconds of status calls, made every 10 ms."""
    found, ends = [], time.monotonic() + seconds
    while time.monotonic() < ends:
        began = time.perf_counter()
        client.call("GET", f"/v1/videos/{identifier}")
        found.append((time.perf_counter() - began) * 1000)
        time.sleep(0.01)
    return found


def percentiles(values: list[float]) -> str:
    """Returns p50, p95 and p99 as cells of a table."""
    cuts = statistics.quantiles(values, n=100)
    return f"{cuts[49]:.1f} | {cuts[94]:.1f} | {cuts[98]:.1f}"


def memory(process: subprocess.Popen) -> float:
    """Returns the resident megabytes of a process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1000


def completed(client: Client) -> int:
    """Returns how many jobs have completed."""
    connection = client._connection
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    name = 'maxdiffusion_jobs{status="completed"}'
    return int(float(next(x for x in text.splitlines() if x.startswith(name)).split()[1]))


def make(client: Client, steps: int) -> str:
    """Queues a video and returns its id."""
    body = {"prompt": PROMPT, "num_inference_steps": steps}
    return client.call("POST", "/v1/videos", body)["id"]


def seconds_of(client: Client, steps: int, count: int = 12) -> float:
    """Returns the seconds of a video while others wait."""
    began = time.perf_counter()
    jobs = [make(client, steps) for _ in range(count)]
    while client.call("GET", f"/v1/videos/{jobs[-1]}")["status"] != "completed":
        time.sleep(0.005)
    return (time.perf_counter() - began) / count


def check_fleet(videos: int = 150, busy: float = 0.6) -> None:
    """Compares the simulation of plan_fleet with the server under the same arrivals."""
    import numpy as np

    from maxdiffusion.costs.fleet import Load, Work, waits

    with tempfile.TemporaryDirectory() as folder:
        process, address = start(Path(folder))
        try:
            client = Client(address)
            seconds_of(client, 20)
            kinds = {steps: seconds_of(client, steps) for steps in (20, 80)}
            works = tuple(Work(name=str(steps), seconds=one) for steps, one in kinds.items())
            mean = sum(kinds.values()) / len(kinds)
            load = Load(per_hour=3600 * busy / mean, works=works)
            arrivals, seconds = load.draw(videos)
            expected = waits(arrivals, seconds, 1) + seconds
            steps_of = {one: steps for steps, one in kinds.items()}
            measured = answer_times(client, arrivals, [steps_of[one] for one in seconds])
        finally:
            process.terminate()
            process.wait(60)
    print(f"{videos} Poisson arrivals, one server {busy:.0%} busy, videos of {kinds} s by steps")
    print("| seconds from request to video | simulated | measured | error |\n|---|---|---|---|")
    for name, pick in (
        ("mean", np.mean),
        ("p50", np.median),
        ("p95", lambda values: np.quantile(values, 0.95)),
    ):
        simulated, found = float(pick(expected)), float(pick(measured))
        print(f"| {name} | {simulated:.2f} | {found:.2f} | {simulated / found - 1:+.0%} |")


def answer_times(client: Client, arrivals: object, steps: list[int]) -> list[float]:
    """Sends requests at the given times; returns the seconds until each video is there."""
    began, sent, done = time.perf_counter(), {}, {}
    waiting = list(zip(arrivals, steps, strict=True))
    while len(done) < len(steps):
        now = time.perf_counter() - began
        if waiting and waiting[0][0] <= now:
            arrival, count = waiting.pop(0)
            sent[make(client, count)] = arrival
            continue
        open_jobs = [name for name in sent if name not in done]
        for name in open_jobs[:2]:  # one server finishes them in order
            if client.call("GET", f"/v1/videos/{name}")["status"] == "completed":
                done[name] = time.perf_counter() - began
        time.sleep(0.004)
    return [done[name] - arrival for name, arrival in sent.items()]


def main(seconds: float) -> None:
    """Runs the measurements and prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        process, address = start(Path(folder))
        try:
            client = Client(address)
            first = client.call("POST", "/v1/videos", {"prompt": PROMPT})["id"]
            while client.call("GET", f"/v1/videos/{first}")["status"] != "completed":
                time.sleep(0.05)
            idle = latencies(client, first, min(5.0, seconds))
            began = time.perf_counter()
            jobs = [
                client.call("POST", "/v1/videos", {"prompt": PROMPT, "seed": seed})["id"]
                for seed in range(HELD)
            ]
            posted = (time.perf_counter() - began) / HELD * 1000
            before = memory(process)
            busy = latencies(client, jobs[-1], seconds / 2)
            middle = memory(process)
            busy += latencies(client, jobs[-1], seconds / 2)
            after = memory(process)
            done = completed(client) - 1
            held = len(jobs)
            for number in range(LONG - HELD):
                client.call("POST", "/v1/videos", {"prompt": PROMPT, "seed": number})
                held += 1
            deep = latencies(client, jobs[-1], min(5.0, seconds))
        finally:
            process.terminate()
            process.wait(60)
        process, address = start(Path(folder))
        try:
            client = Client(address)
            pages, after_id = 0, ""
            while True:
                page = client.call("GET", f"/v1/videos?limit=100{after_id}")
                pages += len(page["data"])
                if not page["has_more"]:
                    break
                after_id = f"&after={page['last_id']}"
        finally:
            process.terminate()
            process.wait(60)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {len(busy)} status calls")
    print(f"videos made during {seconds:g} s: {done}; a POST took {posted:.1f} ms")
    print("| status calls, ms | p50 | p95 | p99 |\n|---|---|---|---|")
    print(f"| nothing to make | {percentiles(idle)} |")
    print(f"| device loop busy, {HELD} jobs queued | {percentiles(busy)} |")
    print(f"| device loop busy, {LONG} jobs queued | {percentiles(deep)} |")
    print(f"\nqueue depth held: {held}; jobs lost over a restart: {held + 1 - pages}; memory: ")
    print(f"{before:.0f} -> {middle:.0f} -> {after:.0f} MB")


if __name__ == "__main__" and sys.argv[1:] == ["fleet"]:
    check_fleet()
elif __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
