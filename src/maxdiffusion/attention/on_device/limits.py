"""Reasons against a kernel that several kernels share."""

from maxdiffusion.attention.on_device.site import KernelSite
from maxdiffusion.attention.options import LANES
from maxdiffusion.runtime.problems import Problem

SPLASH_SIZES = (
    "block_q",
    "block_kv",
    "block_kv_compute",
    "block_q_dkv",
    "block_kv_dkv",
    "block_kv_dkv_compute",
    "block_q_dq",
    "block_kv_dq",
)


def pallas_problems(title: str, site: KernelSite) -> list[Problem]:
    """Why a Pallas TPU kernel cannot run on these devices."""
    if site.platform == "tpu" or site.interpret:
        return []
    return [
        Problem(
            name="device",
            value=site.platform,
            rule=f"{title} is compiled for TPUs only",
            remedy="Interpret it (interpret=True), or use dot_product or, on a GPU, cudnn_flash_te",
        )
    ]


def splash_block_problems(site: KernelSite) -> list[Problem]:
    """Which of the user's tile sizes a splash kernel refuses."""
    sizes = vars(site.options.block_sizes)
    found = [
        Problem(
            name=f"flash_block_sizes.{name}",
            value=sizes[name],
            rule=f"splash tiles are multiples of {LANES}",
            remedy=f"Use {-(-sizes[name] // LANES) * LANES}",
        )
        for name in SPLASH_SIZES
        if sizes[name] is not None and sizes[name] % LANES
    ]
    for outer, inner in (
        ("block_kv", "block_kv_compute"),
        ("block_kv_dkv", "block_kv_dkv_compute"),
    ):
        if sizes[outer] and sizes[inner] and sizes[outer] % sizes[inner]:
            found.append(
                Problem(
                    name=f"flash_block_sizes.{inner}",
                    value=sizes[inner],
                    rule=f"it must divide {outer}={sizes[outer]}",
                    remedy=f"Use {outer} or one of its divisors",
                )
            )
    return found
