"""A run of train_wan that is killed in the middle of a step or of a checkpoint, as by kill -9.

python killed_run.py computing STEP CONFIG.yml checkpoint_dir=FOLDER ...
python killed_run.py saving STEP CONFIG.yml checkpoint_dir=FOLDER ...

The first ends itself by SIGKILL when STEP was started and the one before it was reported, the
second while the checkpoint of STEP is written. An earlier checkpoint is complete by then, so that
the next run has something to continue from.
"""

import os
import signal
import sys
import time
from pathlib import Path

from maxdiffusion import train_wan
from maxdiffusion.training import run as training_run


def wait_for_a_checkpoint(folder: Path) -> None:
    while not any(held.name.isdigit() for held in folder.iterdir()):
        time.sleep(0.01)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_computing(step: int, folder: Path) -> None:
    """Makes the training loop of this process end in a step."""
    start, reporter = training_run.Loop._step, training_run.reporter

    def started(loop, number, state):
        if number + 1 == step:
            wait_for_a_checkpoint(folder)
        return start(loop, number, state)

    def killer(*values):
        report = reporter(*values)

        def reported(figures):
            report(figures)
            if figures.step == step - 1:  # the loop reads a step after it started the next
                kill()

        return reported

    training_run.Loop._step = started
    training_run.reporter = killer


def kill_while_saving(step: int, folder: Path) -> None:
    """Makes the training loop of this process end as soon as threads write a checkpoint."""
    save = training_run.Checkpoints.save

    def saved(checkpoints, state, data):
        save(checkpoints, state, data)
        if int(state.step) == step:
            wait_for_a_checkpoint(folder)
            kill()

    training_run.Checkpoints.save = saved


if __name__ == "__main__":
    doing, step, *arguments = sys.argv[1:]
    named = dict(argument.split("=", 1) for argument in arguments[1:])
    ends = {"computing": kill_while_computing, "saving": kill_while_saving}[doing]
    ends(int(step), Path(named["checkpoint_dir"]))
    sys.exit(train_wan.main(arguments))
