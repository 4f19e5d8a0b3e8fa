"""What a process of a test's job does: python worker.py TASK FOLDER; started by the tests."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxdiffusion.attention import AttentionOptions, AttentionProblem, plan_attention
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.runtime.agreement import Diverged, agree_on_result
from maxdiffusion.runtime.coordination import barrier, members
from maxdiffusion.runtime.joining import Patience, environment, find_place, join, stated_place
from maxdiffusion.runtime.marks import MARKS
from maxdiffusion.runtime.watch import Watch
from maxdiffusion.weights.loading import LoadOptions, load_parameters

EXCHANGES = {
    "ulysses_custom": MeshShape(ulysses=8),
    "tokamax_ring_custom": MeshShape(ring=8),
    "ulysses_ring_custom": MeshShape(ring=4, ulysses=2),
}
QUICK = Patience(join=60, heartbeat=60, hang=2)


def exchanges(folder: Path) -> None:
    """Self-attention of one problem by every exchange; four processes try the one of both kinds."""
    problem = AttentionProblem(
        batch=1, q_len=48, kv_len=48, heads=8, head_dim=16, dtype=np.dtype(np.float32)
    )
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 48, 8, 16), np.float32)
    found = {}
    names = list(EXCHANGES)[2:] if jax.process_count() == 4 else EXCHANGES
    for name, shape in ((name, EXCHANGES[name]) for name in names):
        mesh = build_mesh(shape)
        everywhere = NamedSharding(mesh, PartitionSpec())
        plan = plan_attention(name, problem, mesh, AttentionOptions(flash_min_seq_length=0))
        with jax.set_mesh(mesh):
            # Interpreted kernels are large programs; so they compile twice as fast.
            quick = {"xla_backend_optimization_level": 0}
            program = jax.jit(plan, out_shardings=everywhere, compiler_options=quick)
            found[name] = np.asarray(program(*(jax.device_put(x, everywhere) for x in (q, k, v))))
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
