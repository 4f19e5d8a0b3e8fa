"""What the backward pass keeps of the forward pass, and what it computes anew."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention import AttentionPlan, BlockAttention
from maxdiffusion.mesh import ActivationLayout
from maxdiffusion.models.wan import TextKeysValues, WanTransformer
from maxdiffusion.models.wan.block import StepContext
from maxdiffusion.runtime.problems import Problem, ProblemsFound

HIDDEN_STATES = "hidden_states"  # what goes into a block
NAMES = (HIDDEN_STATES, "query_proj", "key_proj", "value_proj", "attn_output")
_DEVICE, _HOST = "device", "pinned_host"


class Remat(Enum):
    """The policies by their public names."""

    NONE = "NONE"
    FULL = "FULL"
    MATMUL_WITHOUT_BATCH = "MATMUL_WITHOUT_BATCH"
    OFFLOAD_MATMUL_WITHOUT_BATCH = "OFFLOAD_MATMUL_WITHOUT_BATCH"
    CUSTOM = "CUSTOM"
    HIDDEN_STATE_WITH_OFFLOAD = "HIDDEN_STATE_WITH_OFFLOAD"


@dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """A policy; `saved` and `offloaded` name what CUSTOM keeps on the device and on the host."""

    kind: Remat = Remat.NONE
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            Problem(
                name=key,
                value=name,
                rule=f"can hold {', '.join(NAMES)}",
                remedy="Use one of these names",
            )
            for key, names in (
                ("names_which_can_be_saved", self.saved),
                ("names_which_can_be_offloaded", self.offloaded),
            )
            for name in names
            if name not in NAMES
        ]
        if problems:
            raise ProblemsFound(problems)

    def around(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """A block that keeps for its backward pass what the policy says."""
        if self.kind is Remat.NONE:
            return block
        # Inside a scan nothing can be merged with the forward pass, so no barrier is needed.
        return jax.checkpoint(block, policy=self._policy(), prevent_cse=False)

    def _policy(self) -> Callable[..., Any] | None:
        policies = jax.checkpoint_policies
        if self.kind is Remat.MATMUL_WITHOUT_BATCH:
            return policies.dots_with_no_batch_dims_saveable
        if self.kind is Remat.OFFLOAD_MATMUL_WITHOUT_BATCH:
            return policies.offload_dot_with_no_batch_dims(_DEVICE, _HOST)
        if self.kind is Remat.HIDDEN_STATE_WITH_OFFLOAD:
            return self._by_names((), (HIDDEN_STATES,))
        if self.kind is Remat.CUSTOM:
            return self._by_names(self.saved, self.offloaded)
        return None

    def _by_names(self, saved: tuple[str, ...], offloaded: tuple[str, ...]) -> Callable[..., Any]:
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(saved),
            names_which_can_be_offloaded=list(offloaded),
            offload_src=_DEVICE,
            offload_dst=_HOST,
        )


@dataclass(frozen=True, kw_only=True)
class NamedAttention(AttentionPlan):
    """A plan whose inputs and output have names for a policy to keep."""

    @classmethod
    def of(cls, plan: AttentionPlan) -> "NamedAttention":
        """The same plan with names."""
        held = {field.name: getattr(plan, field.name) for field in fields(AttentionPlan)}
        return cls(**held)

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B T N H"],
        v: Float[Array, "B T N H"],
        kv_mask: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B S N H"]:
        q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), NAMES[1:4], strict=True))
        return checkpoint_name(super().__call__(q, k, v, kv_mask), NAMES[4])


class TrainableTransformer(WanTransformer):
    """The transformer with a policy around every block; its parameters are the same."""

    def __init__(self, *args: Any, remat: RematPolicy, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.remat = remat

    def run_blocks(
        self,
        tokens: Float[Array, "B S D"],
        step: StepContext,
        text: TextKeysValues,
        *,
        attention: BlockAttention,
        layout: ActivationLayout,
    ) -> Float[Array, "B S D"]:
        """`tokens` after all blocks."""
        graph, layers = nnx.split(self.blocks)
        named = BlockAttention(
            self_attention=NamedAttention.of(attention.self_attention),
            cross_attention=attention.cross_attention,
        )

        def one_layer(
            x: Float[Array, "B S D"], inputs: tuple[nnx.State, TextKeysValues]
        ) -> tuple[Float[Array, "B S D"], None]:
            layer, layer_text = inputs
            block = nnx.merge(graph, layer)
            x = checkpoint_name(x, HIDDEN_STATES)
            return block(x, step, layer_text, attention=named, layout=layout), None

        with jax.named_scope("blocks"):
            body = self.remat.around(one_layer)
            return jax.lax.scan(body, tokens, (layers, text), unroll=self._unroll)[0]
