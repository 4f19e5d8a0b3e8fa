"""What a projection wrote, with what is still to be done to it."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Columns:
    """Heads side by side as columns; `gain` asks for a norm first, `cosines` for a rotation.

    The norm is x over its root mean square along all columns, times the gain; the rotation turns
    feature i of a head with feature i + H/2.
    """

    values: Float[Array, "B S D"]
    gain: Float[Array, " D"] | None = None
    cosines: Float[Array, "S K"] | None = None
    sines: Float[Array, "S K"] | None = None
    eps: float = field(default=0.0, metadata={"static": True})

    @property
    def finished(self) -> bool:
        """Whether the columns are heads already."""
        return self.gain is None and self.cosines is None
