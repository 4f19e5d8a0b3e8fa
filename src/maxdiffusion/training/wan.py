"""Training of WAN experts: models, attention plans, and one compiled step per expert and size.

WanTraining        one size of clips
BucketedTraining   several sizes; every batch has one of them
"""

from collections.abc import Callable, Mapping, Sequence
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
    AttentionPlan,
    AttentionProblem,
    BlockAttention,
    plan_attention,
    plan_cross_attention,
    with_gradient,
)
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.abstract import AbstractModel, Values
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.training.image_conditioning import ImageConditioning, NoImage
from maxdiffusion.training.lora.adapters import AdapterLoss, LoraSettings
from maxdiffusion.training.loss import (
    ClipBatch,
    ExpertSchedule,
    LossWeighting,
    RematPolicy,
    WanLoss,
)
from maxdiffusion.training.memory.placement import (
    HOST,
    StatePlacement,
    in_memory,
    moved,
    state_shardings,
)
from maxdiffusion.training.metrics import BACKWARD, FROZEN_BACKWARD, Work, step_work
from maxdiffusion.training.step import (
    NOT_FROZEN,
    Loss,
    Optimiser,
    Placed,
    Step,
    StepOnFrozen,
    StepReport,
    TrainState,
    join_state,
    make_step,
    split_state,
)
from maxdiffusion.training.text import (
    TEXT_ENCODER,
    EncodedCaptions,
    RepeatedRowAttention,
    StoredCaptions,
    TextReader,
)


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Sizes of a batch: clips, latent video, and text lengths."""

    clips: int
    latent: tuple[int, int, int]  # frames, rows, columns
    caption_tokens: int  # the longest caption
    text_length: int = 512  # sampling pads texts to it
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
        """Clips of one forward and backward pass."""
        return self.clips // self.accumulation


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Captions are tokens that a text encoder reads at every step; `empty` is the empty one."""

    empty: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredText:
    """Captions are stored text embeddings; `empty` is that of the empty caption."""

    empty: Float[np.ndarray, "T E"]


TextSource = Tokens | StoredText


