"""How strongly each expert follows the prompt."""

from dataclasses import dataclass

# Guidance weighs two predictions; up to this scale the negative prompt has no part in them.
NO_GUIDANCE = 1.0


@dataclass(frozen=True, kw_only=True)
class GuidanceScales:
    """Strength of guidance for each expert; a model with one transformer has both the same."""

    high_noise: float
    low_noise: float

    @property
    def active(self) -> bool:
        """Whether any step needs the negative prompt."""
        return max(self.high_noise, self.low_noise) > NO_GUIDANCE
