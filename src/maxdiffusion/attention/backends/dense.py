"""Backends without a Pallas kernel: dense attention as XLA einsums, and cuDNN's on a GPU."""

from dataclasses import dataclass
from typing import final

from maxdiffusion.attention.backends.base import (
    Keys,
    Precision,
    Queries,
    StatelessBackend,
)
from maxdiffusion.attention.problem import LocalKVMask
from maxdiffusion.errors import Problem, ProblemsFound
from maxdiffusion.kernels.reference import (
    HEAD_DIM_MULTIPLE,
    LARGEST_HEAD_DIM,
    Partials,
    chunked_attention,
    cudnn_attention,
    reference_partials,
)


@final
@dataclass(frozen=True, kw_only=True)
class DenseBackend(StatelessBackend):
    """Scores, float32 softmax and output as XLA einsums, a chunk of queries at a time."""

    title = "dense einsum"
    gradient_precisions = (Precision.NATIVE,)

    @property
    def softmax_title(self) -> str:
        """The softmax in the start-up report."""
        return "float32"

    def attend(self, q: Queries, k: Keys, v: Keys, kv_mask: LocalKVMask, stats: None) -> Queries:
        """Returns attention over all keys."""
        # Global arrays, which XLA partitions, hold several local problems.
        return chunked_attention(
            q,
            k,
            v,
            scale=self.problem.scale,
            valid=kv_mask.valid(k.shape[0], k.shape[1]),
            sequence_shards=q.shape[1] // self.problem.q_len,
            pair_shards=q.shape[0] * q.shape[2] // self.problem.pairs,
        )

    def partials(self, q: Queries, k: Keys, v: Keys, kv_mask: LocalKVMask, stats: None) -> Partials:
        """Returns unnormalised attention over some of the keys."""
        valid = kv_mask.valid(k.shape[0], k.shape[1])
        return reference_partials(q, k, v, scale=self.problem.scale, valid=valid)


@final
@dataclass(frozen=True, kw_only=True)
class CudnnBackend(StatelessBackend):
    """Fused attention of the cuDNN library, through jax."""

    title = "cuDNN"
    gradient_precisions = (Precision.NATIVE,)

    def check(self) -> None:
        """Raises `ProblemsFound` if cuDNN cannot run this problem."""
        found = []
        if self.problem.platform not in ("gpu", "cuda"):
            found.append(
                Problem(
                    name="device",
                    value=self.problem.platform,
                    rule="cuDNN attention runs on NVIDIA GPUs only",
                    remedy="Use flash or a ulysses/ring name on TPUs, dot_product on CPUs",
                )
            )
        if self.problem.dtype.name != "bfloat16":
            found.append(
                Problem(
                    name="dtype",
                    value=self.problem.dtype.name,
                    rule="cuDNN attention computes in 16 bits",
                    remedy="Use activations_dtype: bfloat16",
                )
            )
        width = self.problem.head_dim
        if width % HEAD_DIM_MULTIPLE or width > LARGEST_HEAD_DIM:
            found.append(
                Problem(
                    name="head_dim",
                    value=width,
                    rule=f"a multiple of {HEAD_DIM_MULTIPLE} up to {LARGEST_HEAD_DIM}",
                    remedy="Use dot_product",
                )
            )
        if found:
            raise ProblemsFound(found)

    def attend(self, q: Queries, k: Keys, v: Keys, kv_mask: LocalKVMask, stats: None) -> Queries:
        """Returns attention over all keys."""
        valid = kv_mask.valid(k.shape[0], k.shape[1])
        return cudnn_attention(q, k, v, scale=self.problem.scale, valid=valid)
