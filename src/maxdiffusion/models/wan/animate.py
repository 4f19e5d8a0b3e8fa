"""Parts of the transformer that only Animate has: poses, faces and the adapters that read them.

pose latents -> patches -> added to the tokens of frames 1..    (frame 0 is the character)
faces -> motion encoder -> face encoder -> keys and values of every adapter, once per segment
after blocks 0, 5, 10, ...:  tokens + adapter(tokens, keys and values of the token's frame)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxdiffusion.attention.plan import merge_heads, split_heads
from maxdiffusion.kernels.qk_prep import rms_norm
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan.block import (
    LayerTerm,
    TextKeysValues,
    constrain_heads,
    constrain_tokens,
    gathered,
)
from maxdiffusion.models.wan.config import WanTransformerConfig
from maxdiffusion.models.wan.layers import (
    Linear,
    Numerics,
    PatchEmbedding,
    patches_of,
    standardize,
)
from maxdiffusion.models.wan.motion import FaceEncoder, MotionEncoder, encode_motion


class FaceAdapter(nnx.Module):
    """Attention of video tokens to the face tokens of their own frame.

    Queries and keys are normed head by head, unlike those of a block.
    """

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        square, width = (config.model_dim, config.model_dim), config.model_dim_axis
        self.head_dim, self.eps = config.head_dim, config.eps
        self.to_q = Linear(square, (width, "heads"), numerics, rngs=rngs)
        self.to_k = Linear(square, (width, "heads"), numerics, rngs=rngs)
        self.to_v = Linear(square, (width, "heads"), numerics, rngs=rngs)
        self.to_out = Linear(square, ("heads", width), numerics, rngs=rngs)
        gain = jnp.ones(config.head_dim, numerics.param_dtype)
        self.norm_q = nnx.Param(gain, dims=("head",))
        self.norm_k = nnx.Param(gain, dims=("head",))

    def keys_values(
        self, tokens_BTD: Float[Array, "B T D"], layout: ActivationLayout
    ) -> TextKeysValues:
        """Returns keys and values of the face tokens of all frames, one frame after the other."""
        normal = standardize(tokens_BTD, eps=self.eps).astype(tokens_BTD.dtype)
        keys = rms_norm(
            split_heads(self.to_k(normal), self.head_dim), self.norm_k[...], eps=self.eps
        )
        values = split_heads(self.to_v(normal), self.head_dim)
        dims = ("batch", "text", "heads", "head")
        return TextKeysValues(
            keys=layout.constrain(keys, *dims), values=layout.constrain(values, *dims)
        )

    def __call__(
        self,
        x: Float[Array, "B S D"],
        face: TextKeysValues,
        same_frame: Bool[Array, "S T"],
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        normal = standardize(x, eps=self.eps).astype(x.dtype)
        q = split_heads(constrain_heads(self.to_q(normal), layout), self.head_dim)
        q = rms_norm(q, self.norm_q[...], eps=self.eps)
        out = merge_heads(masked_attention(q, face.keys, face.values, same_frame))
        return self.to_out(constrain_heads(out, layout))


def masked_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    allowed: Bool[Array, "S T"],
) -> Float[Array, "B S N H"]:
    """Returns attention of every query to the keys that it is allowed to see; softmax in float32.

    All T keys are scored: with the 105 of a segment this is a 25th of the work of the query
    projection at width 5120, and queries may be sharded anywhere within a frame.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    scores = jnp.einsum(
        "bsnh,btnh->bnst", q, k, precision=precision, preferred_element_type=jnp.float32
    )
    scores = scores / math.sqrt(q.shape[-1])
    seen = jnp.broadcast_to(allowed[None, None], scores.shape)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum(
        "bnst,btnh->bsnh",
        weights.astype(v.dtype),
        v,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return mixed.astype(q.dtype)


@dataclass(frozen=True, kw_only=True)
class FaceTerm(LayerTerm):
    """The stacked adapters, and the keys and values that they attend to."""

    __no_type_check__: ClassVar[bool] = True

    rows: Int[Array, " L"]
    graph: nnx.GraphDef[FaceAdapter]
    adapters: nnx.State
    face: TextKeysValues
    same_frame: Bool[Array, "S T"]
    layout: ActivationLayout

    def added(self, x: Float[Array, "B S D"], row: Int[Array, ""]) -> Float[Array, "B S D"]:
        """Returns tokens plus the adapter of a row, or as they are for row -1."""

        def adapted() -> Float[Array, "B S D"]:
            weights, face = jax.tree.map(lambda one: one[row], (self.adapters, self.face))
            adapter = nnx.merge(self.graph, gathered(weights, self.layout))
            return x + adapter(x, face, self.same_frame, self.layout)

        with jax.named_scope("face_adapter"):
            return constrain_tokens(jax.lax.cond(row >= 0, adapted, lambda: x), self.layout)


class Animation(nnx.Module):
    """Embedding of poses, encoders of faces, and all adapters, stacked."""

    def __init__(self, config: WanTransformerConfig, numerics: Numerics, *, rngs: nnx.Rngs):
        assert config.face is not None
        self.config, self.face, self.dtype = config, config.face, numerics.dtype
        self.pose_embedding = PatchEmbedding(config, config.face.pose_channels, numerics, rngs=rngs)
        self.motion_encoder = MotionEncoder(config.face, numerics, rngs=rngs)
        self.face_encoder = FaceEncoder(config.face, config.model_dim, numerics, rngs=rngs)
        self.adapters = _stacked(config, numerics, rngs)

    def with_pose(
        self,
        tokens: Float[Array, "B S D"],
        pose: Float[Array, "B F Y X C"],
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        """Returns tokens plus those of the poses, which belong to the frames after the first."""
        patches = patches_of(pose, self.config.patch)
        first = patches.shape[1] // pose.shape[1] * self.config.patch[0]
        rest = tokens.shape[1] - first - patches.shape[1]
        patches = jnp.pad(patches, ((0, 0), (first, rest), (0, 0)))
        patches = layout.constrain(patches, "batch", "sequence", "patch")
        embedded = constrain_tokens(self.pose_embedding(patches), layout)
        # The first frame has no pose: not even the bias of the embedding.
        has_pose = (jnp.arange(tokens.shape[1]) >= first)[None, :, None]
        added = jnp.where(
            jnp.broadcast_to(has_pose, embedded.shape), embedded, jnp.zeros_like(embedded)
        )
        return constrain_tokens(tokens + added, layout)

    def face_keys_values(
        self, faces: Float[Array, "B F Y X C"], *, batch: int | None, layout: ActivationLayout
    ) -> TextKeysValues:
        """Returns keys and values [L B T N H] of every adapter; the first frame has no face."""
        with jax.named_scope("face"):
            features = encode_motion(
                self.motion_encoder,
                faces.astype(self.dtype),
                batch=batch or self.face.batch,
                layout=layout,
            )
            tokens = self.face_encoder(features)
            tokens = jnp.pad(tokens, ((0, 0), (1, 0), (0, 0), (0, 0)))
            tokens = tokens.reshape(tokens.shape[0], -1, tokens.shape[-1])
            graph, adapters = nnx.split(self.adapters)

            def one_adapter(carry: None, weights: nnx.State) -> tuple[None, TextKeysValues]:
                adapter = nnx.merge(graph, gathered(weights, layout))
                return carry, adapter.keys_values(tokens, layout)

            return jax.lax.scan(one_adapter, None, adapters, unroll=self.config.unroll)[1]

    def face_term(
        self,
        face: TextKeysValues,
        grid: tuple[int, int, int],
        length: int,
        layout: ActivationLayout,
    ) -> FaceTerm:
        """Returns what layers add to `length` tokens, of which the last may be padding."""
        frames, rows, columns = grid
        # Padding attends to the last frame; its result is never read.
        of_tokens = np.minimum(np.arange(length) // (rows * columns), frames - 1)
        of_keys = np.arange(face.keys.shape[-3]) // self.face.tokens
        graph, adapters = nnx.split(self.adapters)
        return FaceTerm(
            rows=self._rows(),
            graph=graph,
            adapters=adapters,
            face=face,
            same_frame=jnp.asarray(of_tokens)[:, None] == jnp.asarray(of_keys)[None, :],
            layout=layout,
        )

    def _rows(self) -> Int[Array, " L"]:
        every = self.face.every
        layers = range(self.config.layers)
        return jnp.array([-1 if layer % every else layer // every for layer in layers])


def _stacked(config: WanTransformerConfig, numerics: Numerics, rngs: nnx.Rngs) -> FaceAdapter:
    """Returns all adapters as one, with adapters as the first dimension of parameters."""
    assert config.face is not None

    @nnx.split_rngs(splits=config.layers // config.face.every)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(layer_rngs: nnx.Rngs) -> FaceAdapter:
        return FaceAdapter(config, numerics, rngs=layer_rngs)

    return build(rngs)
