"""Reads the collectives of compiled HLO, to compare with those that a scheme states."""

import re
from collections import Counter
from collections.abc import Iterable

from maxdiffusion.attention import AttentionPlan
from maxdiffusion.attention.context_parallel import Collective, Partitioning

KINDS = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")


def counted(text: str) -> dict[str, int]:
    """Returns how often each collective starts in compiled HLO, without those that do not occur."""
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS}
    return {kind: count for kind, count in counts.items() if count}


def stated(collectives: Iterable[Collective]) -> dict[str, int]:
    """Returns how often each collective runs, as a scheme says."""
    counts: Counter[str] = Counter()
    for collective in collectives:
        counts[collective.kind] += collective.count
    return dict(counts)


def stated_of_gradient(plan: AttentionPlan) -> dict[str, int]:
    """Returns the collectives of a program that only gives gradients, from those of the forward.

    q, k, v go out by all-to-all, then their gradients and that of the output; the output itself
    stays. A ring's second trip is the first one again, which the compiler makes once; gradients of
    k and v go one hop further, to be home. What was gathered is summed on its way back: XLA does
    it for both arrays at once.
    """
    forward = stated(plan.collectives)
    automatic = plan.scheme.partitioning is Partitioning.AUTO
    counts: Counter[str] = Counter()
    for kind, count in forward.items():
        if kind == "all-gather":
            counts[kind] += count
            counts["all-reduce" if automatic else "reduce-scatter"] += 1 if automatic else count
        elif kind == "all-to-all":
            counts[kind] += 7 * count // 4
        else:
            counts[kind] += 2 * count + 2
    return dict(counts)
