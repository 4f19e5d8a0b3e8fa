"""The transformers of the tiny checkpoints as fixtures."""

import pytest

from tests.models.wan.tiny_transformer import Expert, read_expert


@pytest.fixture(
    params=[
        ("wan22_t2v", "transformer"),
        ("wan22_t2v", "transformer_2"),
        ("wan21_t2v", "transformer"),
    ],
    ids="-".join,
    scope="session",
)
def expert(request: pytest.FixtureRequest) -> Expert:
    """Each transformer of the tiny checkpoints in turn."""
    return read_expert(*request.param)


@pytest.fixture(scope="session")
def high_noise() -> Expert:
    """The first expert of the tiny WAN 2.2: 4 heads, 2 layers, 18 tokens."""
    return read_expert("wan22_t2v", "transformer")
