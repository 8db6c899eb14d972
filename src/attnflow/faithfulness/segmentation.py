"""Relevance against a mask of what is in an image: segmentation, the pointing game, the area under the ROC curve.

Each takes the relevance of the patches (row, column) and the mask (height, width), True inside. NaN means that the test
is undefined: a mask that is empty or covers all, a threshold on a map that is constant.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, stats

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


def resized(relevance: Floats, size: tuple[int, int]) -> Floats:
    """A map of patches (row, column) as one of pixels (height, width): bilinear, the outer edges of both aligned.

    Raises ValueError for a map that is no map, or not finite.
    """
    if relevance.ndim != 2 or not np.isfinite(relevance).all():
        raise ValueError(f"relevance must be finite scores (row, column); shape {relevance.shape} was given")
    if alike(relevance):  # interpolation would break the ties by rounding
        return np.full(size, relevance.flat[0])
    zoom = [wanted / given for wanted, given in zip(size, relevance.shape, strict=True)]
    result: Any = ndimage.zoom(relevance, zoom, order=1, mode="nearest", grid_mode=True)
    return result


def pixel_accuracy(relevance: Floats, mask: Mask) -> float:
    """The share of pixels that are right if those above the mean relevance are called foreground, in [0, 1]."""
    foreground = _foreground(relevance, mask)
    return math.nan if foreground is None else float(np.mean(foreground == mask))


def mean_iou(relevance: Floats, mask: Mask) -> float:
    """Intersection over union, the mean of foreground and background, thresholded as in `pixel_accuracy`."""
    foreground = _foreground(relevance, mask)
    if foreground is None or alike(mask):
        return math.nan
    ratios = [np.sum(a & b) / np.sum(a | b) for a, b in ((foreground, mask), (~foreground, ~mask))]
    return float(np.mean(ratios))


def average_precision(relevance: Floats, mask: Mask) -> float:
    """The mean precision over the mask's pixels as the threshold on relevance falls, in [0, 1]; ties fall together."""
    soft, inside = resized(relevance, _size(mask)).ravel(), mask.ravel()
    if alike(inside):
        return math.nan
    order = np.argsort(-soft, kind="stable")
    last_of_ties = np.append(np.nonzero(np.diff(soft[order]))[0], len(order) - 1)
    hits = np.cumsum(inside[order])[last_of_ties]
    return float(np.sum(np.diff(hits, prepend=0) * hits / (last_of_ties + 1)) / hits[-1])


def pixel_auc(relevance: Floats, mask: Mask) -> float:
    """How often a pixel inside the mask is more relevant than one outside, in [0, 1]; a tie counts half."""
    soft, inside = resized(relevance, _size(mask)).ravel(), mask.ravel()
    if alike(inside):
        return math.nan
    positive = int(inside.sum())
    above = stats.rankdata(soft)[inside].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (inside.size - positive)))


def pointing_game(relevance: Floats, mask: Mask) -> float:
    """1 if the most relevant pixel lies inside the mask, else 0; of several that tie, the share inside.

    Zhang et al. 2016, without the margin of 15 pixels around the mask.
    """
    soft = resized(relevance, _size(mask))
    return math.nan if alike(mask) else float(np.mean(mask[np.isclose(soft, soft.max(), rtol=1e-9, atol=0)]))


def alike(values: NDArray[Any]) -> bool:
    """Whether there are no two different values."""
    return values.size == 0 or bool((values == values.flat[0]).all())


def _foreground(relevance: Floats, mask: Mask) -> Mask | None:
    """The pixels above the mean of the resized map; None for a constant map, which has no threshold."""
    soft = resized(relevance, _size(mask))
    return None if alike(relevance) else soft > soft.mean()


def _size(mask: Mask) -> tuple[int, int]:
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise ValueError(f"a mask must be booleans (height, width); {mask.dtype} of shape {mask.shape} was given")
    return mask.shape[0], mask.shape[1]
