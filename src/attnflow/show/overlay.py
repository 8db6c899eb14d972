"""Relevance of an image's patches: the map alone, and over the photograph."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from attnflow.relevance import Relevance
from attnflow.show.canvas import blank, colour_bar, colour_map, literal
from attnflow.show.colour import GROUND, Scale, colours, patch_scale
from attnflow.show.wording import method_and_query, patches, visible

PANEL = 4.0  # inches, the longer side
LARGEST = 1600  # pixels, twice what a panel shows at 200 dpi
FRAMES = 8  # of a video, in one line
BAR = 0.14
WIDTH = 4.5  # inches, what a title needs
ALPHA = 0.55
GREY = (0.25, 1.0)  # the photograph under the map is lightened: both together would be dark


def patch_map(relevance: Relevance) -> Figure:
    """The patches of the topmost layer as squares, coloured as in `overlay`; other tokens left out.

    The frames of a video stand in rows of at most eight, on one scale.

    Raises ValueError where there is no grid.
    """
    grid = patches(relevance, relevance.row)
    ends = patch_scale(grid)
    frames = grid.reshape(-1, *grid.shape[-2:])
    lines, beside = -(-len(frames) // FRAMES), min(len(frames), FRAMES)
    width, height = (side / min(beside, 2) for side in _panel(frames[0].shape))
    title = 0.3 if grid.ndim == 3 else 0
    figure = blank(max(WIDTH, beside * width + 1.2), lines * (height + title) + 0.6, layout="compressed")
    panels = figure.subplots(lines, beside, squeeze=False)
    meshes = [
        axes.imshow(frame, cmap=colour_map(GROUND), interpolation="nearest", vmin=ends.low, vmax=ends.high)
        for frame, axes in zip(frames, panels.flat, strict=False)
    ]
    for number, axes in enumerate(panels.flat):
        axes.set_visible(number < len(frames))
        axes.set_xticks(_ticks(frames.shape[2]))
        axes.set_yticks(_ticks(frames.shape[1]))
        if title:
            axes.set_title(f"frame {number}", fontsize=8)
    _finish(figure, panels, meshes[0], ends, relevance, (width, lines * height))
    return figure


def overlay(relevance: Relevance, image: Any) -> Figure:
    """The photograph beside itself, in grey, under the map of its patches; prefix tokens left out.

    image: a PIL image, or an array (row, column) or (row, column, channel), bytes or floats from 0 to 1. The patches
    are taken to tile all of it: where the model saw a crop, give the crop. The map is of the topmost layer, bilinear
    between the centres of the patches. Its colours run from the lowest patch to the highest, or to the 99th
    percentile of a hundred or more, so that one patch cannot darken all others; the colour bar tells both.

    Raises ValueError where there is no grid, the grid is of a video, or `image` is no image.
    """
    grid = patches(relevance, relevance.row)
    if grid.ndim != 2:
        raise ValueError(
            f"these scores are of {len(grid)} frames of a video, and lie over no single image; leave it out"
        )
    ends = patch_scale(grid)
    photograph = _photograph(image)
    width, height = _panel(photograph.shape[:2])
    figure = blank(max(WIDTH, 2 * width + 1.2), height + 0.6, layout="compressed")
    plain, covered = figure.subplots(1, 2)
    plain.imshow(photograph)
    brightness = photograph @ np.array([0.2126, 0.7152, 0.0722]) / 255
    covered.imshow(np.interp(brightness, (0, 1), GREY), cmap="gray", vmin=0, vmax=1)
    rows, columns = photograph.shape[:2]
    mesh = covered.imshow(
        np.minimum(grid, ends.high),  # else a patch far beyond the scale would fill its neighbours' places too
        cmap=colour_map(GROUND),
        interpolation="bilinear",
        alpha=ALPHA,
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        vmin=ends.low,
        vmax=ends.high,
    )
    plain.set_axis_off()
    covered.set_axis_off()
    _finish(figure, covered, mesh, ends, relevance, (width, height))
    return figure


def blended(grid: NDArray[np.float64], image: Image.Image) -> Image.Image:
    """The photograph in grey under the map of its patches (row, column), as in `overlay`, and nothing beside it."""
    ends = patch_scale(grid)
    clipped = Image.fromarray(np.clip(grid, ends.low, ends.high).astype(np.float32))
    shares = (np.asarray(clipped.resize(image.size, Image.Resampling.BILINEAR)) - ends.low) / (
        ends.high - ends.low or 1
    )
    grey = np.interp(np.asarray(image.convert("L")) / 255, (0, 1), GREY)[..., None]
    pixels = ALPHA * colours(GROUND, np.clip(shares, 0, 1)) + (1 - ALPHA) * grey
    return Image.fromarray(np.rint(255 * pixels).astype(np.uint8))


def _finish(
    figure: Figure, panels: Axes | NDArray[Any], mesh: Any, ends: Scale, relevance: Relevance, size: tuple[float, float]
) -> None:
    text = visible(f"{method_and_query(relevance)}, layer {relevance.layers[-1]}")
    figure.suptitle(text, fontsize=10, **literal([text]))
    every: list[Axes] = np.ravel(np.asarray(panels, dtype=object)).tolist()
    for axes in every:
        axes.tick_params(labelsize=8, length=0)
        axes.spines[:].set_visible(False)
    width, height = size
    colour_bar(figure, mesh, every, ends, fraction=min(0.3, BAR / width), aspect=height / BAR)


def _panel(shape: tuple[int, ...]) -> tuple[float, float]:
    """Width and height in inches of a picture of `shape` (rows, columns); slivers are no thinner than a tenth."""
    rows, columns = shape
    longest = max(rows, columns)
    return PANEL * max(0.1, columns / longest), PANEL * max(0.1, rows / longest)


def _ticks(count: int) -> range:
    return range(0, count, max(1, count // 6))


def _photograph(image: Any) -> NDArray[np.uint8]:
    """The image as (row, column, RGB) bytes, no larger than a picture shows."""
    if not isinstance(image, Image.Image):
        image = Image.fromarray(_bytes(np.asarray(image)))
    photograph = image.convert("RGB")
    photograph.thumbnail((LARGEST, LARGEST))
    return np.asarray(photograph)


def _bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4) or 0 in pixels.shape or pixels.dtype.kind not in "uif":
        raise ValueError(
            "an image is (row, column) or (row, column, channel) of numbers, with 1, 3 or 4 channels; one of shape "
            f"{pixels.shape} and type {pixels.dtype} was given"
        )
    white = 1 if pixels.dtype.kind == "f" else 65535 if pixels.dtype == np.uint16 else 255
    shares = np.clip(np.nan_to_num(pixels[..., :3].astype(np.float32)) / white, 0, 1)
    return np.broadcast_to(np.rint(255 * shares), (*pixels.shape[:2], 3)).astype(np.uint8)
