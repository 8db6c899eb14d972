"""Relevance as pictures: layer x token maps (figures 2 and 3 of Abnar & Zuidema 2020), and the way to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.show.canvas import (
    blank,
    colour_bar,
    colour_map,
    foot,
    hatch,
    label_tokens,
    norm,
    save_figure,
    scores_drawn,
    title,
)
from attnflow.show.colour import PAPER, Scale, is_signed, scale
from attnflow.show.graph import attention_graph
from attnflow.show.lines import text_lines
from attnflow.show.overlay import overlay, overlays, patch_map
from attnflow.show.wording import APART, method_and_query, said_of
from attnflow.show.wording import rows as rows_of

__all__ = [
    "attention_graph",
    "draw_map",
    "layer_map",
    "layer_maps",
    "overlay",
    "overlays",
    "patch_map",
    "picture",
    "save_figure",
    "text_lines",
]

SIDE_BY_SIDE = 12  # tokens up to which three maps fit beside one another
READABLE = 40  # tokens up to which a layer x token map is read at the width of a page
DIVIDER = "#24292f"  # between an encoder and a decoder, a prompt and what a model wrote
MOST = 10_000  # tokens in all the texts of a picture, about a dozen pages


def picture(relevance: Relevance | Sequence[Relevance], image: Any = None) -> Figure:
    """The picture that suits; of several relevances of one input, all of them on one scale.

    An overlay where an image is given, else a map of patches; of up to 40 tokens a layer x token map; of more, the text
    itself in coloured lines, unless it would have to be written too often. Its axes are those of matplotlib, to edit.
    """
    several = [relevance] if isinstance(relevance, Relevance) else list(relevance)
    if not several:
        raise ValueError("no relevance was given; give at least one")
    first = several[0]
    if len(several) > 1 and first.grid:
        return overlays(several, image)
    if image is not None:
        return overlay(first, image)
    if first.grid:
        return patch_map(first)
    scores, _, kind = rows_of(first)
    too_often = kind in APART and scores.size > MOST
    return layer_maps(several) if len(first.tokens) <= READABLE or too_often else text_lines(several)


def layer_map(relevance: Relevance) -> Figure:
    """Layer x token map of the query, or of the mean over the queries; layer 0, nearest the input, at the foot.

    Of tokens that a model wrote, seen from one layer, each is a row, the first at the top.

    Colours run from 0 to the highest score of the map and follow the square root of the score, as the colour bar
    shows, so that words remain visible beside the query's own position; if some scores are negative, they run
    symmetric about 0, which is white. What is exactly 0 is hatched. A line divides encoder and decoder, or a prompt and
    what a model wrote. The foot says what else must be known.
    """
    return layer_maps([relevance])


def draw_map(relevance: Relevance, *, ax: Axes | None = None) -> Axes:
    """The map of `layer_map` alone, on axes to go on editing, for figures of one's own; returns the axes.

    Its colour bar and foot are left out: `axes.collections[0]` is what `figure.colorbar` takes. ax: axes to draw on; by
    default those of a new figure.
    """
    scores, labels, name = rows_of(relevance)
    width, height = float(np.clip(0.24 * len(relevance.tokens), 2.4, 22)), max(1.0, 0.28 * len(scores))
    axes = blank(width + 0.8, height + 1.2).subplots() if ax is None else ax
    _draw_map(axes, relevance, scores, scale(scores, signed=is_signed(relevance.scores)))
    if name in APART:
        axes.invert_yaxis()
    label_tokens(axes.yaxis, labels, height)
    label_tokens(axes.xaxis, relevance.tokens, width, rotation=90)
    axes.set_ylabel(name)
    title(axes, method_and_query(relevance), width)
    return axes


def layer_maps(relevances: Sequence[Relevance]) -> Figure:
    """Several methods' layer x token maps of one input, on one scale: `layer_map`'s, to the highest score of all.

    Signed methods share a scale of their own, since they share out a target and not the relevance of a position.
    One shade is one number in every map. Raw attention and rollout are shares: their rows sum to 1. A flow is in
    units of capacity, of which 1 leaves the query, and its rows may sum to more than 1: it is at most 1 like a
    share, but a dark row of flow does not mean that the other methods' tokens got less. To compare how the tokens
    rank within the rows instead, give `relevance.normalized()` of each.

    Raises ValueError where the inputs differ, or none is given.
    """
    if not relevances:
        raise ValueError("no relevance was given; give at least one")
    tokens = relevances[0].tokens
    if any(relevance.tokens != tokens for relevance in relevances):
        raise ValueError("the maps have different tokens; compare relevances of one input")
    rows, labels, names = zip(*(rows_of(relevance) for relevance in relevances), strict=True)
    signed = [is_signed(relevance.scores) for relevance in relevances]
    ends = {
        kind: scale(np.concatenate([row for row, own in zip(rows, signed, strict=True) if own is kind]), signed=kind)
        for kind in set(signed)
    }
    beside = len(rows) > 1 and len(tokens) <= SIDE_BY_SIDE
    figure, panels, (width, heights) = _panels(rows, len(tokens), beside=beside)
    meshes: dict[bool, Any] = {}
    for number, (axes, relevance, scores) in enumerate(zip(panels, relevances, rows, strict=True)):
        meshes[signed[number]] = _draw_map(axes, relevance, scores, ends[signed[number]])
        if names[number] in APART:
            axes.invert_yaxis()  # what was written first stands first
        if not beside or number == 0 or labels[number] != labels[0]:
            label_tokens(axes.yaxis, labels[number], heights[number])
            axes.set_ylabel(names[number])
        else:
            axes.set_yticks([])
        if beside or number == len(rows) - 1:
            label_tokens(axes.xaxis, tokens, width, rotation=90)
        else:
            axes.set_xticks([])
        title(axes, method_and_query(relevance), width)
    aspect = 4 * (max(heights) if beside else sum(heights))
    for kind, mesh in meshes.items():
        own = [axes for axes, one in zip(panels, signed, strict=True) if one is kind]
        colour_bar(figure, mesh, ends[kind], ax=own, pad=0.02, fraction=0.05, aspect=aspect)
    foot(
        figure,
        said_of(relevances, rows, [ends[kind] for kind in signed]),
        [*tokens, *(label for some in labels for label in some)],
    )
    return figure


def _panels(
    rows: Sequence[NDArray[np.float64]], tokens: int, *, beside: bool
) -> tuple[Figure, list[Axes], tuple[float, list[float]]]:
    """A figure with a panel for each map, the width of each in inches, and their heights."""
    width = float(np.clip(0.24 * tokens, 2.4, 22))
    layers = np.array([len(scores) for scores in rows])
    height = float(np.clip(0.28 * (layers.max() if beside else layers.sum()), 1, 22))
    if beside:
        figure = blank(len(rows) * (width + 0.3) + 1.5, height + 1.6)
        panels = figure.subplots(1, len(rows), squeeze=False)
        heights = np.full(len(rows), height)
    else:
        figure = blank(width + 1.8, height + 0.4 * len(rows) + 1.2)
        panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=layers.tolist())
        heights = height * layers / layers.sum()
    return figure, panels.ravel().tolist(), (width, heights.tolist())


def _draw_map(axes: Axes, relevance: Relevance, scores: NDArray[np.float64], ends: Scale) -> Any:
    height, width = scores.shape
    gap = 0.6 if width <= 130 else 0
    hatch(axes.patch)
    mesh = axes.pcolormesh(
        np.arange(width + 1) - 0.5,
        np.arange(height + 1) - 0.5,
        scores_drawn(scores),
        cmap=colour_map(ends.ramp(PAPER)),
        norm=norm(ends),
        edgecolors="white" if gap else "none",
        linewidth=gap,
    )
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    for start in (relevance.recipe.get("parts") or {}).values():  # a decoder, what a model wrote
        axes.axvline(start - 0.5, color=DIVIDER, linewidth=1.2)
    return mesh
