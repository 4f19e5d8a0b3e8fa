"""The programs of a generation, made from shapes alone: no weight is needed to compile them.

read_text      text embeddings -> keys and values for every layer    once per prompt and expert
start          noise -> the sampler's first state                    once per batch
denoise_step   one step of the loop                                  every step
decode         latents -> frames                                     once per video
fast_heads     latents -> heads on fixed-m softmax's fast path       only where it is asked for
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from maxdiffusion.attention import (
    AttentionPlan,
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.vae import SpatialSharding
from maxdiffusion.models.wan import TextKeysValues
from maxdiffusion.pipelines.denoise import StepFunction, step_inputs
from maxdiffusion.pipelines.executables import Compile, compile_now
from maxdiffusion.pipelines.guidance import Guidance
from maxdiffusion.pipelines.modules import WanModels, wan_models
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.shapes import LatentShape
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.schedulers import Sampler

FrameFormat = Callable[[Float[Array, "B F Y X C"]], Array]


def as_floats(frames: Float[Array, "B F Y X C"]) -> Float[Array, "B F Y X C"]:
    """Frames from 0 to 1."""
    return frames.astype(jnp.float32)


def as_bytes(frames: Float[Array, "B F Y X C"]) -> Array:
    """Frames from 0 to 255, cut off rather than rounded: what diffusers writes to a video file."""
    return (frames.astype(jnp.float32) * 255).astype(jnp.uint8)


@dataclass(frozen=True, kw_only=True)
class ProgramShape:
    """What the programs are compiled for; steps, seeds, scales and shifts are not part of it."""

    videos: int
    latent: LatentShape
    guidance: Guidance
    text_length: int

    @property
    def model_batch(self) -> int:
        """Rows of the transformer's batch."""
        return self.videos * self.guidance.copies


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Makes the programs of one checkpoint, with its settings, on one mesh.

    `compile` makes executables of the lowered programs, under their names.
    """

    spec: WanSpec
    settings: PipelineSettings
    mesh: Mesh
    compile: Compile = field(default=compile_now)

    @cached_property
    def models(self) -> WanModels:
        """Structure and abstract parameters of the models."""
        return wan_models(self.spec, self.settings.precision)

    @property
    def layout(self) -> ActivationLayout:
        """How activations lie on the mesh."""
        return ActivationLayout(mesh=self.mesh)

    @property
    def everywhere(self) -> NamedSharding:
        """The place of small arrays: a copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def attention(self, shape: ProgramShape) -> BlockAttention:
        """The attention plans of a block; raises UnsupportedAttention with every reason."""
        return BlockAttention(
            self_attention=self.self_attention(shape), cross_attention=self.cross_attention(shape)
        )

    def self_attention(self, shape: ProgramShape) -> AttentionPlan:
        """How tokens attend to each other."""
        settings = self.settings
        problem = self._attention_problem(shape)
        return plan_attention(settings.attention, problem, self.mesh, settings.attention_options)

    def cross_attention(self, shape: ProgramShape) -> AttentionPlan:
        """How tokens attend to text."""
        settings = self.settings
        problem = replace(self._attention_problem(shape), kv_len=shape.text_length)
        return plan_cross_attention(
            settings.attention, problem, self.mesh, settings.attention_options
        )

    def _attention_problem(self, shape: ProgramShape) -> AttentionProblem:
        config = self.spec.transformer
        return AttentionProblem(
            batch=shape.model_batch,
            q_len=shape.latent.tokens,
            kv_len=shape.latent.tokens,
            heads=config.heads,
            head_dim=config.head_dim,
            dtype=self.settings.precision.activations,
        )

    def decoder_sharding(self, shape: ProgramShape) -> SpatialSharding:
        """How the frames of one video are shared between devices while they are decoded."""
        return SpatialSharding.over(
            self.mesh.devices.flatten().tolist(),
            self.settings.decoding.spatial_devices,
            batch=1,
            height=shape.latent.rows,
            width=shape.latent.columns,
        )

    def read_text(self, weights: nnx.State, text: Float[Array, "B T E"]) -> TextKeysValues:
        """The keys and values of every layer for text embeddings."""
        transformer = nnx.merge(self.models.transformer.graph, weights)
        return transformer.text_keys_values(text, layout=self.layout)

    def lower_read_text(self, shape: ProgramShape) -> jax.stages.Lowered:
        """The program from text embeddings to the keys and values of every layer."""
        return self._lower(
            jax.jit(self.read_text, out_shardings=self._text_sharding(shape)),
            self.models.transformer.on(self.mesh),
            self._text_embeddings(shape),
        )

    def lower_denoise_step(self, shape: ProgramShape, sampler: Sampler) -> jax.stages.Lowered:
        """The program of one denoising step, for either expert and any step."""
        step = StepFunction(
            graph=self.models.transformer.graph,
            attention=self.attention(shape),
            layout=self.layout,
            guidance=shape.guidance,
            sampler=sampler,
            dtype=self.settings.precision.activations,
        )

        def denoise_step(*inputs: Any) -> Any:  # a function has a name for profiles to show
            return step(*inputs)

        return self._lower(
            jax.jit(denoise_step, donate_argnums=2, out_shardings=self.everywhere),
            self.models.transformer.on(self.mesh),
            self._abstract_text(shape),
            self._abstract_state(shape, sampler),
            jax.tree.map(jax.typeof, step_inputs(sampler, 0, 1.0)),
        )

    def lower_fast_heads(self, shape: ProgramShape) -> jax.stages.Lowered:
        """The program that counts, layer by layer, the heads that pass the gate of fixed-m."""
        graph, dtype = self.models.transformer.graph, self.settings.precision.activations
        attention, layout = self.attention(shape), self.layout

        def fast_heads(weights: nnx.State, text: Any, sample: Array, timestep: Array) -> Array:
            batch = shape.guidance.model_batch(sample.astype(dtype))
            timesteps = jnp.full((batch.shape[0],), timestep, jnp.float32)
            transformer = nnx.merge(graph, weights)
            return transformer.fast_heads(
                batch, timesteps, text, attention=attention, layout=layout
            )

        return self._lower(
            jax.jit(fast_heads, out_shardings=self.everywhere),
            self.models.transformer.on(self.mesh),
            self._abstract_text(shape),
            self._latents(shape),
            self._replicated((), jnp.float32),
        )

    def lower_start(self, shape: ProgramShape, sampler: Sampler) -> jax.stages.Lowered:
        """The program from noise to the sampler's first state."""
        return self._lower(
            jax.jit(sampler.start, out_shardings=self.everywhere), self._latents(shape)
        )

    def lower_decode(self, shape: ProgramShape, frame_format: FrameFormat) -> jax.stages.Lowered:
        """The program from the latents of one video to its frames."""
        graph, decoding = self.models.vae.graph, self.settings.decoding
        sharding = self.decoder_sharding(shape)

        def decode(weights: nnx.State, latents: Float[Array, "B F Y X C"]) -> Array:
            vae = nnx.merge(graph, weights)
            video = vae.decode(
                vae.denormalise(latents),
                chunk=decoding.chunk,
                tiling=decoding.tiling,
                sharding=sharding,
            )
            return frame_format(jnp.clip(video * 0.5 + 0.5, 0.0, 1.0))

        return self._lower(
            jax.jit(decode, out_shardings=self.everywhere),
            self.models.vae.on(self.mesh),
            self._replicated((1, *shape.latent.dims), jnp.float32),
            mesh=sharding.mesh,
        )

    def _lower(
        self, function: Any, *arguments: Any, mesh: Mesh | None = None
    ) -> jax.stages.Lowered:
        """The lowered function; `mesh` is that of its shard_maps, if it is not the job's."""
        with (
            jax.set_mesh(mesh or self.mesh),
            jax.default_matmul_precision(self.settings.precision.matmul),
        ):
            return function.lower(*arguments)

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.everywhere)

    def _latents(self, shape: ProgramShape) -> jax.ShapeDtypeStruct:
        return self._replicated((shape.videos, *shape.latent.dims), jnp.float32)

    def _text_embeddings(self, shape: ProgramShape) -> jax.ShapeDtypeStruct:
        size = (shape.model_batch, shape.text_length, self.spec.transformer.text_dim)
        return self._replicated(size, self.settings.precision.activations)

    def _text_sharding(self, shape: ProgramShape) -> NamedSharding:
        config = self.spec.transformer
        one_layer = (shape.model_batch, shape.text_length, config.heads, config.head_dim)
        dims = ("batch", "text", "heads", "head_dim")
        return self.layout.sharding(dims, (config.layers, *one_layer))

    def _abstract_text(self, shape: ProgramShape) -> TextKeysValues:
        text = jax.eval_shape(
            self.read_text, self.models.transformer.parameters, self._text_embeddings(shape)
        )
        sharding = self._text_sharding(shape)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), text
        )

    def _abstract_state(self, shape: ProgramShape, sampler: Sampler) -> Any:
        state = jax.eval_shape(sampler.start, self._latents(shape))
        return jax.tree.map(lambda leaf: self._replicated(leaf.shape, leaf.dtype), state)
