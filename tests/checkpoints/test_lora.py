"""LoRA files of every dialect change exactly the tensors that they mean, on every mesh."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxdiffusion.checkpoints.load import (
    ComponentSource,
    LoadOptions,
    load_parameters,
    source_shapes,
)
from maxdiffusion.checkpoints.lora import (
    Adapter,
    LoraTargets,
    LowRank,
    fuse,
    read_lora,
)
from maxdiffusion.checkpoints.orbax_cache import load_through_cache
from maxdiffusion.checkpoints.safetensors_io import open_weights
from maxdiffusion.errors import ProblemsFound
from maxdiffusion.models.abstract import AbstractModel, values_of
from maxdiffusion.models.wan import WanTransformer, WanTransformerConfig
from maxdiffusion.models.wan.checkpoint import transformer_map
from maxdiffusion.models.wan.original import original_module
from tests.checkpoints.small_model import mesh
from tests.oracle.lora_files import DIALECTS, write_lora

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "goldens" / "wan22_t2v" / "transformer"
CONFIG = WanTransformerConfig.from_diffusers(json.loads((FOLDER / "config.json").read_text()))
TABLE = transformer_map(CONFIG)
ABSTRACT = AbstractModel.of(
    lambda rngs: WanTransformer(CONFIG, dtype=jnp.float32, param_dtype=jnp.float32, rngs=rngs)
).parameters
SHAPES = source_shapes(TABLE, ABSTRACT)
TARGETS = LoraTargets.of(SHAPES, original_module)
BASE = {n: v.astype(np.float32) for n, v in load_file(next(FOLDER.glob("*.safetensors"))).items()}


def source(stored):
    return ComponentSource(stored=stored, table=TABLE, abstract=ABSTRACT)


def loaded(stored, **options):
    return values_of(load_parameters(source(stored), **options)[0])


def merged(folder, *changes):
    """The parameters of a folder whose tensors were changed before it was written."""
    values = {name: value.astype(np.float64) for name, value in BASE.items()}
    for strength, deltas in changes:
        for name, delta in deltas.items():
            values[name] = values[name] + strength * delta
    folder.mkdir()
    save_file({n: v.astype(np.float32) for n, v in values.items()}, folder / "model.safetensors")
    return loaded(open_weights(folder))


def assert_close(found, wanted):
    # Sums of at most 6 products in float32, added to weights of size 1: a few roundings of 6e-8.
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-6, rtol=1e-6, err_msg=name)


def reasons(lora):
    return {one.name: one.reason for one in lora.unmatched}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_changes_what_it_means(tmp_path, dialect):
    deltas = write_lora(tmp_path / "lora.safetensors", SHAPES, dialect)
    lora = read_lora(tmp_path / "lora.safetensors", TARGETS)
    lora.check(strict=True)
    assert set(lora.changes) == set(deltas)
    found = loaded(fuse(open_weights(FOLDER), [Adapter(lora=lora, strength=0.6)]))
    wanted = merged(tmp_path / "merged", (0.6, deltas))
    assert_close(found, wanted)
    base = loaded(open_weights(FOLDER))
    assert max(float(abs(wanted[name] - base[name]).max()) for name in base) > 0.05


@pytest.mark.parametrize("sizes", [{"tensor": 8}, {"fsdp": 2, "ring": 2, "tensor": 2}], ids=str)
def test_adapters_are_fused_slice_by_slice(tmp_path, sizes):
    deltas = write_lora(tmp_path / "lora.safetensors", SHAPES, "norms", seed=3)
    lora = read_lora(tmp_path / "lora.safetensors", TARGETS)
    stored = fuse(open_weights(FOLDER), [Adapter(lora=lora, strength=-0.4)])
    found = loaded(stored, mesh=mesh(**sizes), options=LoadOptions(read_bytes=700, threads=3))
    assert_close(found, merged(tmp_path / "merged", (-0.4, deltas)))


def test_several_files_at_their_own_strengths(tmp_path):
    first = write_lora(tmp_path / "a.safetensors", SHAPES, "lightx2v", seed=1)
    second = write_lora(tmp_path / "b.safetensors", SHAPES, "diffusers", seed=2)
    adapters = [
        Adapter(lora=read_lora(tmp_path / f"{name}.safetensors", TARGETS), strength=strength)
        for name, strength in (("a", 0.7), ("b", -0.4))
    ]
    found = loaded(fuse(open_weights(FOLDER), adapters))
    assert_close(found, merged(tmp_path / "merged", (0.7, first), (-0.4, second)))


def test_weights_are_rounded_once(tmp_path):
    # bfloat16 weights are added to in float32, and cast after that.
    deltas = write_lora(tmp_path / "lora.safetensors", SHAPES, "diffusers")
    lora = read_lora(tmp_path / "lora.safetensors", TARGETS)
    abstract = AbstractModel.of(
        lambda rngs: WanTransformer(CONFIG, dtype=jnp.float32, param_dtype=jnp.bfloat16, rngs=rngs)
    ).parameters
    stored = fuse(open_weights(FOLDER), [Adapter(lora=lora, strength=1.0)])
    small = ComponentSource(stored=stored, table=TABLE, abstract=abstract)
    found = values_of(load_parameters(small)[0])["blocks.ffn.up.kernel"]
    whole = np.stack(
        [
            (BASE[name] + deltas[name].astype(np.float32)).T
            for name in (f"blocks.{layer}.ffn.net.0.proj.weight" for layer in range(2))
        ]
    ).astype(jnp.bfloat16)
    assert float(np.mean(np.asarray(found) != whole)) < 1e-3  # ties that float32 rounds otherwise
    np.testing.assert_allclose(
        np.asarray(found, np.float32), whole.astype(np.float32), rtol=2**-7, atol=1e-6
    )


def test_the_report_counts_pairs_by_rank(tmp_path):
    write_lora(tmp_path / "lora.safetensors", SHAPES, "lightx2v")
    said = read_lora(tmp_path / "lora.safetensors", TARGETS).describe()
    assert said.startswith("lora.safetensors: 19 pairs of rank 4, 1 pairs of rank 6, ")
    assert "not applied" not in said
    write_lora(tmp_path / "p" / "lora.safetensors", SHAPES, "peft_config")
    assert (
        "alpha from adapter_config.json"
        in read_lora(tmp_path / "p" / "lora.safetensors", TARGETS).describe()
    )


def edited(tmp_path, dialect="lightx2v", drop=(), **extra):
    """The LoRA of a file with tensors left out and added."""
    file = tmp_path / "lora.safetensors"
    write_lora(file, SHAPES, dialect)
    values = {name: value for name, value in load_file(file).items() if name not in drop}
    save_file(values | extra, file)
    return read_lora(file, TARGETS)


Q = "diffusion_model.blocks.0.self_attn.q"
ODD = {
    "diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight": (
        (4, 128),
        "the model has no blocks.0.cross_attn.k_img",
    ),
    "diffusion_model.blocks.7.self_attn.q.lora_down.weight": ((4, 128), "has no blocks.7"),
    "text_encoder.encoder.q.lora_A.weight": ((4, 128), "the model has no"),
    f"{Q}.dora_scale": ((128, 1), "DoRA is not supported"),
    f"{Q}.hada_w1_a": ((128, 1), "LoHa is not supported"),
    f"{Q}.something": ((1,), "is not a part of a LoRA"),
    "diffusion_model.patch_embedding.diff": ((128, 36, 1, 2, 2), "its shape is [128, 36, 1, 2, 2]"),
    f"{Q}.lora_A.weight": ((4, 128), "has the same meaning"),
}


@pytest.mark.parametrize("name", ODD)
def test_tensors_that_do_not_fit_are_named(tmp_path, name):
    shape, reason = ODD[name]
    lora = edited(tmp_path, **{name: np.zeros(shape, np.float32)})
    (only,) = lora.unmatched
    # Of two tensors with one meaning the first in the file is kept.
    assert only.name == name or reason == "has the same meaning"
    assert reason in only.reason
    lora.check(strict=False)
    assert f"not applied: {only.name} ({only.reason})" in lora.describe()
    with pytest.raises(ProblemsFound, match="lora_strict: false"):
        lora.check(strict=True)


def test_halves_of_pairs_are_named(tmp_path):
    lora = edited(tmp_path, drop=(f"{Q}.lora_up.weight",))
    said = reasons(lora)
    assert said[f"{Q}.lora_down.weight"] == "its module has only one of the two factors"
    assert "blocks.0.attn1.to_q.weight" not in lora.changes


def test_all_problems_come_at_once(tmp_path):
    extra = {name: np.zeros(shape, np.float32) for name, (shape, _) in list(ODD.items())[:5]}
    with pytest.raises(ProblemsFound) as caught:
        edited(tmp_path, **extra).check(strict=True)
    assert len(caught.value.problems) == 5


def test_a_file_that_changes_nothing_is_refused_in_any_case(tmp_path):
    file = tmp_path / "lora.safetensors"
    save_file({"unet.down.0.lora_A.weight": np.zeros((4, 8), np.float32)}, file)
    with pytest.raises(ProblemsFound, match="no tensor was matched"):
        read_lora(file, TARGETS).check(strict=False)


def test_an_adapter_of_another_size_matches_nothing(tmp_path):
    shapes = {
        name: tuple(2 * size if size == 128 else size for size in shape)
        for name, shape in SHAPES.items()
    }
    write_lora(tmp_path / "lora.safetensors", shapes, "diffusers")
    lora = read_lora(tmp_path / "lora.safetensors", TARGETS)
    assert not lora.changes
    assert all("its shape is [" in one.reason for one in lora.unmatched)


def test_a_bias_of_the_second_factor_is_scaled_with_its_pair(tmp_path):
    bias = np.arange(128, dtype=np.float32)
    name = "transformer.blocks.0.attn1.to_q.lora_B.bias"
    file = tmp_path / "lora.safetensors"
    write_lora(file, SHAPES, "diffusers_alpha")
    settings = {"transformer.r": 4, "transformer.lora_alpha": 2.0}
    header = {"lora_adapter_metadata": json.dumps(settings)}
    save_file({**load_file(file), name: bias}, file, metadata=header)
    (change,) = read_lora(file, TARGETS).changes["blocks.0.attn1.to_q.bias"]
    assert change.strength == 0.5


def test_settings_of_peft(tmp_path):
    file = tmp_path / "lora.safetensors"
    write_lora(file, SHAPES, "peft")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"lora_alpha": 8, "use_rslora": True}))
    (pair,) = read_lora(file, TARGETS).changes["blocks.1.attn1.to_q.weight"]
    assert isinstance(pair, LowRank)
    assert pair.strength == 4.0
    config.write_text(json.dumps({"lora_alpha": 8, "use_dora": True}))
    with pytest.raises(ProblemsFound, match="DoRA is not supported"):
        read_lora(file, TARGETS)
    config.write_text("{")
    with pytest.raises(ProblemsFound, match="not JSON"):
        read_lora(file, TARGETS)


def test_convolutions_have_pairs_too(tmp_path):
    rng = np.random.default_rng(0)
    down = rng.standard_normal((3, 16, 1, 2, 2), dtype=np.float32)
    up = rng.standard_normal((128, 3, 1, 1, 1), dtype=np.float32)
    file = tmp_path / "lora.safetensors"
    names = ("lora_down", "lora_up")
    save_file(
        {
            f"lora_unet_patch_embedding.{n}.weight": v
            for n, v in zip(names, (down, up), strict=True)
        },
        file,
    )
    lora = read_lora(file, TARGETS)
    delta = np.einsum("or,rixyz->oixyz", up[:, :, 0, 0, 0].astype(np.float64), down)
    found = loaded(
        fuse(open_weights(FOLDER), [Adapter(lora=lora, strength=0.5)]),
        options=LoadOptions(read_bytes=100),
    )
    wanted = merged(tmp_path / "merged", (0.5, {"patch_embedding.weight": delta}))
    assert_close(found, wanted)


def test_the_weight_cache_knows_adapters_and_strengths(tmp_path):
    write_lora(tmp_path / "lora.safetensors", SHAPES, "diffusers")

    def cached(strength):
        lora = read_lora(tmp_path / "lora.safetensors", TARGETS)
        adapters = [] if strength is None else [Adapter(lora=lora, strength=strength)]
        stored = fuse(open_weights(FOLDER), adapters)
        return load_through_cache({"transformer": source(stored)}, tmp_path / "cache").messages[0]

    assert "cached in" in cached(None)
    assert "taken from" in cached(None)
    assert "because adapters was" in cached(0.5)
    assert "taken from" in cached(0.5)
    assert "because adapters was" in cached(0.6)
    write_lora(tmp_path / "lora.safetensors", SHAPES, "diffusers", seed=1)
    assert "because adapters was" in cached(0.6)
