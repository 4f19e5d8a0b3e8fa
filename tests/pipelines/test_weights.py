"""LoRA adapters of a pipeline: diffusers' rules, and weights that follow them exactly."""

from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose
from safetensors.numpy import load_file

from maxdiffusion.checkpoints.load import ComponentSource, source_shapes
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.abstract import values_of
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.spec import open_wan_folder, wan_models
from maxdiffusion.pipelines.weights import LoraAdapters, LoraMethods, find_lora
from tests.checkpoints.small_model import mesh
from tests.oracle.lora_files import write_lora

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parents[1] / "goldens"
EXPERTS = ("transformer", "transformer_2")
RANK = 12  # two files of rank 6
# A bias, and a weight whose features are regrouped.
TENSORS = {
    "blocks.ffn.down.bias": "ffn.net.2.bias",
    "blocks.attn1.to_q.kernel": "attn1.to_q.weight",
}
LAST = "blocks.1"
BASE = {
    name: load_file(next((GOLDENS / "wan22_t2v" / name).glob("*.safetensors"))) for name in EXPERTS
}


def opened(folder, rank=0):
    """Sources of the transformers of a folder, and their abstract parameters with rooms."""
    model, spec = open_wan_folder(folder)
    table = transformer_map(spec.transformer)
    plain, roomy = (
        wan_models(spec.with_adapter_rank(one), Precision()).transformer.parameters
        for one in (0, rank)
    )
    sources = {
        name: ComponentSource(stored=model.weights[name], table=table, abstract=plain)
        for name in spec.experts
    }
    return sources, roomy


SOURCES, _ = opened(GOLDENS / "wan22_t2v")
TABLE = SOURCES["transformer"].table
SHAPES = source_shapes(TABLE, SOURCES["transformer"].abstract)


class Adapted(LoraMethods):
    """The adapters of a pipeline without the rest of it."""

    def __init__(self, folder="wan22_t2v", rank=0, sizes=None):
        self._lora = LoraAdapters(*opened(GOLDENS / folder, rank), mesh(**(sizes or {})))
        self.states = {}
        self._lora.refresh(self.states)

    @property
    def lora(self):
        return self._lora

    def values(self, expert="transformer"):
        """The parameters of an expert after the latest changes."""
        self._lora.refresh(self.states)
        assert not self._lora.stale()
        return values_of(self.states[expert])


