"""LoRA adapters of a pipeline: diffusers' rules, and weights that follow them exactly."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from maxdiffusion.checkpoints.load import ComponentSource, source_shapes
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.abstract import values_of
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.pipelines.adapters import LoraAdapters, LoraMethods, find_lora
from maxdiffusion.pipelines.settings import Precision
from maxdiffusion.pipelines.spec import open_wan_folder, wan_models
from tests.checkpoints.small_model import mesh
from tests.oracle.lora_files import write_lora

GOLDENS = Path(__file__).parents[1] / "goldens"
EXPERTS = ("transformer", "transformer_2")
PARAMETER, TENSOR = "blocks.ffn.down.bias", "blocks.0.ffn.net.2.bias"
BASE = {
    name: load_file(next((GOLDENS / "wan22_t2v" / name).glob("*.safetensors")))[TENSOR]
    for name in EXPERTS
}


def sources_of(folder):
    opened, spec = open_wan_folder(folder)
    table = transformer_map(spec.transformer)
    abstract = wan_models(spec, Precision()).transformer.parameters
    return {
        name: ComponentSource(stored=opened.weights[name], table=table, abstract=abstract)
        for name in spec.experts
    }


SOURCES = sources_of(GOLDENS / "wan22_t2v")
SHAPES = source_shapes(SOURCES["transformer"].table, SOURCES["transformer"].abstract)


class Adapted(LoraMethods):
    """The adapters of a pipeline without the rest of it."""

    def __init__(self, sources=None):
        self._lora = LoraAdapters(SOURCES if sources is None else sources, mesh())

    @property
    def lora(self):
        return self._lora


@pytest.fixture
def pipeline():
    return Adapted()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files with differences of every bias, and the changes of one bias."""
    folder = tmp_path_factory.mktemp("lora")
    paths = {name: folder / f"{name}.safetensors" for name in "ab"}
    deltas = {
        name: write_lora(path, SHAPES, "lightx2v", seed=seed)[TENSOR]
        for seed, (name, path) in enumerate(paths.items())
    }
    return paths, deltas


def assert_weights(pipeline, files, transformer=(), transformer_2=()):
    """Fails unless each expert holds its weights and these (file, strength)."""
    states = pipeline.lora.stream(EXPERTS)
    assert not pipeline.lora.stale()
    for name, changes in (("transformer", transformer), ("transformer_2", transformer_2)):
        wanted = BASE[name].astype(np.float64)
        for file, strength in dict(changes).items():
            wanted = wanted + strength * files[1][file]
        found = np.asarray(values_of(states[name])[PARAMETER][0])
        np.testing.assert_allclose(found, wanted, atol=1e-6, err_msg=name)


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
    base = pipeline.lora.stream(["transformer"])["transformer"]

    def is_base():
        assert pipeline.lora.stale() == ["transformer"]
        state = pipeline.lora.stream(["transformer"])["transformer"]
        jax.tree.map(np.testing.assert_array_equal, values_of(state), values_of(base))

    load(pipeline, files, "a")
    pipeline.lora.stream(["transformer"])
    pipeline.disable_lora()
    is_base()
    pipeline.enable_lora()
    assert_weights(pipeline, files, {"a": 1.0})
    pipeline.delete_adapters("a")
    is_base()
    load(pipeline, files, "a")
    pipeline.lora.stream(["transformer"])
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
    one = Adapted(sources_of(GOLDENS / "wan21_t2v"))
    with pytest.raises(ValueError, match="this model has only transformer"):
        one.load_lora_weights(files[0]["a"], load_into_transformer_2=True)
    with pytest.raises(ProblemsFound, match=r"its shape is|no tensor was matched"):
        one.load_lora_weights(files[0]["a"])


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
