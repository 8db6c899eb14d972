"""A page of photographs, each with its grade, what was predicted, and its maps side by side; it works offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnflow.capturing.vision import open_image
from attnflow.show.listing import SIDE, Listed, save_list
from attnflow.show.overlay import blended

_WARNING = (
    "Not a diagnosis. The maps show what a model attended to or is sensitive to. A bright place is not a lesion, and a "
    "lesion may be dark."
)
_SCALE = "Bright is more. Each map has its own scale, from its lowest patch to its 99th percentile."


class Explained(NamedTuple):
    """A photograph with its grade, the grade and the probability of disease predicted, and maps (row, column)."""

    path: Path
    grade: int
    predicted: int
    disease: float
    maps: Mapping[str, NDArray[np.float64]]


def write_page(path: Path, shown: Sequence[Explained], words: Sequence[str]) -> Path:
    """Write a page, which holds its pictures; returns its path."""
    title = "What the model looked at in photographs of the retina"
    return save_list(path, title, examples=[*map(_listed, shown)], words=[*words, _SCALE], warning=_WARNING)


def _listed(one: Explained) -> Listed:
    image = open_image(one.path)
    image.thumbnail((SIDE, SIDE))
    return Listed(
        one.path.name,
        facts=f"Grade {one.grade}; predicted grade {one.predicted}, by a probe that was not trained on it.",
        pictures={"photograph": image} | {name: blended(grid, image) for name, grid in one.maps.items()},
        numbers={"grade": one.grade, "predicted grade": one.predicted, "probability of disease": one.disease},
    )
