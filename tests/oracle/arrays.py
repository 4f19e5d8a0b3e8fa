"""Arrays between numpy and torch, and the draws that recordings start from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

Record = dict[str, np.ndarray]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns the values as numpy; bfloat16 is widened, which loses nothing."""
    values = tensor.detach()
    return (values.float() if values.is_floating_point() else values).numpy().copy()


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Returns standard normal values that do not depend on torch's generator."""
    drawn = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(drawn)


def small_video(seed: int, *shape: int) -> torch.Tensor:
    """Returns a random video in (-1, 1) whose values are exact in float16, to keep files small."""
    return torch.tanh(0.7 * normal(seed, *shape)).half().float()


@contextmanager
def outputs_of(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, object]]:
    """Yields a dictionary that fills with the last output of each named module."""
    seen: dict[str, object] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.__setitem__(name, output)

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
