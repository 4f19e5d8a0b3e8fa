#!/usr/bin/env python
"""Times one transformer forward of maxdiffusion and of diffusers (torch) on this CPU.

    python scripts/bench_step.py [--tokens 2048] [--repeats 5] [--layers 8]

Both have the same weights. Two child processes, one per side, take turns, so that other load on the
machine affects both. The forward is complete on both sides: text embedding, keys and values of the
text, all blocks, head. In a denoising loop ours computes the part of the text once per prompt; that
time is printed as a second line. Needs the extra `parity` (torch). Sizes are those of WAN 2.1 1.3B
with fewer layers.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

SIDES = ("ours", "diffusers")
FRAME_TOKENS = 16 * 16
# Sums of thousands of float32 products in eight blocks; velocities are of order 1.
TOLERANCE = 1e-3


def main() -> int:
    """Runs a child, or both children in turns; returns 1 if their results differ."""
    arguments = parse_arguments()
    if arguments.side:
        serve(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        children = {side: start(side, arguments, folder) for side in SIDES}
        try:
            times = take_turns(children, arguments.repeats)
        finally:
            for child in children.values():
                child.stdin.close()
                child.wait()
        return report(times, arguments, Path(folder))


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line; `--side` and `--folder` are for the children."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tokens < 1 or arguments.tokens % FRAME_TOKENS:
        parser.error(f"--tokens {arguments.tokens}: must be a multiple of {FRAME_TOKENS}")
    if arguments.repeats < 1 or arguments.layers < 1:
        parser.error("--repeats and --layers must be positive integers")
    return arguments


def start(side: str, arguments: argparse.Namespace, folder: str) -> subprocess.Popen:
    """Starts a child that answers each line on its stdin with the time of one forward."""
    sizes = [f"--tokens={arguments.tokens}", f"--layers={arguments.layers}"]
    # Some virtual CPUs advertise AMX and trap on it.
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "JAX_PLATFORMS": "cpu"} | os.environ
    return subprocess.Popen(
        [sys.executable, __file__, "--side", side, "--folder", folder, *sizes],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ask(child: subprocess.Popen, request: str) -> dict[str, float]:
    """Returns the child's answer to `request`."""
    child.stdin.write(request + "\n")
    child.stdin.flush()
    answer = child.stdout.readline()
    if not answer:
        raise SystemExit(f"{child.args[3]}: the child process ended with code {child.wait()}")
    return json.loads(answer)


def take_turns(
    children: dict[str, subprocess.Popen], repeats: int
) -> dict[str, list[dict[str, float]]]:
    """Returns the times of every run by side, without the first (compilation, page faults)."""
    requests = [("ours", "forward"), ("diffusers", "forward"), ("ours", "step")]
    times: dict[str, list[dict[str, float]]] = {" ".join(request): [] for request in requests}
    for turn in range(repeats + 1):
        for side, request in requests:
            measured = ask(children[side], request)
            if turn:
                times[f"{side} {request}"].append(measured)
    return times


def report(
    times: dict[str, list[dict[str, float]]], arguments: argparse.Namespace, folder: Path
) -> int:
    """Prints times and ratios; returns 1 if the results of the two sides differ."""
    print(
        f"{arguments.layers} layers, 12 heads x 128, ffn 8960, {arguments.tokens} tokens, float32, "
        f"{os.cpu_count()} CPU cores, {arguments.repeats} runs in turns"
    )
    theirs = times["diffusers forward"]
    for name, label in (
        ("diffusers forward", "diffusers (torch), forward"),
        ("ours forward", "ours, forward"),
        ("ours step", "ours, forward with the text's part kept"),
    ):
        runs = times[name]
        ratios = {
            kind: median(run[kind] / other[kind] for run, other in zip(runs, theirs, strict=True))
            for kind in ("wall", "cpu")
        }
        print(
            f"{label:40} {median(run['wall'] for run in runs):7.2f} s "
            f"(cpu {median(run['cpu'] for run in runs):7.2f} s)   "
            f"ratio to diffusers {ratios['wall']:.2f} (cpu {ratios['cpu']:.2f})"
        )
    ours, golden = (np.load(folder / f"{side}.npy") for side in SIDES)
    difference = float(np.abs(ours - golden).max())
    print(f"largest difference of the results {difference:.1e} (spread {golden.std():.2f})")
    return int(difference > TOLERANCE)


