"""Measures the clips that a host delivers to a training, against those that its devices can use.

    python scripts/bench_training_data.py --clips 48 --batch 8 --threads 1 4 8
    python scripts/bench_training_data.py --kind tfrecord --latent 21 60 104

Writes encoded clips of one size (a cache of safetensors shards, or tfrecord files) to a temporary
folder and reads them in shuffled batches as a training does. Before each measurement the files are
dropped from the page cache (cold) or left there (warm). `--folder gs://...` measures a bucket.
The clips that devices can use are bounded by their stated peak: peak / FLOP of a clip, forward and
backward, at an MFU of 1, which no training reaches. The bound needs no prediction of a step. On a
machine with other work, clips per second of a processor vary less than clips per second.
"""

import argparse
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxdiffusion.costs.chips import CHIPS
from maxdiffusion.models.wan.config import WanTransformerConfig, wan_2_1_t2v_1_3b, wan_14b
from maxdiffusion.runtime.files import FilePath, as_path, replacing
from maxdiffusion.training.data.batches import Batches, Order, Samples
from maxdiffusion.training.data.latent_cache import (
    EMPTY,
    MANIFEST,
    ClipsWithText,
    save_shard,
    shard_file,
)
from maxdiffusion.training.data.records import RecordClips
from maxdiffusion.training.data.store import as_clip_batch
from maxdiffusion.training.data.tfrecord import list_records, masked_crc
from maxdiffusion.training.metrics import BACKWARD, forward_flops

CHANNELS, TEXT_WIDTH, TEXT_ROWS = 16, 4096, 512
SHARD_BYTES = 2**28
DEVICES_OF_HOST = {"v6e": 8, "tpu7x": 8}  # ct6e-standard-8t, and four chips of two devices
FRAMES = {"image": 1, "81 frames": 21}  # latent frames
SIZES = {"480x832": (60, 104), "720x1280": (90, 160)}  # latent rows and columns
FLOAT, TENSOR = 1, 2  # DataType, and the wire type of bytes


