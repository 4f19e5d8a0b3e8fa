"""Which attention to run on a slice, by the estimate of every one that is not refused."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionPlan,
    AttentionProblem,
    UnsupportedAttention,
    plan_attention,
    plan_cross_attention,
)
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.preflight.estimate import SHARES, Estimate, Shares, estimate_step
from maxdiffusion.preflight.flops import ForwardFlops
from maxdiffusion.preflight.kernels import tile_of
from maxdiffusion.preflight.links import network
from maxdiffusion.preflight.topology import Topology

# All exact for every head; fixed-m is left to who asks for it, since its gain depends on norms.
# None is held to flash_min_seq_length, so that text goes through our kernel too: with a ring of one
# the first is the program of ulysses_custom, which is held to it.
NAMES = ("ulysses_ring_custom", "ulysses_ring_custom_bidir")

# Estimates that are closer than this are a tie: the model is not more exact.
TIE = 1.02


@dataclass(frozen=True, kw_only=True)
class Task:
    """What attention is chosen for: sizes, work of a forward, layers, options, devices.

    Tokens attend to `text_length` keys of text with the same kernel, so that must run too.
    """

    problem: AttentionProblem
    flops: ForwardFlops
    layers: int
    topology: Topology
    devices: Sequence[jax.Device]
    options: AttentionOptions = field(default_factory=AttentionOptions)
    text_length: int = 512
    shares: Shares = SHARES


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An attention that can run, the split of the context it needs, and its estimate."""

    name: str
    shape: MeshShape
    plan: AttentionPlan
    estimate: Estimate

    @property
    def blocks(self) -> str:
        """The tiles that the kernel takes, from the tuned table or a search."""
        return tiles_in_words(self.plan)

    def describe(self) -> str:
        """What was chosen, in a few words."""
        parts = self.estimate
        return (
            f"{self.name} with ulysses {self.shape.ulysses} x ring {self.shape.ring} and "
            f"{self.blocks}: "
            f"{parts.total:.3f} s/step (kernels {parts.kernels:.3f}, other work "
            f"{parts.outside:.3f}, exchange {parts.exchange_copies:.3f} in copies and "
            f"{parts.exposed_exchange:.3f} exposed)"
        )


def choices(task: Task, *, data: int, context: int, fsdp: int = 1, tensor: int = 1) -> list[Choice]:
    """Every attention that can run on a mesh of these sizes, the best first, then by estimate.

    Best is the one with the fewest ring hops among those that the estimate cannot tell apart.
    """
    shapes = [
        MeshShape(data=data, fsdp=fsdp, ring=context // ulysses, ulysses=ulysses, tensor=tensor)
        for ulysses in range(1, context + 1)
        if context % ulysses == 0
    ]
    found = [choice for shape in shapes for choice in _of_split(task, shape)]
    if not found:
        return []
    found.sort(key=lambda choice: (round(choice.estimate.total, 4), choice.shape.ring))
    near = [c for c in found if c.estimate.total <= TIE * found[0].estimate.total]
    best = min(near, key=lambda choice: choice.shape.ring)
    return [best, *(choice for choice in found if choice is not best)]


def choose(task: Task, *, data: int, context: int) -> Choice:
    """The quickest attention that can run; raises UnsupportedAttention if there is none."""
    found = choices(task, data=data, context=context)
    if not found:
        mesh = build_mesh(MeshShape(data=data, ulysses=context), devices=task.devices)
        plan = plan_attention(NAMES[0], task.problem, mesh, task.options)
        raise AssertionError(plan)  # the line before has raised with every reason
    return found[0]


def explain(found: Sequence[Choice]) -> str:
    """One paragraph on what was chosen and what comes next."""
    best, rest = found[0], [choice for choice in found[1:] if choice.shape != found[0].shape]
    words = f"attention auto: {best.describe()}"
    if rest:
        slower = rest[0].estimate.total / best.estimate.total - 1
        words += f". Next is {rest[0].describe()}, {slower:+.1%}"
        if slower <= 0:  # a tie, see `choices`
            words += ", too close to tell and with more ring hops"
    return words + ". These are estimates; preflight_wan compiles."


def _of_split(task: Task, shape: MeshShape) -> Iterator[Choice]:
    for name in NAMES:
        if name != NAMES[0] and shape.ring == 1:
            continue  # a ring of one is the same program under every name
        mesh = build_mesh(shape, devices=task.devices)
        text = replace(task.problem, kv_len=task.text_length)
        try:
            plan = plan_attention(name, task.problem, mesh, task.options)
            plan_cross_attention(name, text, mesh, task.options)
        except UnsupportedAttention:
            continue
        links = network(task.topology, mesh.devices.flatten().tolist())
        estimate = estimate_step(plan, task.flops, task.layers, links, task.shares)
        yield Choice(name=name, shape=shape, plan=plan, estimate=estimate)


def tiles_in_words(plan: AttentionPlan) -> str:
    """The blocks of a plan's kernel, and how much of them is real queries and keys."""
    tile = tile_of(plan.kernel)
    if tile is None:
        return "no blocks"
    sizes, problem = plan.kernel.site.sizes, plan.problem
    shards = plan.padded_q_len // sizes.q_len
    covered = -(-sizes.q_len // tile.q_tile) * tile.q_tile
    full = problem.q_len / (covered * shards)
    return f"blocks of {tile.block_q} queries ({full:.1%} full) x {tile.block_kv} keys"
