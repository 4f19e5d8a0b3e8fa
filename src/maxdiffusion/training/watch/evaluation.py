"""Evaluation on held-out clips: the same clips, noise levels and noise every time.

    clips of `eval_data_dir`, or synthetic ones that are not trained on
        -> batches in their order -> loss of every expert on its noise levels, running means
        -> eval/loss, eval/loss/EXPERT, eval/loss_LOW-HIGH (timesteps)

Losses are not weighted and captions are not dropped, so that runs with other settings compare. All
batches are started before the first result is read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.models.abstract import Values
from maxdiffusion.training.data.batches import Assemble, Batches, Order, Samples
from maxdiffusion.training.lora.adapters import AdapterLoss
from maxdiffusion.training.loss import BucketLosses
from maxdiffusion.training.step import NOT_FROZEN, Loss, TrainState, joined
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.wan import (
    BucketedTraining,
    Latent,
    WanTraining,
    latent_of,
    place_batch,
)

Program = Callable[[Any, Any, np.uint32], BucketLosses]  # weights, batch, number of the batch


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Returns the losses of a state on held-out clips.

    `samples` has the clips of every size; `frozen` are the weights that adapters are trained on.
    """

    buckets: BucketedTraining
    samples: Sequence[Samples]
    assemble: Assemble
    clips: int  # at most, of all sizes
    seed: int = 0
    frozen: Mapping[str, Values] = field(default_factory=lambda: NOT_FROZEN, repr=False)

    def __post_init__(self) -> None:
        if sum(self.counts) == 0:
            held = sum(map(len, self.samples))
            rule = f"is fewer than one batch of {self.order.batch} clips of a size"
            remedy = (
                "Give more clips in eval_data_dir, raise num_eval_samples, or set eval_every=-1"
            )
            raise ProblemsFound(
                [Problem(name="evaluation clips", value=held, rule=rule, remedy=remedy)]
            )

    @property
    def order(self) -> Order:
        """Batches of the size of one forward pass of training, in the order of the clips."""
        return Order(batch=self.buckets.training.batch.piece, seed=None)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The batches of every size: whole ones, in proportion if there are too many clips."""
        held = sum(map(len, self.samples))
        share = min(1.0, self.clips / max(1, held))
        return tuple(int(len(one) * share) // self.order.batch for one in self.samples)

    def describe(self) -> str:
        """Returns the line of the start-up report."""
        clips = self.order.batch * sum(self.counts)
        return f"evaluation: {clips} held-out clips, unweighted loss of the running means"

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Returns the mean loss of all clips, of each expert, and of each range of timesteps."""
        experts = self.buckets.training.experts.names
        found = {name: self._losses(name, state) for name in experts}
        by_expert = {name: _added(jax.device_get(parts)) for name, parts in found.items()}
        losses = {"eval/loss": _mean(_added(list(by_expert.values())))}
        if len(experts) > 1:
            losses |= {f"eval/loss/{name}": _mean(one) for name, one in by_expert.items()}
        buckets = _added(list(by_expert.values())).means()
        return losses | {f"eval/loss_{name}": value for name, value in buckets.items()}

    def _losses(self, name: str, state: TrainState) -> list[BucketLosses]:
        """Starts every batch of an expert; returns their results, which may not be ready yet."""
        values = joined(self.frozen, state.ema)
        used = {model: values[model] for model in (name, TEXT_ENCODER) if model in values}
        mesh = self.buckets.training.mesh
        found: list[BucketLosses] = []
        for samples, count in zip(self.samples, self.counts, strict=True):
            if not count:
                continue
            for batch in islice(Batches(samples, self.order, self.assemble), count):
                number = np.uint32(len(found))
                with jax.set_mesh(mesh):
                    program = self._program(name, latent_of(batch))
                    found.append(program(used, place_batch(batch, mesh), number))
        return found

    @cached_property
    def _program(self) -> Callable[[str, Latent], Program]:
        """The forward program of an expert and a size, compiled at first use."""
        everywhere = NamedSharding(self.buckets.training.mesh, PartitionSpec())

        @cache
        def program(name: str, latent: Latent) -> Program:
            loss = held_out_loss(self.buckets.by_latent[latent], name)

            def losses(values: Any, batch: Any, number: Any) -> BucketLosses:
                key = jax.random.fold_in(jax.random.key(self.seed), number)
                return loss(values, batch, key)[1]

            return jax.jit(losses, out_shardings=everywhere)

        return program


def held_out_loss(training: WanTraining, name: str) -> Loss:
    """Returns the loss of an expert, with every caption."""
    loss: Loss = replace(training, caption_dropout=0.0).loss(name)
    if training.lora is not None:
        loss = AdapterLoss(loss=loss, expert=name, lora=training.lora)
    return loss


def _added(parts: Sequence[BucketLosses]) -> BucketLosses:
    """Returns the sums of several results, on the host."""
    return jax.tree.map(lambda *leaves: np.sum(np.stack(leaves), axis=0, dtype=np.float64), *parts)


def _mean(losses: BucketLosses) -> float:
    return float(np.sum(losses.totals) / np.sum(losses.counts))
