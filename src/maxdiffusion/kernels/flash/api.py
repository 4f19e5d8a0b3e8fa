"""Flash attention on one device: [B, S, N, H] in and out."""

from jax import Array
from jaxtyping import Bool, Float, Int

from maxdiffusion.kernels.flash.blocks import FlashBlocks, UnsupportedFlash
from maxdiffusion.kernels.flash.call import run
from maxdiffusion.kernels.flash.checks import plan_kernel
from maxdiffusion.kernels.flash.fixed_m import FixedMBounds, fixed_m_bounds, smooth_keys
from maxdiffusion.kernels.flash.fp8_keys import fp8_keys
from maxdiffusion.kernels.flash.inputs import attended_keys, from_kernel, kernel_inputs
from maxdiffusion.kernels.flash.options import FixedM, FlashOptions, Online, Product
from maxdiffusion.kernels.flash.partials import Partials
from maxdiffusion.kernels.flash.shape import FlashShape
from maxdiffusion.runtime.problems import Problem


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
    before: Partials | None = None,
    key_scale: Float[Array, "B K"] | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q k^T / sqrt(H)) v over the keys before `kv_len` where `kv_mask` is True.

    A query without any key gets zeros. With fixed-m softmax and no `bounds`, the keys are smoothed
    and the bounds measured here; given `bounds` describe `k` as it is. `before` are partials over
    other keys, which count as well; with fixed-m softmax they come with the bounds they were made
    with. In float8 the keys are smoothed and split here, unless `key_scale` says that `k` holds
    their pieces.
    """
    _refuse_stray_bounds(options, bounds)
    if before is not None:
        _refuse_missing_bounds(options, bounds)
        _refuse_missing_scale(options, key_scale)
    selection = {"masked": kv_mask is not None, "lengths": kv_len is not None}
    selection["carried"] = before is not None
    shape = FlashShape.of(q, v if options.product is Product.FP8 else k, v)
    plan = plan_kernel(shape, blocks, options, **selection)
    if isinstance(options.softmax, FixedM) and bounds is None:
        attended = attended_keys(kv_len, kv_mask, k.shape[1])
        k = smooth_keys(k, attended)
        bounds = fixed_m_bounds(
            q, k, v, attended, gate=options.softmax.gate, exponent=options.exponent
        )
    if plan.fp8 and key_scale is None:
        attended = attended_keys(kv_len, kv_mask, k.shape[1])
        k, key_scale = fp8_keys(k, attended, interpret=options.interpret)
    (out,) = run(plan, kernel_inputs(plan, (q, k, v), kv_len, kv_mask, bounds, before, key_scale))
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
    before: Partials | None = None,
    key_scale: Float[Array, "B K"] | None = None,
) -> Partials:
    """Returns the unnormalised float32 output and its reference and sum, for merging.

    With fixed-m softmax `bounds` must be given, and be the same for every call that is merged.
    In float8 `k` holds pieces and `key_scale` is that of all calls. Partials `before`, over other
    keys, are taken in, and their memory is used again.
    """
    _refuse_stray_bounds(options, bounds)
    _refuse_missing_bounds(options, bounds)
    _refuse_missing_scale(options, key_scale)
    selection = {"masked": kv_mask is not None, "lengths": kv_len is not None}
    selection["carried"] = before is not None
    shape = FlashShape.of(q, v if options.product is Product.FP8 else k, v)
    plan = plan_kernel(shape, blocks, options, **selection, partials=True)
    o, m, l = run(plan, kernel_inputs(plan, (q, k, v), kv_len, kv_mask, bounds, before, key_scale))  # noqa: E741
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
            remedy="Take them from fixed_m_bounds, or from key_norms and gate_heads on a ring",
        )
        raise UnsupportedFlash([problem])


def _refuse_missing_scale(options: FlashOptions, key_scale: Array | None) -> None:
    if key_scale is None and options.product is Product.FP8:
        problem = Problem(
            name="key_scale",
            value=None,
            rule="must be given for partials in float8: all calls that are merged share it",
            remedy="Take keys and scale from split_keys",
        )
        raise UnsupportedFlash([problem])
