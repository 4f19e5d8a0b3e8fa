#!/usr/bin/env python
"""Counts the cycles of one transformer layer outside kernels, from a stack of few layers.

    python scripts/layer_cycles.py CONFIG.yml topology=tpu7x:2x2x1 [key=value ...] \
        [--layers 4] [--heads 40] [--kernels small|real] [--least 20000] [--text FILE]

Compiles the denoise step of a config with `--layers` layers for a TPU that is not there. With
`--kernels small` the attention kernels get small tiles and claim the VMEM that the real ones need:
they compile in seconds, and the operations around them compile as they do with the real ones.
`--heads` gives the model that many heads of its head_dim, and a feed-forward part in proportion.
Prints every operation of a layer from `--least` cycles on, in schedule order, then the sums by
purpose, and as the last line the same as one JSON object. Needs libtpu.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

SMALL_TILE = 512
# A call that starts and ends elsewhere is a collective that a SparseCore runs.
COLLECTIVES = (
    *("all-to-all", "collective-permute", "all-gather", "all-reduce", "reduce-scatter"),
    *("call-start", "call-done"),
)


def main() -> int:
    """Compiles, prints, returns 0."""
    arguments, config = parse_arguments()
    from maxdiffusion.config.load import read_config
    from maxdiffusion.costs.chips import read_topology
    from maxdiffusion.preflight.devices import prepare_environment
    from maxdiffusion.runtime.tpu_flags import apply_flags, target_chip

    parsed = read_config(config)
    topology = read_topology(parsed.config.topology)
    apply_flags(parsed.config.libtpu_init_args, target_chip(parsed.config.topology))
    prepare_environment(topology)
    text = compile_layers(parsed, arguments)
    if arguments.text:
        Path(arguments.text).write_text(text)
    show(text, arguments.layers, arguments.least, topology.chip)
    return 0


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of this script, and the config with its overrides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, help="of a narrower model, which compiles sooner")
    parser.add_argument("--kernels", choices=("small", "real"), default="small")
    parser.add_argument("--least", type=int, default=20_000, help="cycles worth a line")
    parser.add_argument("--text", help="a file for the scheduled program")
    arguments, config = parser.parse_known_args()
    if not config:
        parser.error("a config is needed, such as configs/base_wan_27b.yml")
    return arguments, config


def compile_layers(parsed: Any, arguments: argparse.Namespace) -> str:
    """Returns the scheduled program of a denoise step with fewer layers."""
    from maxdiffusion.generation.settings import sampler
    from maxdiffusion.preflight.command import plan_for_topology

    job = plan_for_topology(parsed).planned
    builder = with_layers(job.builder, arguments.layers, arguments.heads)
    if arguments.kernels == "small":
        builder = with_small_kernels(builder, job.shape)
    print(builder.attention(job.shape).describe(), flush=True)
    lowered = builder.lower_denoise_step(
        job.shape, sampler(job.config, builder.spec), builder.attention(job.shape)
    )
    return lowered.compile().as_text()


def with_layers(builder: Any, layers: int, heads: int | None) -> Any:
    """Returns the builder of a model with fewer layers and, if given, fewer heads."""
    spec, whole = builder.spec, builder.spec.transformer
    heads = heads or whole.heads
    ffn = whole.ffn_dim * heads // whole.heads // 128 * 128
    smaller = replace(whole, layers=layers, heads=heads, ffn_dim=ffn)
    return replace(builder, spec=replace(spec, transformer=smaller))


def with_small_kernels(builder: Any, shape: Any) -> Any:
    """Returns the builder with small tiles that claim the VMEM of the real ones."""
    from maxdiffusion.attention import BlockSizes
    from maxdiffusion.attention.backends.flash import FlashBackend
    from maxdiffusion.kernels.flash.vmem import vmem_limit

    kernel = builder.attention(shape).self_attention.backend
    if not isinstance(kernel, FlashBackend):
        return builder
    sizes = BlockSizes(
        block_q=SMALL_TILE,
        block_kv=SMALL_TILE,
        block_kv_compute=SMALL_TILE,
        block_kv_compute_in=SMALL_TILE,
        vmem_limit_bytes=max(vmem_limit(plan) for plan in kernel.kernel_plans(kernel.blocks)),
    )
    settings = builder.settings
    options = replace(settings.attention_options, block_sizes=sizes)
    return replace(builder, settings=replace(settings, attention_options=options))


def show(text: str, layers: int, least: int, chip: Any) -> None:
    """Prints the operations of a layer, then their sums."""
    from maxdiffusion.preflight.readers.cycles import (
        count_cycles,
        cycles_of,
        purpose_of,
        visits,
        weight_copies,
    )
    from maxdiffusion.preflight.readers.hlo import read_program

    program = read_program(text)
    for visit in visits(program):
        one = visit.instruction
        if visit.times % layers or visit.loop_trips == 1:
            continue
        cycles = cycles_of(one, chip) * visit.times // layers
        if cycles >= least or one.is_kernel or one.opcode.startswith(COLLECTIVES):
            purpose, source = purpose_of(program, one).value, source_of(program.stack(one))
            print(f"{cycles:>11,} {purpose:20.20} {one.name:34.34} {one.shape:70.70} {source}")
    cycles = count_cycles(program, layers, chip)
    sums = {purpose.value: count for purpose, count in cycles.per_layer.items()}
    for purpose, count in sorted(sums.items(), key=lambda row: -row[1]):
        print(f"{count:>11,} {purpose}")
    copied = sum(weight_copies(program).values())
    print(f"{copied:>11,} bytes of weights copied to other tiles before the first layer")
    alone = exposed_kinds(program, layers, chip)
    print(f"{len(alone):>11,} collectives of a layer with nothing to hide them: {', '.join(alone)}")
    figures = {
        "cycles_per_layer_outside_kernels": cycles.layer,
        "copied_weight_bytes": copied,
        "exposed_collectives": alone,
    }
    print(json.dumps(figures | sums))


def exposed_kinds(program: Any, layers: int, chip: Any) -> list[str]:
    """Returns the kinds of a layer's collectives that nothing runs next to, by name."""
    from maxdiffusion.preflight.readers.collectives import find_collectives

    return sorted(
        f"{one.kind} {one.name}"
        for one in find_collectives(program, {}, chip)
        if one.times % layers == 0
        and (one.overlap is None or not (one.overlap.cycles or one.overlap.kernels))
    )


def source_of(stack: Sequence[Any]) -> str:
    """Returns the file and function of an operation in this package."""
    ours = [frame for frame in stack if "maxdiffusion/" in frame.file]
    return f"{ours[0].file.split('maxdiffusion/')[-1]}:{ours[0].function}" if ours else ""


if __name__ == "__main__":
    sys.exit(main())
