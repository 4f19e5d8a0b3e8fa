"""Starts the server: HTTP in a side thread, the device loop in the main thread.

    main thread   resolve -> load -> compile -> device loop      owns jax and the signals
    side thread   uvicorn: the application of `app.py`           answers from the first second
    side thread   housekeeping: retention, abandoned jobs

jax releases the interpreter lock while it compiles and while devices work, but not while it traces;
a short switch interval keeps answers quick then. SIGTERM stops the loop at the next step and gives
the job back to the queue; a step that takes longer than the grace period is given up, and the next
start takes its job up again.
"""

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from maxdiffusion.config import Config
from maxdiffusion.config.job_fields import stated_inputs
from maxdiffusion.config.load import ParsedConfig
from maxdiffusion.errors import Collector, Problem, ProblemsFound, RunFailed
from maxdiffusion.serving.app import Api, make_app
from maxdiffusion.serving.offer import Offer
from maxdiffusion.serving.queue import JobQueue, state_folder
from maxdiffusion.serving.security import Access
from maxdiffusion.serving.store import JobStore, new_id, open_database

logger = logging.getLogger(__name__)
SWITCH_SECONDS = 0.0005  # p95 of a status call next to a thread that traces: 34 ms -> 6 ms
TIDY_SECONDS = 5.0
STREAM_GRACE_SECONDS = 1
IDLE_CONNECTION_SECONDS = 75  # longer than clients poll; uvicorn closes after 5 otherwise
START_SECONDS = 30.0
HUNG = 3


class FrontDoor:
    """The HTTP server in its thread, and the housekeeping of the queue."""

    def __init__(self, config: Config, queue: JobQueue, offer: Offer, access: Access):
        self._config, self._queue = config, queue
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._api = Api(queue, offer, access, hang_seconds=config.hang_timeout_seconds)
        self._socket = listening_socket(config)
        self.port: int = self._socket.getsockname()[1]
        settings = uvicorn.Config(
            make_app(self._api),
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STREAM_GRACE_SECONDS,
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            lifespan="off",
        )
        self._server = uvicorn.Server(settings)
        self._threads = [
            threading.Thread(target=self._serve, name="http", daemon=True),
            threading.Thread(target=self._keep_house, name="housekeeping", daemon=True),
        ]

    def start(self) -> None:
        """Starts to answer."""
        for thread in self._threads:
            thread.start()
        host = self._config.serve_host
        shown = f"[{host}]" if ":" in host else host
        logger.info("http://%s:%d answers; not ready yet", shown, self.port)

    def stop(self) -> None:
        """Closes event streams and ends the server."""
        self._ended.set()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._api.closing.set)
            self._queue.notify()
        self._server.should_exit = True
        self._threads[0].join(timeout=STREAM_GRACE_SECONDS + 4)
        self._socket.close()

    def _serve(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        try:
            asyncio.run(serve())
        except Exception:
            logger.exception("the HTTP server failed")
        if not self._ended.is_set():  # no client could reach the device loop any more
            self._queue.stop()

    def _keep_house(self) -> None:
        pause = min(TIDY_SECONDS, self._config.serve_lease_seconds / 4)
        while not self._ended.wait(pause):
            try:
                self._queue.tidy()
                if self._queue.store.shared:
                    self._queue.keep_claims()
                    self._queue.take_back()
            except Exception as error:
                logger.warning("housekeeping: %s", str(error).splitlines()[0])


def listening_socket(config: Config) -> socket.socket:
    """Returns the socket of the server; raises ProblemsFound if the address cannot be used."""
    family = socket.AF_INET6 if ":" in config.serve_host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is stated: 40 ms per answer.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((config.serve_host, config.serve_port))
    except OSError as error:
        opened.close()
        rule = f"the server cannot listen on {config.serve_host}: {error.strerror}"
        remedy = "Name another serve_port, or serve_port=0 for a free one"
        problem = Problem(name="serve_port", value=config.serve_port, rule=rule, remedy=remedy)
        raise ProblemsFound([problem]) from None
    opened.listen(256)
    return opened


@contextmanager
def only_server(state: Path) -> Iterator[None]:
    """Locks the folder of the queue: two servers on one file would take the same jobs."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "server.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            problem = Problem(
                name="serve_dir",
                value=str(state),
                rule="another server uses this folder",
                remedy="Stop it, name another folder, or share a queue by serve_database_url",
            )
            raise ProblemsFound([problem]) from None
        yield


def check_no_inputs(config: Config) -> None:
    """Raises if the config states latents, images or videos: requests bring theirs."""
    stated = {"latents_path": config.latents_path, **stated_inputs(config)}
    rule = "serve_wan makes videos from what requests bring"
    Collector(
        [
            Problem(name=name, value=value, rule=rule, remedy="Leave it empty")
            for name, value in stated.items()
            if value
        ]
    ).raise_if_any()


def serve(parsed: ParsedConfig) -> None:
    """Runs the server of a config until SIGTERM or SIGINT; every process of a job calls it."""
    from maxdiffusion.serving.device.worker import Worker  # jax

    sys.setswitchinterval(SWITCH_SECONDS)
    check_no_inputs(parsed.config)
    worker = Worker.resolve(parsed)
    if not worker.is_first:
        stop_on_signals(worker.stop, parsed.config)
        worker.prepare(lambda name, seconds: None, None)
        worker.run(None, None)
        worker.leave()
        return
    config, state = parsed.config, state_folder(parsed.config)
    access = Access.of(config)
    with only_server(state):
        store = JobStore(
            open_database(config.serve_database_url, state),
            replica=new_id(),
            lease_seconds=config.serve_lease_seconds,
        )
        queue = JobQueue.open(config, store, worker.files)
        front = FrontDoor(config, queue, worker.offer(), access)
        stop_on_signals(queue.stop, config)
        front.start()
        try:
            run_first(worker, queue, front, state)
        finally:
            front.stop()
            store.close()
    worker.leave()


def run_first(worker: Any, queue: JobQueue, front: FrontDoor, state: Path) -> None:
    """Prepares the model and makes videos, on the process that takes requests."""

    def phase(name: str, seconds: float) -> None:
        queue.sign()
        queue.metrics.startup.labels(phase=name).set(seconds)

    worker.prepare(phase, state)
    queue.ready = True
    queue.metrics.ready.set(1)
    waiting = queue.store.counts()["queued"]
    logger.info("ready on port %d: %d jobs wait", front.port, waiting)
    worker.run(queue, state)
    if not queue.stopping.is_set():
        raise RunFailed("another process of the job was stopped")


def stop_on_signals(stop: Any, config: Config) -> None:
    """Calls `stop` on SIGTERM and SIGINT; ends the process if that takes too long."""

    def on_signal(number: int, frame: object) -> None:
        stop()
        timer = threading.Timer(config.serve_stop_seconds, os._exit, (HUNG,))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
