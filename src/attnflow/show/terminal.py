"""Relevance in a terminal: a coloured line of tokens, the token x layer table, a map of patches, the recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from attnflow.answer import Relevance
from attnflow.show.colour import GROUND, RGB, Scale, ink, is_signed, patch_scale, rgb, scale, text_scale
from attnflow.show.wording import LONGEST_LABEL, caption, decimals, notes, number, patches, prefix, rows, visible

MAP_WIDTH = 48
HEADER = 10  # columns that a heading may take


def show(relevance: Relevance, *, console: Console | None = None) -> None:
    """Print the tokens coloured by `relevance.row`, the token x layer table, the recipe, and what else must be known.

    The patches of an image are a map with their highest places in words, and the table holds the other tokens.
    Colours of the line and of the table each have a scale of their own; what is exactly 0 has none, and is written 0.
    Where the output is no terminal, or NO_COLOR is set, the same numbers come as plain text, and the map as per cent
    of its range.
    """
    console = console or Console()
    scores, coloured = relevance.row, _coloured(console)
    signed = is_signed(relevance.scores)
    if relevance.grid is None:
        ends = text_scale(scores, signed=signed)
        _print(console, _token_line(relevance, ends, console.width))
    else:
        scores = patches(relevance, scores)
        ends = patch_scale(scores, signed=signed)
        _print(console, _patch_map(scores, ends, console.width, coloured=coloured))
    _print(console, _table(relevance, console.width))
    zero = "without colour" if coloured else "0" if relevance.grid is None else "·"
    for line in [caption(relevance), *(visible(note) for note in notes(relevance, scores, ends, zero=zero))]:
        console.print(Text(line, style="dim"), soft_wrap=True)


def _coloured(console: Console) -> bool:
    """Whether the terminal shows a ramp: of sixteen colours the nearest ones are in no order."""
    return not console.no_color and console.color_system in ("256", "truecolor")


def _print(console: Console, lines: Iterator[Text]) -> None:
    """Each line as it is, with an empty line after the last."""
    printed = False
    for line in lines:
        console.print(line, soft_wrap=True)
        printed = True
    if printed:
        console.print()


def _painted(text: str, score: float, ends: Scale) -> Text:
    """The text on the colour of its score; as it is, where that is exactly 0."""
    if score == 0:
        return Text(text, style="dim")
    return _on(rgb(ends.ramp(GROUND), ends.share(score)), text)


def _on(ground: RGB, text: str) -> Text:
    return Text(text, style=Style(color=_colour(ink(ground)), bgcolor=_colour(ground)))


def _colour(value: RGB) -> Color:
    return Color.from_rgb(*value)


def _token_line(relevance: Relevance, ends: Scale, width: int) -> Iterator[Text]:
    """The tokens in reading order, as many to a line as fit; a token wider than a line is folded."""
    line = Text()
    for token, score in zip(relevance.tokens, relevance.row.tolist(), strict=True):
        for piece in _folded(f" {visible(token)} ", width):
            if line and cell_len(line.plain) + cell_len(piece) > width:
                yield line
                line = Text()
            line.append_text(_painted(piece, score, ends))
    yield line


def _folded(text: str, width: int) -> Iterator[str]:
    piece = ""
    for character in text:
        if piece and cell_len(piece + character) > width:
            yield piece
            piece = ""
        piece += character
    yield piece


def _table(relevance: Relevance, width: int) -> Iterator[Text]:
    """Tokens down, layers (or tokens written) across, in blocks of as many as fit the width."""
    positions = prefix(relevance) if relevance.grid else list(range(len(relevance.tokens)))
    if not positions:
        return
    scores, columns, name = rows(relevance)
    scores = scores[:, positions]
    signed, digits = is_signed(relevance.scores), decimals(scores)
    numbers = [[number(score, digits, signed=signed) for score in layer] for layer in scores.tolist()]
    cell = 2 + max(len(text) for layer in numbers for text in layer)
    cell = max(cell, 2 + min(HEADER, max(cell_len(column) for column in columns)))
    labels = _labels([relevance.tokens[position] for position in positions], width - cell - 5)
    margin = 5 + cell_len(labels[0])
    block = max(1, (width - margin) // cell)
    ends = scale(scores, signed=signed)
    for start in range(0, len(numbers), block):
        chosen = range(start, min(start + block, len(numbers)))
        if start:
            yield Text()
        header = "".join(_right(columns[layer], cell - 2) for layer in chosen)
        yield Text(set_cell_size(name.rjust(margin - 1), margin) + header, style="dim")
        for row, (position, label) in enumerate(zip(positions, labels, strict=True)):
            line = Text().append(f"{position:>3} ", style="dim").append(f"{label} ")
            for layer in chosen:
                line.append_text(_painted(_right(numbers[layer][row], cell - 2), float(scores[layer, row]), ends))
            yield line


def _right(label: str, width: int) -> str:
    """The label at the right of a column, cut where it is wider, with a space on either side."""
    shown = label if cell_len(label) <= width else set_cell_size(label, width)
    return f" {' ' * (width - cell_len(shown))}{shown} "


def _labels(tokens: Sequence[str], width: int) -> list[str]:
    """The tokens as labels of one width; those longer than it, or than 24 columns, end in an ellipsis."""
    shown = [visible(token) for token in tokens]
    longest = max(4, min(LONGEST_LABEL, width, max(cell_len(token) for token in shown)))
    return [
        set_cell_size(token if cell_len(token) <= longest else set_cell_size(token, longest - 1) + "…", longest)
        for token in shown
    ]


def _patch_map(grid: NDArray[np.float64], ends: Scale, width: int, *, coloured: bool) -> Iterator[Text]:
    digits = decimals(grid)
    low, high = (number(end, digits, signed=ends.signed) for end in (ends.low, ends.high))
    for place, frame in enumerate(grid.reshape(-1, *grid.shape[-2:])):
        if grid.ndim == 3:
            yield Text(f"frame {place}:")
        yield from _blocks(frame, ends, width) if coloured else _percents(frame, ends, width)
    if coloured:
        swatch = Text(f"{low} ")
        for share in np.linspace(0, 1, 13).tolist():
            swatch.append_text(_on(rgb(ends.ramp(GROUND), share), " "))
        yield swatch.append(f" {high}{ends.top}")
    elif ends.signed:
        yield Text(f"per cent of {high}{ends.top}")
    else:
        yield Text(f"per cent of the way from {low} to {high}{ends.top}")
    yield _places("highest", np.argsort(-grid, axis=None, kind="stable")[:3], grid, ends)
    if ends.signed:
        yield _places("lowest", np.argsort(grid, axis=None, kind="stable")[:3], grid, ends)


def _places(which: str, chosen: NDArray[np.intp], grid: NDArray[np.float64], ends: Scale) -> Text:
    """Where some patches are, and what they score."""
    digits = decimals(grid)
    places = zip(*np.unravel_index(chosen, grid.shape), strict=True)
    named = (
        f"({', '.join(map(str, place))}) {number(float(grid[place]), digits, signed=ends.signed)}" for place in places
    )
    axes = "frame, row, column" if grid.ndim == 3 else "row, column"
    return Text(f"{which} at ({axes}): " + "; ".join(named))


def _blocks(grid: NDArray[np.float64], ends: Scale, width: int) -> Iterator[Text]:
    """Square patches: a character cell is twice as high as wide, so its two halves are two rows of the map."""
    size = max(1, min(MAP_WIDTH, width) // grid.shape[1])
    halves = grid.repeat(size, axis=0).repeat(size, axis=1)[:, :width]
    for top in range(0, len(halves), 2):
        line = Text()
        for column, score in enumerate(halves[top].tolist()):
            upper = _ground(score, ends)
            lower = _ground(float(halves[top + 1, column]), ends) if top + 1 < len(halves) else None
            if upper is None:
                line.append("▄" if lower else " ", Style(color=lower))
            else:
                line.append("▀", Style(color=upper, bgcolor=lower))
        yield line


def _ground(score: float, ends: Scale) -> Color | None:
    """The colour of a patch; none where it is exactly 0."""
    return None if score == 0 else _colour(rgb(ends.ramp(GROUND), ends.share(score)))


def _percents(grid: NDArray[np.float64], ends: Scale, width: int) -> Iterator[Text]:
    """Per cent of the way along the scale, or from 0 to its end either way; a point where a patch is exactly 0."""
    cell = 5 if ends.signed else 4
    block = max(1, width // cell)
    for start in range(0, grid.shape[1], block):
        if start:
            yield Text(f"columns from {start}:")
        for row in grid[:, start : start + block].tolist():
            yield Text("".join(f"{_percent(score, ends):>{cell}}" for score in row))


def _percent(score: float, ends: Scale) -> str:
    if score == 0:
        return "·"
    return f"{200 * ends.share(score) - 100:+.0f}" if ends.signed else f"{100 * ends.share(score):.0f}"
