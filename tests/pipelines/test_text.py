"""Prompts to text rows: cleaning, ids, bucket lengths and rows as diffusers has them."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.mesh.axes import AXES
from maxdiffusion.models.umt5 import Umt5Config, Umt5Encoder
from maxdiffusion.pipelines.prompts import (
    REMEMBERED_PROMPTS,
    PromptEncoder,
    PromptTokenizer,
    TextPrograms,
    bucket_length,
    clean_prompt,
)
from maxdiffusion.runtime.problems import ProblemsFound
from maxdiffusion.weights.loading import ComponentSource, load_parameters
from maxdiffusion.weights.safetensors_index import open_weights
from maxdiffusion.weights.umt5_map import umt5_map

GOLDENS = Path(__file__).parents[1] / "goldens"
CHECKPOINT = GOLDENS / "wan22_t2v"
GOLDEN = np.load(GOLDENS / "text.npz")
PROMPTS = json.loads(str(GOLDEN["prompts_json"]))
ATOL = 1e-5  # float32, as for the encoder itself


@pytest.fixture(scope="module")
def tokenizer():
    return PromptTokenizer.load(CHECKPOINT / "tokenizer")


def make_encoder(tokenizer, mesh=None):
    folder = CHECKPOINT / "text_encoder"
    config = Umt5Config.from_transformers(json.loads((folder / "config.json").read_text()))
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Umt5Encoder(config, rngs=nnx.Rngs(0))))
    stored, problems = open_weights(folder)
    assert not problems
    source = ComponentSource(stored=stored, table=umt5_map(config), abstract=abstract)
    weights, _ = load_parameters(source, mesh=mesh)
    programs = TextPrograms(graph, mesh)
    return PromptEncoder(tokenizer=tokenizer, programs=programs, weights=weights), programs


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return make_encoder(tokenizer)[0]


def test_cleaning():
    assert [clean_prompt(prompt) for prompt in PROMPTS] == json.loads(str(GOLDEN["clean_json"]))
    assert clean_prompt("\u2003a \t b\u00a0\r\nc ") == "a b c"


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_ids(tokenizer, index):
    ids = tokenizer.ids(PROMPTS[index])
    length = GOLDEN["lens"][index]
    np.testing.assert_array_equal(ids, GOLDEN["input_ids"][index, :length])


def test_a_long_prompt_is_cut_and_keeps_its_end(tokenizer):
    whole, cut = tokenizer.ids(PROMPTS[0]), tokenizer.ids(PROMPTS[0], 5)
    assert cut == (*whole[:4], whole[-1])


def test_an_empty_prompt_is_one_end_token(tokenizer):
    assert tokenizer.ids("") == (1,)


@pytest.mark.parametrize(
    ("tokens", "limit", "length"),
    [
        (1, 512, 64),
        (64, 512, 64),
        (65, 512, 128),
        (257, 512, 512),
        (512, 512, 512),
        (10, 32, 32),
        (100, 226, 128),
        (200, 226, 226),
        (600, 700, 700),
    ],
)
def test_bucket_length(tokens, limit, length):
    assert bucket_length(tokens, limit) == length


def test_rows_of_several_prompts(encoder):
    rows = encoder.encode(PROMPTS[:4])
    assert rows.shape == GOLDEN["prompt_embeds"].shape
    np.testing.assert_allclose(rows, GOLDEN["prompt_embeds"], rtol=0, atol=ATOL)


def test_rows_of_a_cut_prompt(encoder):
    rows = encoder.encode(PROMPTS[4:])
    np.testing.assert_allclose(rows, GOLDEN["prompt_embeds_truncated"], rtol=0, atol=ATOL)


def test_fewer_rows_on_request(encoder):
    rows = encoder.encode(PROMPTS[:4], 40)
    np.testing.assert_allclose(rows, GOLDEN["prompt_embeds"][:, :40], rtol=0, atol=ATOL)


def test_a_prompt_has_the_same_bits_in_any_company(tokenizer):
    alone = make_encoder(tokenizer)[0].encode([PROMPTS[0]])
    together = make_encoder(tokenizer)[0].encode([PROMPTS[4], PROMPTS[2], PROMPTS[0]])
    np.testing.assert_array_equal(alone[0], together[2])


def test_compiling_ahead_leaves_nothing_to_compile(tokenizer, monkeypatch):
    encoder, programs = make_encoder(tokenizer)
    encoder.compile(PROMPTS)
    monkeypatch.setattr(programs, "_compile", lambda *_: pytest.fail("compiled while encoding"))
    encoder.encode(PROMPTS)


def test_prompts_are_remembered_and_forgotten(tokenizer, monkeypatch):
    encoder, _ = make_encoder(tokenizer)
    encoded = []
    encode_ids = encoder._encode_ids
    monkeypatch.setattr(
        encoder, "_encode_ids", lambda ids, rows: encoded.append(ids) or encode_ids(ids, rows)
    )
    encoder.encode(["fox", "fox", " fox "])
    assert len(encoded) == 1
    for count in range(REMEMBERED_PROMPTS):
        encoder.encode(["fox " * (count + 2), "fox"])
    assert len(encoded) == 1 + REMEMBERED_PROMPTS
    encoder.encode(["fox fox"])
    assert len(encoded) == 2 + REMEMBERED_PROMPTS


def test_rows_on_a_mesh_are_whole_on_every_device(tokenizer):
    mesh = jax.make_mesh((2, 2, 1, 1, 2), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 5)
    with jax.set_mesh(mesh):
        rows = make_encoder(tokenizer, mesh)[0].encode(PROMPTS[:2])
    assert rows.sharding.is_fully_replicated
    assert len(rows.sharding.device_set) == 8
    np.testing.assert_allclose(rows, GOLDEN["prompt_embeds"][:2], rtol=0, atol=ATOL)


def test_shapes_compile_the_same_program_as_weights(tokenizer):
    encoder, programs = make_encoder(tokenizer)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), encoder._weights
    )
    programs.get(shapes, 64, 512)
    rows = encoder.encode(PROMPTS[:1])
    assert len(programs._compiled) == 1
    np.testing.assert_allclose(rows, GOLDEN["prompt_embeds"][:1], rtol=0, atol=ATOL)


def test_one_string_is_not_a_list(encoder):
    with pytest.raises(TypeError, match="list of strings"):
        encoder.encode("a fox")


@pytest.mark.parametrize("prompt", [None, 3, ["a"]])
def test_a_prompt_is_text(encoder, prompt):
    with pytest.raises(ProblemsFound, match="prompt="):
        encoder.encode([prompt])


def test_ids_that_the_encoder_does_not_know_are_refused(tokenizer, encoder):
    embedding = jax.ShapeDtypeStruct((5, 64), jnp.float32)
    small = PromptEncoder(
        tokenizer=tokenizer, programs=encoder._programs, weights={"embedding": embedding}
    )
    with pytest.raises(ProblemsFound, match="ids below 5"):
        small.encode([PROMPTS[0]])


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ProblemsFound, match=r"tokenizer\.json.*must exist"):
        PromptTokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ProblemsFound, match=r"tokenizer\.json.*must be a tokenizer"):
        PromptTokenizer.load(tmp_path)


def test_a_tokenizer_without_end_token_is_refused(tmp_path):
    shutil.copy(CHECKPOINT / "tokenizer" / "tokenizer.json", tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    with pytest.raises(ProblemsFound, match="end token"):
        PromptTokenizer.load(tmp_path)
