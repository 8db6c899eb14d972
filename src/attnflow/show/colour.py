"""Two colour ramps, ordered by lightness alone, so that they also read in grey and by any eye.

On a dark ground (a terminal, a photograph) brighter is more; on paper (pages and figures) darker is more. Both run
through blue and away from the red-green axis that colour-blind eyes confuse.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

RGB: TypeAlias = tuple[int, int, int]
Ramp: TypeAlias = NDArray[np.float64]

# Three control points (lightness, green-red, blue-yellow) of a quadratic curve in OKLab (Ottosson 2020), where
# equal steps look equal. Lightness runs evenly from the first to the last.
GROUND: Ramp = np.array([[0.24, 0.00, -0.09], [0.585, -0.11, -0.08], [0.93, -0.03, 0.15]])
PAPER: Ramp = np.array([[0.98, -0.01, 0.02], [0.63, -0.13, -0.04], [0.28, 0.01, -0.12]])

_LMS = np.array(
    [
        [1, 0.3963377774, 0.2158037573],
        [1, -0.1055613458, -0.0638541728],
        [1, -0.0894841775, -1.2914855480],
    ]
)
_LINEAR_RGB = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)


class Scale(NamedTuple):
    """The scores that the two ends of a ramp stand for; between them colour follows a power of the distance.

    highest: the highest score where it lies beyond `high`, and so has the same colour.
    """

    low: float
    high: float
    power: float = 1.0
    highest: float | None = None

    @property
    def top(self) -> str:
        """What to write after the number at the upper end."""
        return "" if self.highest is None else " and above"

    def share(self, score: float) -> float:
        """How far along the ramp a score lies, from 0 to 1; 0 for what is not a number."""
        if not np.isfinite(score) or self.high <= self.low:
            return 0.0
        return float(np.clip((score - self.low) / (self.high - self.low), 0, 1)) ** self.power


def scale(scores: NDArray[np.float64]) -> Scale:
    """From 0 to the highest score, colour following its square root; from the lowest, evenly, if some are negative.

    The residual gives a query's own position most of its relevance (0.5 to 0.8 of a rollout row of MiniLM), beside
    which words of 0.01 to 0.1 would all look like nothing on an even scale.
    """
    finite = scores[np.isfinite(scores)]
    low, high = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    return Scale(low, high, 1.0 if low < 0 else 0.5)


def patch_scale(patches: NDArray[np.float64]) -> Scale:
    """From the lowest patch to the highest, or of a hundred or more to the 99th percentile.

    From the lowest, since patches often share most of their score: a flow of DINOv2 runs from 0.57 to 1. To the
    percentile, since single patches of background can hold many times what any object gets: 0.085 beside 0.016 in
    a rollout of DINOv2, where the object would be as dark as the rest.
    """
    finite = patches[np.isfinite(patches)]
    if finite.size == 0 or finite.min() == finite.max():
        return scale(patches)._replace(power=1.0)
    low, highest = float(finite.min()), float(finite.max())
    high = float(np.percentile(finite, 99)) if finite.size >= 100 else highest
    return Scale(low, high, highest=highest) if low < high < highest else Scale(low, highest)


def colours(ramp: Ramp, shares: ArrayLike) -> NDArray[np.float64]:
    """The sRGB colours (..., 3) from 0 to 1 at `shares` (...) of a ramp."""
    t = np.asarray(shares, dtype=np.float64)[..., None]
    lab = (1 - t) ** 2 * ramp[0] + 2 * t * (1 - t) * ramp[1] + t**2 * ramp[2]
    linear = np.clip((lab @ _LMS.T) ** 3 @ _LINEAR_RGB.T, 0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def rgb(ramp: Ramp, share: float) -> RGB:
    """The colour at one share of a ramp, as bytes."""
    red, green, blue = (round(255 * value) for value in colours(ramp, share).tolist())
    return red, green, blue


def ink(ground: RGB) -> RGB:
    """Black or white, whichever stands out more from `ground` (WCAG 2 contrast)."""
    values = np.array(ground) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return (0, 0, 0) if luminance > 0.179 else (255, 255, 255)
