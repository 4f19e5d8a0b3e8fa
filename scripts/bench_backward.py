#!/usr/bin/env python
"""Counts the bundles of attention's backward kernels for a tpu7x that is not there.

    python scripts/bench_backward.py [--tokens 75600] [--blocks 2048,4096,1024] \
        [--library-blocks 1024,1024,512] [--only ours|jax|jax-separate|tokamax]

Compiles our backward kernel for one head of 128 features, and those of jax and tokamax, in bfloat16
and with libtpu alone. Blocks are queries and keys of a grid step, and keys of one step inside it.
The five products of a (query, key) pair need 3.5 cycles per 1024 pairs on the two MXUs of a tpu7x,
if dQ, dK and dV fill them: that is the bound that all are compared with. The last line is the table
as one JSON object.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HEAD_DIM = 128
CYCLES_PER_PAIR = 3.5 / 1024
KINDS = ("ours", "jax", "jax-separate", "tokamax")


class Row(NamedTuple):
    """Cycles of the main loop (or loops) for some pairs, and of the whole call if known."""

    kind: str
    bundles: int
    mxu_bound: int
    cycles: int
    least: float
    vmem_bytes: int
    whole: float | None = None

    @property
    def share(self) -> float:
        """Returns the share of the least cycles that five products take."""
        return self.least / self.cycles


def main() -> int:
    """Compiles, prints, returns 0."""
    arguments = parse_arguments()
    from maxdiffusion.costs.chips import read_topology
    from maxdiffusion.preflight.devices import describe_devices, prepare_environment
    from maxdiffusion.runtime.tpu_flags import apply_flags

    topology = read_topology("tpu7x:2x2x1")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        apply_flags("", topology.chip.name)
        prepare_environment(topology, dump=folder)
        device = describe_devices(topology)[0]
        for kind in arguments.only or KINDS:
            rows.append(measure(kind, arguments, device, topology.chip, Path(folder)))
            show(rows[-1])
    print(json.dumps({row.kind: {**row._asdict(), "share": row.share} for row in rows}))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=75_600)
    parser.add_argument("--blocks", type=sizes, default="2048,4096,1024")
    parser.add_argument("--library-blocks", type=sizes, default="1024,1024,512")
    parser.add_argument("--only", choices=KINDS, action="append")
    return parser.parse_args()


def sizes(text: str) -> tuple[int, ...]:
    """Returns three sizes."""
    numbers = tuple(int(word) for word in text.split(","))
    if len(numbers) != 3:
        raise argparse.ArgumentTypeError("three sizes: queries, keys, keys of one step")
    return numbers


def show(row: Row) -> None:
    """Prints a row."""
    whole = "" if row.whole is None else f"; whole call {row.whole:.1%}"
    print(
        f"{row.kind:13} {row.bundles:6} bundles, its own MXU bound {row.mxu_bound:6}, "
        f"{row.share:.1%} of the bound of five products{whole}"
        + (f"; VMEM {row.vmem_bytes / 2**20:.1f} MiB" if row.vmem_bytes else ""),
        flush=True,
    )


def measure(kind: str, arguments: argparse.Namespace, device: Any, chip: Any, dump: Path) -> Row:
    """Compiles one backward pass and reads its code; a forward kernel does not count."""
    from maxdiffusion.preflight.readers.bundles import read_kernels
    from maxdiffusion.preflight.readers.cycles import visits
    from maxdiffusion.preflight.readers.hlo import read_program

    block_q, block_kv, compute = arguments.blocks if kind == "ours" else arguments.library_blocks
    tokens = arguments.tokens if kind == "ours" else 2 * max(block_q, block_kv)
    text = compiled(backward(kind, (block_q, block_kv, compute)), tokens, device)
    calls = [visit.instruction for visit in visits(read_program(text))]
    vmem = max(call.vmem_bytes for call in calls if call.is_kernel and "fwd" not in call.name)
    codes = [code for code in read_kernels(dump) if "_fwd_" not in code.name]
    for path in dump.iterdir():
        path.unlink()
    loops = [code.main_loop for code in codes]
    # Our loop is over tiles of 512 queries; the others are one block of queries and of keys.
    pairs = 512 * block_kv if kind == "ours" else block_q * block_kv
    whole = whole_call(codes[0], tokens, arguments.blocks, chip) if kind == "ours" else None
    return Row(
        kind=kind,
        bundles=sum(loop.bundles for loop in loops),
        mxu_bound=sum(loop.mxu_bound(chip) for loop in loops),
        cycles=sum(loop.cycles(chip) for loop in loops),
        least=pairs * CYCLES_PER_PAIR,
        vmem_bytes=vmem,
        whole=whole,
    )


def whole_call(code: Any, tokens: int, blocks: tuple[int, ...], chip: Any) -> float:
    """Returns the least cycles of all pairs over those of every region, by its trips.

    Code around the main loop runs once per block of queries or of keys: the larger number counts.
    """
    block_q, block_kv, compute = blocks
    q_tiles, q_blocks = -(-tokens // 512), -(-tokens // block_q)
    whole_blocks, rest = divmod(tokens, block_kv)
    cycles = q_tiles * whole_blocks * code.main_loop.cycles(chip)
    cycles += q_blocks * -(-tokens // block_kv) * code.every_step
    cycles += max(q_blocks, whole_blocks + 1) * code.every_q_block
    masked = [one for one in code.regions if one.matmuls and one is not code.main_loop]
    if rest and masked:
        cycles += q_tiles * -(-rest // compute) * masked[0].cycles(chip)
    return tokens**2 * CYCLES_PER_PAIR / cycles


def compiled(run: Callable[..., Any], tokens: int, device: Any) -> str:
    """Returns the scheduled program of a backward pass of one head."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array([device]), ("x",))
    where = NamedSharding(mesh, PartitionSpec())
    heads = jax.ShapeDtypeStruct((1, tokens, 1, HEAD_DIM), jnp.bfloat16, sharding=where)
    log_sum = jax.ShapeDtypeStruct((1, tokens, 1), jnp.float32, sharding=where)
    with jax.set_mesh(mesh):
        lowered = jax.jit(run).lower(heads, heads, heads, heads, log_sum, heads)
    text: str = lowered.compile().as_text()
    return text


