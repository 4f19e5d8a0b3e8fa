"""The seconds of a kernel on a device that is there."""

import statistics
import time

import jax
import jax.numpy as jnp

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.preflight.kernels import kernel_alone


def attention_seconds(plan: AttentionPlan, device: jax.Device, runs: int) -> float:
    """The median time of one attention's kernel calls, over keys and queries of random numbers.

    A ring's shards and further groups of heads count as so many calls of the first.
    """
    compiled = kernel_alone(plan, device).compile()
    arrays = _random_tokens(plan, device)
    jax.block_until_ready(compiled(*arrays))  # the first run also loads the program
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - started)
    sizes = plan.kernel.site.sizes
    calls = plan.padded_kv_len // sizes.kv_len * sum(sizes.heads) / sizes.heads[0]
    return statistics.median(seconds) * calls


def _random_tokens(plan: AttentionPlan, device: jax.Device) -> list[jax.Array]:
    """q, k and v of unit normal features, as normalised queries and keys are."""
    sizes, problem = plan.kernel.site.sizes, plan.problem
    made = []
    for index, length in enumerate((sizes.q_len, sizes.kv_len, sizes.kv_len)):
        shape = (sizes.batch, length, sizes.heads[0], problem.head_dim)
        with jax.default_device(device):
            made.append(jax.random.normal(jax.random.key(index), shape, jnp.dtype(problem.dtype)))
    return made