def serve(arguments: argparse.Namespace) -> None:
    """Builds one side, then times one forward per line of stdin."""
    runs = {"ours": build_ours, "diffusers": build_diffusers}[arguments.side](arguments)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        velocity = runs[line.strip()]()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        np.save(Path(arguments.folder) / f"{arguments.side}.npy", velocity)
        print(json.dumps(spent), flush=True)


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the tensor `name`, the same in every process; weights preserve the variance."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    fan_in = np.prod(shape[1:]) if len(shape) > 1 and shape[0] != 1 else 100.0
    offset = 1.0 if name.endswith(("norm_q.weight", "norm_k.weight", "norm2.weight")) else 0.0
    return values / np.float32(np.sqrt(fan_in)) + np.float32(offset)


def inputs(tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns latents [B, C, F, H, W], time and text in the layout of diffusers."""
    frames = tokens // FRAME_TOKENS
    text = drawn("text", (1, 512, 4096))
    return drawn("latents", (1, 16, frames, 32, 32)) * 100, np.asarray([500]), text


def diffusers_config(layers: int) -> dict[str, int]:
    """Returns the config of WAN 2.1 1.3B with `layers` layers."""
    return {"num_layers": layers, "num_attention_heads": 12, "ffn_dim": 8960}


def build_diffusers(arguments: argparse.Namespace) -> dict[str, Callable[[], np.ndarray]]:
    """Returns the forward of diffusers."""
    import torch
    from diffusers import WanTransformer3DModel

    torch.set_num_threads(os.cpu_count() or 1)
    model = WanTransformer3DModel(**diffusers_config(arguments.layers)).eval()
    state = model.state_dict()
    weights = {name: torch.from_numpy(drawn(name, tuple(state[name].shape))) for name in state}
    model.load_state_dict(weights, assign=True)
    latents, timestep, text = (torch.from_numpy(array) for array in inputs(arguments.tokens))

    @torch.inference_mode()
    def forward() -> np.ndarray:
        return model(latents, timestep, text, return_dict=False)[0].numpy()

    return {"forward": forward}


def build_ours(arguments: argparse.Namespace) -> dict[str, Callable[[], np.ndarray]]:
    """Returns our forward, and that of a denoising step, which has the text's part already."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from maxdiffusion.attention import (
        AttentionProblem,
        BlockAttention,
        plan_attention,
        plan_cross_attention,
    )
    from maxdiffusion.mesh import ActivationLayout, single_device_mesh

    model = our_model(arguments.layers)
    latents, timestep, text = inputs(arguments.tokens)
    latents = latents.transpose(0, 2, 3, 4, 1)
    mesh = single_device_mesh()
    sizes = {"batch": 1, "q_len": arguments.tokens, "heads": 12, "head_dim": 128}
    problems = (
        AttentionProblem(**sizes, kv_len=kv_len, dtype=np.dtype("float32"))
        for kv_len in (arguments.tokens, text.shape[1])
    )
    attention = BlockAttention(
        self_attention=plan_attention("dot_product", next(problems), mesh),
        cross_attention=plan_cross_attention("dot_product", next(problems), mesh),
    )

    graph, weights = nnx.split(model)

    @jax.jit
    def read(weights, text):
        return nnx.merge(graph, weights).text_keys_values(text)

    @jax.jit
    def step(weights, latents, timestep, cached):
        model = nnx.merge(graph, weights)
        return model(latents, timestep, cached, attention=attention, layout=ActivationLayout())

    def velocity(cached) -> np.ndarray:
        with jax.set_mesh(mesh):
            result = step(weights, jnp.asarray(latents), jnp.asarray(timestep), cached)
        return np.asarray(result).transpose(0, 4, 1, 2, 3)

    cached = read(weights, jnp.asarray(text))
    return {
        "forward": lambda: velocity(read(weights, jnp.asarray(text))),
        "step": lambda: velocity(cached),
    }


def our_model(layers: int):
    """Returns our transformer with the weights that `drawn` gives to diffusers."""
    import jax.numpy as jnp
    from flax import nnx

    from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
    from maxdiffusion.models.wan.checkpoint import transformer_map

    config = WanTransformerConfig.from_diffusers(diffusers_config(layers))
    kinds = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    abstract = nnx.eval_shape(lambda: WanTransformer(config, **kinds, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    parameters = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(state)}
    names = transformer_map(config)
    for entry in names.entries:
        parameter = parameters[entry.parameter]
        shape = entry.source_shape(parameter.shape)
        tensors = [entry.transform.apply(drawn(name, shape)) for name in names.sources(entry)]
        parameter.set_value(jnp.asarray(np.stack(tensors) if entry.stacked else tensors[0]))
    return nnx.merge(graph, state)


if __name__ == "__main__":
    sys.exit(main())
