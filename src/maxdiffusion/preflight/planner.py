"""Which attention to run on a slice, by the estimate of every one that is not refused."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from maxdiffusion.attention import (
    AttentionOptions,
    AttentionPlan,
    AttentionProblem,
    UnsupportedAttention,
    plan_attention,
)
from maxdiffusion.mesh import MeshShape, build_mesh
from maxdiffusion.preflight.estimate import SHARES, Estimate, Shares, estimate_step
from maxdiffusion.preflight.flops import ForwardFlops
from maxdiffusion.preflight.links import network
from maxdiffusion.preflight.topology import Topology

# All exact for every head; fixed-m is left to who asks for it, since its gain depends on norms.
NAMES = ("ulysses_custom", "ulysses_ring_custom", "ulysses_ring_custom_bidir")

# Estimates that are closer than this are a tie: the model is not more exact.
TIE = 1.03


@dataclass(frozen=True, kw_only=True)
class Task:
    """What attention is chosen for: sizes, work of a forward, layers, options, devices."""

    problem: AttentionProblem
    flops: ForwardFlops
    layers: int
    topology: Topology
    devices: Sequence[jax.Device]
    options: AttentionOptions = field(default_factory=AttentionOptions)
    shares: Shares = SHARES


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An attention that can run, the split of the context it needs, and its estimate."""

    name: str
    shape: MeshShape
    plan: AttentionPlan
    estimate: Estimate

    def describe(self) -> str:
        """What was chosen, in a few words."""
        parts = self.estimate
        return (
            f"{self.name} with ulysses {self.shape.ulysses} x ring {self.shape.ring}: "
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
        plan = _plan(task, NAMES[0], MeshShape(data=data, ulysses=context))
        raise AssertionError(plan)  # the line before has raised with every reason
    return found[0]


def explain(found: Sequence[Choice]) -> str:
    """One paragraph on what was chosen and what comes next."""
    best, rest = found[0], [choice for choice in found[1:] if choice.shape != found[0].shape]
    words = f"attention auto: {best.describe()}"
    if rest:
        slower = rest[0].estimate.total / best.estimate.total - 1
        words += f". Next is {rest[0].describe()}, {slower:+.1%}"
    return words + ". These are estimates; preflight_wan compiles."


def _of_split(task: Task, shape: MeshShape) -> Iterator[Choice]:
    for name in NAMES:
        if (name == "ulysses_custom") != (shape.ring == 1):
            continue  # a ring of one is the same program under another name
        try:
            plan = _plan(task, name, shape)
        except UnsupportedAttention:
            continue
        links = network(task.topology, plan.mesh.devices.flatten().tolist())
        estimate = estimate_step(plan, task.flops, task.layers, links, task.shares)
        yield Choice(name=name, shape=shape, plan=plan, estimate=estimate)


def _plan(task: Task, name: str, shape: MeshShape) -> AttentionPlan:
    mesh = build_mesh(shape, devices=task.devices)
    return plan_attention(name, task.problem, mesh, task.options)
