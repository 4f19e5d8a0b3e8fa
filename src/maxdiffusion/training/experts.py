"""Which transformer is trained at which step, and on which noise levels."""

import math
from dataclasses import dataclass
from enum import Enum

from maxdiffusion.training.flow_matching import NoiseLevels

HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"


class TrainedExperts(Enum):
    """What a run trains: one network for all levels, both experts in turn, or one of them."""

    SHARED = "shared"
    BOTH = "both"
    HIGH_NOISE = "high_noise"
    LOW_NOISE = "low_noise"


@dataclass(frozen=True, kw_only=True)
class ExpertSchedule:
    """The experts of a run; with both, each has the share of steps that its levels have of draws.

    `boundary` is the shifted noise level where they meet; None: a model with one transformer.
    """

    levels: NoiseLevels
    boundary: float | None
    trained: TrainedExperts = TrainedExperts.BOTH

    def __post_init__(self) -> None:
        if self.boundary is not None and not 0 < self.boundary < 1:
            raise ValueError(f"boundary={self.boundary}: must lie between 0 and 1")
        if self.boundary is None and self.trained is not TrainedExperts.SHARED:
            raise ValueError(
                f"trained={self.trained.value!r}: a model without a boundary has one transformer; "
                "use 'shared'"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The parts that are trained."""
        return {
            TrainedExperts.SHARED: (HIGH_NOISE,),
            TrainedExperts.BOTH: (HIGH_NOISE, LOW_NOISE),
            TrainedExperts.HIGH_NOISE: (HIGH_NOISE,),
            TrainedExperts.LOW_NOISE: (LOW_NOISE,),
        }[self.trained]

    def levels_of(self, name: str) -> NoiseLevels:
        """The noise levels that a part is trained on."""
        if self.trained is TrainedExperts.SHARED:
            return self.levels
        return self.levels.of_expert(name, self.boundary)

    def at(self, step: int) -> str:
        """The part that is trained after `step` finished steps."""
        if len(self.names) == 1:
            return self.names[0]
        share = self.levels_of(HIGH_NOISE).share
        turn = math.floor((step + 1) * share) > math.floor(step * share)
        return HIGH_NOISE if turn else LOW_NOISE
