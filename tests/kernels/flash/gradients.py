"""Gradients of attention in float64, and how far from them rounding may take the kernel."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from maxdiffusion.kernels.flash.api import attended_keys
from tests.kernels.flash.cases import Case

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""The largest relative error of a rounding: half the spacing above one, of 24 and of 8 bits."""
DEVIATIONS = 5.0
"""Of the largest errors of a sum of n terms, sqrt(n) apart: by Hoeffding's inequality one in
270,000 such sums is farther off. Errors spread evenly have 1 / sqrt(3) of them as deviation, so it
is more than 8 of their own."""


class Exact(NamedTuple):
    """Output, natural log-sum, gradients of q, k and v, and the bounds of their errors.

    `spreads` are the standard deviations of the errors that `bounds` limit, at most. `worst` are
    bounds where all roundings go the same way, as for keys that are all alike.
    """

    out: np.ndarray
    log_sum: np.ndarray
    gradients: tuple[np.ndarray, ...]
    bounds: tuple[np.ndarray, ...]
    spreads: tuple[np.ndarray, ...]
    worst: tuple[np.ndarray, ...]


def exact_gradients(case: Case, q: Array, k: Array, v: Array, d_out: Array) -> Exact:
    """Returns attention and its gradients in float64, on q as the kernel multiplies it, rounded.

    Bounds are element by element. Errors of float32 are added up in size: a score of H products has
    one of four deviations of their random sum and that of the log-sum, which is P's relative error;
    dP likewise; the last products are sums in float32. Before these products P and dS are rounded
    to the type of the inputs, each by itself: such errors add up like random walks.
    """
    scale = case.options.exponent.per_nat * case.head_dim**-0.5
    rounded = (q.astype(jnp.float32) * scale).astype(case.dtype)
    q = np.asarray(rounded, np.float64) / scale
    k, v, d_out = (np.asarray(x, np.float64) for x in (k, v, d_out))
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    wide_k, wide_v = (np.repeat(x, group, axis=2) for x in (k, v))
    p, log_sum = _softmax(case, np.einsum("bsnh,btnh->bsnt", q, wide_k) * scale)
    out = np.einsum("bsnt,btnh->bsnh", p, wide_v)
    delta = (out * d_out).sum(axis=3, keepdims=True)
    d_s = p * (np.einsum("bsnh,btnh->bsnt", d_out, wide_v) - delta)

    unit, single = ROUNDING[case.dtype], ROUNDING["float32"]
    per_sum = 4 * single * (q.shape[3] ** 0.5 + 1)
    finite = np.where(np.isfinite(log_sum), np.abs(log_sum), 0.0)[..., None]
    sizes = np.einsum("bsnh,btnh->bsnt", *(np.abs(x) for x in (q, wide_k))) * scale
    p_error = p * (per_sum * sizes + 4 * single * (1 + finite))
    d_p_size = np.einsum("bsnh,btnh->bsnt", *(np.abs(x) for x in (d_out, wide_v)))
    d_p_size += (np.abs(out) * np.abs(d_out)).sum(axis=3, keepdims=True)
    d_p = np.abs(np.divide(d_s, p, out=np.zeros_like(p), where=p > 0))
    d_s_error = p_error * d_p + p * per_sum * d_p_size
    p_error, d_s_error = (
        error + 4 * single * size**0.5 * np.abs(x)
        for error, x, size in ((p_error, p, case.q_len), (d_s_error, d_s, case.q_len + case.kv_len))
    )

    def products(d_s, p, q, k, d_out):
        d_k, d_v = (np.einsum("bsnt,bsnh->btnh", *pair) for pair in ((d_s * scale, q), (p, d_out)))
        by_key = (x.reshape(*v.shape[:3], group, v.shape[3]).sum(axis=3) for x in (d_k, d_v))
        return np.einsum("bsnt,btnh->bsnh", d_s * scale, k), *by_key

    sizes = [np.abs(x) for x in (q, wide_k, d_out)]
    summed = products(d_s_error, p_error, *sizes)
    worst = products(d_s_error + unit * np.abs(d_s), p_error + unit * p, *sizes)
    squares = products(d_s**2 * scale, *(x**2 for x in (p, q, wide_k, d_out)))
    walks = [unit * np.sqrt(x) for x in squares]
    bounds = (x + DEVIATIONS * walk for x, walk in zip(summed, walks, strict=True))
    spreads = (x + walk / 3**0.5 for x, walk in zip(summed, walks, strict=True))
    gradients = products(d_s, p, q, wide_k, d_out)
    return Exact(out, log_sum, gradients, tuple(bounds), tuple(spreads), worst)


def _softmax(case: Case, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    attended = attended_keys(**case.selection(), keys=s.shape[3])
    if attended is not None:
        s = np.where(np.asarray(attended)[:, None, None], s, -np.inf)
    top = np.max(s, axis=3, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    p = np.exp(s - top)
    total = p.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        log_sum = (top + np.log(total))[..., 0]
    return p / np.where(total > 0, total, 1.0), log_sum
