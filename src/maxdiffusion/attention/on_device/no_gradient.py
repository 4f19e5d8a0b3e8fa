"""A clear refusal where somebody differentiates a kernel that only goes forward."""

from collections.abc import Callable
from typing import Any

import jax


def forward_only(function: Callable[..., Any], *arrays: Any, **settings: Any) -> Any:
    """`function(*arrays, **settings)`; taking its gradient raises with the way out."""

    @jax.custom_jvp
    def run(*arrays: Any) -> Any:
        return function(*arrays, **settings)

    @run.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(
            "our flash kernel has no gradient: train with ring, tokamax_ring, ulysses_ring, "
            "ulysses, flash, tokamax_flash or dot_product"
        )

    return run(*arrays)
