"""A run of a toy model, started by the tests as a process that can be killed.

python toy_run.py FOLDER STEPS [SECONDS PER STEP [BYTES THAT A FILE MAY HAVE]]

prints every step, and the end as JSON.
"""

import json
import logging
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from maxdiffusion.errors import RunFailed
from maxdiffusion.mesh import single_device_mesh
from maxdiffusion.training.checkpoints import Checkpoints, flat_arrays
from maxdiffusion.training.data.batches import Batches, Order
from maxdiffusion.training.run import Loop, LoopPlan
from maxdiffusion.training.step import Decay, LearningRate, Optimiser, first_state, make_step

RULE = Optimiser(learning_rate=LearningRate(peak=0.01, steps=40, decay=Decay.COSINE))
WIDTH = 64


class Rows:
    """A hundred rows of numbers."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return {"row": np.random.default_rng(index).standard_normal(WIDTH).astype(np.float32)}


def noisy_loss(values, batch, key):
    noise = jax.random.normal(key, batch["row"].shape)
    hidden = jnp.tanh((batch["row"] + noise) @ values["toy"]["kernel"])
    return jnp.mean(jnp.square(hidden - batch["row"])), {}


def start():
    kernel = jax.random.normal(jax.random.key(3), (WIDTH, WIDTH)) / 8
    return first_state({"toy": {"kernel": kernel}}, RULE, seed=5, mesh=single_device_mesh())


class Messages(logging.Handler):
    """Collects the messages of a logger."""

    def __init__(self, found):
        super().__init__()
        self._found = found

    def emit(self, record):
        self._found.append(record.getMessage())


def run(
    folder,
    steps,
    *,
    seconds=0.0,
    report=lambda figures: None,
    loss=noisy_loss,
    every=4,
):
    """Trains from the newest checkpoint in `folder`; returns the end and what was said."""
    said = []
    logger, messages = logging.getLogger("maxdiffusion.training.checkpoints"), Messages(said)
    logger.addHandler(messages)
    checkpoints = Checkpoints(folder, keep=3)
    batches = Batches(Rows(), Order(batch=8, seed=2))
    state = start()
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    restored = checkpoints.restore(state)
    if restored is not None:
        state = restored.state
        batches.seek(restored.data)

    def told(figures):
        report(figures)
        time.sleep(seconds)

    step = make_step(loss, RULE, trained=("toy",))
    program = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    plan = LoopPlan(steps=steps, checkpoint_every=every)
    try:
        loop = Loop(plan, {"": program}, batches, checkpoints=checkpoints, report=told)
        return loop.run(state), said
    finally:
        checkpoints.close()
        logger.removeHandler(messages)


def summary(state):
    """Every number of a state, exactly."""
    return {path: np.asarray(array).tobytes().hex() for path, array in flat_arrays(state).items()}


def main():
    folder, steps = sys.argv[1], int(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    if len(sys.argv) > 4 and int(sys.argv[4]) > 0:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), hard))
    try:
        state, said = run(
            folder,
            steps,
            seconds=seconds,
            report=lambda f: print("step", f.step, flush=True),
        )
    except RunFailed as error:
        print("failed", error, flush=True)
        sys.exit(7)
    print(json.dumps({"said": said, "end": summary(state)}), flush=True)


if __name__ == "__main__":
    main()
