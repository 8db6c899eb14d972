"""A page of photographs, each with its grade, what was predicted, and its maps side by side; it works offline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from attnflow.capturing.vision import open_image
from attnflow.files import write_whole
from attnflow.show.overlay import blended

SIDE = 320  # pixels, the longer side of a picture

_STYLE = """
:root { color-scheme: light; font: 16px/1.5 ui-sans-serif, system-ui, sans-serif; }
body { max-width: 1500px; margin: 2rem auto; padding: 0 1rem; color: #1c2733; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
li { margin: .3rem 0; max-width: 75ch; }
.warning { padding: .7rem 1rem; border-left: 4px solid #b45309; background: #fff7ed; max-width: 75ch; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: .75rem; max-width: 1500px; }
figure { margin: 0; } img { width: 100%; display: block; border-radius: 4px; background: #000; }
figcaption { font-size: .85rem; color: #475569; }
"""


class Explained(NamedTuple):
    """A photograph with its grade, the grade and the probability of disease predicted, and maps (row, column)."""

    path: Path
    grade: int
    predicted: int
    disease: float
    maps: Mapping[str, NDArray[np.float64]]


def write_page(folder: Path, shown: Sequence[Explained], words: Sequence[str]) -> Path:
    """Write `folder`/index.html and the pictures that it shows; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate(shown):
        image = open_image(one.path)
        image.thumbnail((SIDE, SIDE))
        _save(image, folder / f"{number:03}.png")
        for name, grid in one.maps.items():
            _save(blended(grid, image), folder / f"{number:03}-{name}.png")
    text = "\n".join(_lines(shown, words))
    return write_whole(folder / "index.html", lambda file: file.write(text.encode()))


def _save(image: Image.Image, path: Path) -> None:
    write_whole(path, lambda file: image.save(file, format="PNG"))


def _lines(shown: Sequence[Explained], words: Sequence[str]) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>What the model looked at</title><style>{_STYLE}</style></head><body>"
    yield "<h1>What the model looked at in photographs of the retina</h1>"
    yield '<p class="warning"><strong>Not a diagnosis.</strong> The maps show what a model attended to or is '
    yield "sensitive to. A bright place is not a lesion, and a lesion may be dark.</p><ul>"
    yield from (f"<li>{escape(sentence)}</li>" for sentence in words)
    yield "</ul><p>Bright is more. Each map has its own scale, from its lowest patch to its 99th percentile.</p>"
    for number, one in enumerate(shown):
        yield f"<h2>{escape(one.path.name)}</h2>"
        yield (
            f"<p>Grade {one.grade}; predicted grade {one.predicted}, probability of disease {one.disease:.2f}, by a "
            'probe that was not trained on this photograph.</p><div class="row">'
        )
        yield _figure(f"{number:03}.png", "photograph")
        yield from (_figure(f"{number:03}-{name}.png", name) for name in one.maps)
        yield "</div>"
    yield "</body></html>"


def _figure(source: str, caption: str) -> str:
    return (
        f'<figure><img src="{escape(source)}" alt="{escape(caption)}" loading="lazy">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
