"""The loop: batches in, checkpoints, figures and samples out, until all steps are done."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import jax

from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.problems import RunFailed
from maxdiffusion.runtime.profiling import Profiler
from maxdiffusion.runtime.stopping import asked_to_stop
from maxdiffusion.training.checkpoints import Checkpoints
from maxdiffusion.training.data import Batches
from maxdiffusion.training.metrics import Figures, Work
from maxdiffusion.training.state import TrainState
from maxdiffusion.training.step import Step

Report = Callable[[Figures], None]
Visit = Callable[[TrainState], None]
WorkOf = Callable[[Any], Work]  # what a step on a batch computes


class LossNotFinite(RunFailed):
    """The loss is not a number any more."""


class Stopped(RunFailed):
    """The run was asked to end early, and can be continued."""


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """How long to train, and what to do every so many steps (0: never)."""

    steps: int
    checkpoint_every: int = 0
    visit_every: int = 0  # sample videos
    program_at: Callable[[int], str] = field(default=lambda step: "", compare=False)

    def __post_init__(self) -> None:
        for name in ("steps", "checkpoint_every", "visit_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0")


class Loop:
    """Runs steps from where a state stands; the state it was given is used up."""

    def __init__(
        self,
        plan: LoopPlan,
        programs: Mapping[str, Step],
        batches: Batches,
        *,
        checkpoints: Checkpoints | None = None,
        report: Report = lambda figures: None,
        visit: Visit = lambda state: None,
        work_of: WorkOf = lambda batch: Work(),
        profiler: Profiler | None = None,
    ):
        self._plan = plan
        self._programs = programs
        self._batches = batches
        self._checkpoints = checkpoints
        self._report = report
        self._visit = visit
        self._work_of = work_of
        self._profiler = profiler or Profiler(None)

    def run(self, state: TrainState) -> TrainState:
        """The state after the last step; a SIGTERM saves a checkpoint and raises Stopped."""
        plan, saved = self._plan, -1
        with asked_to_stop() as asked, closing(self._profiler):
            for step in range(int(state.step), plan.steps):
                with self._profiler.step():
                    state = self._step(step, state)
                done = step + 1
                stop = asked(done)
                if _due(done, plan.checkpoint_every) or (stop and self._checkpoints):
                    saved = self._save(state)
                if _due(done, plan.visit_every):
                    self._visit(state)
                if stop:
                    raise self._stopped(done)
        if saved != int(state.step):
            self._save(state)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return state

    def _step(self, step: int, state: TrainState) -> TrainState:
        name = self._plan.program_at(step)
        MARKS.reach(f"training step {step + 1}")
        batch = next(self._batches)
        began = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, report = self._programs[name](state, batch)
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
