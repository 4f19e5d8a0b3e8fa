"""From [B, S, N, H] arrays to what the kernel reads, and back."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from maxdiffusion.kernels.flash.call import KernelInputs
from maxdiffusion.kernels.flash.fixed_m import FixedMBounds
from maxdiffusion.kernels.flash.partials import Partials
from maxdiffusion.kernels.flash.plan import KernelPlan


def attended_keys(
    kv_len: Int[Array, "B"] | None, kv_mask: Bool[Array, "B T"] | None, keys: int
) -> Bool[Array, "B T"] | None:
    """Returns which keys are attended; None when all are."""
    if kv_len is None:
        return kv_mask
    before = jnp.arange(keys)[None, :] < kv_len[:, None]
    return before if kv_mask is None else before & kv_mask


def kernel_inputs(
    plan: KernelPlan,
    qkv: tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    kv_len: Int[Array, "B"] | None,
    kv_mask: Bool[Array, "B T"] | None,
    bounds: FixedMBounds | None,
    before: Partials | None = None,
    key_scale: Float[Array, "B K"] | None = None,
) -> KernelInputs:
    """Returns the arrays of one kernel call in the plan's layout."""
    batch, keys = plan.shape.batch, plan.shape.kv_len
    mask = full = None
    if kv_mask is not None:
        attended = kv_mask
        if kv_len is not None:
            attended = attended & (jnp.arange(keys) < kv_len[:, None])
        limits, full = _mask_limits(attended), _full_blocks(plan, attended)
        mask = attended.astype(jnp.int32)[:, None, :]
    elif kv_len is not None:
        limits = jnp.clip(kv_len, 0, keys).astype(jnp.int32)
    else:
        limits = jnp.full(batch, keys, jnp.int32)
    q, k, v = (to_kernel(plan, x) for x in qkv)
    key_norm = None if bounds is None else bounds.key_norm.astype(jnp.float32)
    fixed = None if bounds is None else bounds.fixed.astype(jnp.int32)
    sums = None
    if before is not None:
        m, l = (x.transpose(0, 2, 1)[:, :, None] for x in (before.m, before.l))  # noqa: E741
        sums = (to_kernel(plan, before.o), m, l)
    return KernelInputs(limits, full, key_norm, fixed, key_scale, q, k, v, mask, sums)


def _mask_limits(attended: Bool[Array, "B T"]) -> Int[Array, "B"]:
    """Returns one past the last attended key."""
    past = jnp.arange(1, attended.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(attended, past, 0), axis=1)


def _full_blocks(plan: KernelPlan, attended: Bool[Array, "B T"]) -> Int[Array, "B blocks"]:
    """Returns 1 for every block of keys that is attended to its last key."""
    size = plan.blocks.block_kv
    spare = plan.kv_blocks * size - attended.shape[1]
    whole = jnp.pad(attended, ((0, 0), (0, spare)))
    return jnp.all(whole.reshape(-1, plan.kv_blocks, size), axis=2).astype(jnp.int32)


def to_kernel(plan: KernelPlan, x: Float[Array, "B S N H"]) -> Array:
    """Returns x in the plan's layout."""
    if plan.folded:
        return x.reshape(*x.shape[:2], -1)
    return x.transpose(0, 2, 1, 3)


def from_kernel(plan: KernelPlan, x: Array) -> Float[Array, "B S N H"]:
    """Returns [B, S, N, H] from the plan's layout."""
    if plan.folded:
        return x.reshape(*x.shape[:2], -1, plan.shape.head_dim)
    return x.transpose(0, 2, 1, 3)
