"""Batches in a fixed order, through grain, and the synthetic clips that need no files.

The position in the order is a number of batches, and a process takes the rows of every batch that
follow those of the process before it. So a run continues exactly, on any number of processes.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np

from maxdiffusion.errors import Collector, Problem, ProblemsFound
from maxdiffusion.training.data.synthetic import (
    ClipFormat,
    Pool,
    Scene,
    caption,
    draw_scene,
    render,
)

logger = logging.getLogger(__name__)
READ_AHEAD = 4  # batches, at least
NEXT, ORDER = "next_index", "order"  # of a position
Sample = Mapping[str, np.ndarray]
Assemble = Callable[[Mapping[str, np.ndarray]], Any]


@runtime_checkable
class Samples(Protocol):
    """Interface of samples by number; the same number gives the same sample."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, index: int) -> Sample:
        """Returns one sample."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Batch size, and the seed of the order of samples (None: unshuffled).

    `threads` batches are read ahead, each by a thread.
    """

    batch: int
    seed: int | None = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.threads < 1:
            raise ValueError(f"batch={self.batch}, threads={self.threads}: must be at least 1")


class Batches:
    """An endless stream of batches with a position.

    Each process gets its own share of every batch. Samples of several sizes are a tuple with one
    entry for each size: a batch has one size, and each size has the same share of the batches as
    of the samples.
    """

    def __init__(
        self, samples: Samples | tuple[Samples, ...], order: Order, assemble: Assemble = dict
    ):
        sizes = samples if isinstance(samples, tuple) else (samples,)
        problems = Collector(_too_few(sizes, order))
        with problems:
            _check_even(order)
        problems.raise_if_any()
        streams = [_stream(held, order) for held in sizes]
        batched = streams[0]
        if len(streams) > 1:
            # Depends on the number of the batch alone, so all processes get the same size.
            batched = grain.MapDataset.mix(streams, weights=[float(len(held)) for held in sizes])
        ahead = max(READ_AHEAD, order.threads)
        options = grain.ReadOptions(num_threads=order.threads, prefetch_buffer_size=ahead)
        self._iterator = iter(batched.to_iter_dataset(options))
        self._assemble = assemble
        self._order: dict[str, Any] = {
            "batch": order.batch,
            "seed": order.seed,
            "samples": [len(held) for held in sizes],
        }

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._assemble(next(self._iterator))

    @property
    def position(self) -> dict[str, Any]:
        """The position of the stream, as JSON values: finished batches, and their order."""
        return {**self._iterator.get_state(), ORDER: self._order}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continues from the position of a stream; warns if that stream had another order.

        After a change of the batch size alone, samples of one size continue after as many samples.
        """
        state = {name: value for name, value in position.items() if name != ORDER}
        before = position.get(ORDER, self._order)  # older positions do not have it
        changed = [name for name in self._order if before.get(name) != self._order[name]]
        if changed == ["batch"] and len(self._order["samples"]) == 1 and NEXT in state:
            state[NEXT] = state[NEXT] * before["batch"] // self._order["batch"]
        if changed:
            was = ", ".join(
                f"{name} {before.get(name)}, now {self._order[name]}" for name in changed
            )
            logger.warning(
                f"the clips of this run come in another order than before ({was}): "
                "some may be trained on twice, and others not, in this pass"
            )
        self._iterator.set_state(state)


def _stream(samples: Samples, order: Order) -> grain.MapDataset:
    """Returns this process's share of endless batches of one size."""
    dataset = grain.MapDataset.source(samples)
    if order.seed is not None:
        dataset = dataset.seed(order.seed).shuffle()
    # After the shuffle, so that all processes agree on what an epoch is.
    rows = order.batch // jax.process_count()
    share = _Rows(
        ordered=dataset.repeat(), batch=order.batch, rows=rows, process=jax.process_index()
    )
    return grain.MapDataset.source(share).batch(rows, drop_remainder=True)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows of one process in every batch of an endless order: neighbours, at its place."""

    ordered: grain.MapDataset
    batch: int
    rows: int
    process: int

    def __len__(self) -> int:
        return len(self.ordered) // self.batch * self.rows

    def __getitem__(self, index: int) -> Sample:
        number, row = divmod(int(index), self.rows)
        return self.ordered[number * self.batch + self.process * self.rows + row]


def _too_few(sizes: Sequence[Samples], order: Order) -> list[Problem]:
    """Returns a problem for every size with fewer samples than a batch."""
    problems = []
    for number, held in enumerate(sizes):
        if len(held) < order.batch:
            which = f" of size {number + 1} of {len(sizes)}" if len(sizes) > 1 else ""
            remedy = "Give more clips, or a smaller global_batch_size"
            if which:
                remedy += ", or leave this size out of video_buckets"
            rule = f"is fewer than one batch of {order.batch}"
            name = f"training clips{which}"
            problems.append(Problem(name=name, value=len(held), rule=rule, remedy=remedy))
    return problems


def _check_even(order: Order) -> None:
    """Raises ProblemsFound unless the processes can share a batch evenly."""
    processes = jax.process_count()
    if order.batch % processes:
        rule = f"must be a multiple of the {processes} processes"
        remedy = f"Use {order.batch // processes * processes or processes}"
        problem = Problem(name="global_batch_size", value=order.batch, rule=rule, remedy=remedy)
        raise ProblemsFound([problem])


@dataclass(frozen=True, kw_only=True)
class SyntheticClips:
    """The first `count` clips of a stream of moving shapes.

    With a `window`, clips are cut to a square of that many pixels around a shape: most of a clip is
    plain background, which an autoencoder learns quickly.
    """

    clip: ClipFormat
    count: int
    seed: int = 0
    pool: Pool = Pool.TRAINED
    window: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count}: must be at least 1")
        size = self.clip.size
        if self.window is not None and (not 16 <= self.window <= size or self.window % 16):
            raise ValueError(f"window={self.window}: must be a multiple of 16 up to {size}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        """Returns the frames of a clip, as bytes."""
        clip, scene = self.clip, self.scene(index)
        video = render(scene, frames=clip.frames, size=clip.size)
        return {"video": video if self.window is None else self._cut(video, scene, index)}

    def _cut(self, video: np.ndarray, scene: Scene, index: int) -> np.ndarray:
        """Returns the window around one of the shapes."""
        assert self.window is not None
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, index, 3))))
        shape = scene.objects[int(rng.integers(len(scene.objects)))]
        middle = np.array([shape.row, shape.column]) + rng.uniform(-0.3, 0.3, 2) * self.window
        corner = np.rint(middle - self.window / 2).astype(int)
        row, column = np.clip(corner, 0, self.clip.size - self.window)
        return video[:, row : row + self.window, column : column + self.window]

    def scene(self, index: int) -> Scene:
        """Returns the scene of a clip."""
        return draw_scene(self.clip, self.pool, seed=self.seed, index=index)

    def caption(self, index: int) -> str:
        """Returns the caption of a clip."""
        return caption(self.scene(index), seed=self.seed, index=index)

    def describe(self) -> dict[str, object]:
        """Returns everything that the clips depend on, as JSON values."""
        clip = self.clip
        return {
            "source": "synthetic",
            "count": self.count,
            "seed": self.seed,
            "pool": self.pool.name,
            "frames": clip.frames,
            "size": clip.size,
            "pair_share": clip.pair_share,
            "window": self.window,
        }


def as_signed(video: np.ndarray) -> np.ndarray:
    """Returns bytes as floats from -1 to 1."""
    return video.astype(np.float32) / 127.5 - 1.0
