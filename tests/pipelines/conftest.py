"""The tokenizer and text encoder of the tiny checkpoint as fixtures."""

import pytest

from maxdiffusion.pipelines.text import PromptEncoder, PromptTokenizer
from tests.pipelines.tiny_text import TinyText, load_text, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PromptTokenizer:
    return load_tokenizer()


@pytest.fixture
def text(tokenizer: PromptTokenizer) -> TinyText:
    """The tiny text encoder with nothing compiled yet."""
    return load_text(tokenizer)


@pytest.fixture(scope="session")
def shared_text(tokenizer: PromptTokenizer) -> TinyText:
    """The tiny text encoder; programs are compiled once for all tests."""
    return load_text(tokenizer)


@pytest.fixture(scope="session")
def encoder(shared_text: TinyText) -> PromptEncoder:
    return shared_text.encoder()
