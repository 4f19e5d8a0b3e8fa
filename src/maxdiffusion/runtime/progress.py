"""Progress bars on the first process, where somebody looks: on a terminal, and nowhere else."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import jax
from tqdm import tqdm

from maxdiffusion.runtime.marks import MARKS

Advance = Callable[[], None]
Report = Callable[[int, int], None]

_STEPS = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_inv_fmt}]"
)
_BYTES = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"


def watched(stream: TextIO) -> bool:
    """Whether progress is worth drawing: a terminal of the first process."""
    return stream.isatty() and jax.process_index() == 0


@contextlib.contextmanager
def steps_bar(
    description: str, total: int, *, unit: str = "step", stream: TextIO | None = None
) -> Iterator[Advance]:
    """A bar of `total` steps with seconds per step and time left; call what it gives after each."""
    stream = sys.stderr if stream is None else stream
    with tqdm(
        desc=description,
        total=total,
        unit=unit,
        file=stream,
        bar_format=_STEPS,
        disable=not watched(stream),
        smoothing=0,  # the mean over all steps; the first one is not slower, it is compiled before
    ) as bar:
        yield lambda: _advance(bar)


def _advance(bar: tqdm) -> None:
    bar.update()


@contextlib.contextmanager
def bytes_bar(description: str, *, stream: TextIO | None = None) -> Iterator[Report]:
    """A bar of bytes with speed and time left; call what it gives with bytes done and in all."""
    stream = sys.stderr if stream is None else stream
    with tqdm(
        desc=description,
        unit="B",
        unit_scale=True,
        file=stream,
        bar_format=_BYTES,
        disable=not watched(stream),
    ) as bar:
        yield _Bytes(bar)


class _Bytes:
    """Moves a bar, and tells the watch of every byte that came."""

    def __init__(self, bar: tqdm):
        self._bar, self._done = bar, 0

    def __call__(self, done: int, total: int) -> None:
        if done != self._done:
            MARKS.stir()
            self._done = done
        self._bar.total = total
        self._bar.update(done - self._bar.n)
