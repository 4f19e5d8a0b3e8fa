"""The loop keeps the devices busy: a step is read after the next one was started."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.training.checkpoints import Checkpoints
from maxdiffusion.training.data.batches import Batches, Order
from maxdiffusion.training.metrics import Figures, MetricsWriter
from maxdiffusion.training.run import Loop, LoopPlan, LossNotFinite, add_evaluation, reporter
from maxdiffusion.training.step import StepReport, TrainState
from maxdiffusion.training.watch.divergence import DivergenceWatch
from tests.training import toy_run


class Started:
    """Stands for the loss of a step; says when it is read."""

    def __init__(self, step, said, loss):
        self.step, self.said, self.loss = step, said, loss

    def __array__(self, dtype=None, copy=None):
        self.said.append(f"read {self.step}")
        return np.asarray(self.loss, np.float32)


def fake_step(said, losses):
    """A step without devices; it has the losses given, 1 after them."""

    def run(state, batch):
        number = int(state.step) + 1
        said.append(f"start {number}")
        zero, loss = jnp.zeros(()), losses.get(number, 1.0)
        report = object.__new__(StepReport)  # its loss is not an array
        vars(report).update(
            loss=Started(number, said, loss),
            gradient_norm=zero,
            learning_rate=zero,
            figures={},
            norms={"toy.kernel": zero},
        )
        return new_state(number), report

    return run


def new_state(step):
    state = object.__new__(TrainState)
    vars(state).update(step=step, key=None, values={}, ema={}, moments={})
    return state


def run(plan, losses=None, **more):
    said = []
    loop = Loop(
        plan, {"": fake_step(said, losses or {})}, Batches(toy_run.Rows(), Order(batch=8)), **more
    )
    return said, loop


def test_a_step_is_read_after_the_next_one_was_started():
    reported = []
    said, loop = run(LoopPlan(steps=3), report=reported.append)
    loop.run(new_state(0))
    assert said == ["start 1", "start 2", "read 1", "start 3", "read 2", "read 3"]
    assert [figures.step for figures in reported] == [1, 2, 3]
    assert reported[0].as_json()["gradient_norm/toy.kernel"] == 0


def test_evaluations_and_samples_come_after_their_step_was_read():
    said, loop = run(
        LoopPlan(steps=2, eval_every=1, sample_every=2),
        on_evaluate=lambda state: said.append(f"evaluate {state.step}"),
        on_sample=lambda state: said.append(f"sample {state.step}"),
    )
    loop.run(new_state(0))
    expected = ["start 1", "read 1", "evaluate 1", "start 2", "read 2", "evaluate 2", "sample 2"]
    assert said == expected


class NotSaved(Checkpoints):
    """Notes the steps that would be saved."""

    def __init__(self):
        self.folder, self.saved = "somewhere", []

    def save(self, state, data):
        self.saved.append(int(state.step))

    def wait(self):
        """Nothing is written."""

    @property
    def steps(self):
        return tuple(self.saved)


def test_a_state_whose_loss_is_no_number_is_not_saved():
    checkpoints = NotSaved()
    plan = LoopPlan(steps=9, checkpoint_every=2)
    _, loop = run(plan, {4: np.nan}, checkpoints=checkpoints)
    with pytest.raises(LossNotFinite, match=r"loss of step 4 is nan.*checkpoint is of step 2"):
        loop.run(new_state(0))
    assert checkpoints.saved == [2]


def test_a_rise_is_logged_and_written(tmp_path, caplog):
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.start(0)
    watch = DivergenceWatch(learning_rate=1e-3, clipped_at=1.0)
    report = reporter(metrics, lambda: None, 1000, 50, watch)
    for step in range(1, 401):
        loss = 1.0 + 0.01 * (step % 7) + (2.0 if step > 380 else 0.0)
        report(
            Figures(
                step=step, part="", loss=loss, gradient_norm=0.4, learning_rate=1.0, seconds=1.0
            )
        )
    add_evaluation(metrics, lambda state: {"eval/loss": 0.25}, new_state(400))
    metrics.close()
    events = (tmp_path / "metrics.events.jsonl").read_text().splitlines()
    assert len(events) == 2
    assert "the loss rises" in events[0]
    assert "max_grad_norm=0.4" in events[0]
    assert '"eval/loss": 0.25' in events[1]
    assert "the loss rises" in caplog.text
