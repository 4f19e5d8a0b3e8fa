"""One training for every size of clips: its own attention plan and its own compiled step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from maxdiffusion.training.flops import step_work
from maxdiffusion.training.metrics import Work
from maxdiffusion.training.state import TrainState
from maxdiffusion.training.step import Step, StepReport
from maxdiffusion.training.wan_loss import ClipBatch
from maxdiffusion.training.wan_training import WanTraining

Latent = tuple[int, int, int]  # frames, rows, columns


@dataclass(frozen=True, kw_only=True)
class SizedTraining:
    """The same training for clips of several sizes; a batch has one of them."""

    training: WanTraining
    latents: Sequence[Latent]

    @cached_property
    def by_latent(self) -> Mapping[Latent, WanTraining]:
        """The training of every size; raises UnsupportedAttention if one cannot run."""
        batch = self.training.batch
        found = {
            latent: replace(self.training, batch=replace(batch, latent=latent))
            for latent in self.latents
        }
        for training in found.values():
            training.block_attention  # noqa: B018 - refuses here what cannot run
        return found

    def step(self, name: str) -> Step:
        """The step of one expert: for each size a program, compiled at its first batch."""
        steps = {latent: training.step(name) for latent, training in self.by_latent.items()}

        def run(state: TrainState, batch: Any) -> tuple[TrainState, StepReport]:
            return steps[latent_of(batch)](state, batch)

        return run

    def work_of(self, batch: ClipBatch) -> Work:
        """The tokens and the TFLOP of a step on a batch."""
        training = self.training
        return step_work(
            training.transformer,
            clips=training.batch.clips,
            tokens=training.transformer.tokens(latent_of(batch)),
            text_rows=training.batch.caption_tokens + 1,
            devices=training.mesh.size,
        )


def latent_of(batch: ClipBatch) -> Latent:
    """Frames, rows and columns of the latents of a batch."""
    _, frames, rows, columns, _ = batch.latents.shape
    return frames, rows, columns
