"""Relevance in a notebook: one fragment of HTML that needs nothing else, in which no token can become markup."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np
from numpy.typing import NDArray

from attnflow.relevance import Relevance
from attnflow.show.colour import GROUND, PAPER, Ramp, Scale, ink, patch_scale, rgb, scale
from attnflow.show.wording import caption, decimals, patches, prefix, shortened, visible

_BOX = "font-family:ui-sans-serif,system-ui,sans-serif;font-size:14px;line-height:1.9"
_TOKEN = "padding:2px 5px;margin:1px;border-radius:3px;unicode-bidi:isolate;white-space:pre-wrap"
_CELL = "padding:2px 5px;text-align:right;font-variant-numeric:tabular-nums"
_HEAD = "font-weight:normal;white-space:nowrap"
_MAP_WIDTH = 360


def html(relevance: Relevance) -> str:
    """The coloured tokens with their scores as tooltips, and the layer x token table or the map of patches.

    Self-contained: inline styles, no script, nothing fetched. Every token is escaped.
    """
    positions = prefix(relevance) if relevance.grid else list(range(len(relevance.tokens)))
    parts = [f'<div class="attnflow" style="{_BOX}">']
    if relevance.grid:
        parts.append(_maps(patches(relevance, relevance.row)))
    if positions:
        parts.append(_line(relevance, positions))
        if len(relevance.layers) > 1:
            parts.append(_table(relevance, positions))
    parts.append(f'<div style="opacity:.7;font-size:12px">{escape(caption(relevance))}</div></div>')
    return "".join(parts)


def _painted(score: float, ends: Scale, ramp: Ramp) -> str:
    ground = rgb(ramp, ends.share(score))
    return f"background:{_hex(ground)};color:{_hex(ink(ground))}"


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + bytes(colour).hex()


def _line(relevance: Relevance, positions: list[int]) -> str:
    scores = relevance.row[positions]
    ends, digits = scale(scores), decimals(scores)
    spans = (
        f'<span style="{_TOKEN};{_painted(score, ends, PAPER)}" title="position {position}: {score:.{digits}f}">'
        f"{escape(visible(relevance.tokens[position]))}</span>"
        for position, score in zip(positions, scores.tolist(), strict=True)
    )
    return f"<div>{' '.join(spans)}</div>"


def _table(relevance: Relevance, positions: list[int]) -> str:
    """Layers as rows, the topmost first, so that the input is at the foot as in the figures."""
    scores = relevance.every_layer.mean(axis=1)[:, positions]
    heads = "".join(
        f'<th style="{_CELL};{_HEAD}"><bdi>{escape(shortened(relevance.tokens[position]))}</bdi></th>'
        for position in positions
    )
    rows = "".join(_rows(relevance.layers, scores))
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;font-size:12px"><thead><tr>'
        f'<th style="{_CELL};{_HEAD}">layer</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _rows(layers: tuple[int, ...], scores: NDArray[np.float64]) -> Iterator[str]:
    ends, digits = scale(scores), decimals(scores)
    for number, row in reversed(list(zip(layers, scores.tolist(), strict=True))):
        cells = "".join(f'<td style="{_CELL};{_painted(score, ends, PAPER)}">{score:.{digits}f}</td>' for score in row)
        yield f'<tr><th style="{_CELL};{_HEAD}">{number}</th>{cells}</tr>'


def _maps(grid: NDArray[np.float64]) -> str:
    """The map of an image, or those of a video's frames, on one scale."""
    ends, digits = patch_scale(grid), decimals(grid)
    maps = "\n".join(_svg(frame, ends, digits) for frame in grid.reshape(-1, *grid.shape[-2:]))
    return (
        f'{maps}<div style="font-size:12px">patches from {ends.low:.{digits}f} (dark) to '
        f"{ends.high:.{digits}f}{ends.top} (bright)</div>"
    )


def _svg(grid: NDArray[np.float64], ends: Scale, digits: int) -> str:
    rows, columns = grid.shape
    rects = "".join(
        f'<rect x="{column}" y="{row}" width="1" height="1" fill="{_hex(rgb(GROUND, ends.share(score)))}">'
        f"<title>row {row}, column {column}: {score:.{digits}f}</title></rect>"
        for row, line in enumerate(grid.tolist())
        for column, score in enumerate(line)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns} {rows}" width="{_MAP_WIDTH}" '
        f'height="{_MAP_WIDTH * rows / columns:.0f}" shape-rendering="crispEdges" role="img">{rects}</svg>'
    )
