"""Runs `serve_wan` with the embedded model in its own process, and kills it at a chosen point.

As a program: python real_server.py POINT ARGUMENTS of serve_wan ...
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs/wan_tiny.yml"
# One short text length and few steps: the server is ready in seconds.
QUICK = ("max_sequence_length=64", "num_inference_steps=6", "serve_port=0", "serve_free_bytes=0")
NEVER, FAILURES = "never", "failures"
AFTER_LATENTS = ("half written", "written", "completed")
POINTS = ("claimed", "third step", "latents stored", *AFTER_LATENTS)


class RealServer:
    """A server process."""

    def __init__(self, folder: Path, *arguments: str, point: str = NEVER):
        self.log = folder / "log"
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        variables["PYTHONPATH"] = f"{ROOT / 'src'}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, __file__, point, str(TINY), *QUICK),
                    *(f"serve_dir={folder / 'state'}", f"output_dir={folder / 'videos'}"),
                    *(f"aot_cache_dir={folder / 'programs'}", *arguments),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
            )
        self.started = time.monotonic()
        self.address = self._address()

    def _address(self) -> str:
        while True:
            for line in self.log.read_text().splitlines():
                if line.endswith("answers; not ready yet"):
                    return line.split()[0]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Returns the JSON of an answer, errors included."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return json.loads(error.read())

    def fetch(self, path: str) -> bytes:
        """Returns the bytes of an answer."""
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return answer.read()

    def wait(self, path: str, condition: Any, seconds: float = 90) -> Any:
        """Returns an answer once it fulfils a condition."""
        ends = time.monotonic() + seconds
        while not condition(found := self.call("GET", path)):
            assert time.monotonic() < ends, (found, self.log.read_text()[-3000:])
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.02)
        return found

    def wait_ready(self) -> float:
        """Returns the seconds from the start to ready."""
        self.wait("/readyz", lambda found: found["ready"])
        return time.monotonic() - self.started

    def steps_done(self) -> int:
        """Returns how many denoise steps this process has done."""
        name = "maxdiffusion_step_seconds_count"
        lines = self.fetch("/metrics").decode().splitlines()
        return int(float(next(line for line in lines if line.startswith(name)).split()[1]))

    def killed(self, seconds: float = 90) -> bool:
        """Waits until the process was killed by its own kill -9."""
        return self.process.wait(seconds) == -signal.SIGKILL

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


def kill_now(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(point: str, arguments: list[str]) -> int:
    """Runs the command; the process kills itself when it reaches the point."""
    from maxdiffusion.serve_wan import main as serve
    from maxdiffusion.serving import library, queue, store
    from maxdiffusion.serving.device import worker

    def after(owner: Any, name: str, *, calls: int = 1) -> None:
        original, count = getattr(owner, name), 0

        def call(*positional: Any, **named: Any) -> Any:
            nonlocal count
            result = original(*positional, **named)
            count += 1
            if count == calls:
                kill_now()
            return result

        setattr(owner, name, call)

    if point in AFTER_LATENTS:
        queue.JobQueue.step = lambda *_, **__: os._exit(7)
    if point == "claimed":
        after(store.JobStore, "claim", calls=1)
        original = store.JobStore.claim

        def claim(self: Any, *positional: Any, **named: Any) -> Any:
            return original(self, *positional, **named) if self.counts()["queued"] else []

        store.JobStore.claim = claim
    elif point == "third step":
        after(queue.JobQueue, "step", calls=3)
    elif point == "latents stored":
        after(worker, "store_latents")
    elif point == "half written":
        import maxdiffusion.runtime.video as video

        original_encode = video._encode

        def encode(path: Path, *positional: Any, **named: Any) -> None:
            original_encode(path, *positional, **named)
            path.write_bytes(path.read_bytes()[:500])
            kill_now()

        video._encode = encode
    elif point == "written":
        library.Library.write_stills = kill_now
    elif point == "completed":
        after(store.JobStore, "complete")
    elif point == FAILURES:
        break_seeds(worker)
    return serve(arguments)


def break_seeds(worker: Any) -> None:
    """Makes decoding, writing and denoising fail for some seeds."""
    import jax

    from maxdiffusion.diffusion.denoise import NotFiniteError

    decode, write = worker.VideoPipeline.decode, worker.write_file
    denoise = worker.VideoPipeline.denoise

    def decode_or_fail(self: Any, request: Any, *positional: Any) -> Any:
        if 666 in request.seeds:
            raise RuntimeError("the decoder is broken")
        return decode(self, request, *positional)

    def write_or_fail(provenance: Any, video: Any, frames: Any) -> None:
        if video.seed == 667:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(provenance, video, frames)

    def denoise_or_fail(self: Any, request: Any, experts: Any) -> Any:
        if 668 in request.seeds:
            raise NotFiniteError(step=0, steps=1, timestep=1.0, expert="x")
        return denoise(self, request, experts)

    compile_all = worker.Worker._compile_kind

    def compile_or_wait(self: Any, fields: Any, keys: Any) -> None:
        if fields["width"] == 64:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: by the test")
        while fields["width"] == 48 and not (self.files._folder.parents[1] / "compile").exists():
            time.sleep(0.02)
        compile_all(self, fields, keys)

    worker.Worker._compile_kind = compile_or_wait
    worker.VideoPipeline.decode, worker.write_file = decode_or_fail, write_or_fail
    worker.VideoPipeline.denoise = denoise_or_fail


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
