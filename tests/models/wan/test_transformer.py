"""The whole transformer against diffusers, and against itself written out layer by layer."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan import WanTransformer
from maxdiffusion.models.wan.checkpoint import transformer_map
from tests.models.wan.tiny_transformer import block_attention, forward, golden_inputs

# Sums of up to 512 float32 products of order 1, through 2 blocks: two exact implementations differ
# by 1e-5; the smallest mistake of formula (an eps of 1e-5) moves the output by 1e-4.
FLOAT32 = 3e-5
# Velocities have a spread of 1.3, so one bfloat16 rounding is up to 1.6e-2 at the largest (4 to 8);
# two implementations that round in the same places, but sum in another order, differ by a few.
BFLOAT16 = 5e-2


def velocity_of(expert, name: str) -> np.ndarray:
    return expert.golden[name].transpose(0, 2, 3, 4, 1)


def test_velocity_is_that_of_diffusers_in_float32(expert):
    ours = forward(expert.model(), golden_inputs(expert))
    np.testing.assert_allclose(ours, velocity_of(expert, "out"), rtol=0, atol=FLOAT32)


@pytest.mark.slow
def test_velocity_in_bfloat16_is_that_of_diffusers_and_loses_no_more(expert):
    ours, theirs = forward(expert.model("bfloat16"), golden_inputs(expert)), "out_bf16"
    np.testing.assert_allclose(ours, velocity_of(expert, theirs), rtol=0, atol=BFLOAT16)
    exact = velocity_of(expert, "out")
    own_loss = np.sqrt(np.mean((ours - exact) ** 2))
    their_loss = np.sqrt(np.mean((velocity_of(expert, theirs) - exact) ** 2))
    # Hundreds of values: the two root mean squares of like noise agree to a few percent.
    assert own_loss < 1.2 * their_loss


@pytest.mark.slow
def test_scanned_and_written_out_layers_agree(high_noise):
    scanned = forward(high_noise.model(), golden_inputs(high_noise))
    written = forward(high_noise.model(scan_layers=False), golden_inputs(high_noise))
    # The same operations in the same order: at most a last bit where the compiler fuses otherwise.
    np.testing.assert_allclose(scanned, written, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("scan_layers", "loops"), [(True, True), (False, False)])
def test_scan_layers_decides_whether_the_program_has_a_loop(high_noise, scan_layers, loops):
    model = high_noise.model(scan_layers=scan_layers)
    text = jax.ShapeDtypeStruct((2, 512, model.config.text_dim), jnp.float32)
    program = nnx.jit(lambda model, text: model.text_keys_values(text)).lower(model, text)
    assert ("stablehlo.while" in program.as_text()) == loops


@pytest.mark.slow
def test_text_rows_of_zeros_are_attended_to(high_noise):
    latents, timestep, text = golden_inputs(high_noise)
    model = high_noise.model()
    whole = forward(model, (latents, timestep, text))
    cached = model.text_keys_values(text)
    assert not np.any(text[:, -1]), "the goldens end in padding"
    assert np.all(np.abs(cached.values[:, :, -1]).max(axis=(-1, -2)) > 1e-2)
    louder = text.at[:, -1].set(1.0)
    assert np.abs(forward(model, (latents, timestep, louder)) - whole).max() > 1e-4


def test_cached_text_has_one_entry_per_layer(high_noise):
    model = high_noise.model()
    _, _, text = golden_inputs(high_noise)
    cached = model.text_keys_values(text)
    config = model.config
    expected = (config.layers, 2, 512, config.heads, config.head_dim)
    assert cached.keys.shape == cached.values.shape == expected


@pytest.mark.slow
def test_time_may_be_a_float(high_noise):
    latents, timestep, text = golden_inputs(high_noise)
    whole = forward(high_noise.model(), (latents, timestep, text))
    real = forward(high_noise.model(), (latents, timestep.astype(jnp.float32), text))
    np.testing.assert_array_equal(whole, real)


def test_a_latent_that_patches_do_not_cover_is_refused(high_noise):
    model = high_noise.model()
    _, timestep, text = golden_inputs(high_noise)
    cached = model.text_keys_values(text)
    with pytest.raises(ValueError, match=r"multiple of the patch \(1, 2, 2\)"):
        model(
            jnp.zeros((2, 3, 5, 4, 16)),
            timestep,
            cached,
            attention=block_attention(model, 2, 18),
            layout=ActivationLayout(),
        )


@pytest.mark.slow
def test_random_parameters_give_a_finite_velocity_of_order_one(high_noise):
    kinds = {"dtype": jnp.float32, "param_dtype": jnp.float32}
    model = nnx.jit(lambda: WanTransformer(high_noise.config, **kinds, rngs=nnx.Rngs(3)))()
    velocity = forward(model, golden_inputs(high_noise))
    assert 0.1 < velocity.std() < 10


def test_float32_islands_are_those_of_diffusers(expert):
    model = expert.model("bfloat16")
    dtypes = {
        ".".join(map(str, path)): param.dtype
        for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    table = transformer_map(model.config)
    ours = {
        name
        for entry in table.entries
        for name in table.sources(entry)
        if dtypes[entry.parameter] == jnp.float32
    }
    assert ours == set(json.loads(str(expert.golden["fp32_islands_json"])))
