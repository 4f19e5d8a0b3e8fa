"""Measures how fast weights load, with our reader and with safetensors' own.

    python scripts/bench_load.py --gigabytes 1 --stored bfloat16 --dtype bfloat16

Writes a synthetic checkpoint (a stack of transformer Linears in two components) to a temporary
folder, then alternates between reading its files from start to end and loading them with each
reader. Before each measurement the files are dropped from the page cache (cold) or left there
(warm). Processor seconds vary less than wall time on a machine with other work. The peak of the
resident memory is measured once per reader, each in a process of its own.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from maxdiffusion.checkpoints.load import ComponentSource, LoadOptions, load_components
from maxdiffusion.checkpoints.safetensors_io import (
    Box,
    FileReader,
    StoredTensor,
    TensorReader,
    TensorToWrite,
    open_weights,
    write_file,
)
from maxdiffusion.models.checkpoint_map import LINEAR, CheckpointMap, Entry, RopeHalves, linear

WIDTH, MLP, HEAD_DIM = 1536, 8960, 128  # of the 1.3B transformer
COMPONENTS = ("transformer", "transformer_2")
SHAPES = {"q": (WIDTH, WIDTH), "o": (WIDTH, WIDTH), "up": (WIDTH, MLP), "down": (MLP, WIDTH)}
DIMS = ("model", "mlp")  # the words that a mesh splits them by
BLOCK = 16 << 20


class SafetensorsReader(TensorReader):
    """Reads with `safe_open(...).get_slice`, one handle per file for all threads."""

    def __init__(self) -> None:
        self._handles: dict[Path, Any] = {}
        self._lock = threading.Lock()

    def read(self, tensor: StoredTensor, box: Box) -> np.ndarray:
        with self._lock:
            if tensor.file not in self._handles:
                self._handles[tensor.file] = safe_open(tensor.file, framework="np")
            handle = self._handles[tensor.file]
        values = handle.get_slice(tensor.name)[tuple(slice(*span) for span in box)]
        with self._lock:
            self.bytes_read += values.nbytes
        return values

    def close(self) -> None:
        self._handles.clear()


READERS: dict[str, type[TensorReader]] = {"ours": FileReader, "safetensors": SafetensorsReader}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--stored", default="float32", help="dtype in the files")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the parameters")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        stored = jnp.dtype(arguments.stored)
        layers = write_checkpoint(Path(root), arguments.gigabytes, stored)
        sources = {
            name: source_of(Path(root) / name, layers, jnp.dtype(arguments.dtype))
            for name in COMPONENTS
        }
        files = [file for source in sources.values() for file in source.stored.files]
        gigabytes = sum(file.stat().st_size for file in files) / 1e9
        print(
            f"{gigabytes:.2f} GB of {stored} to {arguments.dtype} in {2 * layers} layers of width"
            f" {WIDTH}; {os.cpu_count()} cores, {jax.devices()[0].device_kind}"
        )
        for state, prepare in (("cold", drop), ("warm", lambda _: None)):
            report(state, files, sources, prepare, arguments.rounds)
        for name in READERS:
            print(f"{name}: peak resident memory grows by {peak_growth(name, root, layers)} MB")


def report(
    state: str,
    files: list[Path],
    sources: dict[str, ComponentSource],
    prepare: Callable[[list[Path]], None],
    rounds: int,
) -> None:
    """Prints medians of every kind of measurement, made in turn."""
    size = sum(file.stat().st_size for file in files) / 1e9
    kinds: dict[str, Callable[[], object]] = {"raw read": lambda: read_all(files)}
    for name, reader in READERS.items():
        options = LoadOptions(reader=reader)
        kinds[name] = lambda options=options: jax.block_until_ready(
            load_components(sources, options=options)[0]
        )
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, work in kinds.items():
            prepare(files)
            began, cpu = time.perf_counter(), time.process_time()
            work()
            wall = time.perf_counter() - began
            found[name].append((size / wall, time.process_time() - cpu))
    for name, values in found.items():
        speeds, cpus = zip(*values, strict=True)
        print(
            f"{state} {name}: {statistics.median(speeds):.2f} GB/s ({min(speeds):.2f} to "
            f"{max(speeds):.2f}), {statistics.median(cpus):.2f} processor seconds "
            f"({min(cpus):.2f} to {max(cpus):.2f}), {rounds} rounds"
        )


def peak_growth(name: str, root: str, layers: int) -> int:
    """Returns the megabytes by which a load in a new process raises its peak memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_growth, (name, root, layers))


def _growth(name: str, root: str, layers: int) -> int:
    sources = {part: source_of(Path(root) / part, layers, jnp.bfloat16) for part in COMPONENTS}
    before = peak_memory()
    states = load_components(sources, options=LoadOptions(reader=READERS[name]))[0]
    jax.block_until_ready(states)
    return (peak_memory() - before) // 1000


def peak_memory() -> int:
    """Returns the peak resident memory in kilobytes; `ru_maxrss` would include the parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def write_checkpoint(root: Path, gigabytes: float, dtype: np.dtype) -> int:
    """Writes both components and returns the number of layers of each."""
    layer_bytes = sum(rows * columns for rows, columns in SHAPES.values()) * dtype.itemsize
    layers = max(1, round(gigabytes * 1e9 / layer_bytes / len(COMPONENTS)))
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(shape[::-1], np.float32).astype(dtype)
        for name, shape in SHAPES.items()
    }
    tensors = [
        TensorToWrite(
            name=f"blocks.{layer}.{name}.weight",
            dtype=dtype,
            shape=value.shape,
            values=lambda value=value: value,
        )
        for layer in range(layers)
        for name, value in values.items()
    ]
    for component in COMPONENTS:
        (root / component).mkdir()
        file = root / component / "diffusion_pytorch_model.safetensors"
        write_file(file, tensors)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    return layers


def source_of(folder: Path, layers: int, dtype: np.dtype) -> ComponentSource:
    """Returns a stack of Linears as parameters; queries are regrouped as in the transformer."""
    state = nnx.State(
        {
            name: {"kernel": nnx.Param(jax.ShapeDtypeStruct((layers, *shape), dtype), dims=DIMS)}
            for name, shape in SHAPES.items()
        }
    )
    rope = RopeHalves(HEAD_DIM, before=LINEAR)
    entries = [
        Entry(parameter="q.kernel", source="blocks.{layer}.q.weight", transform=rope),
        *(
            entry
            for name in ("o", "up", "down")
            for entry in linear(name, f"blocks.{{layer}}.{name}", bias=False)
        ),
    ]
    table = CheckpointMap(entries=tuple(entries), layers=layers)
    return ComponentSource(stored=open_weights(folder), table=table, abstract=state)


def read_all(files: list[Path]) -> None:
    """Reads the files from start to end into a buffer."""
    buffer = bytearray(BLOCK)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop(files: list[Path]) -> None:
    """Asks the system to drop the files from the page cache."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