def backward(kind: str, blocks: tuple[int, int, int]) -> Callable[..., Any]:
    """Returns the backward pass of a kind: from q, k, v, out, log-sum and d_out."""
    import jax

    from maxdiffusion.kernels import splash
    from maxdiffusion.kernels.flash import FlashOptions
    from maxdiffusion.kernels.flash.backward import flash_gradients
    from maxdiffusion.kernels.tpu import BlockSizes

    separate = kind == "jax-separate"
    given = BlockSizes(
        **dict(block_sizes(blocks)),
        block_q_dq=blocks[0] if separate else 0,
        use_fused_bwd_kernel=not separate,
    )
    scale = HEAD_DIM**-0.5

    def ours(q: Any, k: Any, v: Any, *outcome: Any) -> Any:
        settings: dict[str, Any] = {"options": FlashOptions(), "out_dtype": "bfloat16"}
        return flash_gradients((q, k, v), outcome, blocks=given, **settings)

    def tokamax(q: Any, k: Any, v: Any, *outcome: Any) -> Any:
        options = splash.TokamaxOptions(blocks=given, scale=scale)
        return splash.tokamax_gradients((q, k, v), None, outcome, options)

    def of_jax(q: Any, k: Any, v: Any, out: Any, log_sum: Any, d_out: Any) -> Any:
        def attend(*qkv: Any) -> Any:
            return splash.splash_attention(*qkv, blocks=given, scale=scale)

        return jax.vjp(attend, q, k, v)[1](d_out)

    return {"ours": ours, "tokamax": tokamax}.get(kind, of_jax)


def block_sizes(blocks: tuple[int, int, int]) -> Iterator[tuple[str, int]]:
    """Yields every size that one of the kernels reads."""
    block_q, block_kv, compute = blocks
    yield from (("block_q", block_q), ("block_q_dkv", block_q))
    yield from (("block_kv", block_kv), ("block_kv_dkv", block_kv), ("block_kv_dq", block_kv))
    yield from (("block_kv_compute", compute), ("block_kv_dkv_compute", compute))


if __name__ == "__main__":
    sys.exit(main())
