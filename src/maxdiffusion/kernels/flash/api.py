"""Flash attention on one device: [B, S, N, H] in and out."""

from typing import NamedTuple

from jax import Array
from jaxtyping import Bool, Float, Int

from maxdiffusion.kernels.flash.blocks import FlashBlocks, UnsupportedFlash
from maxdiffusion.kernels.flash.call import run
from maxdiffusion.kernels.flash.checks import plan_kernel
from maxdiffusion.kernels.flash.fixed_m import FixedMBounds, fixed_m_bounds, smooth_keys
from maxdiffusion.kernels.flash.inputs import attended_keys, from_kernel, kernel_inputs
from maxdiffusion.kernels.flash.options import FixedM, FlashOptions, Online
from maxdiffusion.kernels.flash.shape import FlashShape
from maxdiffusion.runtime.problems import Problem


class Partials(NamedTuple):
    """Unnormalised attention over some of the keys, to be merged with that over others.

    o = sum_j b**(s_j - m) v_j and l = sum_j b**(s_j - m), with scores s and reference m in units
    of the options' exponent b. m need not be the largest score, but o and l share it, so two
    partials merge as m' = max(m1, m2), w_i = b**(m_i - m'), o' = w1 o1 + w2 o2, l' = w1 l1 + w2 l2.
    Heads with a fixed bound have m = that bound on every call that got the same `bounds`: their
    weights are 1, and plain addition does. Without attended keys l = 0, o = 0 and m is finite.
    """

    o: Float[Array, "B S N H"]
    m: Float[Array, "B S N"]
    l: Float[Array, "B S N"]  # noqa: E741


def flash_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    blocks: FlashBlocks,
    options: FlashOptions,
    kv_len: Int[Array, "B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
    bounds: FixedMBounds | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q k^T / sqrt(H)) v over the keys before `kv_len` where `kv_mask` is True.

    A query without any such key gets zeros. With fixed-m softmax and no `bounds`, the keys are
    smoothed and the bounds measured here; given `bounds` describe `k` as it is.
    """
    _refuse_stray_bounds(options, bounds)
    selection = {"masked": kv_mask is not None, "lengths": kv_len is not None}
    plan = plan_kernel(FlashShape.of(q, k, v), blocks, options, **selection)
    if isinstance(options.softmax, FixedM) and bounds is None:
        attended = attended_keys(kv_len, kv_mask, k.shape[1])
        k = smooth_keys(k, attended)
        bounds = fixed_m_bounds(
            q, k, v, attended, gate=options.softmax.gate, exponent=options.exponent
        )
    (out,) = run(plan, kernel_inputs(plan, (q, k, v), kv_len, kv_mask, bounds))
    return from_kernel(plan, out)


def flash_attention_partials(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    blocks: FlashBlocks,
    options: FlashOptions,
    kv_len: Int[Array, "B"] | None = None,
    kv_mask: Bool[Array, "B T"] | None = None,
    bounds: FixedMBounds | None = None,
) -> Partials:
    """Returns the unnormalised float32 output and its reference and sum, for merging.

    With fixed-m softmax `bounds` must be given, and be the same for every call that is merged.
    """
    _refuse_stray_bounds(options, bounds)
    _refuse_missing_bounds(options, bounds)
    selection = {"masked": kv_mask is not None, "lengths": kv_len is not None}
    plan = plan_kernel(FlashShape.of(q, k, v), blocks, options, **selection, partials=True)
    o, m, l = run(plan, kernel_inputs(plan, (q, k, v), kv_len, kv_mask, bounds))  # noqa: E741
    m, l = (x[:, :, 0].transpose(0, 2, 1) for x in (m, l))  # noqa: E741
    return Partials(o=from_kernel(plan, o), m=m, l=l)


def _refuse_stray_bounds(options: FlashOptions, bounds: FixedMBounds | None) -> None:
    if bounds is not None and isinstance(options.softmax, Online):
        problem = Problem(
            name="bounds",
            value="given",
            rule="belong to fixed-m softmax, and the options say online",
            remedy="Use FlashOptions(softmax=FixedM()) or give no bounds",
        )
        raise UnsupportedFlash([problem])


def _refuse_missing_bounds(options: FlashOptions, bounds: FixedMBounds | None) -> None:
    if bounds is None and isinstance(options.softmax, FixedM):
        problem = Problem(
            name="bounds",
            value=None,
            rule="must be given for fixed-m partials: all calls that are merged share them",
            remedy="Take them from fixed_m_bounds, or from measure_norms and gate_heads on a ring",
        )
        raise UnsupportedFlash([problem])
