"""A text as a picture: its tokens in reading order, each on its colour, in lines that wrap."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.show.canvas import FOOT_LINE, SMALL, colour_bar, colour_map, foot_lines, hatch, literal, norm, wrapped
from attnflow.show.colour import PAPER, Scale, ink, is_signed, rgb, text_scale
from attnflow.show.wording import APART, layers, rows, said_of, title_with, visible

WIDTH = 8.0  # inches of a text of up to a thousand tokens; longer ones are wider, as their square root
SIZE = 10.0  # points
LINE = 0.23  # inches from one line to the next
BOX = 0.19  # inches that a token's colour is high
SPACE = 0.035  # inches on either side of a token, within its colour
GAP = 0.02  # inches between colours
LABEL = 0.24  # inches that the name of a text takes above it
BAR = 0.45  # inches that the scale and its numbers take
MARGIN = 0.12
LONGEST = 320.0  # inches, what a .png of 200 dots per inch may be high


class Piece(NamedTuple):
    """Text of one token that stands on one line: its line, left edge and width in inches."""

    position: int
    text: str
    line: int
    left: float
    width: float


def text_lines(relevance: Relevance | Sequence[Relevance]) -> Figure:
    """The tokens in lines that wrap, coloured by the score of the topmost layer, with the scale under them.

    Tokens that a model wrote and groups, seen from one layer, have a text each, on one scale; of other queries it is
    the mean. Colours run from 0 to the highest score that is not dominant (`colour.text_scale`), and the foot names
    those beyond. Of several relevances of one input each has a text, on one scale, with its name above.

    Raises ValueError where the lines would fill more than a picture can hold, and for relevances of other tokens.
    """
    several = [relevance] if isinstance(relevance, Relevance) else list(relevance)
    if not several or any(one.tokens != several[0].tokens for one in several):
        raise ValueError("the texts have different tokens, or there is none; compare relevances of one input")
    first = several[0]
    if len(several) == 1:
        scores, labels, kind = rows(first)
        apart = kind in APART
        scores, labels = (scores, [f"{kind} {label}" for label in labels]) if apart else (first.row[None], [""])
        heading = title_with(first, layers(first) if apart else _layer(first))
    else:
        apart, scores = True, np.stack([one.row for one in several])
        labels = [title_with(one, _layer(one)) for one in several]
        heading = f"{len(several)} methods on one scale"
    ends = text_scale(scores, signed=any(is_signed(one.scores) for one in several))
    width = WIDTH * max(1.0, np.sqrt(len(first.tokens) / 1000))
    shown = [visible(token) or " " for token in first.tokens]
    pieces = list(_placed(shown, width))
    each = 0.05 + LINE * (max(piece.line for piece in pieces) + 1) + (LABEL if apart else 0)
    if each * len(scores) > LONGEST:
        raise ValueError(
            f"{len(scores)} texts of {len(shown)} tokens fill {each * len(scores):.0f} inches, more than the "
            f"{LONGEST:.0f} of a picture; explain fewer queries, or save .json"
        )
    above = wrapped(visible(heading), width, 10)
    drawn = [scores if apart else scores[0]] if len(several) == 1 else list(scores)
    said = said_of(several, drawn, [ends] * len(several))
    below = foot_lines(said, [*shown, *labels], width)
    page = _Page(width, [0.2 * len(above) + 0.1, each * len(scores), BAR, FOOT_LINE * len(below)])
    page.write(0, above, 10)
    axes = page.panel(1)
    for number, (row, label) in enumerate(zip(scores, labels, strict=True)):
        top = number * each
        if apart:
            axes.text(0, top + 0.72 * LABEL, label, fontsize=SMALL, color="#475569", **literal([label]))
        _draw(axes, pieces, row, ends, top + (LABEL if apart else 0))
    mesh = ScalarMappable(norm(ends), colour_map(ends.ramp(PAPER)))
    colour_bar(page.figure, mesh, ends, cax=page.bar(2), orientation="horizontal")
    page.write(3, below, SMALL)
    return page.figure


class _Page:
    """A figure of parts under one another, whose axes count inches from the top left of their part."""

    def __init__(self, width: float, parts: Sequence[float]) -> None:
        self.width, self.parts = width, parts
        self.size = (width + 2 * MARGIN, sum(parts) + 2 * MARGIN)
        self.figure = Figure(figsize=self.size, facecolor="white")

    def panel(self, number: int, left: float = 0.0, width: float | None = None, height: float | None = None) -> Axes:
        """Axes over a part, or as wide and high as is said from its top on."""
        width, height = width or self.width, height or self.parts[number]
        top = MARGIN + sum(self.parts[:number])
        bottom = self.size[1] - top - height
        place = ((MARGIN + left) / self.size[0], bottom / self.size[1], width / self.size[0], height / self.size[1])
        axes = self.figure.add_axes(place)
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        return axes

    def bar(self, number: int) -> Axes:
        """Thin axes at the top of a part, for a scale."""
        axes = self.panel(number, left=0.3, width=0.5 * self.width, height=0.1)
        axes.set_axis_on()
        return axes

    def write(self, number: int, lines: Sequence[str], size: float) -> None:
        """Lines of text from the top of a part."""
        if lines:
            self.panel(number).text(0, 0, "\n".join(lines), fontsize=size, va="top", linespacing=1.25, **literal(lines))


def _layer(relevance: Relevance) -> str:
    topmost = f"layer {relevance.layers[-1]}"
    return topmost if len(relevance.layers) == 1 else f"{topmost}, the topmost of {len(relevance.layers)}"


def _measure(tokens: Sequence[str]) -> Callable[[str], float]:
    """Tells how many inches a text made of the characters of `tokens` takes."""
    figure = Figure(dpi=200)  # as .png files are written: hinting makes widths depend on it
    renderer: Any = FigureCanvasAgg(figure).get_renderer()
    artist = figure.text(0, 0, "", fontsize=SIZE, **literal(tokens))

    @cache
    def measure(text: str) -> float:
        artist.set_text(text)
        with warnings.catch_warnings():
            # No font here has the character: a box is drawn, and the foot says so.
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            return max(0.04, artist.get_window_extent(renderer).width / figure.dpi)

    return measure


def _placed(tokens: Sequence[str], width: float) -> Iterator[Piece]:
    """Where each token stands; one wider than a line is cut into pieces."""
    measure = _measure(tokens)
    line, left = 0, 0.0
    for position, token in enumerate(tokens):
        for text in _cut(token, measure, width - 2 * SPACE):
            taken = measure(text) + 2 * SPACE
            if left and left + taken > width:
                line, left = line + 1, 0.0
            yield Piece(position, text, line, left, taken)
            left += taken + GAP


def _cut(token: str, measure: Callable[[str], float], width: float) -> Iterator[str]:
    if measure(token) <= width:
        yield token
        return
    piece = ""
    for character in token:
        if piece and measure(piece + character) > width:
            yield piece
            piece = ""
        piece += character
    yield piece


def _draw(axes: Axes, pieces: Sequence[Piece], scores: NDArray[np.float64], ends: Scale, start: float) -> None:
    """The pieces from `start` inches on."""
    fonts = literal([piece.text for piece in pieces])
    for piece in pieces:
        score, top = float(scores[piece.position]), start + piece.line * LINE
        ground = rgb(ends.ramp(PAPER), ends.share(score)) if score else (255, 255, 255)
        box = Rectangle((piece.left, top), piece.width, BOX, linewidth=0, facecolor=np.array(ground) / 255)
        if score == 0:
            hatch(box)
        axes.add_patch(box)
        colour = np.array(ink(ground)) / 255
        axes.text(piece.left + SPACE, top + 0.74 * BOX, piece.text, fontsize=SIZE, color=colour, **fonts)
