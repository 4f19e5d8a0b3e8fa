"""A server without a model: the real HTTP layer and queue, and a loop that draws simple videos."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from starlette.testclient import TestClient

from maxdiffusion.config.load import parse_config
from maxdiffusion.runtime.video import write_video
from maxdiffusion.serving.app import Api, make_app
from maxdiffusion.serving.offer import Offer, Size
from maxdiffusion.serving.queue import JobQueue
from maxdiffusion.serving.security import Access
from maxdiffusion.serving.server import FrontDoor
from maxdiffusion.serving.store import Job, JobStore, new_id, open_database

TINY = Path(__file__).parents[2] / "configs/wan_tiny.yml"
SIZES = (Size(width=64, height=64, frames=9), Size(width=96, height=64, frames=9))

PLAN = {
    "device": "TPU7x",
    "devices": 8,
    "mesh": {"data": 2, "ring": 2, "ulysses": 2},
    "attention": "ulysses_ring_custom",
    "runs": "ulysses_ring_custom",
    "scheme": "ring 2 x Ulysses 2",
    "kernel": "flash",
    "tokens": 75600,
    "text": "the plan",
}


def config_of(folder: Path, **overrides):
    values = {
        "serve_dir": str(folder / "state"),
        "output_dir": str(folder / "videos"),
        "serve_port": 0,
        "serve_free_bytes": 0,
    }
    return parse_config(str(TINY), values | overrides).checked()


def offer_of(config, **facts) -> Offer:
    usual = {
        "sizes": SIZES,
        "size_multiple": 16,
        "frame_step": 4,
        "most_pixels": 10**6,
        "schedulers": ("unipc", "euler"),
        "inputs": {"input_video": False},  # as the embedded model
        "plan": PLAN,
    }
    return Offer.of(config, **usual | facts)


class StandIn:
    """A queue with its HTTP layer; `run` makes videos in a thread, one step per `tick`."""

    def __init__(self, folder: Path, adapters: tuple[str, ...] = (), **overrides):
        self.config = config_of(folder, **overrides)
        self.state = Path(self.config.serve_dir)
        self.store = JobStore(
            open_database(self.config.serve_database_url, self.state),
            replica=new_id(),
            lease_seconds=self.config.serve_lease_seconds,
        )
        self.queue = JobQueue.open(self.config, self.store)
        self.access = Access.of(self.config)
        self.offer = offer_of(self.config, adapters=adapters)
        self.api = Api(self.queue, self.offer, self.access, hang_seconds=1800)
        self.app = make_app(self.api)
        self.queue.ready = True
        self.step_seconds = 0.0
        self._thread: threading.Thread | None = None

    def client(self, **headers: str) -> TestClient:
        return TestClient(self.app, base_url="http://127.0.0.1", headers=headers)

    def start(self) -> "StandIn":
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        self.queue.stop()
        if self._thread is not None:
            self._thread.join(10)
        self.store.close()

    def make_all(self) -> None:
        """Makes every queued video, in this thread."""
        while jobs := self.queue.take(1, wait_seconds=0.01):
            self._make(jobs[0])

    def _loop(self) -> None:
        while not self.queue.stopping.is_set():
            for job in self.queue.take(1, wait_seconds=0.05):
                self._make(job)

    def _make(self, job: Job) -> None:
        self.queue.stage([job.id], "denoising")
        for step in range(job.steps):
            time.sleep(self.step_seconds)
            if self.queue.stopping.is_set():
                self.queue.requeue([job])
                return
            if self.queue.cancelled([job.id]):
                self.queue.cancel_running(job)
                return
            self.queue.step([job.id], step + 1, self.step_seconds)
        if job.fields["prompt"] == "fail":
            self.queue.fail(job, "internal_error", "It failed.")
            return
        frames = np.full((9, job.fields["height"], job.fields["width"], 3), 128, np.uint8)
        write_video(self.queue.library.path(job.id), frames, fps=job.fields["fps"])
        self.queue.library.write_stills(job.id, frames)
        self.queue.complete(job, {"finish_seconds": 0.01})


@contextmanager
def listening(folder: Path, *, step_seconds: float = 0.0, **overrides) -> Iterator[tuple]:
    """Yields a stand-in and the address where it answers, over a real socket."""
    server = StandIn(folder, **overrides)
    server.step_seconds = step_seconds
    front = FrontDoor(server.config, server.queue, server.offer, server.access)
    front.start()
    server.start()
    try:
        yield server, f"http://127.0.0.1:{front.port}"
    finally:
        front.stop()
        server.stop()
