"""How many heads of a denoising step fixed-m softmax served without its fallback."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FastHeads:
    """The (batch, head) pairs of every layer, `pairs` in each, that passed the gate in one step."""

    step: int
    expert: str
    pairs: int
    of_layers: tuple[int, ...]

    @property
    def counted(self) -> int:
        """Pairs that passed, over all layers."""
        return sum(self.of_layers)

    @property
    def total(self) -> int:
        """Pairs of all layers."""
        return self.pairs * len(self.of_layers)

    def describe(self) -> str:
        """One line for people, which names the layer with the fewest."""
        fewest = min(self.of_layers)
        layer = self.of_layers.index(fewest)
        return (
            f"fixed-m softmax, step {self.step + 1} ({self.expert}): {self.counted} of "
            f"{self.total} heads on the fast path; fewest in layer {layer}: {fewest} of "
            f"{self.pairs}"
        )

    def as_json(self) -> dict[str, object]:
        """The same for json.dump."""
        return {
            "step": self.step,
            "expert": self.expert,
            "pairs_of_a_layer": self.pairs,
            "fast_pairs_of_layers": list(self.of_layers),
        }