def main() -> None:
    """Prints what was measured and what is needed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("cache", "tfrecord"), default="cache")
    parser.add_argument("--latent", type=int, nargs=3, default=(21, 60, 104))
    parser.add_argument("--caption-tokens", type=int, default=128)
    parser.add_argument("--clips", type=int, default=48)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 4, 8))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default="", help="where to write; empty = a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = as_path(given.folder or scratch)
        samples = written(folder, given)
        size = sum(array.nbytes for array in samples[0].values()) / 1e6
        print(
            f"{given.kind}: {len(samples)} clips of {size:.1f} MB in {given.folder or 'a folder'}"
        )
        for threads in given.threads:
            for state in ("cold", "warm") if isinstance(folder, Path) else ("storage",):
                print(measured(samples, folder, given, threads, state, size))
    print("\nmost that the 8 devices of a host can use (MFU 1; 0.4 is a good training)")
    for line in needs():
        print(line)


def measured(
    samples: Samples,
    folder: FilePath,
    given: argparse.Namespace,
    threads: int,
    state: str,
    size: float,
) -> str:
    """Returns the median rate of several passes, by the clock and by the time of processors."""
    rates, per_core = [], []
    clips = given.batch * given.batches
    for repeat in range(given.repeats):
        if state == "cold":
            drop(folder)
        order = Order(batch=given.batch, seed=repeat, threads=threads)
        began, worked = time.perf_counter(), time.process_time()
        batches = Batches(samples, order, as_clip_batch)
        for _ in range(given.batches):
            next(batches)
        rates.append(clips / (time.perf_counter() - began))
        per_core.append(clips / (time.process_time() - worked))
    rate = statistics.median(rates)
    return (
        f"{threads:3d} threads, {state:8s} {rate:8.1f} clips/s ({min(rates):.1f}-{max(rates):.1f}) "
        f"{rate * size / 1e3:6.2f} GB/s, {statistics.median(per_core):7.1f} clips per core second"
    )


def drop(folder: FilePath) -> None:
    """Drops the files of a folder from the page cache."""
    assert isinstance(folder, Path)
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def needs() -> Iterator[str]:
    """Yields the bounds of two models on two chips."""
    models: dict[str, WanTransformerConfig] = {"1.3B": wan_2_1_t2v_1_3b(), "A14B": wan_14b()}
    for name, config in models.items():
        for kind, frames in FRAMES.items():
            for picture, (rows, columns) in SIZES.items():
                tokens = config.tokens((frames, rows, columns))
                flops = (1 + BACKWARD) * forward_flops(config, tokens, TEXT_ROWS)
                rates = ", ".join(
                    f"{chip} {devices * CHIPS[chip].bf16_flops / flops:8.3f} clips/s"
                    f" = {devices * CHIPS[chip].bf16_flops / flops * tokens / 1e6:5.2f} Mtokens/s"
                    for chip, devices in DEVICES_OF_HOST.items()
                )
                yield f"{name} {picture:8s} {kind:9s} {tokens:6d} tokens a clip: {rates}"


# Clips of random numbers


def written(folder: FilePath, given: argparse.Namespace) -> Samples:
    """Writes the clips, and returns them as samples."""
    folder.mkdir(parents=True, exist_ok=True)
    if given.kind == "tfrecord":
        file = folder / "file_00.tfrec"
        write_records(file, given)
        records = tuple((file, record) for record in list_records(file))
        return RecordClips(records=records)
    rng = np.random.default_rng(0)
    rows, text_rows = given.clips, given.caption_tokens
    clip_bytes = 4 * CHANNELS * int(np.prod(given.latent))
    shard = max(1, SHARD_BYTES // clip_bytes)
    (folder / MANIFEST).write_text("{}")
    for number, first in enumerate(range(0, rows, shard)):
        count = min(shard, rows - first)
        latents = rng.standard_normal((count, *given.latent, CHANNELS), np.float32)
        ids = np.zeros((count, text_rows), np.int32)
        lengths = np.full(count, text_rows, np.int32)
        tensors = {"latents": latents, "ids": ids, "lengths": lengths}
        save_shard(shard_file(folder, number), tensors)
        text = rng.standard_normal((count, text_rows, TEXT_WIDTH), np.float32)
        save_shard(shard_file(folder, number, "text"), {"text": text})
    save_shard(folder / EMPTY, {"text": np.zeros((text_rows, TEXT_WIDTH), np.float32)})
    return ClipsWithText(folder)


def write_records(file: FilePath, given: argparse.Namespace) -> None:
    """Writes clips as Examples of serialized tensors."""
    rng = np.random.default_rng(0)
    with replacing(file) as unfinished, unfinished.open("wb") as stream:
        for _ in range(given.clips):
            latents = rng.standard_normal((CHANNELS, *given.latent), np.float32)
            text = np.zeros((TEXT_ROWS, TEXT_WIDTH), np.float32)
            text[: given.caption_tokens] = rng.standard_normal((given.caption_tokens, TEXT_WIDTH))
            features = _feature("latents", latents) + _feature("encoder_hidden_states", text)
            record = _bytes(1, features)
            length = struct.pack("<Q", len(record))
            stream.write(length + struct.pack("<I", masked_crc(length)))
            stream.write(record + struct.pack("<I", masked_crc(record)))


def _feature(name: str, array: np.ndarray) -> bytes:
    """Returns an entry of an Example's features: a list of one serialized tensor."""
    shape = b"".join(_bytes(2, b"\x08" + _varint(size)) for size in array.shape)
    tensor = b"\x08" + _varint(FLOAT) + _bytes(2, shape) + _bytes(4, array.tobytes())
    return _bytes(1, _bytes(1, name.encode()) + _bytes(2, _bytes(1, _bytes(1, tensor))))


def _bytes(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | TENSOR) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


if __name__ == "__main__":
    main()