@pytest.fixture(params=[0, RANK], ids=["fused", "kept"])
def pipeline(request):
    return Adapted(rank=request.param)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files with differences of every bias, and the changes of one bias."""
    folder = tmp_path_factory.mktemp("lora")
    paths = {name: folder / f"{name}.safetensors" for name in "ab"}
    deltas = {
        name: write_lora(path, SHAPES, "lightx2v", seed=seed)
        for seed, (name, path) in enumerate(paths.items())
    }
    return paths, deltas


def effective(values, parameter):
    """A parameter of the last layer, with what is in the room of its linear map."""
    value = np.asarray(values[parameter][-1], np.float64)
    module = parameter.removesuffix(".kernel")
    if f"{module}.lora_down" in values:
        down, up = (
            np.asarray(values[f"{module}.{part}"][-1], np.float64)
            for part in ("lora_down", "lora_up")
        )
        value = value + down @ up
    return value


def assert_weights(pipeline, files, transformer=(), transformer_2=()):
    """Fails unless each expert holds its weights and these (file, strength)."""
    entries = {entry.parameter: entry for entry in TABLE.entries}
    for expert, changes in (("transformer", transformer), ("transformer_2", transformer_2)):
        found = pipeline.values(expert)
        for parameter, tensor in TENSORS.items():
            name = f"{LAST}.{tensor}"
            wanted = BASE[expert][name].astype(np.float64)
            for file, strength in dict(changes).items():
                wanted = wanted + strength * files[1][file][name]
            wanted = entries[parameter].transform.apply(wanted)
            assert_allclose(effective(found, parameter), wanted, atol=1e-6, err_msg=name)


def load(pipeline, files, name, **options):
    pipeline.load_lora_weights(files[0][name], adapter_name=name, **options)


def test_only_the_last_one_loaded_is_active(pipeline, files):
    load(pipeline, files, "a")
    assert pipeline.lora.stale() == ["transformer"]
    load(pipeline, files, "b")
    assert pipeline.get_active_adapters() == ["b"]
    assert pipeline.get_list_adapters() == {"transformer": ["a", "b"]}
    assert_weights(pipeline, files, {"b": 1.0})


def test_strengths_of_several(pipeline, files):
    load(pipeline, files, "a")
    load(pipeline, files, "b")
    pipeline.set_adapters(["a", "b"], [0.7, -0.4])
    assert_weights(pipeline, files, {"a": 0.7, "b": -0.4})
    pipeline.set_adapters("b", 0.5)
    assert_weights(pipeline, files, {"b": 0.5})
    pipeline.set_adapters(["a", "b"])
    assert_weights(pipeline, files, {"a": 1.0, "b": 1.0})


def test_each_expert_has_its_own(pipeline, files):
    load(pipeline, files, "a")
    load(pipeline, files, "b", load_into_transformer_2=True)
    assert_weights(pipeline, files, {"a": 1.0}, {"b": 1.0})
    pipeline.set_adapters(["a", "b"], [0.8, 0.3])
    assert_weights(pipeline, files, {"a": 0.8}, {"b": 0.3})
    pipeline.set_adapters(["a"])  # turns the other one off
    assert_weights(pipeline, files, {"a": 1.0}, {})


def test_one_name_on_both_experts(pipeline, files):
    load(pipeline, files, "a")
    load(pipeline, files, "a", load_into_transformer_2=True)
    pipeline.set_adapters(["a"], [{"transformer": 0.8, "transformer_2": 0.3}])
    assert_weights(pipeline, files, {"a": 0.8}, {"a": 0.3})
    pipeline.set_adapters("a", {"transformer_2": 0.3})
    assert_weights(pipeline, files, {"a": 1.0}, {"a": 0.3})


def test_disable_delete_and_unload_give_back_the_very_weights(pipeline, files):
    base = pipeline.values()

    def is_base():
        assert pipeline.lora.stale() == ["transformer"]
        jax.tree.map(np.testing.assert_array_equal, pipeline.values(), base)

    load(pipeline, files, "a")
    pipeline.values()
    pipeline.disable_lora()
    is_base()
    pipeline.enable_lora()
    assert_weights(pipeline, files, {"a": 1.0})
    pipeline.delete_adapters("a")
    is_base()
    load(pipeline, files, "a")
    pipeline.values()
    pipeline.unload_lora_weights()
    assert pipeline.get_list_adapters() == {}
    is_base()


def test_fused_adapters_stay_after_unloading(pipeline, files):
    load(pipeline, files, "a")
    load(pipeline, files, "b")
    pipeline.set_adapters(["a", "b"], [0.5, 0.2])
    pipeline.fuse_lora(lora_scale=0.5, adapter_names=["a"])
    assert_weights(pipeline, files, {"a": 0.25, "b": 0.2})
    pipeline.unfuse_lora()
    assert_weights(pipeline, files, {"a": 0.5, "b": 0.2})
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    assert_weights(pipeline, files, {"a": 0.5, "b": 0.2})
    load(pipeline, files, "a")
    assert_weights(pipeline, files, {"a": 1.5, "b": 0.2})


def test_names_without_one(pipeline, files):
    for _ in range(2):
        pipeline.load_lora_weights(files[0]["a"])
    assert pipeline.get_list_adapters() == {"transformer": ["default_0", "default_1"]}


def test_what_cannot_be(pipeline, files):
    load(pipeline, files, "a")
    with pytest.raises(ValueError, match="adapter_name='a': is in use in the transformer"):
        load(pipeline, files, "a")
    with pytest.raises(ValueError, match=r"adapter_names=\['c'\]: not loaded. Loaded adapters: a"):
        pipeline.set_adapters(["a", "c"])
    with pytest.raises(ValueError, match="2 strengths for 1 adapters"):
        pipeline.set_adapters(["a"], [1, 2])
    with pytest.raises(ValueError, match=r"adapter_weights=\['vae'\]"):
        pipeline.set_adapters(["a"], [{"vae": 1}])
    with pytest.raises(ValueError, match="it has no adapter to fuse"):
        pipeline.fuse_lora(components=["transformer_2"])
    with pytest.raises(ValueError, match="components='vae': must be one of transformer"):
        pipeline.fuse_lora(components=["vae"])
    with pytest.raises(ValueError, match="'c': is not loaded"):
        pipeline.delete_adapters(["c"])
    one = Adapted("wan21_t2v")
    with pytest.raises(ValueError, match="this model has only transformer"):
        one.load_lora_weights(files[0]["a"], load_into_transformer_2=True)
    with pytest.raises(ProblemsFound, match=r"its shape is|no tensor was matched"):
        one.load_lora_weights(files[0]["a"])


def test_only_what_changes_is_replaced(files, tmp_path):
    write_lora(tmp_path / "lora.safetensors", SHAPES, "original")  # pairs of attention alone
    for rank in (0, RANK):
        pipeline = Adapted(rank=rank)
        before = pipeline.values()
        pipeline.load_lora_weights(tmp_path / "lora.safetensors")
        after = pipeline.values()
        replaced = {name for name in after if after[name] is not before[name]}
        kept = [name for name in replaced if name.endswith((".lora_down", ".lora_up"))]
        assert len(replaced) == (16 if rank else 8)
        assert len(kept) == (16 if rank else 0)
        assert all(".attn" in name for name in replaced)
        pipeline.set_adapters("default_0", 0.5)
        again = pipeline.values()
        assert {name for name in again if again[name] is not after[name]} == replaced


def test_rooms_on_a_mesh(files):
    pipeline = Adapted(rank=RANK, sizes={"fsdp": 2, "ring": 2, "tensor": 2})
    load(pipeline, files, "a")
    assert_weights(pipeline, files, {"a": 1.0})
    down = pipeline.values()["blocks.attn1.to_q.lora_up"]
    assert down.sharding.shard_shape(down.shape) == (2, RANK, 64)


def test_a_room_that_is_too_small(files):
    pipeline = Adapted(rank=5)
    load(pipeline, files, "a")
    with pytest.raises(ProblemsFound, match=r"lora_rank=5: the active adapters have rank 6 toge"):
        pipeline.values()
    assert set(pipeline.states) == set(EXPERTS)  # nothing was given up for it
    pipeline.delete_adapters("a")
    pipeline.values()


def test_a_load_that_fails_is_made_up_for(files, tmp_path):
    pipeline = Adapted()
    copy = tmp_path / "a.safetensors"
    copy.write_bytes(files[0]["a"].read_bytes())
    pipeline.load_lora_weights(copy, adapter_name="a")
    copy.unlink()
    with pytest.raises(FileNotFoundError):
        pipeline.values()
    pipeline.unload_lora_weights()
    assert_weights(pipeline, files)


def test_where_files_are_found(tmp_path, monkeypatch):
    usual = tmp_path / "pytorch_lora_weights.safetensors"
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    assert find_lora(tmp_path / "one.safetensors") == tmp_path / "one.safetensors"
    assert find_lora(tmp_path, "two.safetensors") == tmp_path / "two.safetensors"
    with pytest.raises(ProblemsFound, match=r"several files: one.safetensors, two.safetensors"):
        find_lora(tmp_path)
    usual.write_bytes(b"x")
    assert find_lora(tmp_path) == usual
    for missing in (tmp_path / "gone.safetensors", tmp_path / "gone"):
        with pytest.raises(ProblemsFound, match=r"has no such \.safetensors file"):
            find_lora(missing)
    asked = {}

    def snapshot_download(repository, allow_patterns):
        asked[repository] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_lora("owner/lora", "one.safetensors") == tmp_path / "one.safetensors"
    assert asked == {"owner/lora": ["one.safetensors", "adapter_config.json"]}
