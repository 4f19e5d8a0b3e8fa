"""Compares the bytes that each process reads of a checkpoint with the bytes its devices hold.

    python scripts/bench_load_processes.py --processes 2 --gigabytes 0.5

Writes the synthetic checkpoint of bench_load.py to a temporary folder and starts the processes on
this machine, with eight CPU devices in all. They load it once with weights split over all devices
and once with whole weights on every device, each time from cold files. `above MB` is the most
memory that a process took above what its devices hold (on a CPU that is memory of the host too).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_load import COMPONENTS, drop, source_of, write_checkpoint

DEVICES = 8


def main() -> None:
    """Starts the processes and prints a table of their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="processes, which divide eight")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(**arguments.worker)
        return
    if arguments.processes < 1 or DEVICES % arguments.processes:
        parser.error(f"--processes {arguments.processes}: must divide the {DEVICES} devices")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        import jax.numpy as jnp

        layers = write_checkpoint(Path(root), arguments.gigabytes, jnp.dtype("bfloat16"))
        report(start(arguments.processes, root, layers))


def start(processes: int, root: str, layers: int) -> list[list[dict[str, object]]]:
    """Returns the results of every process."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    started = []
    for index in range(processes):
        job = {"address": address, "processes": processes, "process": index}
        worker = json.dumps({"root": root, "layers": layers, **job})
        line = [sys.executable, __file__, "--worker", worker]
        started.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit("a process failed")
    return [
        [json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said
    ]


def report(said: list[list[dict[str, object]]]) -> None:
    """Prints a line for every load and process, and one for the job."""
    print("weights     process  read MB  needed MB  read/needed  held MB   above MB  seconds")
    for loads in zip(*said, strict=True):
        for index, load in enumerate(loads):
            read, needed = load["read"] / 1e6, load["needed"] / 1e6
            held, above = load["held"] / 1e6, (load["growth"] - load["held"]) / 1e6
            cost = f"{held:8.1f} {above:10.1f} {load['seconds']:8.2f}"
            ratio = f"{read:8.1f} {needed:10.1f} {read / needed:12.2f}"
            print(f"{load['weights']:11} {index:7} {ratio} {cost}")
        whole = loads[0]["whole"] / 1e6
        total = sum(load["read"] for load in loads) / 1e6
        print(f"{loads[0]['weights']:11} {'job':>7} {total:8.1f} of {whole:.1f} MB in the files")


def work(root: str, layers: int, address: str, processes: int, process: int) -> None:
    """Runs one process: loads on two meshes and prints the costs as JSON."""
    import jax
    import jax.numpy as jnp

    from maxdiffusion.checkpoints.load import load_components
    from maxdiffusion.distributed.coordination import barrier
    from maxdiffusion.distributed.initialize import ProcessGroup, Timeouts, join
    from maxdiffusion.mesh import MeshShape, build_mesh

    if processes > 1:
        join(ProcessGroup(address=address, processes=processes, process=process), Timeouts())
    sources = {
        name: source_of(Path(root) / name, layers, jnp.dtype("bfloat16")) for name in COMPONENTS
    }
    tensors = [tensor for source in sources.values() for tensor in source.stored.tensors.values()]
    for weights, shape in (("split", MeshShape(fsdp=8)), ("whole", MeshShape(data=8))):
        drop([file for source in sources.values() for file in source.stored.files])
        barrier("load")
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        states, cost = load_components(sources, mesh=build_mesh(shape))
        arrays = jax.block_until_ready(jax.tree.leaves(states))
        line = {"weights": weights, "read": cost.bytes_read, "needed": cost.bytes_needed}
        line |= {"seconds": cost.seconds, "whole": sum(t.stop - t.start for t in tensors)}
        line |= {"held": sum(s.data.nbytes for a in arrays for s in a.addressable_shards)}
        print(json.dumps(line | {"growth": resident("VmHWM") - before}), flush=True)
        del states, arrays
    if processes > 1:
        jax.distributed.shutdown()


def resident(name: str) -> int:
    """Returns the memory of this process in bytes: now (VmRSS), or its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
