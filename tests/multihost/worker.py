"""What a process of a test's job does: python worker.py TASK FOLDER; started by the tests."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from maxdiffusion import WanPipeline
from maxdiffusion.attention import AttentionOptions
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.runtime.agreement import Diverged, agree_on_result
from maxdiffusion.runtime.coordination import barrier, members
from maxdiffusion.runtime.joining import Patience, environment, find_place, join, stated_place
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.watch import Watch
from maxdiffusion.weights.loading import LoadOptions, load_parameters

MODEL = Path(__file__).parents[1] / "goldens" / "wan21_t2v"
EXCHANGES = {
    "ulysses_custom": MeshShape(data=2, ulysses=4),
    "tokamax_ring_custom": MeshShape(ring=8),
    "ulysses_ring_custom": MeshShape(ring=4, ulysses=2),
}
CALL = {
    "prompt": "A red fox runs through deep snow.",
    "negative_prompt": "blurred",
    "height": 32,
    "width": 32,
    "num_frames": 5,
    "num_inference_steps": 2,
    "seed": 11,
    "output_type": "latent",
}
QUICK = Patience(join=60, heartbeat=60, hang=2)


def exchanges(folder: Path) -> None:
    """Latents by every exchange, from one load of the weights for each mesh."""
    found = {}
    for attention, shape in EXCHANGES.items():
        settings = PipelineSettings(
            attention=attention, attention_options=AttentionOptions(flash_min_seq_length=0)
        )
        pipeline = WanPipeline.from_pretrained(MODEL, mesh=build_mesh(shape), settings=settings)
        found[attention] = pipeline(**CALL).frames
    if jax.process_index() == 0:
        np.savez(folder / f"exchanges_{jax.process_count()}.npz", **found)


def stand_still(folder: Path) -> None:
    """The processes disagree on a result, and then one of them stays behind."""
    watch = Watch(members(), QUICK)
    watch.start()
    MARKS.reach("a result")
    try:
        agree_on_result("the latents of seed 7", "odd" if jax.process_index() == 1 else "usual")
    except Diverged as error:
        print(f"diverged: {error}", flush=True)
    MARKS.reach("before the step")
    if jax.process_index() == 1:
        time.sleep(120)
    MARKS.reach("the step")
    barrier("the step")


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
    {"exchanges": exchanges, "stand_still": stand_still, "load": load}[task](Path(folder))
    if place is not None:
        jax.distributed.shutdown()
