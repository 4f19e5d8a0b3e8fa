"""Prompts to text rows: cleaning, ids, bucket lengths and rows as diffusers has them."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxdiffusion.errors import ProblemsFound
from maxdiffusion.mesh.mesh import AXES
from maxdiffusion.pipelines.text import (
    REMEMBERED_PROMPTS,
    PromptTokenizer,
    bucket_length,
    clean_prompt,
)
from tests.pipelines.tiny_text import CHECKPOINT, GOLDEN, PROMPTS, load_text

ATOL = 1e-5  # float32, as for the encoder itself


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


def test_a_prompt_has_the_same_bits_in_any_company(shared_text):
    alone = shared_text.encoder().encode([PROMPTS[0]])
    in_company = shared_text.encoder().encode([PROMPTS[4], PROMPTS[2], PROMPTS[0]])
    np.testing.assert_array_equal(alone[0], in_company[2])


def test_compiling_ahead_leaves_nothing_to_compile(text):
    encoder = text.encoder()
    encoder.compile(PROMPTS)
    ahead = list(text.compiled)
    assert ahead
    encoder.encode(PROMPTS)
    assert text.compiled == ahead


def test_prompts_are_remembered_and_forgotten(text):
    encoder, encoded = text.encoder(), text.encoded
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
        rows = load_text(tokenizer, mesh).encoder().encode(PROMPTS[:2])
    assert rows.sharding.is_fully_replicated
    assert len(rows.sharding.device_set) == 8
    np.testing.assert_allclose(rows, GOLDEN["prompt_embeds"][:2], rtol=0, atol=ATOL)


def test_shapes_compile_the_same_program_as_weights(text):
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), text.weights)
    text.programs.get(shapes, 64, 512)
    rows = text.encoder().encode(PROMPTS[:1])
    assert text.compiled == ["text_encoder"]
    np.testing.assert_allclose(rows, GOLDEN["prompt_embeds"][:1], rtol=0, atol=ATOL)


def test_one_string_is_not_a_list(encoder):
    with pytest.raises(TypeError, match="list of strings"):
        encoder.encode("a fox")


@pytest.mark.parametrize("prompt", [None, 3, ["a"]])
@pytest.mark.usefixtures("unchecked_types")
def test_a_prompt_is_text(encoder, prompt):
    with pytest.raises(ProblemsFound, match="prompt="):
        encoder.encode([prompt])


def test_ids_that_the_encoder_does_not_know_are_refused(shared_text):
    embedding = jax.ShapeDtypeStruct((5, 64), jnp.float32)
    small = shared_text.encoder(weights=nnx.State({"embedding": embedding}))
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
