"""Three colour ramps, ordered by lightness alone, so that they also read in grey and by any eye.

On a dark ground (a terminal, a photograph) brighter is more; on paper (pages and figures) darker is more. Both run
through blue and away from the red-green axis that colour-blind eyes confuse. Scores with a sign have one ramp
everywhere, from orange (against) through white (0) to blue (for).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

RGB: TypeAlias = tuple[int, int, int]
Ramp: TypeAlias = NDArray[np.float64]

# Three control points (lightness, green-red, blue-yellow) of a quadratic curve in OKLab (Ottosson 2020), where
# equal steps look equal. Lightness changes in equal steps from the first to the last.
GROUND: Ramp = np.array([[0.24, 0.00, -0.09], [0.585, -0.11, -0.08], [0.93, -0.03, 0.15]])
PAPER: Ramp = np.array([[0.98, -0.01, 0.02], [0.63, -0.13, -0.04], [0.28, 0.01, -0.12]])
# Two such curves that meet at white, as dark at one end as at the other.
SIGNED: Ramp = np.array([[0.46, 0.10, 0.09], [0.73, 0.10, 0.13], [1, 0, 0], [0.73, -0.05, -0.13], [0.46, -0.02, -0.17]])

# Scores that differ by no more than this share of the largest are drawn flat. Between bfloat16 and float32 one score in
# ten of a rollout of DINOv2 moves by more than 1 per cent, and the worst by 3: such a picture may be one of rounding.
EVEN = 0.02
# The few tokens that hold more than so many times what the next one does lie beyond the scale of a text.
DOMINANT = 4.0
# Rounding may leave a score that cannot be negative this share of the largest below 0.
ROUNDING = 1e-9

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

    highest: the score farthest from 0 where it lies beyond an end, and so has the colour of that end.
    signed: the scale is symmetric about 0, and its ramp is `SIGNED`.
    even: how far the scores differ, as a share of the largest, where that is too little to be drawn.
    """

    low: float
    high: float
    power: float = 1.0
    highest: float | None = None
    signed: bool = False
    even: float | None = None

    @property
    def top(self) -> str:
        """What to write after the number at the upper end."""
        return "" if self.highest is None else " and beyond" if self.signed else " and above"

    def share(self, score: float) -> float:
        """How far along the ramp a score lies, from 0 to 1; 0 for what is not a number."""
        if not np.isfinite(score) or self.high <= self.low:
            return 0.0
        return float(np.clip((score - self.low) / (self.high - self.low), 0, 1)) ** self.power

    def ramp(self, unsigned: Ramp) -> Ramp:
        """The ramp of this scale: `unsigned`, unless the scores have a sign."""
        return SIGNED if self.signed else unsigned


def scale(scores: NDArray[np.float64], *, signed: bool = False) -> Scale:
    """From 0 to the highest score, colour following its square root; linear on both sides of 0, if some are negative.

    The residual gives a query's own position most of its relevance (0.5 to 0.8 of a rollout row of MiniLM), beside
    which words of 0.01 to 0.1 would all look like nothing on an even scale. Scores that hardly differ are drawn flat
    (`EVEN`). What is exactly 0 counts for nothing, since it is drawn as no score at all. signed: the scores belong to
    others of which some are negative.
    """
    found = _found(scores)
    signed = signed or is_signed(found)
    largest = float(np.abs(found).max(initial=0.0))
    if (spread := _spread(found)) <= EVEN:
        middle = abs(float(found.mean()))
        return Scale(-2 * middle if signed else 0.0, 2 * middle, signed=signed, even=spread)
    return Scale(-largest, largest, signed=True) if signed else Scale(0.0, largest, power=0.5)


