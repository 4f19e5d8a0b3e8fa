"""What the TPU compiler says of the kernel's VMEM: recorded figures, and how to ask it again.

As a program, `python compiled.py CHIP ROW...` compiles rows of the table and prints bytes of VMEM.
"""

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxdiffusion.kernels.flash import (
    FixedM,
    FlashOptions,
    FlashShape,
    KernelPlan,
    Online,
    Product,
    plan_kernel,
)
from maxdiffusion.kernels.tpu import BlockSizes

TABLE = Path(__file__).with_name("compiler_vmem.csv")
TOKENS = 75_600
HEADS = 8
KINDS = ("masked", "lengths", "partials", "carried")
BLOCKS = ("block_q", "block_kv", "block_kv_compute", "block_kv_compute_in", "heads_per_tile")
USED = re.compile(r'"used_scoped_memory_configs":\[\{[^]]*?"size":"(\d+)"')


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One row: a kernel call and the MiB of VMEM that libtpu 0.0.42.1 gave it."""

    chip: str
    plan: KernelPlan
    mib: float

    def __str__(self) -> str:
        blocks, shape = self.plan.blocks, self.plan.shape
        tile = f"{blocks.block_q}({blocks.q_tile})x{blocks.block_kv}/{blocks.block_kv_compute}"
        return f"{self.chip}-{shape.dtype}-{shape.head_dim}-{tile}/{blocks.block_kv_compute_in}"


def figures() -> list[Figure]:
    """Returns all rows."""
    with TABLE.open(newline="") as file:
        return [_figure(row) for row in csv.DictReader(file)]


def _figure(row: dict[str, str]) -> Figure:
    shape = FlashShape(
        batch=1,
        q_len=TOKENS,
        kv_len=TOKENS,
        heads=HEADS,
        kv_heads=int(row["kv_heads"]),
        head_dim=int(row["head_dim"]),
        dtype=row["dtype"],
    )
    compute = int(row["block_q_compute"]) if row["block_q_compute"] else 0
    blocks = BlockSizes(**{name: int(row[name]) for name in BLOCKS}, block_q_compute=compute)
    softmax = FixedM() if row["softmax"] == "fixed-m" else Online()
    product = Product.FP8 if row["softmax"] == "online, fp8" else Product.NATIVE
    options = FlashOptions(softmax=softmax, product=product, chip=row["chip"])
    kinds = {kind: kind in row["kinds"].split() for kind in KINDS}
    plan = plan_kernel(shape, blocks, options, **kinds)
    return Figure(chip=row["chip"], plan=plan, mib=float(row["mib"]))


def compiled_bytes(plan: KernelPlan, device: Any) -> int:
    """Returns the bytes of VMEM that the compiler gives a call on a described device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from maxdiffusion.kernels.flash import FixedMBounds
    from maxdiffusion.kernels.flash.api import kernel_inputs, pallas_call
    from maxdiffusion.kernels.reference import Partials

    mesh = Mesh(np.array([device]), ("x",))
    shape, where = plan.shape, NamedSharding(mesh, PartitionSpec())

    def array(*sizes: int, dtype: Any = shape.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=where)

    def call(qkv: Any, *others: Any) -> Any:
        inputs = kernel_inputs(plan, qkv, *others)
        return pallas_call(plan, inputs)(*inputs.scalars, *inputs.blocks)

    keys = array(shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim)
    rows = -(-shape.kv_len // 32) * 32 // plan.keys_per_row
    packed = array(shape.batch, rows, shape.kv_heads, plan.product_depth, dtype="int32")
    per_head = (shape.batch, shape.heads)
    per_query = (shape.batch, shape.q_len, shape.heads)
    arguments = (
        (
            array(shape.batch, shape.q_len, shape.heads, shape.head_dim),
            packed if plan.fp8 else keys,
            keys,
        ),
        array(shape.batch, dtype="int32") if plan.lengths else None,
        array(shape.batch, shape.kv_len, dtype="bool") if plan.masked else None,
        FixedMBounds(array(*per_head, dtype="float32"), array(*per_head, dtype="bool"))
        if plan.fixed_m
        else None,
        Partials(
            array(*per_query, shape.head_dim, dtype="float32"),
            *(array(*per_query, dtype="float32") for _ in "ml"),
        )
        if plan.carried
        else None,
        array(shape.batch, shape.kv_heads, dtype="float32") if plan.fp8 else None,
    )
    with jax.set_mesh(mesh):
        lines = jax.jit(call).lower(*arguments).compile().as_text().splitlines()
    (kernel,) = (line for line in lines if "tpu_custom_call" in line)
    return int(USED.search(kernel)[1])


def main(chip: str, rows: list[str]) -> None:
    """Compiles rows of the table for a chip and prints their bytes."""
    from maxdiffusion.costs.chips import CHIPS, topology_of_size
    from maxdiffusion.preflight.devices import describe_devices, prepare_environment

    topology = topology_of_size(CHIPS[chip], 4 * CHIPS[chip].devices_per_chip)
    prepare_environment(topology)
    device = describe_devices(topology)[0]
    for row in rows:
        print(compiled_bytes(figures()[int(row)].plan, device), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
