"""The parts of a model folder as training reads them, or draws them anew."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxdiffusion.config.config import Config
from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh
from maxdiffusion.models.umt5 import Umt5Encoder
from maxdiffusion.models.vae import ALL_FRAMES, WanVae
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.training.latent_cache import Encode
from maxdiffusion.training.parts import Part, Values, fresh_values, values_of
from maxdiffusion.training.state import TrainState, first_state
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.text_cache import EncodeText
from maxdiffusion.training.wan_training import WanTraining
from maxdiffusion.weights.checkpoint_map import CheckpointMap
from maxdiffusion.weights.folder import ModelFolder
from maxdiffusion.weights.loading import ComponentSource, load_parameters
from maxdiffusion.weights.transformer_map import transformer_map
from maxdiffusion.weights.umt5_map import umt5_map
from maxdiffusion.weights.vae_map import vae_map

WHOLE_CLIP_PIXELS = 8_000_000  # more than so many are encoded a latent frame at a time


def loaded(
    folder: ModelFolder, name: str, part: Part[Any], table: CheckpointMap, mesh: Mesh | None
) -> Values:
    """The parameters of one component as the part has them."""
    source = ComponentSource(stored=folder.weights[name], table=table, abstract=part.variables)
    return values_of(load_parameters(source, mesh=mesh)[0])


def vae_of(
    folder: ModelFolder, spec: WanSpec, mesh: Mesh | None = None
) -> tuple[Part[WanVae], Values]:
    """The autoencoder of a folder, in float32, on the mesh or (None) on one device."""
    part: Part[WanVae] = Part.of(lambda rngs: WanVae(spec.vae, rngs=rngs))
    return part, loaded(folder, "vae", part, vae_map(spec.vae), mesh)


def clip_encoder(folder: ModelFolder, spec: WanSpec) -> Encode:
    """Turns bytes of clips into normalised latents (the most likely ones).

    Each process works on its own; its devices share the clips of a batch.
    """
    devices = jax.local_devices()
    mesh = build_mesh(MeshShape(data=len(devices)), devices=devices)
    part, values = vae_of(folder, spec, mesh)

    @jax.jit
    def encode(values: Values, videos: jax.Array) -> jax.Array:
        vae = part.merge(values)
        signed = videos.astype(jnp.float32) / 127.5 - 1.0
        whole = videos.size <= 3 * WHOLE_CLIP_PIXELS * len(devices)
        return vae.normalise(vae.encode(signed, chunk=ALL_FRAMES if whole else 1).mean)

    def run(videos: np.ndarray) -> np.ndarray:
        missing = -len(videos) % len(devices)
        even = np.concatenate([videos, np.repeat(videos[-1:], missing, axis=0)])
        with jax.set_mesh(mesh):
            shared = jax.device_put(even, NamedSharding(mesh, PartitionSpec("data")))
            return np.asarray(encode(values, shared))[: len(videos)]

    return run


def text_encoder(folder: ModelFolder, spec: WanSpec) -> EncodeText:
    """Turns tokens of captions into the rows that transformers read; each process on its own."""
    devices = jax.local_devices()
    mesh = build_mesh(MeshShape(fsdp=len(devices)), devices=devices)
    part: Part[Umt5Encoder] = Part.of(lambda rngs: Umt5Encoder(spec.text_encoder, rngs=rngs))
    values = loaded(folder, TEXT_ENCODER, part, umt5_map(spec.text_encoder), mesh)

    @jax.jit
    def encode(values: Values, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = jnp.arange(ids.shape[1])[None, :] < lengths[:, None]
        return part.merge(values)(ids, mask, layout=ActivationLayout(mesh=mesh))

    def run(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        with jax.set_mesh(mesh):
            return np.asarray(encode(values, ids, lengths))

    return run


def first(config: Config, training: WanTraining, folder: ModelFolder, spec: WanSpec) -> TrainState:
    """The state before the first step: the weights of the folder, or new ones.

    `train_from_scratch` draws what is trained; a text encoder that is not trained is read.
    """
    tables = dict.fromkeys(training.experts.names, transformer_map(spec.transformer))
    tables[TEXT_ENCODER] = umt5_map(spec.text_encoder)
    builds = dict.fromkeys(training.experts.names, training.build_transformer)
    values = {}
    for place, (name, part) in enumerate(training.parts.items()):
        trained = name != TEXT_ENCODER or config.train_text_encoder
        if config.train_from_scratch and trained:
            build = builds.get(name, training.build_text_encoder)
            values[name] = fresh_values(build, seed=config.seed + place, mesh=training.mesh)
        else:
            values[name] = loaded(folder, name, part, tables[name], training.mesh)
    return first_state(values, training.optimiser, seed=config.seed, mesh=training.mesh)
