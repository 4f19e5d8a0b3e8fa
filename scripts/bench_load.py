"""Prints how fast weights load beside how fast the same files can be read.

    python scripts/bench_load.py --gigabytes 1 --dtype bfloat16

Writes a synthetic checkpoint (a stack of transformer Linears in two components) to a temporary
folder, then in turn reads its files from start to end and loads them, several times. Before each
measurement the files are dropped from the page cache (cold), or they are left there (warm).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxdiffusion.weights.checkpoint_map import LINEAR, CheckpointMap, Entry, RopeHalves, linear
from maxdiffusion.weights.loading import ComponentSource, load_components
from maxdiffusion.weights.safetensors_index import open_weights
from maxdiffusion.weights.safetensors_writer import TensorToWrite, write_file

WIDTH, MLP, HEAD_DIM = 1536, 8960, 128  # of the 1.3B transformer
COMPONENTS = ("transformer", "transformer_2")
SHAPES = {"q": (WIDTH, WIDTH), "o": (WIDTH, WIDTH), "up": (WIDTH, MLP), "down": (MLP, WIDTH)}
DIMS = ("model", "mlp")  # the words that a mesh splits them by
BLOCK = 16 << 20


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


def report(
    state: str,
    files: list[Path],
    sources: dict[str, ComponentSource],
    prepare: Callable[[list[Path]], None],
    rounds: int,
) -> None:
    """Prints medians of both speeds and their ratio, measured in turn."""
    size = sum(file.stat().st_size for file in files) / 1e9
    raw, load = [], []
    for _ in range(rounds):
        prepare(files)
        raw.append(size / seconds(lambda: read_all(files)))
        prepare(files)
        load.append(size / seconds(lambda: jax.block_until_ready(load_components(sources)[0])))
    raw_speed, load_speed = statistics.median(raw), statistics.median(load)
    print(
        f"{state}: raw read {raw_speed:.2f} GB/s, load {load_speed:.2f} GB/s,"
        f" ratio {load_speed / raw_speed:.2f} (median of {rounds})"
    )


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
    """The stack of Linears as parameters; queries are regrouped as in the transformer."""
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
    return ComponentSource(stored=open_weights(folder)[0], table=table, abstract=state)


def read_all(files: list[Path]) -> None:
    """Reads the files from start to end into a buffer."""
    buffer = bytearray(BLOCK)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop(files: list[Path]) -> None:
    """Asks the system to forget the files' pages."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
