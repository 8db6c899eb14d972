"""Relevance in a notebook: one fragment of HTML that needs nothing else, in which no token can become markup."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.show.colour import GROUND, PAPER, Scale, ink, is_signed, patch_scale, rgb, scale, text_scale
from attnflow.show.wording import APART, caption, decimals, notes, number, patches, prefix, rows, shortened, visible

_BOX = "font-family:ui-sans-serif,system-ui,sans-serif;font-size:14px;line-height:1.9"
_TOKEN = "padding:2px 5px;margin:1px;border-radius:3px;unicode-bidi:isolate;white-space:pre-wrap"
_CELL = "padding:2px 5px;text-align:right;font-variant-numeric:tabular-nums"
_HEAD = "font-weight:normal;white-space:nowrap"
_SMALL = "font-size:12px"
_MAP_WIDTH = 360
# What is exactly 0; it reads on a light page and on a dark one.
_HATCH = "background:repeating-linear-gradient(135deg,transparent 0 3px,rgba(128,128,128,.45) 3px 4px)"


def html(relevance: Relevance) -> str:
    """The coloured tokens with their scores as tooltips, the layer x token table or the map of patches, and notes.

    Tokens that a model wrote and groups, seen from one layer, have a line each. Self-contained: inline styles, no
    script, nothing fetched. Every token is escaped.
    """
    positions = prefix(relevance) if relevance.grid else list(range(len(relevance.tokens)))
    scores, labels, kind = rows(relevance)
    apart, signed = kind in APART, is_signed(relevance.scores)
    parts = [f'<div class="attnflow" style="{_BOX}">']
    lines = scores if apart else relevance.row[None]
    ends = text_scale(lines[:, positions], signed=signed)
    drawn = lines if apart else lines[0]
    if positions:
        parts += [
            _line(relevance, positions, line, ends, f"{kind} {label}" if apart else None)
            for line, label in zip(lines, labels, strict=False)
        ]
    if relevance.grid:
        drawn = patches(relevance, relevance.row)
        ends = patch_scale(drawn, signed=signed)
        parts.insert(1, _maps(drawn, ends))
    if positions and len(scores) > 1:
        parts.append(_table(relevance, positions, scores, labels, kind))
    parts += [
        f'<div style="opacity:.7;{_SMALL}">{escape(visible(text))}</div>'
        for text in (caption(relevance), *notes(relevance, drawn, ends, zero="hatched"))
    ]
    return "".join([*parts, "</div>"])


def _painted(score: float, ends: Scale) -> str:
    if score == 0:
        return _HATCH
    ground = rgb(ends.ramp(PAPER), ends.share(score))
    return f"background:{_hex(ground)};color:{_hex(ink(ground))}"


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + bytes(colour).hex()


def _line(
    relevance: Relevance, positions: list[int], scores: NDArray[np.float64], ends: Scale, label: str | None
) -> str:
    """The tokens at `positions`, with what the line is of before them."""
    digits = decimals(scores[positions])
    name = "" if label is None else f'<b style="{_SMALL};{_HEAD};opacity:.7"><bdi>{escape(label)}</bdi></b> '
    spans = (
        f'<span style="{_TOKEN};{_painted(float(scores[position]), ends)}" '
        f'title="position {position}: {number(float(scores[position]), digits, signed=ends.signed)}">'
        f"{escape(visible(relevance.tokens[position]))}</span>"
        for position in positions
    )
    return f"<div>{name}{' '.join(spans)}</div>"


def _table(
    relevance: Relevance, positions: list[int], scores: NDArray[np.float64], labels: list[str], kind: str
) -> str:
    """A row for each layer, the topmost first, so that the input is at the foot as in the figures; others in order."""
    scores = scores[:, positions]
    heads = "".join(
        f'<th style="{_CELL};{_HEAD}"><bdi>{escape(shortened(relevance.tokens[position]))}</bdi></th>'
        for position in positions
    )
    ends, digits = scale(scores, signed=is_signed(relevance.scores)), decimals(scores)
    lines = list(_rows(labels, scores, ends, digits))
    body = "".join(reversed(lines) if kind == "layer" else lines)
    return (
        f'<div style="overflow-x:auto"><table style="border-collapse:collapse;{_SMALL}"><thead><tr>'
        f'<th style="{_CELL};{_HEAD}">{kind}</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _rows(labels: list[str], scores: NDArray[np.float64], ends: Scale, digits: int) -> Iterator[str]:
    for label, row in zip(labels, scores.tolist(), strict=True):
        cells = "".join(
            f'<td style="{_CELL};{_painted(score, ends)}">{number(score, digits, signed=ends.signed)}</td>'
            for score in row
        )
        yield f'<tr><th style="{_CELL};{_HEAD}"><bdi>{escape(label)}</bdi></th>{cells}</tr>'


def _maps(grid: NDArray[np.float64], ends: Scale) -> str:
    """The map of an image, or those of a video's frames, on one scale."""
    digits = decimals(grid)
    maps = "\n".join(_svg(frame, ends, digits) for frame in grid.reshape(-1, *grid.shape[-2:]))
    low, high = (number(end, digits, signed=ends.signed) for end in (ends.low, ends.high))
    colours = ("orange", "blue") if ends.signed else ("dark", "bright")
    return f'{maps}<div style="{_SMALL}">patches from {low} ({colours[0]}) to {high}{ends.top} ({colours[1]})</div>'


def _svg(grid: NDArray[np.float64], ends: Scale, digits: int) -> str:
    """One map; where a patch is exactly 0 the hatched ground is seen."""
    rows, columns = grid.shape
    rects = "".join(
        f'<rect x="{column}" y="{row}" width="1" height="1" fill="{_fill(score, ends)}">'
        f"<title>row {row}, column {column}: {number(score, digits, signed=ends.signed)}</title></rect>"
        for row, line in enumerate(grid.tolist())
        for column, score in enumerate(line)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns} {rows}" width="{_MAP_WIDTH}" '
        f'height="{_MAP_WIDTH * rows / columns:.0f}" style="{_HATCH}" shape-rendering="crispEdges" role="img">'
        f"{rects}</svg>"
    )


def _fill(score: float, ends: Scale) -> str:
    return "transparent" if score == 0 else _hex(rgb(ends.ramp(GROUND), ends.share(score)))
