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

    With several processes each has its own share of every batch.
    """

    def __init__(self, samples: Samples, order: Order, assemble: Assemble = dict):
        processes = jax.process_count()
        if len(samples) < order.batch:
            rule = f"is fewer than one batch of {order.batch}"
            remedy = "Give more clips, or a smaller global_batch_size"
            raise ProblemsFound(
                [Problem(name="training clips", value=len(samples), rule=rule, remedy=remedy)]
            )
        if order.batch % processes:
            rule = f"must be a multiple of the {processes} processes"
            remedy = f"Use {order.batch // processes * processes or processes}"
            name = "global_batch_size"
            raise ProblemsFound([Problem(name=name, value=order.batch, rule=rule, remedy=remedy)])
        dataset = grain.MapDataset.source(samples)
        if order.seed is not None:
            dataset = dataset.seed(order.seed).shuffle()
        # Shares are taken after the shuffle, so that all processes agree on what a pass is.
        dataset = dataset.repeat()[jax.process_index() :: processes]
        batched = dataset.batch(order.batch // processes, drop_remainder=True)
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


def together(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Samples stacked to one batch."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
