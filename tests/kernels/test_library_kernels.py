"""jax's and tokamax's splash kernels and cuDNN's call, against the dense reference."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.kernels.reference import (
    cudnn_attention,
    dense_attention,
    normalise,
    reference_partials,
)
from maxdiffusion.kernels.splash import (
    TokamaxOptions,
    splash_attention,
    tokamax_attention,
    tokamax_gradients,
    tokamax_partials,
)
from maxdiffusion.kernels.tpu import BlockSizes

pytestmark = pytest.mark.slow

SCALE = 0.2
# 150 keys of 32 features in float32: random walks of roundings, plus exponents of a dozen bits.
ATOL = 64 * 2**-24
BLOCKS = BlockSizes(
    block_q=128,
    block_kv=256,
    block_kv_compute=128,
    block_q_dkv=128,
    block_kv_dkv=256,
    block_kv_dkv_compute=128,
    block_q_dq=128,
    block_kv_dq=256,
)


def arrays():
    rng = np.random.default_rng(5)
    shapes = [(2, 70, 2, 32), (2, 150, 2, 32), (2, 150, 2, 32)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


MASK = jnp.asarray(np.random.default_rng(6).random((2, 150)) < 0.6)
MASKS = pytest.mark.parametrize("valid", [None, MASK], ids=["all keys", "masked"])


def splash(q, k, v, valid):
    return splash_attention(q, k, v, blocks=BLOCKS, scale=SCALE, valid=valid, interpret=True)


def splash_with_a_fused_backward_pass(q, k, v, valid):
    blocks = replace(BLOCKS, use_fused_bwd_kernel=True)
    return splash_attention(q, k, v, blocks=blocks, scale=SCALE, valid=valid, interpret=True)


def tokamax_options(**changes):
    return TokamaxOptions(blocks=BLOCKS, scale=SCALE, interpret=True, **changes)


def tokamax(q, k, v, valid):
    return tokamax_attention(q, k, v, valid, tokamax_options())


def tokamax_natural(q, k, v, valid):
    return tokamax_attention(q, k, v, valid, tokamax_options(use_base2_exp=False))


def cudnn_by_xla(q, k, v, valid):
    return cudnn_attention(q, k, v, scale=SCALE, valid=valid, implementation="xla")


@MASKS
@pytest.mark.parametrize("kernel", [splash, tokamax, tokamax_natural, cudnn_by_xla])
def test_equals_the_reference(kernel, valid):
    q, k, v = arrays()
    wanted = dense_attention(q, k, v, scale=SCALE, valid=valid)
    np.testing.assert_allclose(kernel(q, k, v, valid), wanted, atol=ATOL)


@pytest.mark.parametrize("kernel", [splash, splash_with_a_fused_backward_pass, tokamax])
def test_has_the_gradient_of_the_reference(kernel):
    q, k, v = arrays()

    def gradients(attention):
        loss = jax.jit(lambda *qkv: jnp.sum(attention(*qkv, MASK) ** 2))
        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    wanted = gradients(lambda q, k, v, m: dense_attention(q, k, v, scale=SCALE, valid=m))
    for pair in zip(gradients(kernel), wanted, strict=True):
        np.testing.assert_allclose(*pair, atol=4 * ATOL)


@MASKS
def test_tokamax_partials_stand_for_the_same_attention(valid):
    q, k, v = arrays()
    got = tokamax_partials(q, k, v, valid, tokamax_options())
    wanted = reference_partials(q, k, v, scale=SCALE, valid=valid)
    np.testing.assert_allclose(got.o, normalise(wanted.o, wanted.l), atol=ATOL)
    log_sum = wanted.m + jnp.log(wanted.l)
    np.testing.assert_allclose(got.m + jnp.log(got.l), log_sum, atol=ATOL)


def test_tokamax_gradients_of_some_keys_add_up_to_those_of_all():
    q, k, v = arrays()
    d_out = jnp.asarray(np.random.default_rng(7).standard_normal(q.shape), jnp.float32)
    out, pull_back = jax.vjp(lambda *x: dense_attention(*x, scale=SCALE, valid=MASK), q, k, v)
    whole = reference_partials(q, k, v, scale=SCALE, valid=MASK)
    outcome = (whole.m + jnp.log(whole.l), jnp.sum(out * d_out, axis=-1), d_out)
    parts = [
        tokamax_gradients((q, k[:, keys], v[:, keys]), MASK[:, keys], outcome, tokamax_options())
        for keys in (slice(0, 40), slice(40, 150))
    ]
    got = (
        parts[0][0] + parts[1][0],
        jnp.concatenate([part[1] for part in parts], axis=1),
        jnp.concatenate([part[2] for part in parts], axis=1),
    )
    for pair in zip(got, pull_back(d_out), strict=True):
        np.testing.assert_allclose(*pair, atol=4 * ATOL)


def backward_kernels(fused):
    """Counts the Pallas calls of a gradient: one forward, then one or two backward."""
    blocks = replace(BLOCKS, use_fused_bwd_kernel=fused)

    def loss(q, k, v):
        return jnp.sum(splash_attention(q, k, v, blocks=blocks, scale=SCALE, interpret=True))

    return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays())).count("pallas_call[")


def test_use_fused_bwd_kernel_makes_one_backward_pass_of_two():
    assert (backward_kernels(True), backward_kernels(False), backward_kernels(None)) == (2, 3, 3)
