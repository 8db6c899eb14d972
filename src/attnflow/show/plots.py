"""Relevance as pictures: layer x token maps (figures 2 and 3 of Abnar & Zuidema 2020), and the way to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnflow.relevance import Relevance
from attnflow.show.canvas import blank, colour_bar, colour_map, label_tokens, save_figure, title
from attnflow.show.colour import PAPER, Scale, scale
from attnflow.show.graph import attention_graph
from attnflow.show.overlay import overlay, patch_map
from attnflow.show.wording import method_and_query
from attnflow.show.wording import rows as rows_of

__all__ = ["attention_graph", "layer_map", "layer_maps", "overlay", "patch_map", "picture", "save_figure"]

SIDE_BY_SIDE = 12  # tokens up to which three maps fit beside one another


def picture(relevance: Relevance, image: Any = None) -> Figure:
    """The picture that suits: an overlay where an image is given, a map of patches, or a layer x token map."""
    if image is not None:
        return overlay(relevance, image)
    return patch_map(relevance) if relevance.grid else layer_map(relevance)


def layer_map(relevance: Relevance) -> Figure:
    """Layer x token map of the query, or of the mean over the queries; layer 0, nearest the input, at the foot.

    Of tokens that a model wrote, seen from one layer, each is a row, the first at the top.

    Colours run from 0 to the highest score of the map and follow the square root of the score, as the colour bar
    shows, so that words remain visible beside the query's own position; if some scores are negative, they run
    evenly from the lowest.
    """
    return layer_maps([relevance])


def layer_maps(relevances: Sequence[Relevance]) -> Figure:
    """Several methods' layer x token maps of one input, on one scale: `layer_map`'s, to the highest score of all.

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
    ends = scale(np.concatenate(rows))
    beside = len(rows) > 1 and len(tokens) <= SIDE_BY_SIDE
    figure, panels = _panels(rows, len(tokens), beside=beside)
    mesh = None
    for number, (axes, relevance, scores) in enumerate(zip(panels, relevances, rows, strict=True)):
        mesh = _draw_map(axes, scores, ends)
        if names[number] != "layer":
            axes.invert_yaxis()  # what was written first stands first
        if not beside or number == 0 or labels[number] != labels[0]:
            axes.set_yticks(range(len(scores)), labels[number])
            axes.set_ylabel(names[number])
        else:
            axes.set_yticks([])
        if beside or number == len(rows) - 1:
            label_tokens(axes.xaxis, tokens, 8, rotation=90)
        else:
            axes.set_xticks([])
        title(axes, method_and_query(relevance))
    colour_bar(figure, mesh, panels, ends, fraction=0.05, aspect=4 * _height(rows, beside=beside))
    return figure


def _panels(rows: Sequence[NDArray[np.float64]], tokens: int, *, beside: bool) -> tuple[Figure, list[Axes]]:
    width = float(np.clip(0.24 * tokens, 2.4, 22))
    height = _height(rows, beside=beside)
    if beside:
        figure = blank(len(rows) * (width + 0.3) + 1.5, height + 1.6)
        panels = figure.subplots(1, len(rows), squeeze=False)
    else:
        figure = blank(width + 1.8, height + 0.4 * len(rows) + 1.2)
        panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=[len(scores) for scores in rows])
    return figure, panels.ravel().tolist()


def _height(rows: Sequence[NDArray[np.float64]], *, beside: bool) -> float:
    """Inches that the rows of the maps take, between one and a page's."""
    layers = [len(scores) for scores in rows]
    return float(np.clip(0.28 * (max(layers) if beside else sum(layers)), 1, 22))


def _draw_map(axes: Axes, scores: NDArray[np.float64], ends: Scale) -> Any:
    height, width = scores.shape
    gap = 0.6 if width <= 130 else 0
    mesh = axes.pcolormesh(
        np.arange(width + 1) - 0.5,
        np.arange(height + 1) - 0.5,
        scores,
        cmap=colour_map(PAPER),
        norm=PowerNorm(ends.power, ends.low, ends.high),
        edgecolors="white" if gap else "none",
        linewidth=gap,
    )
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    return mesh