def text_scale(scores: NDArray[np.float64], *, signed: bool = False) -> Scale:
    """The scale of a row of tokens: `scale`, but up to the largest score that is not dominant.

    Dominant are [CLS], a sink or the query's own position, where a tenth of the tokens at most (or two, of eight or
    more) each hold more than four times what the next does: beside 0.6 the words of a long text are of 0.001. Signed
    scores are drawn whole: they share out one number, and what holds most of it is the answer.
    """
    found = _found(scores)
    ends = scale(scores, signed=signed)
    ranked = np.sort(np.abs(found))[::-1]
    few = min(max(2, len(ranked) // 10), len(ranked) // 4)
    far = np.flatnonzero(ranked[:few] > DOMINANT * ranked[1 : few + 1]) if ends.even is None and not ends.signed else ()
    if len(far) == 0:
        return ends
    high = float(ranked[far[-1] + 1])
    highest = float(found[np.abs(found).argmax()])
    return ends._replace(high=high, highest=highest)


def patch_scale(patches: NDArray[np.float64], *, signed: bool = False) -> Scale:
    """From the lowest patch to the highest, or of a hundred or more to the 99th percentile; `scale` if signed or even.

    From the lowest, since patches often share most of their score: a flow of DINOv2 runs from 0.57 to 1. To the
    percentile, since single patches of background can hold many times what any object gets: 0.085 beside 0.016 in
    a rollout of DINOv2, where the object would be as dark as the rest. Patches that hardly differ are drawn flat, and
    what is exactly 0 counts for nothing.
    """
    found = _found(patches)
    ends = scale(patches, signed=signed)._replace(power=1.0)
    if found.size < 2 or ends.even is not None:
        return ends
    distance = np.abs(found) if ends.signed else found
    low, highest = float(distance.min()), float(distance.max())
    high = float(np.percentile(distance, 99)) if found.size >= 100 else highest
    beyond = float(found[distance.argmax()]) if low < high < highest else None
    high = highest if beyond is None else high
    return ends._replace(low=-high if ends.signed else low, high=high, highest=beyond)


def is_signed(scores: NDArray[np.float64]) -> bool:
    """Whether scores speak against as well as for: some are negative, beyond rounding."""
    found = _found(scores)
    return bool(found.size) and float(found.min()) < -ROUNDING * float(np.abs(found).max())


def _found(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return scores[np.isfinite(scores) & (scores != 0)]


def _spread(found: NDArray[np.float64]) -> float:
    """How far the scores differ, as a share of the largest; of fewer than two there is nothing to compare."""
    return float(np.ptp(found) / np.abs(found).max()) if found.size > 1 else np.inf


def colours(ramp: Ramp, shares: ArrayLike) -> NDArray[np.float64]:
    """The sRGB colours (..., 3) from 0 to 1 at `shares` (...) of a ramp."""
    return srgb(oklab(ramp, shares))


def oklab(ramp: Ramp, shares: ArrayLike) -> NDArray[np.float64]:
    """The colours (..., 3) at `shares` (...) of a ramp as lightness, green-red, blue-yellow."""
    t = np.asarray(shares, dtype=np.float64)[..., None]
    if len(ramp) == 3:
        return _curve(ramp, t)
    return np.where(t < 0.5, _curve(ramp[:3], 2 * t), _curve(ramp[2:], 2 * t - 1))


def _curve(points: Ramp, t: NDArray[np.float64]) -> NDArray[np.float64]:
    return (1 - t) ** 2 * points[0] + 2 * t * (1 - t) * points[1] + t**2 * points[2]


def srgb(lab: NDArray[np.float64]) -> NDArray[np.float64]:
    """OKLab colours (..., 3) as sRGB from 0 to 1; what no screen can show is clipped."""
    linear = np.clip((lab @ _LMS.T) ** 3 @ _LINEAR_RGB.T, 0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def luminance(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The light (...) that sRGB colours (..., 3) from 0 to 1 send out, from 0 to 1."""
    linear = np.where(pixels <= 0.04045, pixels / 12.92, ((pixels + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def rgb(ramp: Ramp, share: float) -> RGB:
    """The colour at one share of a ramp, as bytes."""
    red, green, blue = (round(255 * value) for value in colours(ramp, share).tolist())
    return red, green, blue


def ink(ground: RGB) -> RGB:
    """Black or white, whichever stands out more from `ground` (WCAG 2 contrast)."""
    return (0, 0, 0) if luminance(np.array(ground) / 255) > 0.179 else (255, 255, 255)
