"""Curves of a score as tokens are removed or shown, for papers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from scipy.integrate import trapezoid

from attnflow.show.canvas import SMALL, blank, literal
from attnflow.show.listing import Line
from attnflow.show.wording import visible

# Of Okabe & Ito, told apart by every kind of colour vision; the grey ones are set apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
APART = "#6b727c"
DASHES = ("-", "--", "-.", ":")


def curves(lines: Sequence[Line], across: str, *, marks: Sequence[str] = (), ax: Axes | None = None) -> Axes:
    """Each line with its interval as a band, and its area in the legend; returns the axes.

    across: what the shares are of. marks: labels of lines that are grey, broken and without a band. ax: axes to
    draw on; by default those of a new figure.
    """
    axes = blank(5.2, 3.4).subplots() if ax is None else ax
    own = [line.label for line in lines if line.label not in marks]
    for line in lines:
        if line.label in marks:
            colour, dashes = APART, (":", "--")[list(marks).index(line.label) % 2]
        else:
            place = own.index(line.label)
            colour, dashes = COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]
        name = f"{visible(line.label)} ({trapezoid(line.mean, line.shares):.3f})"
        axes.plot(line.shares, line.mean, dashes, color=colour, label=name, linewidth=1.5)
        if line.label not in marks and np.isfinite(line.low).all():
            axes.fill_between(line.shares, line.low, line.high, color=colour, alpha=0.12, linewidth=0)
    axes.set_xlim(0, 1)
    axes.set_xlabel(f"share of {across}")
    axes.set_ylabel("score")
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(title="area under the mean", fontsize=SMALL, title_fontsize=SMALL, frameon=False)
    for text in legend.get_texts():
        text.set(**literal([text.get_text()]))
    return axes
