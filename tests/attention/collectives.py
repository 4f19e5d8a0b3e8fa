"""The collectives that each attention name is expected to compile to, and those it did."""

import re

KINDS = ("all-gather", "all-to-all", "collective-permute", "all-reduce", "reduce-scatter")
WHOLE_RING = ("ring", "tokamax_ring", "tokamax_ring_custom")
WHOLE_ULYSSES = ("ulysses", "ulysses_custom", "ulysses_custom_fixed_m")
GATHERED = ("dot_product", "flash", "tokamax_flash")


def counted(text: str) -> dict[str, int]:
    """How often each collective starts in compiled HLO, without those that do not occur."""
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS}
    return {kind: count for kind, count in counts.items() if count}


def expected_collectives(name: str, ring: int, ulysses: int, groups: int = 1) -> dict[str, int]:
    """Forward collectives on a (ring, ulysses) mesh: what moves, counted per array."""
    context = ring * ulysses
    if name in GATHERED:
        counts = {"all-gather": 2}
        return counts if context > 1 else {}
    if name in WHOLE_RING:
        return {"collective-permute": 2 * (context - 1)} if context > 1 else {}
    if name in WHOLE_ULYSSES:
        return {"all-to-all": 4 * groups} if context > 1 else {}
    counts = {"all-to-all": 4 * groups} if ulysses > 1 else {}
    if ring > 1:
        streams = 2 if name.endswith("bidir") else 1
        counts["collective-permute"] = 2 * streams * (ring - 1) * groups
        if name.endswith(("fixed_m", "fp8")):
            # One sum for the key mean, one maximum for the bounds or the largest key.
            counts["all-reduce"] = 2 * groups
    return counts


def expected_gradient_collectives(name: str, ring: int, ulysses: int) -> dict[str, int]:
    """Collectives of a program that only gives gradients, on ring and ulysses axes above 1."""
    # What was gathered for the queries of all devices is summed over them on its way back.
    if name == "dot_product":
        return {"all-gather": 2, "all-reduce": 1}
    if name in GATHERED:
        return {"all-gather": 2, "reduce-scatter": 2}
    # q, k and v go out, then their gradients and that of the output; the output itself stays.
    exchanges = {"all-to-all": 7}
    if name in WHOLE_ULYSSES:
        return exchanges
    # The second trip of k and v is the first one again, which the compiler sees and makes once; the
    # gradients of k and v go one hop further than those, to be home.
    degree = ring * ulysses if name in WHOLE_RING else ring
    hops = {"collective-permute": 2 * (degree - 1) + 2 * degree}
    return hops if name in WHOLE_RING else exchanges | hops
