"""The one mesh: its axes, their sizes, and what `context` means."""

import math
from dataclasses import dataclass, fields

AXES = ("data", "fsdp", "ring", "ulysses", "tensor")
CONTEXT_AXES = ("ring", "ulysses")


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Sizes of the five axes; the sequence is split over `context`, the pair (ring, ulysses)."""

    data: int = 1
    fsdp: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {field.name}={size!r}: sizes are whole numbers from 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The five sizes in the order of AXES."""
        return (self.data, self.fsdp, self.ring, self.ulysses, self.tensor)

    @property
    def context(self) -> int:
        """How many devices share one sequence."""
        return self.ring * self.ulysses

    @property
    def devices(self) -> int:
        """How many devices the mesh needs."""
        return math.prod(self.sizes)
