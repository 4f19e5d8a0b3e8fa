"""Builds the programs of a generation from shapes alone; compiling them needs no weights.

encode         pixels -> latents                                     once per image or video
encode_image   pixels -> CLIP tokens                                 once per image
read_text      text embeddings -> keys and values for every layer    once per prompt and expert
start          noise -> the sampler's first state                    once per batch
denoise_step   one step of the loop                                  every step
decode         latents -> frames                                     once per video
fixed_m_heads  latents -> heads that pass the gate of fixed-m       on request
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt32

from maxdiffusion.attention import (
    AttentionPlan,
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.diffusion import Sampler
from maxdiffusion.diffusion.denoise import (
    CacheShapes,
    LoopState,
    StepCache,
    StepFunction,
    StepInputs,
    step_inputs,
)
from maxdiffusion.diffusion.guidance import NO_GUIDANCE, Action, Guidance, GuidanceScales, plan_run
from maxdiffusion.mesh import ActivationLayout, with_data_in_ring
from maxdiffusion.models.vae import SpatialSharding
from maxdiffusion.models.vae.autoencoder import FITTING_FRAMES, fitting_chunk
from maxdiffusion.models.wan import Conditioning, TextKeysValues
from maxdiffusion.pipelines.settings import PipelineSettings
from maxdiffusion.pipelines.spec import WanModels, WanSpec, wan_models
from maxdiffusion.pipelines.tasks.base import LatentShape, Task, TextToVideo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FixedMEligibleHeads:
    """Counts, per layer, of the (batch, head) pairs that pass the gate of fixed-m in one step.

    Every layer has `pairs` of them.
    """

    step: int
    expert: str
    pairs: int
    of_layers: tuple[int, ...]

    @property
    def counted(self) -> int:
        """Pairs of all layers that pass."""
        return sum(self.of_layers)

    @property
    def total(self) -> int:
        """Pairs of all layers."""
        return self.pairs * len(self.of_layers)

    def describe(self) -> str:
        """Returns one line, which names the layer with the fewest."""
        fewest = min(self.of_layers)
        layer = self.of_layers.index(fewest)
        return (
            f"fixed-m softmax, step {self.step + 1} ({self.expert}): {self.counted} of "
            f"{self.total} heads on the fast path; fewest in layer {layer}: {fewest} of "
            f"{self.pairs}"
        )

    def as_json(self) -> dict[str, object]:
        """Returns the counts for json.dump."""
        return {
            "step": self.step,
            "expert": self.expert,
            "pairs_of_a_layer": self.pairs,
            "fast_pairs_of_layers": list(self.of_layers),
        }


Compile = Callable[[str, jax.stages.Lowered], jax.stages.Compiled]
"""Compiles a lowered program that has a name, possibly through a cache."""
Options = dict[str, str | bool]
"""XLA's options of one program by name."""


# XLA for CPUs computes bfloat16 products in float32. This pass moves the conversion of the weights
# out of the scan over layers: float32 for all layers at once (docs/design/cpu_memory.md).
_CPU_OPTIONS: Options = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
# Libtpu ends its search for the tiles of a convolution at this part of the best that it hopes for.
# The convolutions of the VAE compile in half of the time (docs/design/vae_programs.md).
_VAE_OPTIONS: Options = {"xla_jf_convolution_performance_target": "0.97"}
_VAE_PROGRAMS = ("encode", "decode")


def compiler_options(platform: str, name: str = "") -> Options:
    """Returns XLA's options for a program; TPUs take all others from LIBTPU_INIT_ARGS."""
    if platform == "cpu":
        return dict(_CPU_OPTIONS)
    return dict(_VAE_OPTIONS) if platform == "tpu" and name in _VAE_PROGRAMS else {}


def compile_lowered(lowered: jax.stages.Lowered, name: str = "") -> jax.stages.Compiled:
    """Compiles a program with the options of its name and of the platform it was lowered for."""
    platform = lowered._lowering.compile_args["backend"].platform
    options = compiler_options(platform, name)
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        message = "this %s compiler does not know %s: %s is compiled without"
        logger.warning(message, platform, ", ".join(options), name or "a program")
        return lowered.compile()


