"""Early warning of a run that diverges, from the losses and gradient norms of its steps.

A rise is the mean m of the last n = 16 or 64 values over the lowest mean M that 256 consecutive
values have had before them, in standard errors of the difference (s: deviation of the 256 values):

    z = (m - M) / (s sqrt(1 / n + 1 / 256))

Without a rise, and with independent steps, z follows Student's t with 255 degrees of freedom, which
exceeds 5 once in 2 million steps. The lowest of up to 1000 windows lies up to sqrt(2 ln 1000) = 3.7
standard errors of a window below their mean, which adds 1.7 to z for n = 64. A warning needs
z > 7, and a rise that matters: a tenth of the loss, or four times the gradient norm (whose
logarithm is compared). The experts of a run have losses of their own, so each is watched alone.

Everything is arithmetic on a few hundred numbers of the host; no device is asked for anything.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

RECENT = (16, 64)
WINDOW = 256
LIMIT = 7.0
LEAST_LOSS_RISE = 0.1  # of the lowest loss
LEAST_NORM_RISE = math.log(4.0)
LOSS, NORM = "learning/loss", "learning/gradient_norm"


@dataclass(frozen=True, kw_only=True)
class Level:
    """Mean and deviation of a window of values, and the step after which it ends."""

    mean: float
    deviation: float
    step: int


@dataclass(frozen=True, kw_only=True)
class Rise:
    """A rise: means of the last `count` values and of the lowest window, and its z."""

    count: int
    recent: float
    lowest: Level
    z: float


class Series:
    """The last values of one quantity, and the lowest level that it has had."""

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=WINDOW + max(RECENT))
        self._lowest: Level | None = None

    def add(self, step: int, value: float) -> Rise | None:
        """Adds a value. Returns the larger of the two rises, or None if there is no level yet."""
        self._values.append((step, value))
        values = np.array([one for _, one in self._values])
        before = values[: -max(RECENT)]
        if len(before) == WINDOW:
            level = Level(
                mean=float(before.mean()),
                deviation=float(before.std(ddof=1)),
                step=self._values[WINDOW - 1][0],
            )
            if self._lowest is None or level.mean < self._lowest.mean:
                self._lowest = level
        if self._lowest is None:
            return None
        rises = [_rise(values[-count:], self._lowest) for count in RECENT]
        return max(rises, key=lambda rise: rise.z)

    def median(self) -> float:
        """Returns the median of the values that are held."""
        return float(np.median([value for _, value in self._values]))


def _rise(recent: np.ndarray, lowest: Level) -> Rise:
    count, mean = len(recent), float(recent.mean())
    error = lowest.deviation * math.sqrt(1 / count + 1 / WINDOW)
    # Values without any deviation are rounding or a constant; any rise of theirs is one.
    z = (mean - lowest.mean) / max(error, 1e-12 * abs(lowest.mean), 1e-300)
    return Rise(count=count, recent=mean, lowest=lowest, z=z)


class DivergenceWatch:
    """Compares every step with those before it; warns once in `WINDOW` steps of an expert."""

    def __init__(self, *, learning_rate: float, clipped_at: float | None = None):
        self._learning_rate = learning_rate
        self._clipped_at = clipped_at
        self._losses: dict[str, Series] = {}
        self._norms: dict[str, Series] = {}
        self._quiet: dict[str, int] = {}

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Takes over the steps of a run that is continued, as `metrics_file` has them."""
        for line in lines:
            self.add(line["step"], line["part"], loss=line[LOSS], norm=line[NORM])

    def add(self, step: int, part: str, *, loss: float, norm: float) -> str | None:
        """Returns a warning, or None."""
        norms = self._norms.setdefault(part, Series())
        loss_rise = self._losses.setdefault(part, Series()).add(step, loss)
        norm_rise = norms.add(step, math.log(max(norm, 1e-30)))
        quiet = self._quiet[part] = max(0, self._quiet.get(part, 0) - 1)
        text = self._text(part, loss_rise, norm_rise)
        if text is None or quiet:
            return None
        self._quiet[part] = WINDOW
        return f"step {step}: {text} {self._remedy(math.exp(norms.median()))}"

    def _text(self, part: str, loss: Rise | None, norm: Rise | None) -> str | None:
        named = f" of {part}" if part else ""
        if loss is not None and loss.z > LIMIT:
            least = LEAST_LOSS_RISE * abs(loss.lowest.mean)
            if loss.recent - loss.lowest.mean > least:
                return (
                    f"the loss{named} rises: its mean over {loss.count} steps is "
                    f"{loss.recent:.4g}, and was {loss.lowest.mean:.4g} up to step "
                    f"{loss.lowest.step} ({loss.z:.1f} standard errors)."
                )
        if norm is None or norm.z <= LIMIT or norm.recent - norm.lowest.mean <= LEAST_NORM_RISE:
            return None
        return (
            f"the gradient norm{named} rises: its mean over {norm.count} steps is "
            f"{math.exp(norm.recent):.4g}, and was {math.exp(norm.lowest.mean):.4g} up to "
            f"step {norm.lowest.step}."
        )

    def _remedy(self, median_norm: float) -> str:
        """Returns what to do: an earlier checkpoint, a lower rate, and clipping."""
        clip = (
            f"max_grad_norm={min(median_norm, self._clipped_at / 2):.2g}"
            if self._clipped_at is not None
            else "opt_enable_grad_global_norm_clipping=true "
            f"max_grad_norm={median_norm:.2g} (the median)"
        )
        return (
            "If it stays, stop, remove the checkpoints since then, and continue with "
            f"learning_rate={self._learning_rate / 2:g} or {clip}."
        )
