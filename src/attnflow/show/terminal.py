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

from attnflow.relevance import Relevance
from attnflow.show.colour import GROUND, RGB, Scale, ink, patch_scale, rgb, scale
from attnflow.show.wording import LONGEST_LABEL, caption, decimals, patches, prefix, rows, visible

MAP_WIDTH = 48
HEADER = 10  # columns that a heading may take


def show(relevance: Relevance, *, console: Console | None = None) -> None:
    """Print the tokens coloured by `relevance.row`, the token x layer table and the recipe.

    The patches of an image are a map with their highest places in words, and the table holds the other tokens.
    Colours of the line and of the table each run from 0 to their own highest score. Where the output is no
    terminal the same numbers come as plain text, and the map as per cent of its range.
    """
    console = console or Console()
    if relevance.grid is None:
        _print(console, _token_line(relevance, console.width))
    else:
        _print(console, _patch_map(relevance, console.width, coloured=console.color_system is not None))
    _print(console, _table(relevance, console.width))
    console.print(Text(caption(relevance), style="dim"), soft_wrap=True)


def _print(console: Console, lines: Iterator[Text]) -> None:
    """Each line as it is, with an empty line after the last."""
    printed = False
    for line in lines:
        console.print(line, soft_wrap=True)
        printed = True
    if printed:
        console.print()


def _painted(text: str, score: float, ends: Scale) -> Text:
    ground = rgb(GROUND, ends.share(score))
    return Text(text, style=Style(color=_colour(ink(ground)), bgcolor=_colour(ground)))


def _colour(value: RGB) -> Color:
    return Color.from_rgb(*value)


def _token_line(relevance: Relevance, width: int) -> Iterator[Text]:
    """The tokens in reading order, as many to a line as fit; a token wider than a line is folded."""
    ends = scale(relevance.row)
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
    numbers = [[f"{score:.{decimals(scores)}f}" for score in layer] for layer in scores.tolist()]
    cell = 2 + max(len(number) for layer in numbers for number in layer)
    cell = max(cell, 2 + min(HEADER, max(cell_len(column) for column in columns)))
    labels = _labels([relevance.tokens[position] for position in positions], width - cell - 5)
    margin = 5 + cell_len(labels[0])
    block = max(1, (width - margin) // cell)
    ends = scale(scores)
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


def _patch_map(relevance: Relevance, width: int, *, coloured: bool) -> Iterator[Text]:
    grid = patches(relevance, relevance.row)
    ends = patch_scale(grid)
    digits = decimals(grid)
    for number, frame in enumerate(grid.reshape(-1, *grid.shape[-2:])):
        if grid.ndim == 3:
            yield Text(f"frame {number}:")
        yield from _blocks(frame, ends, width) if coloured else _percents(frame, ends, width)
    if coloured:
        swatch = Text(f"{ends.low:.{digits}f} ")
        for share in np.linspace(0, 1, 12).tolist():
            swatch.append_text(_painted(" ", share, Scale(0, 1)))
        yield swatch.append(f" {ends.high:.{digits}f}{ends.top}")
    else:
        yield Text(f"per cent of the way from {ends.low:.{digits}f} to {ends.high:.{digits}f}{ends.top}")
    best = np.argsort(-grid, axis=None, kind="stable")[:3]
    places = zip(*np.unravel_index(best, grid.shape), strict=True)
    named = (f"({', '.join(map(str, place))}) {grid[place]:.{digits}f}" for place in places)
    axes = "frame, row, column" if grid.ndim == 3 else "row, column"
    yield Text(f"highest at ({axes}): " + "; ".join(named))


def _blocks(grid: NDArray[np.float64], ends: Scale, width: int) -> Iterator[Text]:
    """Square patches: a character cell is twice as high as wide, so its two halves are two rows of the map."""
    size = max(1, min(MAP_WIDTH, width) // grid.shape[1])
    halves = grid.repeat(size, axis=0).repeat(size, axis=1)[:, :width]
    for top in range(0, len(halves), 2):
        line = Text()
        for column, score in enumerate(halves[top].tolist()):
            upper = _colour(rgb(GROUND, ends.share(score)))
            if top + 1 < len(halves):
                lower = _colour(rgb(GROUND, ends.share(float(halves[top + 1, column]))))
                line.append("▀", Style(color=upper, bgcolor=lower))
            else:
                line.append("▀", Style(color=upper))
        yield line


def _percents(grid: NDArray[np.float64], ends: Scale, width: int) -> Iterator[Text]:
    block = max(1, width // 4)
    for start in range(0, grid.shape[1], block):
        if start:
            yield Text(f"columns from {start}:")
        for row in grid[:, start : start + block].tolist():
            yield Text("".join(f"{round(100 * ends.share(score)):>4}" for score in row))
