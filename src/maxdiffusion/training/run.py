"""The training loop, the same for experts and autoencoder.

    newest checkpoint or initial state
        -> (batch -> step -> metrics, checkpoint, evaluation, sample) x steps -> report

The metrics of a step are read after the next one was started, so that the devices never wait for
the host. A SIGTERM ends the loop after the current step, with a checkpoint.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from maxdiffusion.config import Config
from maxdiffusion.distributed.coordination import listen_for_preemption
from maxdiffusion.errors import RunFailed
from maxdiffusion.generation.settings import profile_plan
from maxdiffusion.runtime.files import as_path, check_free_space, read_json_lines
from maxdiffusion.runtime.progress import PROGRESS, Advance, steps_bar
from maxdiffusion.runtime.timing import Profiler
from maxdiffusion.training.checkpoints import Checkpoints, flat_arrays
from maxdiffusion.training.data.batches import Batches
from maxdiffusion.training.metrics import Figures, MetricsWriter, Sample, Work
from maxdiffusion.training.step import Step, StepReport, TrainState
from maxdiffusion.training.watch.divergence import DivergenceWatch
from maxdiffusion.training.watch.report import write_report

Report = Callable[[Figures], None]
OnState = Callable[[TrainState], None]
MakeSample = Callable[[TrainState], Sample | None]
Evaluate = Callable[[TrainState], Mapping[str, float]]  # losses by name
WorkOf = Callable[[Any], Work]  # batch -> tokens and TFLOP of a step

logger = logging.getLogger(__name__)
LOG_EVERY = 50  # steps


class LossNotFinite(RunFailed):
    """The loss or its gradient is not finite."""


class Stopped(RunFailed):
    """The run was preempted and can be continued."""


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """The number of steps, and the intervals of checkpoints, samples, evaluations (0: never)."""

    steps: int
    checkpoint_every: int = 0
    sample_every: int = 0
    eval_every: int = 0
    expert_at: Callable[[int], str] = field(default=lambda step: "", compare=False)

    def __post_init__(self) -> None:
        for name, value in (
            ("steps", self.steps),
            ("checkpoint_every", self.checkpoint_every),
            ("sample_every", self.sample_every),
            ("eval_every", self.eval_every),
        ):
            if value < 0:
                raise ValueError(f"{name}={value}: must be at least 0")


@dataclass(frozen=True, kw_only=True)
class _Started:
    """A step that the devices are computing, and the time when it was started."""

    step: int
    part: str
    report: StepReport
    began: float
    work: Work


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
        on_sample: OnState = lambda state: None,
        on_evaluate: OnState = lambda state: None,
        work_of: WorkOf = lambda batch: Work(),
        profiler: Profiler | None = None,
    ):
        self._plan = plan
        self._steps = steps
        self._batches = batches
        self._checkpoints = checkpoints
        self._report = report
        self._on_sample = on_sample
        self._on_evaluate = on_evaluate
        self._work_of = work_of
        self._profiler = profiler or Profiler(None)
        self._started: _Started | None = None
        self._ended = 0.0

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
                if _due(done, plan.eval_every):
                    self._finish()
                    self._on_evaluate(state)
                if _due(done, plan.sample_every):
                    self._finish()
                    self._on_sample(state)
                if stop:
                    self._finish()
                    raise self._stopped(done)
        self._finish()
        if saved != int(state.step):
            self._save(state)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return state

    def _step(self, step: int, state: TrainState) -> TrainState:
        """Starts a step, and then finishes the one before it."""
        name = self._plan.expert_at(step)
        PROGRESS.checkpoint(f"training step {step + 1}")
        batch = next(self._batches)
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, report = self._steps[name](state, batch)
            started = _Started(
                step=step + 1, part=name, report=report, began=began, work=self._work_of(batch)
            )
            self._finish()
            self._started = started
            if self._profiler.unfinished:
                self._finish()  # a trace has whole steps
        return state

    def _finish(self) -> None:
        """Waits for the step that was started last, and reports it."""
        started, self._started = self._started, None
        if started is None:
            return
        report: StepReport = jax.device_get(started.report)
        # A step that was started early begins when the one before it ends.
        began, self._ended = max(started.began, self._ended), time.perf_counter()
        loss, norm = float(report.loss), float(report.gradient_norm)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise self._not_finite(started.step, loss)
        self._report(
            Figures(
                step=started.step,
                part=started.part,
                loss=loss,
                gradient_norm=norm,
                gradient_norms={group: float(one) for group, one in report.norms.items()},
                learning_rate=float(report.learning_rate),
                seconds=self._ended - began,
                details=report.figures,
                work=started.work,
            )
        )

    def _save(self, state: TrainState) -> int:
        self._finish()  # a state whose loss is no number is not saved
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
    """The inputs of a loop: a step per expert, the schedule of experts, and the batches.

    `about` is the start-up report, `base` what adapters are trained on.
    """

    steps: Mapping[str, Step]
    expert_at: Callable[[int], str] = field(compare=False)
    batches: Batches
    work_of: WorkOf = field(default=lambda batch: Work(), compare=False)
    make_sample: MakeSample = field(default=lambda state: None, compare=False)
    evaluate: Evaluate = field(default=lambda state: {}, compare=False)
    about: str = ""
    base: Mapping[str, str] = field(default_factory=dict)


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
    """Returns the state after the last step; writes metrics and a report, and shows progress."""
    plan = LoopPlan(
        steps=config.max_train_steps,
        checkpoint_every=max(0, config.checkpoint_every),
        sample_every=config.sample_every,
        eval_every=max(0, config.eval_every),
        expert_at=run.expert_at,
    )
    metrics = metrics_writer(config)
    metrics.start(int(state.step))
    watch, ended = divergence_watch(config, metrics), ""
    try:
        with steps_bar("Training", max(0, plan.steps - int(state.step))) as advance:
            return Loop(
                plan,
                run.steps,
                run.batches,
                checkpoints=checkpoints,
                report=reporter(metrics, advance, plan.steps, LOG_EVERY, watch),
                on_sample=partial(add_sample, metrics, run.make_sample),
                on_evaluate=partial(add_evaluation, metrics, run.evaluate),
                work_of=run.work_of,
                profiler=Profiler(profile_plan(config)),
            ).run(state)
    except RunFailed as error:
        ended = str(error)
        raise
    finally:
        metrics.close()
        if metrics.path is not None:
            write_report(metrics.path, about=run.about, ended=ended)


def add_sample(metrics: MetricsWriter, make: MakeSample, state: TrainState) -> None:
    """Makes a sample video and writes it to the metrics."""
    sample = make(state)
    if sample is not None:
        metrics.sampled(sample)


def add_evaluation(metrics: MetricsWriter, evaluate: Evaluate, state: TrainState) -> None:
    """Evaluates a state, and writes and logs its losses."""
    began, losses = time.perf_counter(), evaluate(state)
    if losses:
        metrics.evaluated(int(state.step), losses)
        shown = " ".join(f"{name.removeprefix('eval/')}={one:.4f}" for name, one in losses.items())
        seconds = time.perf_counter() - began
        logger.info(f"step {int(state.step)} held-out {shown} in {seconds:.1f} s")


def divergence_watch(config: Config, metrics: MetricsWriter) -> DivergenceWatch | None:
    """Returns the watch of a run, with the steps that it continues; only the first process has."""
    if jax.process_index() != 0:
        return None
    clipped = config.max_grad_norm if config.opt_enable_grad_global_norm_clipping else None
    watch = DivergenceWatch(learning_rate=config.learning_rate, clipped_at=clipped)
    watch.replay(read_json_lines(metrics.path) if metrics.path is not None else ())
    return watch


def metrics_writer(config: Config) -> MetricsWriter:
    """Returns the writer of a run's metrics; only the first process writes."""
    if jax.process_index() != 0:
        return MetricsWriter(None)
    return MetricsWriter(
        Path(config.metrics_file).expanduser() if config.metrics_file else None,
        tensorboard=Path(config.tensorboard_dir).expanduser() if config.tensorboard_dir else None,
    )


def reporter(
    metrics: MetricsWriter,
    advance: Advance,
    steps: int,
    every: int = LOG_EVERY,
    watch: DivergenceWatch | None = None,
) -> Report:
    """Returns a function that writes the metrics of a step, logs some of them, and warns."""

    def report(figures: Figures) -> None:
        metrics(figures)
        advance()
        warning = None
        if watch is not None:
            norm = figures.gradient_norm
            warning = watch.add(figures.step, figures.part, loss=figures.loss, norm=norm)
        if warning is not None:
            metrics.warned(figures.step, warning)
            logger.warning(warning)
        if figures.step % every == 0 or figures.step in (1, steps):
            parts = " ".join(f"{k}={v:.4f}" for k, v in figures.named_details().items())
            logger.info(
                f"step {figures.step}/{steps} {figures.part} loss {figures.loss:.4f} "
                f"norm {figures.gradient_norm:.3f} {figures.seconds:.3f} s/step {parts}"
            )

    return report
