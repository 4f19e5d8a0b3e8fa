"""From what the TPU compiler says to a sentence that names the keys to change."""

import re

import jax

from maxdiffusion.preflight.chips import Chip
from maxdiffusion.runtime.problems import Problem

_REMEDIES = {
    "hbm": "Use more devices, split the weights with ici_fsdp_parallelism or "
    "ici_tensor_parallelism, raise ici_context_parallelism, lower per_device_batch_size, height, "
    "width or num_frames",
    "vmem": "Lower flash_block_sizes.block_q or flash_block_sizes.block_kv, or raise "
    "flash_block_sizes.vmem_limit_bytes if the chip has more",
    "decode": "Use vae_decode_chunk=1, vae_tiling=true or more vae_spatial devices",
    "layout": "Use multiples of 128 for flash_block_sizes.block_q and flash_block_sizes.block_kv, "
    "or leave flash_block_sizes out; or another attention or activations_dtype",
}


def is_refusal(error: Exception) -> bool:
    """Whether an error is the compiler's, and not a mistake of this program.

    The compiler of Pallas kernels raises classes of its own, which jax.errors does not name.
    """
    if isinstance(error, jax.errors.JaxRuntimeError | NotImplementedError):
        return True
    return type(error).__module__.startswith("jax.") and not isinstance(error, TypeError)


def explain(program: str, message: str, chip: Chip) -> Problem:
    """The problem that a compiler's message is about."""
    used = _sizes(message)
    if re.search(r"vmem", message, re.IGNORECASE) and _exhausted(message):
        return Problem(
            name=program,
            value="compile error",
            rule=f"a kernel needs more VMEM than it may use ({used or _first_line(message)}; "
            f"{chip.title} has {chip.vmem_bytes / 2**20:.0f} MiB)",
            remedy=_REMEDIES["vmem"],
        )
    if re.search(r"hbm", message, re.IGNORECASE) and _exhausted(message):
        remedy = _REMEDIES["decode"] if program == "decode" else _REMEDIES["hbm"]
        return Problem(
            name=program,
            value="compile error",
            rule=f"it does not fit into the device's HBM ({used or _first_line(message)}; "
            f"{chip.title} has {chip.hbm_bytes / 2**30:.0f} GiB a device)",
            remedy=remedy,
        )
    if re.search(r"mosaic|layout|pallas", message, re.IGNORECASE):
        return Problem(
            name=program,
            value="compile error",
            rule=f"a kernel has no form on {chip.title} at these sizes: {_first_line(message)}",
            remedy=_REMEDIES["layout"],
        )
    return Problem(
        name=program,
        value="compile error",
        rule=f"the TPU compiler refuses it: {_first_line(message)}",
        remedy="Try another attention, other flash_block_sizes or another mesh",
    )


def _exhausted(message: str) -> bool:
    return bool(re.search(r"RESOURCE_EXHAUSTED|out of memory|exceed", message, re.IGNORECASE))


def _sizes(message: str) -> str:
    """The part of the message with the sizes, where there is one."""
    for pattern in (
        r"Used [\d.]+\w* of [\d.]+\w* \w+",
        r"[Ss]coped allocation with size [\d.]+\w* and limit [\d.]+\w*",
        r"\([\d.]+\w\) exceeds available HBM \([\d.]+\w\)",
        r"size [\d.]+\w* .{0,40}limit [\d.]+\w*",
    ):
        found = re.search(pattern, message)
        if found:
            return found[0]
    return ""


def _first_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[0][:300].rstrip(".") if lines else "no reason given"
