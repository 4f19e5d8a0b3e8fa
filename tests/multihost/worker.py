"""What a process of a test's job does: python worker.py TASK FOLDER; started by the tests."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from maxdiffusion.checkpoints.load import LoadOptions, load_parameters
from maxdiffusion.config.load import read_config
from maxdiffusion.distributed.coordination import (
    Diverged,
    all_processes,
    assert_same_result,
    barrier,
    joined_service,
)
from maxdiffusion.distributed.initialize import (
    ClusterConfig,
    Timeouts,
    configured_cluster,
    detect_cluster,
    join,
)
from maxdiffusion.distributed.watchdog import Watchdog
from maxdiffusion.generation.generate import check_same, generate
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.request import Request
from maxdiffusion.runtime.progress import PROGRESS
from tests.multihost.launching import ROOT, TINY

MODEL = ROOT / "tests" / "goldens" / "wan22_t2v"
# One attention name for each context-parallel scheme, with the kernel that compiles quickest.
NAMES = ("flash", "ulysses", "ulysses_ring", "ulysses_ring_custom_bidir")
EIGHT_BIT = ("use_qwix_quantization=true", "quantization=int8", "quantize_activations=always")
QUICK = Timeouts(join=60, heartbeat=60, hang=2)


def context_parallel(folder: Path) -> None:
    """Makes a video with every scheme over all devices; the first process saves the latents."""
    found: dict[str, np.ndarray] = {}

    def keep(latents: np.ndarray, request: Request) -> None:
        check_same(latents, request)
        found[name] = latents

    # Each of four processes has a part of rings and all-to-alls: the last two names have both.
    for name in NAMES if jax.process_count() <= 2 else NAMES[2:]:
        generate(read_config([str(TINY), *arguments(name, folder)]), check_latents=keep)
    if jax.process_count() <= 2:
        name = "int8"  # weights and activations
        given = arguments("flash", folder, *EIGHT_BIT, output=name)
        generate(read_config([str(TINY), *given]), check_latents=keep)
    if jax.process_index() == 0:
        np.savez(folder / f"latents_{jax.process_count()}.npz", **found)


def arguments(
    attention: str, folder: Path, *more: str, output: str | None = None
) -> tuple[str, ...]:
    """A small video: 8 tokens over eight devices, and a step for both experts."""
    count = jax.process_count()
    return (
        *(f"pretrained_model_name_or_path={MODEL}", f"attention={attention}"),
        *("height=32", "width=32", "num_frames=5", "num_inference_steps=2", "seed=5"),
        *("ici_ring_parallelism=4", "ici_ulysses_parallelism=2", "per_device_batch_size=0.125"),
        *(f"output_dir={folder / f'{output or attention}_{count}'}", *more),
        f"jax_cache_dir={folder / str(count)}",
    )


def train(folder: Path) -> None:
    """Trains two steps on one context of all devices; the first process writes the losses."""
    from tests.training import tiny_training as tiny

    # Heads are traded between the processes.
    run = tiny.training(mesh=tiny.mesh_of(ulysses=8), attention="ulysses_custom")
    losses, _ = tiny.losses_of(run, run.step("transformer"))
    if jax.process_index() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def stand_still(folder: Path) -> None:
    """The processes disagree on a result, and then one of them stays behind."""
    try:
        assert_same_result("the latents of seed 7", "odd" if jax.process_index() == 1 else "usual")
    except Diverged as error:
        print(f"diverged: {error}", flush=True)
    watch(QUICK)
    PROGRESS.checkpoint("before the step")
    if jax.process_index() == 1:
        time.sleep(120)
    PROGRESS.checkpoint("the step")
    barrier("the step")


def wait(folder: Path) -> None:
    """Waits for a value that no process publishes."""
    PROGRESS.checkpoint("waiting")
    watch(replace(QUICK, heartbeat=8, hang=100))
    print("waits", flush=True)
    joined_service().receive("never published", sender=0, timeout=120)


def abort(folder: Path) -> None:
    """Ends as native code ends a process that it cannot go on with."""
    watch(QUICK)
    os.abort()


def watch(timeouts: Timeouts) -> None:
    """Starts the watchdog."""
    Watchdog(all_processes(), timeouts, address=os.environ["JAX_COORDINATOR_ADDRESS"]).start()


def load(folder: Path) -> None:
    """Loads with small parameters sent from the first process, and then all in parts."""
    from tests.checkpoints.small_model import expected, flat, source_of, tensors

    source, wanted = source_of(folder), expected(tensors())
    costs = []
    for small in (4 << 20, 0):
        for shape in (MeshShape(data=8), MeshShape(data=2, fsdp=2, tensor=2)):
            options = replace(LoadOptions(), small_bytes=small)
            state, report = load_parameters(source, mesh=build_mesh(shape), options=options)
            for name, array in flat(state).items():
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(np.asarray(shard.data), wanted[name][shard.index])
            costs.append({"read": report.bytes_read, "needed": report.bytes_needed})
    # To a file: gloo writes to stdout whenever it likes, in the middle of a line too.
    (folder / f"costs_{jax.process_index()}.json").write_text(json.dumps(costs))


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    stated = configured_cluster(ClusterConfig(), os.environ)
    group = detect_cluster(stated, timeouts=QUICK)
    if group is not None:
        join(group, QUICK)
    tasks = (context_parallel, train, stand_still, wait, abort, load)
    {one.__name__: one for one in tasks}[task](Path(folder))
    if group is not None:
        jax.distributed.shutdown()
