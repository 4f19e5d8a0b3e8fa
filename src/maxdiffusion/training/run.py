"""The training loop, the same for experts and autoencoder.

    newest checkpoint or initial state -> (batch -> step -> metrics, checkpoint, sample) x steps

A SIGTERM ends the loop after the current step, with a checkpoint.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from maxdiffusion.config import Config
from maxdiffusion.distributed.coordination import listen_for_preemption
from maxdiffusion.errors import RunFailed
from maxdiffusion.generation.settings import profile_plan
from maxdiffusion.runtime.files import as_path, check_free_space
from maxdiffusion.runtime.progress import PROGRESS, Advance, steps_bar
from maxdiffusion.runtime.timing import Profiler
from maxdiffusion.training.checkpoints import Checkpoints, flat_arrays
from maxdiffusion.training.data.batches import Batches
from maxdiffusion.training.metrics import Figures, MetricsWriter, Work
from maxdiffusion.training.step import Step, TrainState

Report = Callable[[Figures], None]
OnSample = Callable[[TrainState], None]
WorkOf = Callable[[Any], Work]  # batch -> tokens and TFLOP of a step

logger = logging.getLogger(__name__)
LOG_EVERY = 50  # steps


class LossNotFinite(RunFailed):
    """The loss or its gradient is not finite."""


class Stopped(RunFailed):
    """The run was preempted and can be continued."""


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """The number of steps, and the intervals of checkpoints and samples (0: never)."""

    steps: int
    checkpoint_every: int = 0
    sample_every: int = 0
    expert_at: Callable[[int], str] = field(default=lambda step: "", compare=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", self.steps),
            ("checkpoint_every", self.checkpoint_every),
            ("sample_every", self.sample_every),
        ):
            if value < 0:
                raise ValueError(f"{name}={value}: must be at least 0")


class Loop:
    """Runs the remaining steps of a state, whose buffers are donated."""

    def __init__(
        self,
        plan: LoopPlan,
        steps: Mapping[str, Step],
        batches: Batches,
        *,
        checkpoints: Checkpoints | None = None,
        report: Report = lambda figures: None,
        on_sample: OnSample = lambda state: None,
        work_of: WorkOf = lambda batch: Work(),
        profiler: Profiler | None = None,
    ):
        self._plan = plan
        self._steps = steps
        self._batches = batches
        self._checkpoints = checkpoints
        self._report = report
        self._on_sample = on_sample
        self._work_of = work_of
        self._profiler = profiler or Profiler(None)

    def run(self, state: TrainState) -> TrainState:
        """Returns the state after the last step. A SIGTERM saves it and raises Stopped."""
        plan, saved = self._plan, -1
        with listen_for_preemption() as asked, closing(self._profiler):
            for step in range(int(state.step), plan.steps):
                with self._profiler.step():
                    state = self._step(step, state)
                done = step + 1
                stop = asked(done)
                if _due(done, plan.checkpoint_every) or (stop and self._checkpoints):
                    saved = self._save(state)
                if _due(done, plan.sample_every):
                    self._on_sample(state)
                if stop:
                    raise self._stopped(done)
        if saved != int(state.step):
            self._save(state)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return state

    def _step(self, step: int, state: TrainState) -> TrainState:
        name = self._plan.expert_at(step)
        PROGRESS.checkpoint(f"training step {step + 1}")
        batch = next(self._batches)
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, report = self._steps[name](state, batch)
            loss = float(report.loss)  # waits for the step
        if not math.isfinite(loss) or not math.isfinite(float(report.gradient_norm)):
            raise self._not_finite(step + 1, loss)
        self._report(
            Figures(
                step=step + 1,
                part=name,
                loss=loss,
                gradient_norm=float(report.gradient_norm),
                learning_rate=float(report.learning_rate),
                seconds=time.perf_counter() - began,
                details=report.figures,
                work=self._work_of(batch),
            )
        )
        return state

    def _save(self, state: TrainState) -> int:
        if self._checkpoints is not None:
            self._checkpoints.save(state, self._batches.position)
        return int(state.step)

    def _not_finite(self, step: int, loss: float) -> LossNotFinite:
        return LossNotFinite(
            f"the loss of step {step} is {loss} or has no finite gradient; {self._last_good()} "
            "Lower learning_rate or clip gradients (opt_enable_grad_global_norm_clipping=true)."
        )

    def _stopped(self, step: int) -> Stopped:
        return Stopped(
            f"stopped after step {step} of {self._plan.steps}, as asked; {self._last_good()} "
            "The same command continues."
        )

    def _last_good(self) -> str:
        if self._checkpoints is None:
            return "no checkpoints were kept."
        self._checkpoints.wait()
        steps = self._checkpoints.steps
        if not steps:
            return f"there is no checkpoint in {self._checkpoints.folder} yet."
        return f"the last good checkpoint is of step {steps[-1]} in {self._checkpoints.folder}."


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """The inputs of a loop: a step per expert, the schedule of experts, and the batches."""

    steps: Mapping[str, Step]
    expert_at: Callable[[int], str] = field(compare=False)
    batches: Batches
    work_of: WorkOf = field(default=lambda batch: Work(), compare=False)
    on_sample: OnSample = field(default=lambda state: None, compare=False)
    base: Mapping[str, str] = field(default_factory=dict)  # what adapters are trained on


def train_steps(config: Config, run: Run, initial: TrainState) -> TrainState:
    """Returns the state after the last step, from the newest checkpoint or the initial state."""
    folder = as_path(config.checkpoint_dir)
    checkpoints = Checkpoints(folder, keep=config.keep_checkpoints, base=run.base)
    try:
        check_room(checkpoints, initial, config.keep_checkpoints)
        state = newest(checkpoints, run.batches, initial)
        return loop(config, run, checkpoints, state)
    finally:
        checkpoints.close()


def check_base(config: Config, base: Mapping[str, str]) -> None:
    """Raises ProblemsFound if the run would continue adapters of another base."""
    folder = as_path(config.checkpoint_dir)
    with closing(Checkpoints(folder, keep=config.keep_checkpoints, base=base)) as held:
        held.check_base()


def check_room(checkpoints: Checkpoints, state: TrainState, keep: int) -> None:
    """Raises ProblemsFound if the checkpoints of a run do not fit on the disk.

    One more than is kept has to fit: the oldest is removed after the newest is complete.
    """
    size = sum(array.nbytes for array in flat_arrays(state).values())
    missing = max(1, keep + 1 - len(checkpoints.steps))
    check_free_space("checkpoint_dir", checkpoints.folder, missing * size)


def newest(checkpoints: Checkpoints, batches: Batches, initial: TrainState) -> TrainState:
    """Returns the state of the newest checkpoint, or the initial one; seeks the batches."""
    restored = checkpoints.restore(initial)
    if restored is None:
        return initial
    batches.seek(restored.data)
    logger.info(f"continuing after step {int(restored.state.step)} from {checkpoints.folder}")
    return restored.state


def loop(config: Config, run: Run, checkpoints: Checkpoints, state: TrainState) -> TrainState:
    """Returns the state after the last step; writes metrics and shows progress."""
    plan = LoopPlan(
        steps=config.max_train_steps,
        checkpoint_every=max(0, config.checkpoint_every),
        sample_every=config.sample_every,
        expert_at=run.expert_at,
    )
    metrics = metrics_writer(config)
    metrics.start(int(state.step))
    try:
        with steps_bar("Training", max(0, plan.steps - int(state.step))) as advance:
            return Loop(
                plan,
                run.steps,
                run.batches,
                checkpoints=checkpoints,
                report=reporter(metrics, advance, plan.steps),
                on_sample=run.on_sample,
                work_of=run.work_of,
                profiler=Profiler(profile_plan(config)),
            ).run(state)
    finally:
        metrics.close()


def metrics_writer(config: Config) -> MetricsWriter:
    """Returns the writer of a run's metrics; only the first process writes."""
    if jax.process_index() != 0:
        return MetricsWriter(None)
    return MetricsWriter(
        Path(config.metrics_file).expanduser() if config.metrics_file else None,
        tensorboard=Path(config.tensorboard_dir).expanduser() if config.tensorboard_dir else None,
    )


def reporter(
    metrics: MetricsWriter, advance: Advance, steps: int, every: int = LOG_EVERY
) -> Report:
    """Returns a function that writes the metrics of a step and logs some of them."""

    def report(figures: Figures) -> None:
        metrics(figures)
        advance()
        if figures.step % every == 0 or figures.step in (1, steps):
            parts = " ".join(f"{k}={v:.4f}" for k, v in figures.named_details().items())
            logger.info(
                f"step {figures.step}/{steps} {figures.part} loss {figures.loss:.4f} "
                f"norm {figures.gradient_norm:.3f} {figures.seconds:.3f} s/step {parts}"
            )

    return report
