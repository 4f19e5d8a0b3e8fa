"""What every kernel on a device can be asked for."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxdiffusion.attention.keys import KeyShard
from maxdiffusion.attention.merge import merge_knowing, output
from maxdiffusion.attention.on_device.site import KernelSite, Shards
from maxdiffusion.kernels.reference import Partials
from maxdiffusion.runtime.problems import Problem

Tokens = Float[Array, "B S N H"]


@dataclass(frozen=True)
class DeviceKernel(abc.ABC):
    """Attention on one device over [B, S, N, H] arrays, for calls of the site's sizes.

    An attention is one `prepare_keys` and, for every group of queries, one `prepare_queries`, then
    either one `attend` over all keys, or a `carry_on` for each shard of keys but the last, which
    `finish` takes.
    """

    site: KernelSite

    title = ""
    softmax = "online"
    differentiable = False

    @abc.abstractmethod
    def attend(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Tokens:
        """Attention over all keys; a row without keys may be anything finite."""

    def partials(self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any) -> Partials:
        """Unnormalised attention over some of the keys."""
        raise NotImplementedError(f"{self.title} attends to all keys at once; rings need others")

    def carry_on(
        self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any, before: Partials | None
    ) -> Partials:
        """Unnormalised attention over these keys and those of `before`."""
        part = self.partials(q, k, v, keys, shared)
        if before is None:
            return part
        return merge_knowing(before, part, self.power, self.one_reference(shared))

    def finish(
        self, q: Tokens, k: Tokens, v: Tokens, keys: KeyShard, shared: Any, before: Partials | None
    ) -> Tokens:
        """Attention over these keys, the last ones, and those of `before`."""
        return output(self.carry_on(q, k, v, keys, shared, before), q.dtype)

    def prepare_keys(
        self, k: Tokens, v: Tokens, keys: KeyShard, others: Shards
    ) -> tuple[Tokens, Any]:
        """The keys to use in every call of one attention, and what is known of all of them."""
        del v, keys, others
        return k, None

    def prepare_queries(self, q: Tokens, known: Any) -> Any:
        """What the calls for these queries share, given what is known of the keys."""
        del q
        return known

    def fast_heads(self, shared: Any) -> Bool[Array, "B N"] | None:
        """The heads whose m is known before the first call; None if no head's is."""
        del shared
        return None

    def one_reference(self, shared: Any) -> Bool[Array, ""] | None:
        """Whether all partials of this attention have the same m; None if they never do."""
        fast = self.fast_heads(shared)
        return None if fast is None else jnp.all(fast)

    def power(self, x: Array) -> Array:
        """The base of this kernel's partials to the power of x."""
        return jnp.exp(x)

    def limits(self) -> Sequence[Problem]:
        """Why this kernel cannot run at its site."""
        return ()

    def details(self) -> Sequence[str]:
        """Blocks, memory and settings, for a plan's description."""
        return ()


class GradientKernel(DeviceKernel):
    """A kernel whose gradient over some keys needs only the output and log-sum over all of them."""

    @abc.abstractmethod
    def gradients(
        self,
        q: Tokens,
        k: Tokens,
        v: Tokens,
        keys: KeyShard,
        out: Tokens,
        log_sum: Float[Array, "B S N"],
        d_out: Tokens,
    ) -> tuple[Tokens, Tokens, Tokens]:
        """What these keys contribute to the gradient of q, and the gradients of k and v."""
