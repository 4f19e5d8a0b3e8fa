"""A WAN model as training sees it: its parts, and one compiled step for each expert."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
    with_gradient,
)
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.runtime.problems import Problem, ProblemsFound
from maxdiffusion.training.experts import ExpertSchedule
from maxdiffusion.training.flow_matching import LossWeighting
from maxdiffusion.training.optimiser import Optimiser
from maxdiffusion.training.parts import Part
from maxdiffusion.training.remat import RematPolicy, TrainableTransformer
from maxdiffusion.training.step import Step, make_step
from maxdiffusion.training.text import (
    TEXT_ENCODER,
    EncodedCaptions,
    RepeatedRowAttention,
    StoredCaptions,
    TextReader,
)
from maxdiffusion.training.wan_loss import WanLoss


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How much is trained on at once: clips, their latent sizes, and the lengths of texts."""

    clips: int
    latent: tuple[int, int, int]  # frames, rows, columns
    caption_tokens: int  # the longest caption
    text_length: int = 512  # what sampling pads a text to
    accumulation: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.clips < 1 or self.accumulation < 1 or self.clips % self.accumulation:
            rule = f"must be a positive multiple of gradient_accumulation={self.accumulation}"
            remedy = f"Use {max(1, self.clips // max(1, self.accumulation)) * self.accumulation}"
            problems.append(
                Problem(name="global_batch_size", value=self.clips, rule=rule, remedy=remedy)
            )
        if not 0 < self.caption_tokens < self.text_length:
            rule = f"must be less than max_sequence_length={self.text_length}, and at least 1"
            remedy = f"Use {min(64, self.text_length - 1)}"
            name = "caption_tokens"
            problems.append(Problem(name=name, value=self.caption_tokens, rule=rule, remedy=remedy))
        if problems:
            raise ProblemsFound(problems)

    @property
    def piece(self) -> int:
        """Clips that one pass works on."""
        return self.clips // self.accumulation


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Captions are tokens that a text encoder reads at every step; `empty` are those of none."""

    empty: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredText:
    """Captions were encoded before; `empty` are the rows of the empty one."""

    empty: Float[np.ndarray, "T E"]


TextSource = Tokens | StoredText


@dataclass(frozen=True, kw_only=True)
class WanTraining:
    """Everything that a run's programs are made from."""

    transformer: WanTransformerConfig
    text_encoder: Umt5Config
    batch: BatchShape
    experts: ExpertSchedule
    weighting: LossWeighting
    optimiser: Optimiser
    mesh: Mesh
    text: TextSource
    caption_dropout: float = 0.1
    text_rate: float = 0.0  # of the learning rate; 0: the text encoder stays as it is
    dtype: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    remat: RematPolicy = field(default_factory=RematPolicy)
    attention: str = "dot_product"
    attention_options: AttentionOptions = field(default_factory=AttentionOptions)

    def build_transformer(self, rngs: nnx.Rngs) -> TrainableTransformer:
        """A transformer with float32 parameters that computes in `dtype`."""
        return TrainableTransformer(
            self.transformer,
            dtype=self.dtype,
            param_dtype=jnp.float32,
            rngs=rngs,
            remat=self.remat,
        )

    def build_text_encoder(self, rngs: nnx.Rngs) -> Umt5Encoder:
        """A text encoder in float32."""
        return Umt5Encoder(self.text_encoder, rngs=rngs)

    @cached_property
    def parts(self) -> Mapping[str, Part[Any]]:
        """The models of the run by name."""
        transformer = Part.of(self.build_transformer)
        parts: dict[str, Part[Any]] = dict.fromkeys(self.experts.names, transformer)
        if isinstance(self.text, StoredText):
            return parts
        return parts | {TEXT_ENCODER: Part.of(self.build_text_encoder)}

    @property
    def layout(self) -> ActivationLayout:
        """How activations lie on the mesh."""
        return ActivationLayout(mesh=self.mesh)

    @cached_property
    def block_attention(self) -> BlockAttention:
        """The attention plans; raises UnsupportedAttention with every reason."""
        config, batch = self.transformer, self.batch
        tokens = AttentionProblem(
            batch=batch.piece,
            q_len=config.tokens(batch.latent),
            kv_len=config.tokens(batch.latent),
            heads=config.heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )
        text = replace(tokens, kv_len=batch.caption_tokens + 1)
        cross = plan_cross_attention("dot_product", text, self.mesh, self.attention_options)
        planned = plan_attention(self.attention, tokens, self.mesh, self.attention_options)
        return BlockAttention(
            self_attention=with_gradient(planned),
            cross_attention=RepeatedRowAttention.of(
                cross, batch.text_length - batch.caption_tokens
            ),
        )

    def loss(self, name: str) -> WanLoss:
        """The loss of one expert."""
        return WanLoss(
            expert=name,
            transformer=self.parts[name],
            text=self._text_reader,
            attention=self.block_attention,
            layout=self.layout,
            levels=self.experts.levels_of(name),
            weighting=self.weighting,
        )

    @property
    def _text_reader(self) -> TextReader:
        if isinstance(self.text, StoredText):
            return StoredCaptions(empty=self.text.empty, dropout=self.caption_dropout)
        return EncodedCaptions(
            encoder=self.parts[TEXT_ENCODER], empty=self.text.empty, dropout=self.caption_dropout
        )

    def step(self, name: str) -> Step:
        """The step of one expert, compiled at its first use; it consumes the state."""
        trained = (name, TEXT_ENCODER) if self.text_rate > 0 else (name,)
        optimiser = replace(
            self.optimiser, rates={**self.optimiser.rates, TEXT_ENCODER: self.text_rate}
        )
        step = make_step(
            self.loss(name), optimiser, trained=trained, accumulation=self.batch.accumulation
        )
        return on_mesh(step, self.mesh)


def on_mesh(step: Step, mesh: Mesh) -> Step:
    """The step as one program on the mesh; the old state's memory is used for the new one."""

    @cache
    def program(places: tuple[Any, ...], structure: Any) -> Any:
        # The new state lies where the old one did, or the second step would compile anew.
        state = jax.tree.unflatten(structure, places)
        return jax.jit(step, donate_argnums=0, out_shardings=(state, None))

    def run(state: Any, batch: Any) -> Any:
        leaves, structure = jax.tree.flatten(state)
        places = tuple(leaf.sharding for leaf in leaves)
        with jax.set_mesh(mesh):
            return program(places, structure)(state, place_batch(batch, mesh))

    return run


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """A batch from the host, its rows shared by the devices that train on different clips.

    With several processes each brings its share of the rows.
    """
    layout, processes = ActivationLayout(mesh=mesh), jax.process_count()

    def put(rows: Any) -> jax.Array:
        shape = (rows.shape[0] * processes, *rows.shape[1:])
        sharding = layout.sharding(("batch", *("rest",) * (rows.ndim - 1)), shape)
        if processes == 1:
            return jax.device_put(rows, sharding)
        if not _brings_its_own(sharding, shape):
            rows = multihost_utils.process_allgather(rows, tiled=True)
        return jax.make_array_from_process_local_data(sharding, np.asarray(rows), shape)

    return jax.tree.map(put, batch)


def _brings_its_own(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether the devices of every process work on as many rows as it brings, and on no others'."""
    held: dict[int, set[int]] = {}
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in placed.items():
        held.setdefault(device.process_index, set()).update(range(*index[0].indices(shape[0])))
    shares = list(held.values())
    return sum(map(len, shares)) == shape[0] and len({*map(len, shares)}) == 1
