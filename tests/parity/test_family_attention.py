"""Every lossless attention name on eight devices, for the models with blocks of their own.

A forward pass of VACE or of Animate, in turn, for each name against dense attention on one device,
which other tests compare with diffusers. `test_family_meshes` has whole runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.attention.backends.base import Precision
from maxdiffusion.attention.backends.dense import CudnnBackend
from maxdiffusion.attention.registry import ATTENTION_OPS, DOT_PRODUCT
from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh, single_device_mesh
from maxdiffusion.models.wan import ControlInput, WanTransformer
from tests.oracle.tiny_checkpoints import TransformerSize
from tests.oracle.tiny_family import make_family_transformer, wan21_vace, wan22_animate
from tests.parity.loaded import load_transformer

pytestmark = pytest.mark.slow
# Meshes and kernels change the order of float32 sums alone, in two layers.
TOLERANCE = 3e-5
MESH = MeshShape(data=2, ring=2, ulysses=2)
SIZE = TransformerSize(heads=4, head_dim=32, layers=2, ffn=64)
MODELS = {
    "VACE": wan21_vace(61, control_layers=(0, 1), transformer=SIZE),
    "Animate": wan22_animate(62, every=1, transformer=SIZE),
}
KERNELS = AttentionOptions(flash_min_seq_length=0)
ROWS, LATENT = 2, (3, 8, 12)
TEXT_TOKENS, IMAGE_TOKENS = 40, 5
# Not those for GPUs, nor those that round to 8 bits; of equal ones the last.
NAMES = tuple(
    {
        op: name
        for name, op in ATTENTION_OPS.items()
        if op.backend is not CudnnBackend and op.precision is Precision.NATIVE
    }.values()
)
CASES = [(model, name) for turn, model in enumerate(MODELS) for name in NAMES[turn::2]]


def drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


@dataclass(frozen=True, kw_only=True)
class Member:
    """A transformer, what a step gives it, and the text keys and values of each mesh."""

    model: WanTransformer
    inputs: Mapping[str, Any]
    layouts: Mapping[str, ActivationLayout]
    texts: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, folder: Path) -> "Member":
        make_family_transformer(MODELS[name], seed=1).save_pretrained(folder)
        model = load_transformer(folder)
        control = ControlInput(video=drawn(2, ROWS, *LATENT, 96), scales=jnp.array([0.8, -0.5]))
        pose = drawn(3, ROWS, LATENT[0] - 1, *LATENT[1:], 16)
        meshes = {"one": single_device_mesh(), "eight": build_mesh(MESH)}
        layouts = {mesh: ActivationLayout(mesh=found) for mesh, found in meshes.items()}
        return cls(
            model=model,
            inputs={"control": control} if name == "VACE" else {"pose": pose},
            layouts=layouts,
            texts={mesh: _text(model, layout) for mesh, layout in layouts.items()},
        )

    def velocity(self, name: str, on: str) -> np.ndarray:
        """Returns the velocity with an attention name on one device or on eight."""
        config, layout = self.model.config, self.layouts[on]
        attention = self._attention(name, layout)

        @jax.jit
        def forward(video, timestep, text, inputs):
            return self.model(video, timestep, text, attention=attention, layout=layout, **inputs)

        with jax.set_mesh(layout.mesh):
            video = drawn(4, ROWS, *LATENT, config.in_channels)
            return np.asarray(forward(video, jnp.array([971.0, 3.0]), self.texts[on], self.inputs))

    def _attention(self, name: str, layout: ActivationLayout) -> BlockAttention:
        config = self.model.config

        def problem(keys: int) -> AttentionProblem:
            return AttentionProblem(
                batch=ROWS,
                q_len=config.tokens(LATENT),
                kv_len=keys,
                heads=config.heads,
                head_dim=config.head_dim,
                dtype=jnp.dtype("float32"),
            )

        def cross(keys: int) -> Any:
            return plan_cross_attention(name, problem(keys), layout.mesh, KERNELS)

        tokens = problem(config.tokens(LATENT))
        return BlockAttention(
            self_attention=plan_attention(name, tokens, layout.mesh, KERNELS),
            cross_attention=cross(TEXT_TOKENS),
            image_attention=None if config.image_dim is None else cross(IMAGE_TOKENS),
        )


def _text(model: WanTransformer, layout: ActivationLayout) -> Any:
    """Returns keys and values of a text, and of an image and faces where the model has them."""
    config = model.config
    faces = image = None
    if config.face is not None:
        faces = drawn(5, ROWS, 4 * (LATENT[0] - 2) + 1, config.face.size, config.face.size, 3)
        image = drawn(6, ROWS, IMAGE_TOKENS, config.image_dim)
    with jax.set_mesh(layout.mesh):
        text = drawn(7, ROWS, TEXT_TOKENS, config.text_dim)
        read = jax.jit(lambda *given: model.text_keys_values(*given, layout=layout))
        return read(text, image, faces)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Member, Any]]:
    """Returns a function to a model, and its velocity with dense attention on one device."""

    @cache
    def member(name: str) -> tuple[Member, np.ndarray]:
        made = Member.of(name, tmp_path_factory.mktemp("model"))
        return made, made.velocity(DOT_PRODUCT, "one")

    return member


@pytest.mark.parametrize(("model", "name"), CASES)
def test_eight_devices_give_the_velocity_of_one(members, model: str, name: str) -> None:
    made, expected = members(model)
    np.testing.assert_allclose(made.velocity(name, "eight"), expected, rtol=0, atol=TOLERANCE)
    assert np.std(expected) > 0.1