@dataclass(frozen=True, kw_only=True)
class WanTraining:
    """Everything that the training steps of a run are built from.

    With `lora` its adapters are trained, and all weights are frozen in `weights_dtype`.
    """

    transformer: WanTransformerConfig
    text_encoder: Umt5Config
    batch: BatchShape
    experts: ExpertSchedule
    weighting: LossWeighting
    optimiser: Optimiser
    mesh: Mesh
    text: TextSource
    image: ImageConditioning = field(default_factory=NoImage)
    caption_dropout: float = 0.1
    text_rate: float = 0.0  # share of the learning rate; 0: the text encoder is frozen
    dtype: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    remat: RematPolicy = field(default_factory=RematPolicy)
    lora: LoraSettings | None = None
    weights_dtype: jnp.dtype = field(default_factory=lambda: jnp.dtype(jnp.float32))
    placement: StatePlacement = field(default_factory=StatePlacement)
    attention: str = "dot_product"
    attention_options: AttentionOptions = field(default_factory=AttentionOptions)

    def build_transformer(self, rngs: nnx.Rngs) -> WanTransformer:
        """Returns a transformer that computes in `dtype`; trained parameters are float32."""
        if self.lora is None:
            return WanTransformer(
                self.transformer, dtype=self.dtype, param_dtype=jnp.float32, rngs=rngs
            )
        roomy = replace(self.transformer, adapter_rank=self.lora.rank)
        return self.lora.keep_rooms(
            WanTransformer(roomy, dtype=self.dtype, param_dtype=self.weights_dtype, rngs=rngs)
        )

    def build_text_encoder(self, rngs: nnx.Rngs) -> Umt5Encoder:
        """Returns a text encoder in float32."""
        return Umt5Encoder(self.text_encoder, rngs=rngs)

    @cached_property
    def models(self) -> Mapping[str, AbstractModel[Any]]:
        """The models of the run by name, without weights."""
        transformer = AbstractModel.of(self.build_transformer)
        models: dict[str, AbstractModel[Any]] = dict.fromkeys(self.experts.names, transformer)
        if isinstance(self.text, StoredText):
            return models
        return models | {TEXT_ENCODER: AbstractModel.of(self.build_text_encoder)}

    @property
    def layout(self) -> ActivationLayout:
        """The shardings of activations on the mesh."""
        return ActivationLayout(mesh=self.mesh)

    @cached_property
    def block_attention(self) -> BlockAttention:
        """The attention plans. Raises UnsupportedAttention with every reason."""
        config, batch = self.transformer, self.batch
        tokens = AttentionProblem(
            batch=batch.piece,
            q_len=config.tokens(batch.latent),
            kv_len=config.tokens(batch.latent),
            heads=config.heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )
        cross = self._dense_attention(tokens, batch.caption_tokens + 1)
        attended = self.image.attended_tokens
        planned = plan_attention(self.attention, tokens, self.mesh, self.attention_options)
        return BlockAttention(
            self_attention=with_gradient(planned),
            cross_attention=RepeatedRowAttention(
                plan=cross, repeats=batch.text_length - batch.caption_tokens
            ),
            image_attention=self._dense_attention(tokens, attended) if attended else None,
        )

    def _dense_attention(self, tokens: AttentionProblem, keys: int) -> AttentionPlan:
        """Plans the attention of tokens to a text or an image."""
        problem = replace(tokens, kv_len=keys)
        return plan_cross_attention("dot_product", problem, self.mesh, self.attention_options)

    def loss(self, name: str) -> WanLoss:
        """Returns the loss of one expert."""
        return WanLoss(
            expert=name,
            transformer=self.models[name],
            text=self._text_reader,
            image=self.image,
            attention=self.block_attention,
            layout=self.layout,
            remat=self.remat,
            levels=self.experts.levels_of(name),
            weighting=self.weighting,
        )

    @property
    def _text_reader(self) -> TextReader:
        if isinstance(self.text, StoredText):
            return StoredCaptions(empty=self.text.empty, dropout=self.caption_dropout)
        return EncodedCaptions(
            encoder=self.models[TEXT_ENCODER], empty=self.text.empty, dropout=self.caption_dropout
        )

    @property
    def backward(self) -> int:
        """Cost of a backward pass in forward passes; frozen weights have no gradient."""
        return BACKWARD if self.lora is None else FROZEN_BACKWARD

    def step_function(self, name: str) -> StepOnFrozen:
        """Returns the step of one expert as a function of arrays, not compiled."""
        loss: Loss = self.loss(name)
        if self.lora is not None:
            loss = AdapterLoss(loss=loss, expert=name, lora=self.lora)
        trained = (name, TEXT_ENCODER) if self.text_rate > 0 else (name,)
        optimiser = replace(
            self.optimiser, rates={**self.optimiser.rates, TEXT_ENCODER: self.text_rate}
        )
        return make_step(
            loss,
            optimiser,
            trained=trained,
            accumulation=self.batch.accumulation,
            placed=Placed(
                placement=self.placement,
                shardings={model: self.models[model].shardings(self.mesh) for model in trained},
            ),
        )

    def step(self, name: str, frozen: Mapping[str, Values] = NOT_FROZEN) -> Step:
        """Returns the step of one expert, compiled at first use; it donates the state.

        `frozen` are the weights that adapters are trained on.
        """
        models = (name, TEXT_ENCODER)
        used = {model: frozen[model] for model in models if model in frozen}
        return on_mesh(
            self.step_function(name),
            self.mesh,
            used,
            models=models,
            home=self.home if self.placement.parks else None,
        )

    def home(self, state: TrainState) -> TrainState:
        """Returns the sharding of every array of a state while it is trained."""
        return state_shardings(state, state.values, self.mesh, self.placement)

    def on_device(self, means: Mapping[str, Values]) -> dict[str, Values]:
        """Returns running means in the shardings of their parameters, in device memory."""
        return {
            name: {
                path: jax.device_put(value, self.models[name].shardings(self.mesh)[path])
                for path, value in part.items()
            }
            for name, part in means.items()
        }


Home = Callable[[TrainState], TrainState]


