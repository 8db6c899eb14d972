"""The layered graph of figure 1 of Abnar & Zuidema 2020: nodes are tokens at layers, edges are weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnflow.show.canvas import blank, foot, label_tokens, title
from attnflow.show.colour import is_signed
from attnflow.show.wording import shortened

EDGE = "#1f4e79"
ROUTE = "#d55e00"  # vermilion, told from blue by every kind of colour vision
NODE = "#8a8f98"
FAINTEST = 0.02
STRONGEST = 150  # edges of a layer
SAME = 1e-9  # edges as alike as this, as a share of the strongest, are drawn together or not at all


def attention_graph(
    panels: Mapping[str, NDArray[np.float64]],
    tokens: Sequence[str],
    *,
    query: int | None = None,
    notes: Iterable[str] = (),
) -> Figure:
    """Figure 1 of the paper: one graph per panel, tokens down, layers across from the input at the left.

    panels: title -> weights (layer, query, token), layer 0 first. As in the paper every panel joins the nodes of a
    layer to the column at its left. For raw attention that column is what the layer attended to. For rollout and
    flow the edge from query i at layer l towards row j is the score of *input token* j for that node: the column at
    its left stands in for the input, so that the panels can be compared edge by edge. Of conserved relevance
    (edges="conserved-relevance", carry="layer", layer="all") the edges are what every layer carried, in two colours:
    blue speaks for the score, orange against it.

    Width and opacity grow with the size of the weight, on one scale from 0 to the largest of all panels. So that the
    graph stays readable, edges under 2 per cent of it are left out, and of a layer only the 150 strongest are drawn
    (all of them up to 12 tokens). Edges of one weight are drawn together or not at all. The foot says what they carry.
    query: the edges of this query, at every layer, are drawn in a second colour, all those of 2 per cent or more; where
    colours tell signs, as strongly as they would be in it.
    notes: what the foot says as well, such as the `wording.doubts` of a method.

    Raises ValueError for weights that do not fit the tokens, or a query out of range.
    """
    weights = _checked(panels, len(tokens), query)
    highest = max(float(np.abs(panel).max(initial=0)) for panel in weights.values())
    signed = any(is_signed(panel) for panel in weights.values())
    layers, count = max(len(panel) for panel in weights.values()), len(tokens)
    height = float(np.clip(0.19 * count, 2, 22))
    figure = blank(1.6 + len(weights) * float(np.clip(0.55 * layers, max(2, 0.4 * height), 7)), height + 1)
    axes = figure.subplots(1, len(weights), squeeze=False).ravel().tolist()
    chosen = None if query is None else query % count
    shares: list[str] = []
    for number, (name, panel) in enumerate(weights.items()):
        sizes = np.abs(panel)
        drawn = (sizes > 0) & (sizes >= FAINTEST * highest)
        strongest = drawn & _strongest(sizes, SAME * highest)
        shares.append(f"{sizes[strongest].sum() / (sizes.sum() or 1):.0%} of {name}")
        _draw_edges(axes[number], panel, strongest | (drawn & _of_query(count, chosen)), highest, chosen, signed)
        _draw_nodes(axes[number], layers, count)
        title(axes[number], name, figure.get_figwidth() / len(weights) - 0.5)
        if number == 0:
            label_tokens(axes[0].yaxis, tokens, height)
        else:
            axes[number].set_yticks([])
    foot(figure, [*_notes(shares, highest, tokens, chosen, signed), *notes], [*tokens, *weights])
    return figure


def _notes(shares: Sequence[str], highest: float, tokens: Sequence[str], chosen: int | None, signed: bool) -> list[str]:
    least = f"{FAINTEST * highest:.2g}"
    some = "" if len(tokens) ** 2 <= STRONGEST else f"the {STRONGEST} strongest of each layer, "
    own = "" if chosen is None else f"all of query {shortened(tokens[chosen])} at {chosen}"
    if signed:
        what, colours = "size", ["blue speaks for, orange against", f"strongly drawn: {own}" if own else ""]
    else:
        what, colours = "weight", [f"orange: {own}" if own else ""]
    return [
        "; ".join(filter(None, [f"edges: {some}of {what} {least} to {highest:.3g}", *colours])),
        f"the strongest carry, of all {what}, {', '.join(shares)}; attnflow.paths tells the routes",
    ]


def _checked(
    panels: Mapping[str, NDArray[np.float64]], count: int, query: int | None
) -> dict[str, NDArray[np.float64]]:
    if not panels:
        raise ValueError("no panel was given; give at least one, for instance {'rollout': scores}")
    if query is not None and not -count <= query < count:
        raise ValueError(f"query {query} is out of range: there are {count} tokens, 0 to {count - 1}")
    for name, panel in panels.items():
        if np.ndim(panel) != 3 or np.shape(panel)[1:] != (count, count):
            raise ValueError(f"panel {name!r} has shape {np.shape(panel)}; expected (layer, {count}, {count})")
    return {name: np.nan_to_num(np.asarray(panel, dtype=np.float64)) for name, panel in panels.items()}


def _strongest(panel: NDArray[np.float64], same: float) -> NDArray[np.bool_]:
    """The strongest edges of each layer, without those of which equals would be left out; (layer, query, token)."""
    if panel[0].size <= STRONGEST:
        return np.ones(panel.shape, dtype=bool)
    ranked = np.sort(panel.reshape(len(panel), -1), axis=1)
    return panel > ranked[:, -STRONGEST - 1, None, None] + same


def _of_query(count: int, query: int | None) -> NDArray[np.bool_]:
    return (np.arange(count) == query)[None, :, None]


def _draw_edges(
    axes: Axes, panel: NDArray[np.float64], drawn: NDArray[np.bool_], highest: float, query: int | None, signed: bool
) -> None:
    count = panel.shape[1]
    layer, row, token = np.nonzero(drawn)
    weight = panel[layer, row, token]
    order = np.lexsort((np.abs(weight), row == query))  # the strongest, and the chosen query's, lie on top
    layer, row, token, weight = layer[order], row[order], token[order], weight[order]
    share = np.abs(weight) / highest
    segments = np.stack([np.stack([layer + 1, row], -1), np.stack([layer, token], -1)], axis=1)
    routes = (row == query)[:, None]
    strongest = 0.7 if query is None else 0.45
    opacity = np.where(routes, 0.3 + 0.7 * share[:, None], 0.06 + (strongest - 0.06) * share[:, None])
    colour = np.where((weight < 0)[:, None] if signed else routes, to_rgb(ROUTE), to_rgb(EDGE))
    widest = float(np.clip(40 / count, 0.4, 2.6))
    axes.add_collection(
        LineCollection(
            segments.astype(float).tolist(), colors=np.hstack([colour, opacity]), linewidths=0.3 + widest * share
        )
    )


def _draw_nodes(axes: Axes, layers: int, count: int) -> None:
    columns, rows = np.meshgrid(np.arange(layers + 1), np.arange(count))
    axes.plot(columns.ravel(), rows.ravel(), "o", color=NODE, markersize=3 if count <= 80 else 1.5, zorder=3)
    axes.set_xlim(-0.3, layers + 0.3)
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xticks(range(layers + 1), ["input", *(str(number) for number in range(layers))])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
