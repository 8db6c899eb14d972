"""Pages of more than one answer: the scores of methods with their intervals, and lists of examples that can be sorted.

They are written as the page of answers is (`document`): one file, offline, under the same policy.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import rankdata

from attnflow.answer import Relevance
from attnflow.files import write_whole
from attnflow.show.colour import GROUND, is_signed, patch_scale, rgb
from attnflow.show.document import document
from attnflow.show.wording import patches, visible

SIDE = 320  # pixels, the longer side of a picture
TEXT = 300  # characters of an example's text
NAME = 60  # characters of a text that name an example


class Interval(NamedTuple):
    """A method's mean on one metric with its interval, NaN where there is none.

    n: the examples counted; undefined: those that the metric is undefined on.
    """

    label: str
    mean: float
    low: float
    high: float
    n: int
    undefined: int = 0


class Line(NamedTuple):
    """A method's mean curve over shares of the tokens, with its interval, NaN where there is none; all (point,)."""

    label: str
    shares: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


class Chart(NamedTuple):
    """Methods on one metric.

    direction: whether more ("up") or less ("down") is better. marks: labels set apart. lines: the curves whose areas
    the means are, where they are areas; across: what their shares are of.
    """

    name: str
    direction: Literal["up", "down"]
    intervals: Sequence[Interval]
    marks: Sequence[str] = ()
    lines: Sequence[Line] = ()
    across: str = ""


@dataclass(frozen=True, eq=False)
class Listed:
    """An example of a list.

    name: what it is called. text: its beginning, or "". facts: what is said of it in a line. pictures: images (PIL) by
    name, drawn beside one another. numbers: what the list can be sorted by, NaN where undefined. page: the address of
    its own page, relative to the list. answer: the answer of this page that it is, as a place.
    """

    name: str
    text: str = ""
    facts: str = ""
    pictures: Mapping[str, Image.Image] = field(default_factory=dict[str, Image.Image])
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    page: str | None = None
    answer: int | None = None


def save_list(
    path: Path,
    title: str,
    *,
    examples: Sequence[Listed] = (),
    means: Sequence[Listed] = (),
    charts: Sequence[Chart] = (),
    words: Sequence[str] = (),
    warning: str | None = None,
) -> Path:
    """Write one page of charts and examples, whole or not at all.

    means: of classes of the examples, in this order. words: what is said above them, a sentence each. warning: what
    must be read first. Raises ValueError if there is neither an example nor a chart.
    """
    if not examples and not charts:
        raise ValueError("there is nothing to list: give at least one example or one chart")
    data = {
        "warning": warning,
        "words": [visible(sentence) for sentence in words],
        "charts": [_chart(chart) for chart in charts],
        "means": [_listed(one) for one in means],
        "examples": [_listed(one) for one in examples],
    }
    text = document(title, ("numbers.js", "draw.js", "list.js", "list-page.js"), data)
    return write_whole(path, lambda file: file.write(text.encode()))


def examples_of(relevances: Sequence[Relevance], names: Sequence[str] | None) -> tuple[list[int], list[dict[str, Any]]]:
    """Which example each relevance is of, and the examples as a page holds them; none where there is one alone.

    Relevances are of one example if they have the same tokens, until a method comes again with the same settings: an
    answer does not hold its input. names: what each relevance is called; by default the beginning of its text.
    """
    groups = list[list[int]]()
    for place, one in enumerate(relevances):
        fitting = (group for group in groups if all(_other(one, relevances[at]) for at in group))
        group = next(fitting, None)
        if group is None:
            groups.append(group := [])
        group.append(place)
    found = [next(number for number, group in enumerate(groups) if at in group) for at in range(len(relevances))]
    if len(groups) == 1:
        return found, []
    return found, [
        _listed(_example([relevances[at] for at in group], group[0], None if names is None else names[group[0]]))
        for group in groups
    ]


def _other(one: Relevance, other: Relevance) -> bool:
    """Whether two relevances can be of one input: of the same tokens, by different methods or settings."""
    alike = (one.tokens, one.grid) == (other.tokens, other.grid)
    return alike and any(one.recipe.get(name) != other.recipe.get(name) for name in ("method", "settings"))


def _example(answers: Sequence[Relevance], place: int, name: str | None) -> Listed:
    first = answers[0]
    whole = first if first.words is None else first.by_word()
    text = " ".join(token for token, role in zip(whole.tokens, whole.roles, strict=True) if role == "text")
    methods = [str(one.recipe.get("method", "relevance")) for one in answers]
    target = first.recipe.get("target")
    return Listed(
        name or _shortened(text, NAME) or f"example {place + 1}",
        text=text if name or len(text) > NAME else "",
        facts="; ".join([", ".join(methods), *([f"target {target['target']}"] if target else [])]),
        pictures={
            method: map_image(patches(one, one.row), signed=is_signed(one.scores))
            for method, one in zip(methods, answers, strict=True)
            if _is_image(one)
        },
        numbers={"tokens": len(first.tokens)} | ({"disagreement": disagreement(answers)} if len(answers) > 1 else {}),
        answer=place,
    )


def disagreement(answers: Sequence[Relevance]) -> float:
    """1 less the mean rank correlation (Spearman) of the rows of every two answers: 0 if all rank alike, 1 by chance.

    NaN where one of them ranks all tokens alike.
    """
    ranks = np.array([rankdata(one.row) for one in answers])
    if (np.ptp(ranks, axis=1) == 0).any():
        return math.nan
    return float(1 - np.corrcoef(ranks)[np.triu_indices(len(answers), 1)].mean())


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _is_image(relevance: Relevance) -> bool:
    return relevance.grid is not None and len(relevance.grid) == 2


def map_image(grid: NDArray[np.float64], *, signed: bool = False) -> Image.Image:
    """The map of patches (row, column) as an image, a square of some pixels for each, on its own scale."""
    ends = patch_scale(grid, signed=signed)
    colours = [[rgb(ends.ramp(GROUND), ends.share(score)) for score in line] for line in grid.tolist()]
    each = max(1, SIDE // 2 // max(grid.shape))
    return Image.fromarray(np.array(colours, dtype=np.uint8).repeat(each, 0).repeat(each, 1))


def _listed(one: Listed) -> dict[str, Any]:
    """An example as a page holds it."""
    return {
        "name": visible(one.name),
        "text": _shortened(visible(one.text), TEXT),
        "facts": visible(one.facts),
        "pictures": [{"name": visible(name), "href": _address(image)} for name, image in one.pictures.items()],
        "numbers": {visible(name): _finite(value) for name, value in one.numbers.items()},
        "page": one.page,
        "answer": one.answer,
    }


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "name": visible(chart.name),
        "direction": chart.direction,
        "marks": [visible(label) for label in chart.marks],
        "intervals": [
            {
                "label": visible(one.label),
                **{name: _finite(getattr(one, name)) for name in ("mean", "low", "high")},
                "n": one.n,
                "undefined": one.undefined,
            }
            for one in chart.intervals
        ],
        "across": chart.across,
        "lines": [
            {
                "label": visible(one.label),
                **{name: _brief(getattr(one, name)) for name in ("shares", "mean", "low", "high")},
            }
            for one in chart.lines
        ],
    }


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _brief(values: NDArray[np.float64]) -> list[float | None]:
    """Seven digits of each, which is more than a line shows."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values.tolist()]


def _address(image: Image.Image) -> str:
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    content = io.BytesIO()
    small.save(content, format="JPEG", quality=90, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