def on_mesh(
    step: StepOnFrozen,
    mesh: Mesh,
    frozen: Mapping[str, Values] = NOT_FROZEN,
    *,
    models: Sequence[str] | None = None,
    home: Home | None = None,
) -> Step:
    """Returns the step as one program on the mesh, with the state donated.

    The program gets the part of the state that belongs to `models` (None: all of it). With `home`
    the rest moves to host memory first, and the part to the shardings that `home` states.
    """

    @cache
    def program(shardings: tuple[Any, ...], structure: Any) -> Any:
        return jitted(step, jax.tree.unflatten(structure, shardings))

    def run(state: Any, batch: Any) -> Any:
        part, rest = split_state(state, models)
        if home is not None:
            rest = {kind: in_memory(held, HOST) for kind, held in rest.items()}
            part = moved(part, home(part))
        leaves, structure = jax.tree.flatten(part)
        shardings = tuple(leaf.sharding for leaf in leaves)
        with jax.set_mesh(mesh):
            inputs = (part, place_batch(batch, mesh), {**frozen})
            part, report = program(shardings, structure)(*inputs)
        return join_state(part, rest), report

    return run


def jitted(step: StepOnFrozen, shardings: TrainState) -> Any:
    """Returns the program of a step.

    The new state keeps the shardings of the old one; otherwise the second step recompiles.
    """
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """Returns a host batch on the mesh, sharded over its rows.

    With several processes each passes its own rows.
    """
    layout, processes = ActivationLayout(mesh=mesh), jax.process_count()

    def put(rows: Any) -> jax.Array:
        shape = (rows.shape[0] * processes, *rows.shape[1:])
        sharding = layout.sharding(("batch", *("rest",) * (rows.ndim - 1)), shape)
        if processes == 1:
            return jax.device_put(rows, sharding)
        if not _holds_own_rows(sharding, shape):
            rows = multihost_utils.process_allgather(rows, tiled=True)
        return jax.make_array_from_process_local_data(sharding, np.asarray(rows), shape)

    return jax.tree.map(put, batch)


def _holds_own_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Returns whether every process holds exactly as many rows as it passes, and no others."""
    held: dict[int, set[int]] = {}
    placed: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in placed.items():
        held.setdefault(device.process_index, set()).update(range(*index[0].indices(shape[0])))
    shares = list(held.values())
    return sum(map(len, shares)) == shape[0] and len({*map(len, shares)}) == 1


Latent = tuple[int, int, int]  # frames, rows, columns


@dataclass(frozen=True, kw_only=True)
class BucketedTraining:
    """A training for clips of several sizes; every batch has one of them."""

    training: WanTraining
    latents: Sequence[Latent]

    @cached_property
    def by_latent(self) -> Mapping[Latent, WanTraining]:
        """The training of every size."""
        batch = self.training.batch
        return {
            latent: replace(self.training, batch=replace(batch, latent=latent))
            for latent in self.latents
        }

    def check_attention(self) -> None:
        """Plans the attention of every size. Raises UnsupportedAttention if one cannot run."""
        for training in self.by_latent.values():
            training.block_attention  # noqa: B018 - a cached property

    def bucketed_step(self, name: str, frozen: Mapping[str, Values] = NOT_FROZEN) -> Step:
        """Returns the step of one expert; every size has a program, compiled at first use."""
        self.check_attention()
        steps = {latent: training.step(name, frozen) for latent, training in self.by_latent.items()}

        def run(state: TrainState, batch: Any) -> tuple[TrainState, StepReport]:
            return steps[latent_of(batch)](state, batch)

        return run

    def work_of(self, batch: ClipBatch) -> Work:
        """Returns the tokens and the TFLOP of a step on a batch."""
        training = self.training
        return step_work(
            training.transformer,
            clips=training.batch.clips,
            tokens=training.transformer.tokens(latent_of(batch)),
            text_rows=training.batch.caption_tokens + 1 + training.image.attended_tokens,
            devices=training.mesh.size,
            backward=training.backward,
            device_kind=training.mesh.devices.flat[0].device_kind,
        )


def latent_of(batch: ClipBatch) -> Latent:
    """Returns frames, rows and columns of the latents of a batch."""
    _, frames, rows, columns, _ = batch.latents.shape
    return frames, rows, columns
