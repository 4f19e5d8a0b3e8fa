"""Reads the components of a model folder for training, or initialises them at random."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image

from maxdiffusion.checkpoints.diffusers_folder import ModelFolder
from maxdiffusion.checkpoints.load import ComponentSource, load_parameters
from maxdiffusion.config import Config
from maxdiffusion.mesh import ActivationLayout, MeshShape, build_mesh
from maxdiffusion.models.abstract import AbstractModel, Values, fresh_values, values_of
from maxdiffusion.models.checkpoint_map import CheckpointMap
from maxdiffusion.models.umt5 import Umt5Encoder
from maxdiffusion.models.umt5.checkpoint import umt5_map
from maxdiffusion.models.vae import ALL_FRAMES, WanVae
from maxdiffusion.models.vae.checkpoint import vae_map
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.pipelines.preprocess.images import ClipPreprocessor, clip_pixels
from maxdiffusion.pipelines.spec import WanSpec
from maxdiffusion.training.data.latent_cache import Encode, EncodeFrames, EncodeText
from maxdiffusion.training.step import TrainState, first_state_of_each
from maxdiffusion.training.text import TEXT_ENCODER
from maxdiffusion.training.wan import WanTraining

WHOLE_CLIP_PIXELS = 8_000_000  # longer clips are encoded one latent frame at a time


def loaded(
    folder: ModelFolder,
    name: str,
    model: AbstractModel[Any],
    table: CheckpointMap,
    mesh: Mesh | None,
) -> Values:
    """Returns the parameters of one component by dotted path."""
    source = ComponentSource(stored=folder.weights[name], table=table, abstract=model.parameters)
    return values_of(load_parameters(source, mesh=mesh)[0])


def vae_of(
    folder: ModelFolder, spec: WanSpec, mesh: Mesh | None = None
) -> tuple[AbstractModel[WanVae], Values]:
    """Returns the autoencoder of a folder in float32, on the mesh or (None) on one device."""
    model: AbstractModel[WanVae] = AbstractModel.of(lambda rngs: WanVae(spec.vae, rngs=rngs))
    return model, loaded(folder, "vae", model, vae_map(spec.vae), mesh)


def clip_encoder(folder: ModelFolder, spec: WanSpec) -> Encode:
    """Returns a function from clips (bytes) to the normalised means of their latents.

    Each process encodes its own clips; its devices share the clips of a batch.
    """
    mesh = _own_devices()
    model, values = vae_of(folder, spec, mesh)

    @jax.jit
    def encode(values: Values, videos: jax.Array) -> jax.Array:
        vae = model.merge(values)
        signed = videos.astype(jnp.float32) / 127.5 - 1.0
        whole = videos.size <= 3 * WHOLE_CLIP_PIXELS * mesh.size
        return vae.normalise(vae.encode(signed, chunk=ALL_FRAMES if whole else 1).mean)

    return lambda videos: _on_rows(encode, values, videos, mesh)


def frame_encoder(folder: ModelFolder, spec: WanSpec) -> EncodeFrames:
    """Returns a function from first frames (bytes) to the CLIP tokens that the model attends to.

    Each process encodes its own frames; its devices share those of a batch.
    """
    # For models with an image encoder alone.
    from maxdiffusion.models.clip import ClipVisionEncoder
    from maxdiffusion.models.clip.checkpoint import clip_map

    config, mesh = spec.image_encoder, _own_devices()
    assert config is not None
    model: AbstractModel[ClipVisionEncoder] = AbstractModel.of(
        lambda rngs: ClipVisionEncoder(config, rngs=rngs)
    )
    values = loaded(folder, "image_encoder", model, clip_map(config), mesh)
    preprocessor = ClipPreprocessor.from_config(spec.image_processor or {})

    @jax.jit
    def encode(values: Values, pixels: jax.Array) -> jax.Array:
        return model.merge(values)(pixels)

    def run(frames: np.ndarray) -> np.ndarray:
        images = [clip_pixels(Image.fromarray(frame), preprocessor) for frame in frames]
        return _on_rows(encode, values, np.stack(images), mesh)

    return run


def _own_devices() -> Mesh:
    """Returns the mesh of this process's devices, which share the rows of a batch."""
    devices = jax.local_devices()
    return build_mesh(MeshShape(data=len(devices)), devices=devices)


def _on_rows(
    encode: Callable[[Values, jax.Array], jax.Array], values: Values, rows: np.ndarray, mesh: Mesh
) -> np.ndarray:
    """Returns the encoded rows; the last one is repeated until the devices divide them."""
    missing = -len(rows) % mesh.size
    even = np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])
    with jax.set_mesh(mesh):
        shared = jax.device_put(even, NamedSharding(mesh, PartitionSpec("data")))
        return np.asarray(encode(values, shared))[: len(rows)]


def text_encoder(folder: ModelFolder, spec: WanSpec) -> EncodeText:
    """Returns a function from caption tokens to text embeddings; each process runs its own."""
    devices = jax.local_devices()
    mesh = build_mesh(MeshShape(fsdp=len(devices)), devices=devices)
    model: AbstractModel[Umt5Encoder] = AbstractModel.of(
        lambda rngs: Umt5Encoder(spec.text_encoder, rngs=rngs)
    )
    values = loaded(folder, TEXT_ENCODER, model, umt5_map(spec.text_encoder), mesh)

    @jax.jit
    def encode(values: Values, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = jnp.arange(ids.shape[1])[None, :] < lengths[:, None]
        return model.merge(values)(ids, mask, layout=ActivationLayout(mesh=mesh))

    def run(ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        with jax.set_mesh(mesh):
            return np.asarray(encode(values, ids, lengths))

    return run


def initial_state(
    config: Config, training: WanTraining, folder: ModelFolder, spec: WanSpec
) -> TrainState:
    """Returns the state before the first step: weights of the folder, or random ones.

    `train_from_scratch` initialises what is trained; a frozen text encoder is always read.
    """
    tables = dict.fromkeys(training.experts.names, transformer_map(spec.transformer))
    tables[TEXT_ENCODER] = umt5_map(spec.text_encoder)
    builds = dict.fromkeys(training.experts.names, training.build_transformer)

    def parts() -> Iterator[tuple[str, Values]]:
        for offset, (name, model) in enumerate(training.models.items()):
            trained = name != TEXT_ENCODER or config.train_text_encoder
            if config.train_from_scratch and trained:
                build = builds.get(name, training.build_text_encoder)
                yield name, fresh_values(build, seed=config.seed + offset, mesh=training.mesh)
            else:
                yield name, loaded(folder, name, model, tables[name], training.mesh)

    return first_state_of_each(
        parts(),
        training.optimiser,
        seed=config.seed,
        mesh=training.mesh,
        placement=training.placement,
    )
