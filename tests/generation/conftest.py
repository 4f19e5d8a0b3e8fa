"""A compilation cache that ends with the tests of a module."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for `jax_cache_dir`; afterwards this process uses no cache again."""
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    yield tmp_path_factory.mktemp("cache")
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
