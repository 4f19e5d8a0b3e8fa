"""Attention backends: the kernels of one device behind one interface."""

from maxdiffusion.attention.backends.base import (
    AnyBackend,
    AttentionBackend,
    LocalReducer,
    Precision,
    Reducer,
    Softmax,
)

__all__ = [
    "AnyBackend",
    "AttentionBackend",
    "LocalReducer",
    "Precision",
    "Reducer",
    "Softmax",
]
