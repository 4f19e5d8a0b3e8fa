"""What a process of a test's job does: python worker.py TASK FOLDER; started by the tests."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from multihost.launching import ROOT, TINY

from maxdiffusion.commands import generate
from maxdiffusion.config.loading import read_config
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.request import Request
from maxdiffusion.runtime.agreement import Diverged, agree_on_result
from maxdiffusion.runtime.coordination import barrier, client, members
from maxdiffusion.runtime.joining import Patience, environment, find_place, join, stated_place
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.watch import Watch
from maxdiffusion.weights.loading import LoadOptions, load_parameters

MODEL = ROOT / "tests" / "goldens" / "wan22_t2v"
# One name for each way in which devices exchange keys: gathered, around a ring, heads for tokens,
# both of these, and both with two streams. Of several kernels the one that compiles quickest.
EXCHANGES = ("flash", "ring", "ulysses", "ulysses_ring", "ulysses_ring_custom_bidir")
QUICK = Patience(join=60, heartbeat=60, hang=2)


def exchanges(folder: Path) -> None:
    """A video by every exchange over all devices; the first process keeps the latents of each."""
    found: dict[str, np.ndarray] = {}
    compare = generate.check_same

    def keep(latents: np.ndarray, request: Request) -> None:
        compare(latents, request)
        found[name] = latents

    generate.check_same = keep
    for name in EXCHANGES:
        generate.generate(read_config([str(TINY), *arguments(name, folder)]))
    if jax.process_index() == 0:
        np.savez(folder / f"exchanges_{jax.process_count()}.npz", **found)


def arguments(attention: str, folder: Path) -> tuple[str, ...]:
    """A small video: 8 tokens over eight devices, and a step for both experts."""
    count = jax.process_count()
    return (
        *(f"pretrained_model_name_or_path={MODEL}", f"attention={attention}"),
        *("height=32", "width=32", "num_frames=5", "num_inference_steps=2", "seed=5"),
        *("ici_ring_parallelism=4", "ici_ulysses_parallelism=2", "per_device_batch_size=0.125"),
        *(f"output_dir={folder / f'{attention}_{count}'}", f"jax_cache_dir={folder / str(count)}"),
    )


def stand_still(folder: Path) -> None:
    """The processes disagree on a result, and then one of them stays behind."""
    try:
        agree_on_result("the latents of seed 7", "odd" if jax.process_index() == 1 else "usual")
    except Diverged as error:
        print(f"diverged: {error}", flush=True)
    watch(QUICK)
    MARKS.reach("before the step")
    if jax.process_index() == 1:
        time.sleep(120)
    MARKS.reach("the step")
    barrier("the step")


def wait(folder: Path) -> None:
    """Waits for a word that nobody says."""
    MARKS.reach("waiting")
    watch(replace(QUICK, heartbeat=8, hang=100))
    print("waits", flush=True)
    client().blocking_key_value_get("nobody says it", 120_000)


def abort(folder: Path) -> None:
    """Ends as native code ends a process that it cannot go on with."""
    watch(QUICK)
    os.abort()


def watch(patience: Patience) -> None:
    """Begins to watch over the job."""
    Watch(members(), patience, address=os.environ["JAX_COORDINATOR_ADDRESS"]).start()


def load(folder: Path) -> None:
    """Loads with small parameters sent from the first process, and then all in parts."""
    from weights.small_model import expected, flat, source_of, tensors

    source, wanted = source_of(folder), expected(tensors())
    for small in (4 << 20, 0):
        for shape in (MeshShape(data=8), MeshShape(data=2, fsdp=2, tensor=2)):
            options = replace(LoadOptions(), small_bytes=small)
            state, report = load_parameters(source, mesh=build_mesh(shape), options=options)
            for name, array in flat(state).items():
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), wanted[name][shard.index])
            print(json.dumps({"read": report.bytes_read, "needed": report.bytes_needed}))


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    place = find_place(stated_place("", None, None, environment()), patience=QUICK)
    if place is not None:
        join(place, QUICK)
    tasks = (exchanges, stand_still, wait, abort, load)
    {one.__name__: one for one in tasks}[task](Path(folder))
    if place is not None:
        jax.distributed.shutdown()
