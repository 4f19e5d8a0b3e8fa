"""Registry of attention names: each is a context-parallel scheme, a backend and its softmax.

To add a mode, write the scheme or backend in one new file and add one row to `ATTENTION_OPS`. No
code after this table looks at a name: a plan holds the scheme and the backend.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from maxdiffusion.attention.backends.base import AnyBackend, Precision, Softmax
from maxdiffusion.attention.backends.dense import CudnnBackend, DenseBackend
from maxdiffusion.attention.backends.flash import FlashBackend
from maxdiffusion.attention.backends.splash import JaxSplashBackend, TokamaxSplashBackend
from maxdiffusion.attention.context_parallel import (
    AllGatherKV,
    AutoSharded,
    BidirectionalRing,
    ContextParallel,
    OverlappedQueries,
    Ring,
    Ulysses,
)
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import AttentionProblem, LocalProblem


@dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """One attention mode: context-parallel scheme x backend x softmax and precision.

    `dense_below_min_seq_length`: with fewer queries or keys than `flash_min_seq_length`,
    `dot_product` runs in its place.
    """

    scheme: ContextParallel
    backend: type[AnyBackend]
    softmax: Softmax = Softmax.ONLINE
    precision: Precision = Precision.NATIVE
    dense_below_min_seq_length: bool = False

    @property
    def differentiable(self) -> bool:
        """Returns whether the backend has a gradient in this precision."""
        return self.precision in self.backend.gradient_precisions

    def resolve(
        self, problem: AttentionProblem, options: AttentionOptions
    ) -> tuple[ContextParallel, AnyBackend]:
        """Returns the scheme and the backend of a problem that is split over a mesh."""
        if problem.replicated_kv:
            scheme = self.scheme.for_replicated_kv(problem, options)
            return scheme, self.cross_backend(scheme.local_problem(problem.shard), options)
        scheme = self.scheme.for_mesh(problem, options)
        return scheme, self.self_backend(scheme.local_problem(problem.shard), options)

    def self_backend(self, problem: LocalProblem, options: AttentionOptions) -> AnyBackend:
        """Returns the backend for tokens that attend to tokens."""
        return self.backend(
            problem=problem, options=options, softmax=self.softmax, precision=self.precision
        )

    def cross_backend(self, problem: LocalProblem, options: AttentionOptions) -> AnyBackend:
        """Returns the backend over text keys: online softmax, full precision."""
        return self.backend(problem=problem, options=options)


_RING = Ring(axes=("ring",), across=("ulysses",))
_ULYSSES_RING = Ulysses(axes=("ulysses",), inner=_RING)
_OVERLAPPED_ULYSSES_RING = Ulysses(axes=("ulysses",), inner=_RING, queries=OverlappedQueries())

DOT_PRODUCT = "dot_product"
ATTENTION_OPS: dict[str, AttentionOp] = {
    DOT_PRODUCT: AttentionOp(scheme=AutoSharded(), backend=DenseBackend),
    "flash": AttentionOp(
        scheme=AllGatherKV(), backend=JaxSplashBackend, dense_below_min_seq_length=True
    ),
    "tokamax_flash": AttentionOp(
        scheme=AllGatherKV(), backend=TokamaxSplashBackend, dense_below_min_seq_length=True
    ),
    "cudnn_flash_te": AttentionOp(scheme=AllGatherKV(), backend=CudnnBackend),
    "ring": AttentionOp(scheme=Ring(), backend=TokamaxSplashBackend),
    "tokamax_ring": AttentionOp(scheme=Ring(), backend=TokamaxSplashBackend),
    "tokamax_ring_custom": AttentionOp(scheme=Ring(), backend=FlashBackend),
    "ulysses": AttentionOp(
        scheme=Ulysses(), backend=JaxSplashBackend, dense_below_min_seq_length=True
    ),
    "ulysses_custom": AttentionOp(
        scheme=Ulysses(), backend=FlashBackend, dense_below_min_seq_length=True
    ),
    "ulysses_custom_fixed_m": AttentionOp(
        scheme=Ulysses(),
        backend=FlashBackend,
        softmax=Softmax.FIXED_M,
        dense_below_min_seq_length=True,
    ),
    "ulysses_ring": AttentionOp(
        scheme=_ULYSSES_RING, backend=TokamaxSplashBackend, dense_below_min_seq_length=True
    ),
    "ulysses_ring_custom": AttentionOp(scheme=_OVERLAPPED_ULYSSES_RING, backend=FlashBackend),
    "ulysses_ring_custom_bidir": AttentionOp(
        scheme=Ulysses(axes=("ulysses",), inner=BidirectionalRing(axes=("ring",))),
        backend=FlashBackend,
    ),
    "ulysses_ring_custom_fp8": AttentionOp(
        scheme=_OVERLAPPED_ULYSSES_RING, backend=FlashBackend, precision=Precision.FP8
    ),
    "ulysses_ring_custom_fixed_m": AttentionOp(
        scheme=_OVERLAPPED_ULYSSES_RING, backend=FlashBackend, softmax=Softmax.FIXED_M
    ),
}
ATTENTION_NAMES = tuple(ATTENTION_OPS)


def differentiable_names() -> Iterable[str]:
    """Returns the names that have a gradient."""
    return (name for name, op in ATTENTION_OPS.items() if op.differentiable)
