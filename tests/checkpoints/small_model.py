"""A small model with every kind of parameter, its table, and checkpoints of it made with numpy."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save_file

from maxdiffusion.checkpoints.load import ComponentSource
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.mesh import AXES
from maxdiffusion.models.checkpoint_map import (
    CONV2D,
    LINEAR,
    CheckpointMap,
    DropUnitDims,
    Entry,
    RopeHalves,
    linear,
)

LAYERS, MODEL, HEAD_DIM, HEADS, MLP = 3, 16, 4, 8, 24
SHAPES = {
    "embedding.weight": (10, MODEL),
    "conv.weight": (MODEL, 3, 2, 2),
    "gain": (5, 1, 1),
} | {
    f"blocks.{layer}.{name}": shape
    for layer in range(LAYERS)
    for name, shape in {
        "q.weight": (HEADS * HEAD_DIM, MODEL),
        "q.bias": (HEADS * HEAD_DIM,),
        "up.weight": (MLP, MODEL),
        "up.bias": (MLP,),
        "table": (1, 6, MODEL),
    }.items()
}


class SmallModel(nnx.Module):
    def __init__(self, param_dtype):
        def param(*shape, dims):
            return nnx.Param(jnp.zeros(shape, param_dtype), dims=dims)

        heads = HEADS * HEAD_DIM
        self.embedding = param(10, MODEL, dims=("tokens", "model"))
        self.conv = nnx.Dict(kernel=param(2, 2, 3, MODEL, dims=("k", "k", "channels", "model")))
        self.gain = nnx.Param(jnp.zeros((5,), param_dtype))
        self.blocks = nnx.Dict(
            q=nnx.Dict(
                kernel=param(LAYERS, MODEL, heads, dims=("model", "heads")),
                bias=param(LAYERS, heads, dims=("heads",)),
            ),
            up=nnx.Dict(
                kernel=param(LAYERS, MODEL, MLP, dims=("model", "mlp")),
                bias=param(LAYERS, MLP, dims=("mlp",)),
            ),
            table=param(LAYERS, 6, MODEL, dims=("modulation", "model")),
        )


TABLE = CheckpointMap(
    entries=(
        Entry(parameter="embedding", source="embedding.weight"),
        Entry(parameter="conv.kernel", source="conv.weight", transform=CONV2D),
        Entry(parameter="gain", source="gain", transform=DropUnitDims((-1, 1, 1))),
        Entry(
            parameter="blocks.q.kernel",
            source="blocks.{layer}.q.weight",
            transform=RopeHalves(HEAD_DIM, before=LINEAR),
        ),
        Entry(
            parameter="blocks.q.bias",
            source="blocks.{layer}.q.bias",
            transform=RopeHalves(HEAD_DIM),
        ),
        *linear("blocks.up", "blocks.{layer}.up"),
        Entry(
            parameter="blocks.table",
            source="blocks.{layer}.table",
            transform=DropUnitDims((1, 6, -1)),
        ),
    ),
    layers=LAYERS,
    ignored=(r".*\.position_ids",),
    aliases=((r"model\.embedding\.weight", "embedding.weight"),),
)


def tensors(dtype=np.float32, seed=0):
    """Random tensors of the checkpoint, by name."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32).astype(dtype)
        for name, shape in SHAPES.items()
    }


def save(folder, values, shards=1, index=True):
    """Writes a component's folder: one file, or shards with or without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"_class_name": "SmallModel"}')
    stem = "diffusion_pytorch_model"
    if shards == 1:
        save_file(values, folder / f"{stem}.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(values)[shard::shards]
        save_file({name: values[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if index:
        content = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
        (folder / f"{stem}.safetensors.index.json").write_text(content)
    return folder


def source_of(folder, param_dtype=jnp.float32, table=TABLE):
    """What a load needs, for a folder without problems."""
    abstract = nnx.state(nnx.eval_shape(lambda: SmallModel(param_dtype)), nnx.Param)
    return ComponentSource(stored=open_weights(folder), table=table, abstract=abstract)


def expected(values, dtype=np.float32):
    """The parameters that the tensors become, each computed whole and by hand."""

    def stacked(name, change):
        return np.stack([change(values[f"blocks.{layer}.{name}"]) for layer in range(LAYERS)])

    def halves(rows):
        heads = [rows[head * HEAD_DIM : (head + 1) * HEAD_DIM] for head in range(HEADS)]
        return np.concatenate([part for head in heads for part in (head[0::2], head[1::2])])

    return {
        name: value.astype(dtype)
        for name, value in {
            "embedding": values["embedding.weight"],
            "conv.kernel": np.einsum("oikl->klio", values["conv.weight"].astype(np.float64)),
            "gain": values["gain"][:, 0, 0],
            "blocks.q.kernel": stacked("q.weight", lambda tensor: halves(tensor).T),
            "blocks.q.bias": stacked("q.bias", halves),
            "blocks.up.kernel": stacked("up.weight", np.transpose),
            "blocks.up.bias": stacked("up.bias", np.asarray),
            "blocks.table": stacked("table", lambda tensor: tensor[0]),
        }.items()
    }


def flat(state):
    """The arrays of a state by dotted path."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)}


def assert_holds(state, wanted):
    """Fails unless the state has exactly the wanted values, bit for bit."""
    found = flat(state)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(np.asarray(found[name]), value, err_msg=name)


def mesh(data=1, fsdp=1, ring=1, ulysses=1, tensor=1):
    """A mesh over as many devices as the sizes need."""
    sizes = (data, fsdp, ring, ulysses, tensor)
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), AXES)


FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
