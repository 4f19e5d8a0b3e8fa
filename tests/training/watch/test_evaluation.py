"""An evaluation gives the same figures for the same weights, of every expert on its levels."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.training.data.store import as_clip_batch
from maxdiffusion.training.loss import ExpertSchedule, NoiseLevels, TrainedExperts
from maxdiffusion.training.wan import BucketedTraining
from maxdiffusion.training.watch.evaluation import Evaluation
from tests.training import tiny_training as tiny


class Clips:
    """Clips of the tiny model, drawn by number."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        batch = tiny.batch_of(index, clips=1)
        captions = batch.captions
        return {
            "latents": batch.latents[0],
            "ids": captions.ids[0],
            "lengths": captions.lengths[0],
        }


def evaluation(run, count=20, clips=420):
    return Evaluation(
        buckets=BucketedTraining(training=run, latents=[tiny.LATENT]),
        samples=(Clips(count),),
        assemble=as_clip_batch,
        clips=clips,
    )


def schedule(trained):
    return ExpertSchedule(levels=NoiseLevels(shift=3.0), boundary=0.5, trained=trained)


@pytest.fixture(scope="module")
def both():
    """A run of both experts on one device, its state and its losses."""
    run = tiny.training(experts=schedule(TrainedExperts.BOTH))
    held_out, state = evaluation(run), tiny.state_of(run)
    return held_out, state, held_out(state)


def test_experts_are_evaluated_on_their_levels_and_alike_each_time(both):
    held_out, state, losses = both
    assert "16 held-out clips" in held_out.describe()  # two batches of eight, of twenty clips
    assert losses == held_out(state)
    names = {f"eval/loss_{125 * place}-{125 * (place + 1)}" for place in range(8)}
    experts = {"eval/loss/transformer", "eval/loss/transformer_2"}
    assert experts < losses.keys() <= {"eval/loss"} | experts | names
    # Both experts see every clip once.
    assert losses["eval/loss"] == pytest.approx(np.mean([losses[name] for name in experts]))
    doubled = jax.tree.map(lambda value: 2 * value, state.ema["transformer_2"])
    other = held_out(replace(state, ema={**state.ema, "transformer_2": doubled}))
    assert other["eval/loss/transformer"] == losses["eval/loss/transformer"]
    assert other["eval/loss/transformer_2"] != losses["eval/loss/transformer_2"]


def test_a_mesh_gives_the_figures_of_one_device(both):
    mesh = tiny.mesh_of(data=4, fsdp=2)
    run = tiny.training(mesh=mesh, experts=schedule(TrainedExperts.LOW_NOISE))
    found = evaluation(run)(tiny.state_of(run, seed=1))  # the weights of the second expert
    # Sums of a few hundred float32 terms in another order.
    assert found["eval/loss"] == pytest.approx(both[2]["eval/loss/transformer_2"], rel=1e-5)


def test_fewer_clips_than_a_batch_are_refused():
    with pytest.raises(ProblemsFound, match=r"evaluation clips=7: is fewer than one batch of 8"):
        evaluation(tiny.training(), count=7)
    with pytest.raises(ProblemsFound, match="num_eval_samples"):
        evaluation(tiny.training(), count=20, clips=7)