def compile_now(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program without a cache."""
    return compile_lowered(lowered, name)


FrameFormat = Callable[[Float[Array, "B F Y X C"]], Array]


def as_floats(frames: Float[Array, "B F Y X C"]) -> Float[Array, "B F Y X C"]:
    """Returns frames from 0 to 1."""
    return frames.astype(jnp.float32)


def as_bytes(frames: Float[Array, "B F Y X C"]) -> Array:
    """Returns frames from 0 to 255, truncated as diffusers does before it writes a video."""
    return (frames.astype(jnp.float32) * 255).astype(jnp.uint8)


@dataclass(frozen=True, kw_only=True)
class ProgramShape:
    """Sizes that programs are compiled for; steps, seeds, scales and shifts are arguments."""

    videos: int
    latent: LatentShape
    guidance: Guidance
    text_length: int
    task: Task = field(default_factory=TextToVideo)

    @property
    def decoded(self) -> LatentShape:
        """Latents of one video as they are decoded: without frames that the task adds."""
        return self.latent.with_frames(self.latent.frames - self.task.extra_frames)

    @property
    def model_batch(self) -> int:
        """Rows of the transformer's batch."""
        return self.videos * self.guidance.copies

    def with_guidance(self, guidance: Guidance) -> "ProgramShape":
        """Returns the shape of steps with another guidance."""
        return replace(self, guidance=guidance)


@dataclass(frozen=True, kw_only=True)
class _TracedText:
    """The function that reads a text, and its results as shapes with shardings."""

    function: Callable[..., TextKeysValues]
    results: TextKeysValues


@dataclass(frozen=True, kw_only=True)
class ProgramBuilder:
    """Lowers the programs of one checkpoint, with its settings, on one mesh.

    `compile` compiles a lowered program under its name, possibly through a cache. `weights_mesh` is
    the mesh of the weights if it is another view of the same devices.
    """

    spec: WanSpec
    settings: PipelineSettings
    mesh: Mesh
    compile: Compile = field(default=compile_now)
    weights_mesh: Mesh | None = None
    _tracing: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    def folded_for(self, shape: ProgramShape) -> "ProgramBuilder":
        """Returns the builder for this shape, with a data axis that it cannot use in the ring.

        Prompt and negative prompt may be on different devices of the data axis. Once the prompt is
        computed alone, these devices share its sequence instead.
        """
        folded = with_data_in_ring(self.mesh)
        if folded is None or shape.model_batch % self.mesh.shape["data"] == 0:
            return self
        return replace(self, mesh=folded, weights_mesh=self.mesh)

    @property
    def weights(self) -> nnx.State:
        """Abstract parameters of a transformer, with their shardings."""
        return self.models.transformer.on(self.weights_mesh or self.mesh)

    @cached_property
    def models(self) -> WanModels:
        """Graphs and abstract parameters of the models."""
        return wan_models(self.spec, self.settings.precision)

    @cached_property
    def _texts(self) -> "dict[ProgramShape, _TracedText]":
        """The programs `read_text` that are traced."""
        return {}

    @property
    def layout(self) -> ActivationLayout:
        """Shardings of activations."""
        return ActivationLayout(mesh=self.mesh)

    @property
    def everywhere(self) -> NamedSharding:
        """The replicated sharding."""
        return NamedSharding(self.mesh, PartitionSpec())

    def attention(self, shape: ProgramShape) -> BlockAttention:
        """Plans the attentions of a block; raises UnsupportedAttention with every reason."""
        image_tokens = shape.task.image_tokens
        return BlockAttention(
            self_attention=self.self_attention(shape),
            cross_attention=self.cross_attention(shape, shape.text_length),
            image_attention=self.cross_attention(shape, image_tokens) if image_tokens else None,
        )

    def self_attention(self, shape: ProgramShape) -> AttentionPlan:
        """Plans the attention of tokens to tokens."""
        settings = self.settings
        problem = self._attention_problem(shape)
        return plan_attention(settings.attention, problem, self.mesh, settings.attention_options)

    def cross_attention(self, shape: ProgramShape, keys: int) -> AttentionPlan:
        """Plans the attention of tokens to this many keys of a text or an image."""
        settings = self.settings
        problem = replace(self._attention_problem(shape), kv_len=keys)
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
        """Returns how devices split the frames of one video to decode them."""
        return SpatialSharding.over(
            self.mesh.devices.flatten().tolist(),
            self.settings.decoding.spatial_devices,
            batch=1,
            height=shape.latent.rows,
            width=shape.latent.columns,
        )

    def read_text(
        self,
        weights: nnx.State,
        text: Float[Array, "B T E"],
        image: Float[Array, "B I O"] | None,
        faces: Float[Array, "B F Y X C"] | None,
        *,
        face_batch: int | None = None,
    ) -> TextKeysValues:
        """Returns the keys and values of every layer for a text, image tokens and faces."""
        transformer = nnx.merge(self.models.transformer.graph, weights)
        return transformer.text_keys_values(
            text, image, faces, face_batch=face_batch, layout=self.layout
        )

    def lower_read_text(self, shape: ProgramShape) -> jax.stages.Lowered:
        """Lowers `read_text`."""
        traced = self._traced_text(shape)
        shardings = _shardings(traced.results)
        return self._lower(
            jax.jit(traced.function, out_shardings=shardings), *self._text_inputs(shape)
        )

    def _text_inputs(self, shape: ProgramShape) -> tuple[Any, ...]:
        """Returns the inputs of `read_text` as shapes with shardings."""
        return (
            self.weights,
            self._text_embeddings(shape),
            self.image_tokens(shape),
            self.faces(shape),
        )

    def lower_encode(self, shape: ProgramShape, frames: int) -> jax.stages.Lowered:
        """Lowers the VAE encoder: pixels of `frames` frames in -1..1 to normalised latents."""
        graph, tiling = self.models.vae.graph, self.settings.decoding.tiling
        sharding, factor = self.decoder_sharding(shape), self.spec.vae.spatial_factor
        chunk = self._vae_chunk(sharding, self.spec.vae.latent_frames(frames))
        size = (1, frames, shape.latent.rows * factor, shape.latent.columns * factor, 3)

        def encode(weights: nnx.State, pixels: Float[Array, "B F Y X C"]) -> Array:
            vae = nnx.merge(graph, weights)
            encoded = vae.encode(pixels, chunk=chunk, tiling=tiling, sharding=sharding)
            return vae.normalise(encoded.mean)

        return self._lower(
            jax.jit(encode, out_shardings=self.everywhere),
            self.models.vae.on(self.mesh),
            self._replicated(size, jnp.float32),
            mesh=sharding.mesh,
        )

    def lower_encode_image(self, images: int) -> jax.stages.Lowered:
        """Lowers the image encoder: pixels of `images` images to tokens."""
        encoder, config = self.models.image_encoder, self.spec.image_encoder
        assert encoder is not None
        assert config is not None
        size = (images, config.image_size, config.image_size, 3)

        def encode_image(weights: nnx.State, pixels: Float[Array, "B Y X C"]) -> Array:
            return nnx.merge(encoder.graph, weights)(pixels)

        return self._lower(
            jax.jit(encode_image, out_shardings=self.everywhere),
            encoder.on(self.mesh),
            self._replicated(size, jnp.float32),
        )

    def lower_denoise_step(
        self,
        shape: ProgramShape,
        sampler: Sampler,
        attention: BlockAttention,
        *,
        cache: StepCache | None = None,
        action: Action = Action.COMPUTE,
    ) -> jax.stages.Lowered:
        """Lowers one denoising step, for either expert and any step with this use of a cache."""
        step = StepFunction(
            graph=self.models.transformer.graph,
            attention=attention,
            layout=self.layout,
            guidance=shape.guidance,
            sampler=sampler,
            dtype=self.settings.precision.activations,
            cache=cache,
            action=action,
        )

        def denoise_step(*inputs: Any) -> Any:  # profiles show the name of the function
            return step(*inputs)

        state = LoopState(
            sampler=self._abstract_state(shape, sampler),
            cache=self._cache_state(shape, attention, cache),
        )
        return self._lower(
            jax.jit(
                denoise_step,
                donate_argnums=2,
                out_shardings=(_shardings(state), self.everywhere),
            ),
            self.weights,
            self._abstract_text(shape),
            state,
            self._step_inputs(sampler, cache),
            self.conditioning(shape),
        )

    def _step_inputs(self, sampler: Sampler, cache: StepCache | None) -> StepInputs:
        """Returns the inputs of a step as types; they are the same for every plan."""
        scales = GuidanceScales(high_noise=NO_GUIDANCE, low_noise=NO_GUIDANCE)
        plan = plan_run(sampler, scales=scales, boundary_ratio=None)
        rows = () if cache is None else cache.rows(plan)
        return jax.tree.map(jax.typeof, step_inputs(sampler, plan.steps[0], rows))

    def lower_fixed_m_eligible_heads(
        self, shape: ProgramShape, attention: BlockAttention
    ) -> jax.stages.Lowered:
        """Lowers the count, layer by layer, of heads that pass the gate of fixed-m."""
        graph, dtype = self.models.transformer.graph, self.settings.precision.activations
        layout = self.layout

        def fixed_m_eligible_heads(
            weights: nnx.State,
            text: Any,
            sample: Array,
            timestep: Array,
            conditioning: Conditioning,
        ) -> Array:
            batch = shape.guidance.model_batch(conditioning.model_input(sample).astype(dtype))
            timesteps = jnp.full((batch.shape[0],), timestep, jnp.float32)
            transformer = nnx.merge(graph, weights)
            rows = shape.guidance.model_batch
            return transformer.fixed_m_eligible_heads(
                batch,
                timesteps,
                text,
                attention=attention,
                layout=layout,
                known_frames=conditioning.known_frames,
                control=conditioning.control_for(rows, dtype),
                pose=conditioning.pose_for(rows, dtype),
            )

        return self._lower(
            jax.jit(fixed_m_eligible_heads, out_shardings=self.everywhere),
            self.weights,
            self._abstract_text(shape),
            self._latents(shape),
            self._replicated((), jnp.float32),
            self.conditioning(shape),
        )

    def lower_start(
        self,
        shape: ProgramShape,
        sampler: Sampler,
        attention: BlockAttention,
        *,
        cache: StepCache | None = None,
    ) -> jax.stages.Lowered:
        """Lowers the start of a run: noise to the first state of the sampler, zeros of a cache."""
        kept = self._cache_state(shape, attention, cache)

        def start(latents: Float[Array, "B F Y X C"], seeds: UInt32[Array, " B"]) -> LoopState:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kept)
            return LoopState(sampler=sampler.start(latents, seeds), cache=zeros)

        state = LoopState(sampler=self._abstract_state(shape, sampler), cache=kept)
        return self._lower(
            jax.jit(start, out_shardings=_shardings(state)),
            self._latents(shape),
            self._seeds(shape),
        )

    def lower_decode(self, shape: ProgramShape, frame_format: FrameFormat) -> jax.stages.Lowered:
        """Lowers the decoder: latents of one video to its frames."""
        graph, tiling = self.models.vae.graph, self.settings.decoding.tiling
        sharding = self.decoder_sharding(shape)
        chunk = self._vae_chunk(sharding, shape.decoded.frames)

        def decode(weights: nnx.State, latents: Float[Array, "B F Y X C"]) -> Array:
            vae = nnx.merge(graph, weights)
            video = vae.decode(
                vae.denormalise(latents), chunk=chunk, tiling=tiling, sharding=sharding
            )
            return frame_format(jnp.clip(video * 0.5 + 0.5, 0.0, 1.0))

        return self._lower(
            jax.jit(decode, out_shardings=self.everywhere),
            self.models.vae.on(self.mesh),
            self._replicated((1, *shape.decoded.dims), jnp.float32),
            mesh=sharding.mesh,
        )

    def _vae_chunk(self, sharding: SpatialSharding, frames: int) -> int:
        """Returns the latent frames that the VAE runs at a time, of this many."""
        chunk = self.settings.decoding.chunk
        if chunk != FITTING_FRAMES:
            return chunk
        return fitting_chunk(self.spec.vae, sharding, frames=frames)

    def _lower(
        self, function: Any, *arguments: Any, mesh: Mesh | None = None
    ) -> jax.stages.Lowered:
        """Lowers a function; `mesh` is that of its shard_maps, by default the job's."""
        with self._context(mesh or self.mesh):
            return function.lower(*arguments)

    @contextmanager
    def _context(self, mesh: Mesh) -> Iterator[None]:
        """Traces and lowers on a mesh, with the precision of the settings."""
        with jax.set_mesh(mesh), jax.default_matmul_precision(self.settings.precision.matmul):
            yield

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.everywhere)

    def _latents(self, shape: ProgramShape) -> jax.ShapeDtypeStruct:
        return self._replicated((shape.videos, *shape.latent.dims), jnp.float32)

    def _seeds(self, shape: ProgramShape) -> jax.ShapeDtypeStruct:
        return self._replicated((shape.videos,), jnp.uint32)

    def _text_embeddings(self, shape: ProgramShape) -> jax.ShapeDtypeStruct:
        size = (shape.model_batch, shape.text_length, self.spec.transformer.text_dim)
        return self._replicated(size, self.settings.precision.activations)

    def image_tokens(self, shape: ProgramShape) -> jax.ShapeDtypeStruct | None:
        """Returns the image tokens of a batch as a replicated shape; None if it has none."""
        if not shape.task.image_tokens:
            return None
        assert self.spec.transformer.image_dim is not None
        size = (shape.model_batch, shape.task.image_tokens, self.spec.transformer.image_dim)
        return self._replicated(size, self.settings.precision.activations)

    def faces(self, shape: ProgramShape) -> jax.ShapeDtypeStruct | None:
        """Returns the faces of a batch as a replicated shape; None if its task has none."""
        if not shape.task.face_batch:
            return None
        face = self.spec.transformer.face
        assert face is not None
        frames = self.spec.vae.video_frames(shape.decoded.frames)
        size = (shape.model_batch, frames, face.size, face.size, 3)
        return self._replicated(size, self.settings.precision.activations)

    def conditioning(self, shape: ProgramShape) -> Conditioning:
        """Returns the conditioning of a batch as replicated shapes."""
        return jax.tree.map(
            lambda leaf: self._replicated(leaf.shape, leaf.dtype),
            shape.task.shapes(shape.latent, shape.videos),
        )

    def _abstract_text(self, shape: ProgramShape) -> TextKeysValues:
        """Returns the text keys and values of a batch as shapes with shardings."""
        return self._traced_text(shape).results

    def _traced_text(self, shape: ProgramShape) -> "_TracedText":
        """Returns `read_text` of a shape, traced once: the step needs its results too.

        jax keeps the trace of a function that it sees again, with equal inputs in an equal context.
        """
        dims = ("batch", "text", "heads", "head_dim")

        def with_sharding(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = self.layout.sharding(dims, leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        with self._tracing:  # programs are lowered in several threads
            if shape not in self._texts:
                function = partial(self.read_text, face_batch=shape.task.face_batch or None)
                with self._context(self.mesh):
                    shapes = jax.jit(function).eval_shape(*self._text_inputs(shape))
                results = jax.tree.map(with_sharding, shapes)
                self._texts[shape] = _TracedText(function=function, results=results)
            return self._texts[shape]

    def _abstract_state(self, shape: ProgramShape, sampler: Sampler) -> Any:
        state = jax.eval_shape(sampler.start, self._latents(shape), self._seeds(shape))
        return jax.tree.map(lambda leaf: self._replicated(leaf.shape, leaf.dtype), state)

    def _cache_state(
        self, shape: ProgramShape, attention: BlockAttention, cache: StepCache | None
    ) -> Any:
        """Returns the state of a step cache as shapes with shardings; empty without one."""
        if cache is None:
            return ()
        dtype, config = self.settings.precision.activations, self.spec.transformer
        tokens = (shape.model_batch, attention.self_attention.padded_q_len, config.model_dim)
        sharding = self.layout.sharding(("batch", "sequence", "model"), tokens)
        latents = (shape.videos, *shape.latent.dims)
        return cache.state(
            CacheShapes(
                tokens=jax.ShapeDtypeStruct(tokens, dtype, sharding=sharding),
                velocity=self._replicated(latents, dtype),
                sample=self._replicated(latents, jnp.float32),
                number=self._replicated((), jnp.float32),
            )
        )


def _shardings(state: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, state)
