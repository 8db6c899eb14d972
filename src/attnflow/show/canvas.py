"""What every picture shares: a figure without global state, literal text in fonts that have its characters, files."""

from __future__ import annotations

import os
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
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure

from attnflow.files import write_whole
from attnflow.memory import check_memory
from attnflow.relevance import PICTURES
from attnflow.show.colour import Ramp, Scale, colours
from attnflow.show.wording import shortened, visible

FONT = "DejaVu Sans"  # comes with matplotlib, so that a picture is the same on every machine
LABELS = 120
_FILES: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "attnflow", "pdf.fonttype": 42}
_NO_DATE: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}


def blank(width: float, height: float, *, layout: Literal["constrained", "compressed"] = "constrained") -> Figure:
    """An empty white figure, in inches; compressed where the panels keep a ratio of their own."""
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def colour_map(ramp: Ramp) -> Colormap:
    """A ramp as matplotlib wants it; what is not a number is left white."""
    return ListedColormap(colours(ramp, np.linspace(0, 1, 256)), name="attnflow").with_extremes(bad="white")


def literal(texts: Iterable[str]) -> dict[str, Any]:
    """Settings of matplotlib's text under which `texts` appear as they are: no mathtext, no TeX, no empty boxes."""
    return {"parse_math": False, "usetex": False, "family": _families(frozenset("".join(texts)))}


def label_tokens(axis: Axis, tokens: Sequence[str], size: float, **settings: Any) -> None:
    """A tick for every token, or for every second, third, ... where there are more than 120 of them."""
    positions = range(0, len(tokens), -(-len(tokens) // LABELS))
    shown = [shortened(tokens[position]) for position in positions]
    axis.set_ticks(list(positions), shown, fontsize=size, **literal(shown), **settings)


def title(axes: Axes, text: str) -> None:
    """A title at the left, in literal text."""
    text = visible(text)
    axes.set_title(text, loc="left", fontsize=10, **literal([text]))


def colour_bar(figure: Figure, mesh: Any, axes: Axes | Sequence[Axes], ends: Scale, **settings: Any) -> None:
    """The scores of six evenly spaced colours, both ends among them; and the highest, where it lies beyond."""
    bar = figure.colorbar(
        mesh, ax=axes, pad=0.02, extend="neither" if ends.highest is None else "max", extendfrac=0.03, **settings
    )
    if ends.highest is not None:
        bar.set_label(f"highest {ends.highest:.3g}", fontsize=8)
    scores = ends.low + (ends.high - ends.low) * np.linspace(0, 1, 6) ** (1 / ends.power)
    bar.set_ticks(scores.tolist(), labels=[f"{score:.3g}" for score in scores])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=8, length=3)
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
def _families(characters: frozenset[str]) -> list[str]:
    """The usual font, then as many of the installed ones as the characters that it lacks call for."""
    families = [FONT]
    missing = {ord(character) for character in characters} - _characters(font_manager.findfont(FONT))
    for entry in font_manager.fontManager.ttflist:
        # Its glyphs are labelled boxes, one for every character there is.
        if not missing or entry.name.startswith("Last Resort"):
            continue
        found = missing & _characters(entry.fname)
        if found and entry.style == "normal":
            missing -= found
            families.append(entry.name)
    return [*families, "sans-serif"]  # for viewers of .svg that have none of these


@cache
def _characters(path: str) -> frozenset[int]:
    return frozenset(font_manager.get_font(path).get_charmap())
