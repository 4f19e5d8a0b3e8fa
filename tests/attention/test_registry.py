"""One row of the registry per mode, and a new mode is one file and one row: this file is one.

`GatherInOne` is a toy scheme. It gathers k and v in a single collective and attends shard by
shard, which no mode of the registry does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import jax
import numpy as np
import pytest

from maxdiffusion.attention import ATTENTION_NAMES, UnsupportedAttention, plan_attention
from maxdiffusion.attention.backends import AnyBackend, LocalReducer, Precision, Softmax
from maxdiffusion.attention.backends.dense import DenseBackend
from maxdiffusion.attention.backends.flash import FlashBackend
from maxdiffusion.attention.backends.splash import TokamaxSplashBackend
from maxdiffusion.attention.context_parallel import Collective, ContextParallel, LocalKV
from maxdiffusion.attention.options import AttentionOptions
from maxdiffusion.attention.problem import AttentionProblem, KVMask, LocalProblem
from maxdiffusion.attention.registry import ATTENTION_OPS, AttentionOp
from maxdiffusion.mesh import CONTEXT_AXES
from tests.attention.cases import (
    Case,
    allowed_error,
    compiled,
    inputs_of,
    mesh_of,
    placed,
    relative_error,
)
from tests.attention.collectives import counted, stated

CASE = Case(label="toy", mesh=(1, 1, 2, 2, 1), length=37, masked=True)


@final
@dataclass(frozen=True, kw_only=True)
class GatherInOne(ContextParallel):
    """Gathers k and v, stacked, in a single all-gather, and attends shard by shard."""

    degree: int = 1

    def for_mesh(self, problem: AttentionProblem, options: AttentionOptions) -> ContextParallel:
        degree = problem.mesh.context
        return LocalKV() if degree == 1 else replace(self, degree=degree)

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, kv_mask: KVMask, backend: AnyBackend
    ) -> jax.Array:
        stacked = jax.lax.all_gather(jax.numpy.stack([k, v]), CONTEXT_AXES)
        carry = None
        for source in range(self.degree):
            k, v = stacked[source]
            mask = kv_mask.shard(jax.numpy.int32(source), self.degree)
            k, stats = backend.preprocess_kv(k, v, mask, LocalReducer())
            stats = backend.preprocess_q(q, stats)
            if source < self.degree - 1:
                carry = backend.accumulate(q, k, v, mask, stats, carry)
        return backend.finalize(q, k, v, mask, stats, carry)

    def local_problem(self, shard: LocalProblem) -> LocalProblem:
        return shard

    def collectives(
        self, shard: LocalProblem, reductions: Sequence[int] = ()
    ) -> tuple[Collective, ...]:
        sent = 2 * shard.kv_bytes
        return (
            Collective(
                kind="all-gather",
                axes=CONTEXT_AXES,
                count=1,
                bytes=(self.degree - 1) * sent,
                rounds=1,
                round_bytes=self.degree * sent,
            ),
        )

    def title(self) -> str:
        return f"k and v gathered at once over {self.degree} devices"


@pytest.mark.parametrize("backend", [DenseBackend, FlashBackend, TokamaxSplashBackend])
def test_a_new_mode_is_one_row(monkeypatch, backend):
    monkeypatch.setitem(ATTENTION_OPS, "toy", AttentionOp(scheme=GatherInOne(), backend=backend))
    plan = plan_attention("toy", CASE.problem, mesh_of(CASE.mesh))
    inputs = inputs_of(CASE)
    arrays = placed(plan, inputs, padded=True)
    program = compiled(plan, arrays)
    got = np.asarray(program(*arrays))[:, : CASE.length]
    expected = inputs.expected(CASE.problem.scale)
    assert relative_error(got, expected) <= allowed_error(CASE, inputs, fixed_m=False)
    assert counted(program.as_text()) == stated(plan.collectives) == {"all-gather": 1}
    assert "k and v gathered at once over 4 devices" in plan.describe()


def test_the_row_is_gone_again():
    with pytest.raises(UnsupportedAttention, match="no attention has this name"):
        plan_attention("toy", CASE.problem, mesh_of(CASE.mesh))


def test_every_public_name_has_a_row_whose_backend_can_be_built():
    for name in ATTENTION_NAMES:
        op = ATTENTION_OPS[name]
        local = op.scheme.local_problem(CASE.problem.shard)
        assert op.self_backend(local, AttentionOptions()).softmax is op.softmax
        cross = op.cross_backend(local, AttentionOptions())
        assert (cross.softmax, cross.precision) == (Softmax.ONLINE, Precision.NATIVE)
