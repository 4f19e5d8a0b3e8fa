"""What every training does with its steps: continue, report, keep checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax

from maxdiffusion.commands.generate import say
from maxdiffusion.commands.profiles import profile_plan
from maxdiffusion.config.config import Config
from maxdiffusion.runtime.disk import room_problems
from maxdiffusion.runtime.places import place
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.runtime.profiling import Profiler
from maxdiffusion.runtime.progress import Advance, steps_bar
from maxdiffusion.training.checkpoints import Checkpoints, flat_arrays
from maxdiffusion.training.data import Batches
from maxdiffusion.training.loop import Loop, LoopPlan, Report, Visit, WorkOf
from maxdiffusion.training.metrics import Figures, MetricsWriter, Work
from maxdiffusion.training.state import TrainState
from maxdiffusion.training.step import Step

TOLD_EVERY = 50


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained: the programs, which of them at which step, and the batches."""

    programs: Mapping[str, Step]
    program_at: Callable[[int], str] = field(compare=False)
    batches: Batches
    work_of: WorkOf = field(default=lambda batch: Work(), compare=False)
    visit: Visit = field(default=lambda state: None, compare=False)


def train_steps(config: Config, run: Run, first: TrainState) -> TrainState:
    """The state after the last step, from the newest checkpoint or from the first state."""
    folder = place(config.checkpoint_dir)
    checkpoints = Checkpoints(folder, keep=config.keep_checkpoints, say=say)
    try:
        check_room(checkpoints, first, config.keep_checkpoints)
        state = newest(checkpoints, run.batches, first)
        return loop(config, run, checkpoints, state)
    finally:
        checkpoints.close()


def check_room(checkpoints: Checkpoints, state: TrainState, keep: int) -> None:
    """Raises a problem if the checkpoints of a run do not fit on the disk.

    One more than is kept has to fit: the oldest is removed when the newest is whole.
    """
    size = sum(array.nbytes for array in flat_arrays(state).values())
    missing = max(1, keep + 1 - len(checkpoints.steps))
    problems = list(room_problems("checkpoint_dir", checkpoints.folder, missing * size))
    if problems:
        raise ProblemsFound(problems)


def newest(checkpoints: Checkpoints, batches: Batches, first: TrainState) -> TrainState:
    """The state of the newest checkpoint, with the batches where it stood; else the first one."""
    restored = checkpoints.restore(first)
    if restored is None:
        return first
    batches.seek(restored.data)
    say(f"continuing after step {int(restored.state.step)} from {checkpoints.folder}")
    return restored.state


def loop(config: Config, run: Run, checkpoints: Checkpoints, state: TrainState) -> TrainState:
    """The state after the last step; figures are written and told meanwhile."""
    plan = LoopPlan(
        steps=config.max_train_steps,
        checkpoint_every=max(0, config.checkpoint_every),
        visit_every=config.sample_every,
        program_at=run.program_at,
    )
    metrics = figures_of(config)
    metrics.start(int(state.step))
    try:
        with steps_bar("Training", max(0, plan.steps - int(state.step))) as advance:
            return Loop(
                plan,
                run.programs,
                run.batches,
                checkpoints=checkpoints,
                report=reporter(metrics, advance, plan.steps),
                visit=run.visit,
                work_of=run.work_of,
                profiler=Profiler(profile_plan(config)),
            ).run(state)
    finally:
        metrics.close()


def figures_of(config: Config) -> MetricsWriter:
    """Where the figures of a run go; the first process writes them."""
    if jax.process_index() != 0:
        return MetricsWriter(None)
    return MetricsWriter(
        Path(config.metrics_file).expanduser() if config.metrics_file else None,
        tensorboard=Path(config.tensorboard_dir).expanduser() if config.tensorboard_dir else None,
    )


def reporter(
    metrics: MetricsWriter, advance: Advance, steps: int, every: int = TOLD_EVERY
) -> Report:
    """What is told after each step: a line of JSON, the bar, and now and then a line to read."""

    def report(figures: Figures) -> None:
        metrics(figures)
        advance()
        if figures.step % every == 0 or figures.step in (1, steps):
            parts = " ".join(f"{k}={v:.4f}" for k, v in figures.named_details().items())
            say(
                f"step {figures.step}/{steps} {figures.part} loss {figures.loss:.4f} "
                f"norm {figures.gradient_norm:.3f} {figures.seconds:.3f} s/step {parts}"
            )

    return report
