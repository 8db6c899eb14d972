"""What every picture shares: a figure without global state, literal text in fonts that have its characters, files."""

from __future__ import annotations

import os
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from attnflow.answer import PICTURES
from attnflow.files import write_whole
from attnflow.memory import check_memory
from attnflow.show.colour import Ramp, Scale, colours
from attnflow.show.wording import shortened, visible

FONT = "DejaVu Sans"  # comes with matplotlib, so that a picture is the same on every machine
LABELS = 120
LABEL = 0.15  # inches that a label takes across its axis
SMALL = 8  # points, of labels and of the foot
FOOT_LINE = 0.16  # inches from one line of the foot to the next
_WIDE = 0.6  # of a font's size: what a character of a line takes, at most on average
_FILES: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "attnflow", "pdf.fonttype": 42}
_NO_DATE: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def blank(width: float, height: float, *, layout: Literal["constrained", "compressed"] = "constrained") -> Figure:
    """An empty white figure, in inches; compressed where the panels keep a ratio of their own."""
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def colour_map(ramp: Ramp) -> Colormap:
    """A ramp as matplotlib wants it; what is not a number is left out."""
    return ListedColormap(colours(ramp, np.linspace(0, 1, 256)), name="attnflow").with_extremes(bad=(0, 0, 0, 0))


