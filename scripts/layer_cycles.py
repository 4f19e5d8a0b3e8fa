#!/usr/bin/env python
"""Counts the cycles of one transformer layer outside kernels, from a stack of few layers.

    python scripts/layer_cycles.py CONFIG.yml topology=tpu7x:2x2x1 [key=value ...] \
        [--layers 4] [--heads 40] [--kernels small|real] [--least 20000] [--text FILE]

Compiles the denoise step of a config with `--layers` layers for a TPU that is not there. With
`--kernels small` the attention kernels get small tiles and claim the VMEM that the real ones need:
they compile in seconds, and everything around them compiles to what it is beside the real ones.
With `--heads` the model gets so many heads of its width, and a feed-forward part in proportion.
Prints every operation of a layer from `--least` cycles on, in the order of the schedule, then the
sums by purpose, and as the last line the same as one JSON object. Needs libtpu.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

SMALL_TILE = 512
EXCHANGES = ("all-to-all", "collective-permute", "all-gather", "all-reduce", "reduce-scatter")


def main() -> int:
    """Compiles, prints, returns 0."""
    arguments, config = parse_arguments()
    from maxdiffusion.commands.entry import chip_of
    from maxdiffusion.config.loading import read_config
    from maxdiffusion.preflight.topology import prepare_environment, read_topology
    from maxdiffusion.runtime.libtpu_flags import apply_flags

    reading = read_config(config)
    topology = read_topology(reading.config.topology)
    apply_flags(reading.config.libtpu_init_args, chip_of(reading.config))
    prepare_environment(topology)
    text = compile_layers(reading, arguments)
    if arguments.text:
        Path(arguments.text).write_text(text)
    show(text, arguments.layers, arguments.least, topology.chip)
    return 0


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest, which is a config and its overrides."""
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


def compile_layers(reading: Any, arguments: argparse.Namespace) -> str:
    """The scheduled program of a denoise step with fewer layers."""
    from maxdiffusion.commands.pipeline_settings import sampler
    from maxdiffusion.commands.preflight import prepare

    job = prepare(reading)
    workshop = with_layers(job.workshop, arguments.layers, arguments.heads)
    if arguments.kernels == "small":
        workshop = with_small_kernels(workshop, job.shape)
    print(workshop.attention(job.shape).describe(), flush=True)
    lowered = workshop.lower_denoise_step(job.shape, sampler(job.config, job.workshop.spec))
    return lowered.compile().as_text()


def with_layers(workshop: Any, layers: int, heads: int | None) -> Any:
    """The workshop of a model with fewer layers and, if told so, fewer heads."""
    spec, whole = workshop.spec, workshop.spec.transformer
    heads = heads or whole.heads
    ffn = whole.ffn_dim * heads // whole.heads // 128 * 128
    smaller = replace(whole, layers=layers, heads=heads, ffn_dim=ffn)
    return replace(workshop, spec=replace(spec, transformer=smaller))


def with_small_kernels(workshop: Any, shape: Any) -> Any:
    """The workshop with small tiles that claim what the tiles of its own plan need."""
    from maxdiffusion.attention.on_device.flash import FlashKernel
    from maxdiffusion.attention.options import FlashBlockSizes
    from maxdiffusion.kernels.flash.vmem import vmem_limit

    kernel = workshop.attention(shape).self_attention.kernel
    if not isinstance(kernel, FlashKernel):
        return workshop
    sizes = FlashBlockSizes(
        block_q=SMALL_TILE,
        block_kv=SMALL_TILE,
        block_kv_compute=SMALL_TILE,
        block_kv_compute_in=SMALL_TILE,
        vmem_limit_bytes=max(vmem_limit(plan) for plan in kernel.kernel_plans(kernel.blocks)),
    )
    settings = workshop.settings
    options = replace(settings.attention_options, block_sizes=sizes)
    return replace(workshop, settings=replace(settings, attention_options=options))


def show(text: str, layers: int, least: int, chip: Any) -> None:
    """Prints the operations of a layer, then what they sum up to."""
    from maxdiffusion.preflight.cycles import count_cycles, cycles_of, purpose_of, visits
    from maxdiffusion.preflight.hlo import read_program

    program = read_program(text)
    for visit in visits(program):
        one = visit.instruction
        if visit.times % layers or visit.loop_trips == 1:
            continue
        cycles = cycles_of(one, chip) * visit.times // layers
        if cycles >= least or one.is_kernel or one.opcode.startswith(EXCHANGES):
            purpose, place = purpose_of(program, one).value, source_of(program.stack(one))
            print(f"{cycles:>11,} {purpose:20.20} {one.name:34.34} {one.shape:70.70} {place}")
    cycles = count_cycles(program, layers, chip)
    sums = {purpose.value: count for purpose, count in cycles.per_layer.items()}
    for purpose, count in sorted(sums.items(), key=lambda row: -row[1]):
        print(f"{count:>11,} {purpose}")
    print(f"{moved_at_start(program):>11,} bytes of weights written anew before the first layer")
    print(json.dumps({"cycles_per_layer_outside_kernels": cycles.layer, **sums}))


def moved_at_start(program: Any) -> int:
    """Bytes of arrays that a SparseCore brings to other tiles outside of the layers."""
    return sum(
        one.bytes
        for one in program.computations[program.entry]
        if one.opcode.endswith("-done") and "data-format" in one.name
    )


def source_of(stack: Sequence[Any]) -> str:
    """Where in the package an operation was written."""
    ours = [frame for frame in stack if "maxdiffusion/" in frame.file]
    return f"{ours[0].file.split('maxdiffusion/')[-1]}:{ours[0].function}" if ours else ""


if __name__ == "__main__":
    sys.exit(main())
