"""Batches in a fixed order through grain: the position is a number, so a run continues exactly."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grain
import jax
import numpy as np

from maxdiffusion.runtime.problems import Problem, ProblemsFound

Sample = Mapping[str, np.ndarray]
Assemble = Callable[[Mapping[str, np.ndarray]], Any]


class Samples(Protocol):
    """Samples by number; the same number gives the same sample."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int) -> Sample:
        """The sample of that number."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """How samples become batches: how many at once, and the seed of their order (None: as is)."""

    batch: int
    seed: int | None = 0
    threads: int = 1

    def __post_init__(self) -> None:
        if self.batch < 1 or self.threads < 1:
            raise ValueError(f"batch={self.batch}, threads={self.threads}: must be at least 1")


class Batches:
    """An endless stream of batches that knows where it stands.

    With several processes each has its own share of every batch. Samples of several sizes are a
    tuple, one entry for each size: a batch has one size, and each size has as large a share of the
    batches as it has of the samples.
    """

    def __init__(
        self, samples: Samples | tuple[Samples, ...], order: Order, assemble: Assemble = dict
    ):
        sizes = samples if isinstance(samples, tuple) else (samples,)
        problems = [*_too_few(sizes, order), *_uneven(order)]
        if problems:
            raise ProblemsFound(problems)
        streams = [_stream(held, order) for held in sizes]
        batched = streams[0]
        if len(streams) > 1:
            # A function of the number of a batch alone: all processes get the same size.
            batched = grain.MapDataset.mix(streams, weights=[float(len(held)) for held in sizes])
        options = grain.ReadOptions(num_threads=order.threads, prefetch_buffer_size=4)
        self._iterator = iter(batched.to_iter_dataset(options))
        self._assemble = assemble

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._assemble(next(self._iterator))

    @property
    def position(self) -> dict[str, Any]:
        """Where the stream stands, as plain numbers."""
        return dict(self._iterator.get_state())

    def seek(self, position: Mapping[str, Any]) -> None:
        """Goes on from where a stream over the same samples stood."""
        self._iterator.set_state(dict(position))


def _stream(samples: Samples, order: Order) -> grain.MapDataset:
    """Endless batches of samples of one size: this process's share of each."""
    processes = jax.process_count()
    dataset = grain.MapDataset.source(samples)
    if order.seed is not None:
        dataset = dataset.seed(order.seed).shuffle()
    # Shares are taken after the shuffle, so that all processes agree on what a pass is.
    dataset = dataset.repeat()[jax.process_index() :: processes]
    return dataset.batch(order.batch // processes, drop_remainder=True)


def _too_few(sizes: Sequence[Samples], order: Order) -> Iterator[Problem]:
    for number, held in enumerate(sizes):
        if len(held) < order.batch:
            which = f" of size {number + 1} of {len(sizes)}" if len(sizes) > 1 else ""
            remedy = "Give more clips, or a smaller global_batch_size"
            if which:
                remedy += ", or leave this size out of video_buckets"
            rule = f"is fewer than one batch of {order.batch}"
            name = f"training clips{which}"
            yield Problem(name=name, value=len(held), rule=rule, remedy=remedy)


def _uneven(order: Order) -> Iterator[Problem]:
    processes = jax.process_count()
    if order.batch % processes:
        rule = f"must be a multiple of the {processes} processes"
        remedy = f"Use {order.batch // processes * processes or processes}"
        yield Problem(name="global_batch_size", value=order.batch, rule=rule, remedy=remedy)
