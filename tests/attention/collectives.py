"""Reads the collectives of compiled HLO, to compare with those that a scheme states."""

import re
from collections import Counter
from collections.abc import Iterable

from maxdiffusion.attention.context_parallel import Collective

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
