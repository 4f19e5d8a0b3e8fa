"""Compiles in half the time for code that runs once: these tests compile more than they compute."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
