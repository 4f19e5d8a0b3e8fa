"""Distances between a clip and its reference: PSNR, SSIM, MS-SSIM and flicker, in float64.

    PSNR      10 log10(255^2 / mean squared error), over all pixels of the clip
    SSIM      mean over frames, channels and every place where the 11 x 11 Gaussian window fits
    MS-SSIM   SSIM over halved sizes, with the five published weights
    flicker   mean |(a[t+1] - a[t]) - (b[t+1] - b[t])| in grey levels of 255

Flicker is the error that changes from frame to frame: a constant shift of colour has none.

Number of scales of MS-SSIM: five, or as many as leave at least 11 rows and columns at the smallest
scale (three for 64 x 64). With fewer than five, the weights of the first ones are divided by their
sum, so figures with different numbers of scales are not comparable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, UInt8
from scipy import ndimage

Clip = UInt8[np.ndarray, "F Y X 3"]
Picture = Float[np.ndarray, "Y X 3"]
Smaller = Float[np.ndarray, "y x 3"]

PEAK = 255.0
WINDOW, SIGMA = 11, 1.5
LUMINANCE, CONTRAST = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2
SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
"""Of MS-SSIM, from the full size down (Wang, Simoncelli and Bovik 2003)."""


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distances of one clip, or of several as a mean; `squared_error` gives the PSNR."""

    squared_error: float
    ssim: float
    ms_ssim: float
    flicker: float

    @property
    def psnr(self) -> float:
        """Peak signal-to-noise ratio in dB; infinite for equal clips."""
        return psnr_of(self.squared_error)


def distance(clip: Clip, reference: Clip) -> Distance:
    """Returns the distances of a clip from its reference."""
    check_comparable(clip, reference)
    pairs = [
        (one.astype(np.float64), two.astype(np.float64))
        for one, two in zip(clip, reference, strict=True)
    ]
    return Distance(
        squared_error=float(np.mean([np.mean(np.square(one - two)) for one, two in pairs])),
        ssim=float(np.mean([ssim(one, two) for one, two in pairs])),
        ms_ssim=float(np.mean([ms_ssim(one, two) for one, two in pairs])),
        flicker=flicker(clip, reference),
    )


def mean_distance(distances: Sequence[Distance]) -> Distance:
    """Returns the mean of several clips; its PSNR is that of their mean squared error."""
    return Distance(
        squared_error=float(np.mean([one.squared_error for one in distances])),
        ssim=float(np.mean([one.ssim for one in distances])),
        ms_ssim=float(np.mean([one.ms_ssim for one in distances])),
        flicker=float(np.mean([one.flicker for one in distances])),
    )


def check_comparable(clip: Clip, reference: Clip) -> None:
    """Raises if two clips differ in size, or are smaller than the window of SSIM."""
    if clip.shape != reference.shape:
        raise ValueError(f"clips of {clip.shape} and {reference.shape} cannot be compared")
    if min(clip.shape[1:3]) < WINDOW:
        raise ValueError(f"frames of {clip.shape[1:3]}: SSIM needs {WINDOW} rows and columns")


def psnr_of(squared_error: float) -> float:
    """Returns the PSNR in dB of a mean squared error of bytes."""
    return float("inf") if squared_error == 0 else 10 * float(np.log10(PEAK**2 / squared_error))


def flicker(clip: Clip, reference: Clip) -> float:
    """Returns the mean absolute error of the differences between frames; 0 for one frame."""
    if len(clip) < 2:
        return 0.0
    changes = [np.diff(one.astype(np.int16), axis=0) for one in (clip, reference)]
    return float(np.mean(np.abs(changes[0] - changes[1])))


def ssim(one: Picture, two: Picture) -> float:
    """Returns the mean structural similarity of two pictures of 0 to 255."""
    luminance, structure = _similarities(one, two)
    return float(np.mean(luminance * structure))


def ms_ssim(one: Picture, two: Picture) -> float:
    """Returns the multi-scale structural similarity: contrast at every scale, all at the last.

    The product over scales is taken for each channel; a negative mean contrast counts as 0.
    """
    weights = scale_weights(*one.shape[:2])
    result = np.ones(3)
    for scale, weight in enumerate(weights):
        if scale:
            one, two = _halved(one), _halved(two)
        luminance, structure = _similarities(one, two)
        last = scale == len(weights) - 1
        similarity = np.mean(luminance * structure if last else structure, axis=(0, 1))
        result = result * np.maximum(similarity, 0.0) ** weight
    return float(np.mean(result))


def scale_weights(rows: int, columns: int) -> tuple[float, ...]:
    """Returns the weights of the scales that frames of this size have."""
    side, count = min(rows, columns), 0
    while count < len(SCALE_WEIGHTS) and side >> count >= WINDOW:
        count += 1
    used = SCALE_WEIGHTS[:count]
    # The five published weights sum to 1.0001 and are used as published.
    return used if count == len(SCALE_WEIGHTS) else tuple(one / sum(used) for one in used)


def _similarities(one: Picture, two: Picture) -> tuple[Smaller, Smaller]:
    """Returns the luminance term, and the product of contrast and structure, at every place."""
    mean_1, mean_2 = _blurred(one), _blurred(two)
    variance_1 = _blurred(one * one) - mean_1**2
    variance_2 = _blurred(two * two) - mean_2**2
    covariance = _blurred(one * two) - mean_1 * mean_2
    luminance = (2 * mean_1 * mean_2 + LUMINANCE) / (mean_1**2 + mean_2**2 + LUMINANCE)
    structure = (2 * covariance + CONTRAST) / (variance_1 + variance_2 + CONTRAST)
    return luminance, structure


def _blurred(picture: Picture) -> Smaller:
    """Returns Gaussian means where the whole window lies inside the picture."""
    offsets = np.arange(WINDOW) - WINDOW // 2
    window = np.exp(-np.square(offsets / SIGMA) / 2)
    window /= window.sum()
    rows = ndimage.correlate1d(picture, window, axis=0)
    both = ndimage.correlate1d(rows, window, axis=1)
    edge = WINDOW // 2
    return both[edge:-edge, edge:-edge]


def _halved(picture: Picture) -> Smaller:
    """Returns means of 2 x 2 pixels; an odd last row or column is left out."""
    rows, columns = picture.shape[0] // 2, picture.shape[1] // 2
    even = picture[: 2 * rows, : 2 * columns]
    return even.reshape(rows, 2, columns, 2, 3).mean(axis=(1, 3))
