"""A run of train_wan that is killed in the middle of a step, as by kill -9.

python killed_run.py STEP CONFIG.yml checkpoint_dir=FOLDER ...

ends itself by SIGKILL when STEP was started and the one before it was reported. A checkpoint is
complete by then, so that the next run has something to continue from.
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


def kill_in(step: int, folder: Path) -> None:
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
                os.kill(os.getpid(), signal.SIGKILL)

        return reported

    training_run.Loop._step = started
    training_run.reporter = killer


if __name__ == "__main__":
    step, *arguments = sys.argv[1:]
    named = dict(argument.split("=", 1) for argument in arguments[1:])
    kill_in(int(step), Path(named["checkpoint_dir"]))
    sys.exit(train_wan.main(arguments))