def scores_drawn(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores with NaN for what is exactly 0, so that the hatching behind is seen."""
    return np.where(scores == 0, np.nan, scores)


def hatch(patch: Patch) -> None:
    """Hatch a patch in grey on white; that of some axes is seen where nothing is drawn."""
    patch.set(facecolor="white", edgecolor="#b0b6be", hatch="/////", linewidth=0)


def literal(texts: Iterable[str]) -> dict[str, Any]:
    """Settings of matplotlib's text under which `texts` appear as they are: no mathtext, no TeX, no empty boxes."""
    return {"parse_math": False, "usetex": False, "family": _fonts(frozenset("".join(texts)))[0]}


def label_tokens(axis: Axis, tokens: Sequence[str], room: float, **settings: Any) -> None:
    """A tick for every token, or for every second, third, ... where they would overlap in `room` inches, or be many."""
    most = max(1, min(LABELS, int(room / LABEL)))
    positions = range(0, len(tokens), -(-len(tokens) // most))
    shown = [shortened(tokens[position]) for position in positions]
    axis.set_ticks(list(positions), shown, fontsize=SMALL, **literal(shown), **settings)


def title(axes: Axes, text: str, width: float = 7.0) -> None:
    """A title at the left in literal text, in as many lines as `width` inches call for."""
    text = "\n".join(wrapped(visible(text), width, 10))
    axes.set_title(text, loc="left", fontsize=10, **literal([text]))


def head(figure: Figure, text: str) -> None:
    """A title over the whole figure, which grows by all lines but the first."""
    lines = wrapped(visible(text), figure.get_figwidth(), 10)
    _grow(figure, 1.2 * FOOT_LINE * (len(lines) - 1))
    figure.suptitle("\n".join(lines), fontsize=10, **literal(lines))


def foot(figure: Figure, notes: Iterable[str], texts: Iterable[str]) -> None:
    """Each note once in small print under everything else; the figure grows by their lines.

    texts: what else the figure says, of which the last note tells the characters that no font here has.
    """
    if lines := foot_lines(notes, texts, figure.get_figwidth()):
        _grow(figure, FOOT_LINE * len(lines))
        figure.supxlabel("\n".join(lines), fontsize=SMALL, x=0.01, ha="left", **literal(lines))


def foot_lines(notes: Iterable[str], texts: Iterable[str], width: float) -> list[str]:
    """The lines of `foot` for a figure of `width` inches."""
    notes = [visible(note) for note in dict.fromkeys(notes)]
    if (without_font := lacking([*texts, *notes])) is not None:
        notes.append(without_font)
    return [line for note in notes for line in wrapped(note, width, SMALL)]


def lacking(texts: Iterable[str]) -> str | None:
    """Which characters no font of this machine has, by script; None if there is none."""
    characters = frozenset("".join(visible(text) for text in texts))
    boxes = sorted(chr(code) for code in _fonts(characters)[1])
    if not boxes:
        return None
    scripts = sorted({_script(character) for character in boxes})
    many = "1 character is" if len(boxes) == 1 else f"{len(boxes)} characters are"
    return f"{many} drawn as boxes, since no font of this machine has them ({', '.join(scripts)}): install one that has"


def _script(character: str) -> str:
    """The first word of a letter's name in Unicode, which is that of its script."""
    letter = unicodedata.category(character)[0] in "LM"
    return unicodedata.name(character).split()[0] if letter else "symbols"


def wrapped(text: str, width: float, size: float) -> list[str]:
    """Visible text in lines that `width` inches hold at `size` points."""
    return textwrap.wrap(text, max(20, int(width * 72 / (_WIDE * size)))) or [""]


def _grow(figure: Figure, height: float) -> None:
    figure.set_figheight(figure.get_figheight() + height)


def norm(ends: Scale) -> PowerNorm:
    """The scale as matplotlib wants it."""
    return PowerNorm(ends.power, ends.low, _top(ends))


def _top(ends: Scale) -> float:
    """The upper end, set apart from the lower one where both are the same number."""
    return ends.high if ends.high > ends.low else ends.low + 1


def colour_bar(figure: Figure, mesh: Any, ends: Scale, **place: Any) -> None:
    """The scores of five or six equally spaced colours, both ends among them; at an upright bar the highest beyond.

    place: where, as matplotlib takes it.
    """
    beyond = "neither" if ends.highest is None else "both" if ends.signed else "max"
    bar = figure.colorbar(mesh, extend=beyond, extendfrac=0.03, **place)
    if ends.highest is not None and bar.orientation == "vertical":
        bar.set_label(f"{'farthest' if ends.signed else 'highest'} {ends.highest:.3g}", fontsize=SMALL)
    shares = np.linspace(0, 1, 5 if ends.signed else 6)
    scores = ends.low + (_top(ends) - ends.low) * shares ** (1 / ends.power)
    sign = "+" if ends.signed else ""
    bar.set_ticks(scores.tolist(), labels=["0" if abs(s) < 1e-9 * scores[-1] else f"{s:{sign}.3g}" for s in scores])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL, length=3)
    bar.outline.set_visible(False)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as .png (200 dpi), .svg or .pdf (both with real text), whole or not at all.

    No dates or random names: a picture drawn anew gives the same bytes. Raises ValueError for any other suffix.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise ValueError(f"cannot write {path.name!r}: the suffix of a picture must be one of {', '.join(PICTURES)}")
    kind = suffix[1:]
    if kind == "png":
        width, height = (round(200 * inches) for inches in figure.get_size_inches())
        # Four bytes a pixel: the canvas, the layer drawn last, and the picture that is compressed.
        check_memory(12 * width * height, f"a picture of {width:,} x {height:,} pixels", "write it as .svg or .pdf")

    def write(file: IO[bytes]) -> None:
        with matplotlib.rc_context(_FILES), warnings.catch_warnings():
            # No font here has the character: a box is drawn, and .svg keeps the character itself.
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            figure.savefig(file, format=kind, dpi=200, metadata=_NO_DATE[kind])

    return write_whole(path, write)


@cache
def _fonts(characters: frozenset[str]) -> tuple[list[str], frozenset[int]]:
    """The usual font, then those of the installed ones that have characters that it lacks; and codes that all lack."""
    families = [FONT]
    missing = {ord(character) for character in characters if not _drawn_as_nothing(character)}
    missing -= _characters(font_manager.findfont(FONT))
    for entry in font_manager.fontManager.ttflist:
        # Its glyphs are labelled boxes, one for every character there is.
        if not missing or entry.name.startswith("Last Resort"):
            continue
        found = missing & _characters(entry.fname)
        if found and entry.style == "normal":
            missing -= found
            families.append(entry.name)
    return [*families, "sans-serif"], frozenset(missing)  # for viewers of .svg that have none of these


def _drawn_as_nothing(character: str) -> bool:
    """A line's end, and what only tells how its neighbours are drawn: joiners, and variants of emoji."""
    return character == "\n" or unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


@cache
def _characters(path: str) -> frozenset[int]:
    try:
        return frozenset(font_manager.get_font(path).get_charmap())
    except (OSError, RuntimeError):  # a font of bitmaps, which matplotlib cannot draw, or a file that is gone
        return frozenset()
