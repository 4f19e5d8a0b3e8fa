"""A WAN training small enough to compile in seconds."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxdiffusion.mesh import MeshShape, build_mesh, single_device_mesh
from maxdiffusion.models.abstract import dotted
from maxdiffusion.models.umt5 import Umt5Config
from maxdiffusion.models.wan import WanTransformerConfig
from maxdiffusion.training.loss import (
    ClipBatch,
    EvenWeighting,
    ExpertSchedule,
    NoiseLevels,
    TrainedExperts,
)
from maxdiffusion.training.step import Clipping, LearningRate, Optimiser, first_state, place_values
from maxdiffusion.training.text import Captions
from maxdiffusion.training.wan import BatchShape, Tokens, WanTraining

TRANSFORMER = WanTransformerConfig(
    layers=2,
    heads=8,  # one for each device
    head_dim=16,
    ffn_dim=32,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=16,
)
TEXT = Umt5Config(vocab=32, width=16, head_dim=8, mlp_width=16, layers=1, heads=2)
LATENT = (2, 4, 4)
CLIPS = 8
CAPTION_TOKENS = 6


def optimiser(**changes):
    rate = LearningRate(peak=2e-3, steps=20, warmup_share=0.1)
    return Optimiser(
        **{"learning_rate": rate, "clipping": Clipping.GLOBAL_NORM, "ema_decay": 0.9} | changes
    )


def mesh_of(**sizes):
    shape = MeshShape(**sizes)
    return build_mesh(shape, devices=jax.devices()[: shape.devices])


def training(**changes):
    values = {
        "transformer": TRANSFORMER,
        "text_encoder": TEXT,
        "batch": BatchShape(
            clips=CLIPS, latent=LATENT, caption_tokens=CAPTION_TOKENS, text_length=24
        ),
        "experts": ExpertSchedule(
            levels=NoiseLevels(shift=3.0), boundary=0.875, trained=TrainedExperts.SHARED
        ),
        "weighting": EvenWeighting(),
        "optimiser": optimiser(),
        "mesh": single_device_mesh(),
        "text": Tokens(empty=(1,)),
    }
    return WanTraining(**values | changes)


def drawn_values(part, mesh, seed):
    """Parameters drawn by numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)
    shapes = {dotted(path): leaf.shape for path, leaf in nnx.to_flat_state(part.parameters)}
    values = {
        path: rng.standard_normal(shape).astype(np.float32) * 0.3 + path.endswith("scale")
        for path, shape in shapes.items()
    }
    return place_values(values, part, mesh)


def state_of(run, seed=0):
    values = {
        name: drawn_values(part, run.mesh, seed + place)
        for place, (name, part) in enumerate(run.models.items())
    }
    return first_state(values, run.optimiser, seed=seed, mesh=run.mesh)


def batch_of(number, clips=CLIPS):
    rng = np.random.default_rng(number)
    lengths = rng.integers(2, CAPTION_TOKENS + 1, clips).astype(np.int32)
    ids = rng.integers(3, TEXT.vocab, (clips, CAPTION_TOKENS)).astype(np.int32)
    ids[np.arange(CAPTION_TOKENS) >= lengths[:, None]] = 0
    latents = rng.standard_normal((clips, *LATENT, 4)).astype(np.float32)
    return ClipBatch(latents=latents, captions=Captions(ids=ids, lengths=lengths))


def own_rows(batch):
    """The rows of a batch that this process passes on."""
    share = CLIPS // jax.process_count()
    start = share * jax.process_index()
    return jax.tree.map(lambda rows: rows[start : start + share], batch)


def losses_of(run, program, steps=2):
    """The losses and the last state of a few steps on the same batches."""
    state, losses = state_of(run), []
    for number in range(steps):
        state, report = program(state, own_rows(batch_of(number)))
        losses.append(float(report.loss))
    return losses, state


@cache
def alone():
    """The training on one device and its compiled step; once for all tests."""
    run = training()
    return run, run.step("transformer")


@cache
def losses_alone():
    return losses_of(*alone())[0]


def flat(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
