"""Relevance of an image's patches: the map alone, and over the photograph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import gaussian_filter

from attnflow.answer import Relevance
from attnflow.show.canvas import blank, colour_bar, colour_map, foot, hatch, head, norm, scores_drawn, title
from attnflow.show.colour import GROUND, Scale, is_signed, luminance, oklab, patch_scale, srgb
from attnflow.show.wording import notes, patches, said_of, title_with

PANEL = 4.0  # inches, the longer side
LARGEST = 1600  # pixels, twice what a panel shows at 200 dpi
BESIDE = 4  # maps in one line of a comparison
FRAMES = 8  # of a video, in one line
BAR = 0.14
WIDTH = 4.5  # inches, what a title needs
# What a photograph may add to the lightness of the map, or take from it, where the ramp spans 0.7: its edges are seen,
# and no sunlit wall looks relevant.
DETAIL = 0.08
BROAD = 0.015  # of the longer side: what is smoother than this is no detail


def patch_map(relevance: Relevance) -> Figure:
    """The patches of the topmost layer as squares, coloured as in `overlay`; other tokens left out.

    The frames of a video stand in rows of at most eight, on one scale.

    Raises ValueError where there is no grid.
    """
    grid = patches(relevance, relevance.row)
    ends = patch_scale(grid, signed=is_signed(relevance.scores))
    frames = grid.reshape(-1, *grid.shape[-2:])
    lines, beside = -(-len(frames) // FRAMES), min(len(frames), FRAMES)
    width, height = (side / min(beside, 2) for side in _panel(frames[0].shape))
    heading = 0.3 if grid.ndim == 3 else 0
    figure = blank(max(WIDTH, beside * width + 1.2), lines * (height + heading) + 0.6, layout="compressed")
    panels = figure.subplots(lines, beside, squeeze=False)
    meshes = [
        axes.imshow(scores_drawn(frame), cmap=colour_map(ends.ramp(GROUND)), interpolation="nearest", norm=norm(ends))
        for frame, axes in zip(frames, panels.flat, strict=False)
    ]
    for number, axes in enumerate(panels.flat):
        hatch(axes.patch)
        axes.set_visible(number < len(frames))
        axes.set_xticks(_ticks(frames.shape[2]))
        axes.set_yticks(_ticks(frames.shape[1]))
        if heading:
            axes.set_title(f"frame {number}", fontsize=8)
    _finish(figure, panels, meshes[0], ends, relevance, grid, (width, lines * height))
    return figure


def overlay(relevance: Relevance, image: Any) -> Figure:
    """The photograph beside the map of its patches, in which its edges show; prefix tokens left out.

    image: a PIL image, or an array (row, column) or (row, column, channel), bytes or floats from 0 to 1. The patches
    are taken to tile all of it: where the model saw a crop, give the crop. The map is of the topmost layer, bilinear
    between the centres of the patches. Its colours run from the lowest patch to the highest, or to the 99th
    percentile of a hundred or more, so that one patch cannot darken all others; the colour bar tells both. Of the
    photograph the map keeps fine detail alone, as a little lightness: hue and broad lightness are the score's.

    Raises ValueError where there is no grid, the grid is of a video, or `image` is no image.
    """
    grid = patches(relevance, relevance.row)
    if grid.ndim != 2:
        raise ValueError(
            f"these scores are of {len(grid)} frames of a video, and lie over no single image; leave it out"
        )
    ends = patch_scale(grid, signed=is_signed(relevance.scores))
    shown = Image.fromarray(photograph(image))
    width, height = _panel((shown.height, shown.width))
    figure = blank(max(WIDTH, 2 * width + 1.2), height + 0.6, layout="compressed")
    plain, covered = figure.subplots(1, 2)
    plain.imshow(shown)
    covered.imshow(_blended(grid, shown, ends))
    _hatch_zeros(covered, grid, (shown.height, shown.width))
    plain.set_axis_off()
    covered.set_axis_off()
    mesh = ScalarMappable(norm(ends), colour_map(ends.ramp(GROUND)))
    _finish(figure, covered, mesh, ends, relevance, grid, (width, height))
    return figure


def overlays(relevances: Sequence[Relevance], image: Any = None) -> Figure:
    """Several methods' maps of one image beside one another and on one scale; first the photograph, if it is given.

    Each is drawn as in `overlay`, or without an image as squares. Where one map would hardly leave the low end of the
    scale of all (it reaches less than a quarter of it), each has a scale of its own, and the foot says so.

    Raises ValueError for no relevance, one without a grid of one image, and grids that differ.
    """
    if not relevances:
        raise ValueError("no relevance was given; give at least one")
    grids = [patches(one, one.row) for one in relevances]
    if any(grid.ndim != 2 or grid.shape != grids[0].shape for grid in grids):
        shapes = ", ".join(str(grid.shape) for grid in grids)
        raise ValueError(f"the maps have patches of {shapes}; compare relevances of one image")
    signed = any(is_signed(one.scores) for one in relevances)
    common = patch_scale(np.concatenate([grid.ravel() for grid in grids]), signed=signed)
    own = [patch_scale(grid, signed=is_signed(one.scores)) for grid, one in zip(grids, relevances, strict=True)]
    apart = any(ends.high < common.high / 4 for ends in own)
    scales = own if apart else [common] * len(grids)
    shown = None if image is None else Image.fromarray(photograph(image))
    width, height = _panel(grids[0].shape if shown is None else (shown.height, shown.width))
    width, height = 0.75 * width, 0.75 * height
    count = len(grids) + (shown is not None)
    beside = min(count, BESIDE)
    lines = -(-count // beside)
    figure = blank(max(WIDTH, beside * (width + 0.8)), lines * (height + 0.6), layout="compressed")
    panels = figure.subplots(lines, beside, squeeze=False).ravel().tolist()
    for axes in panels:
        axes.set_axis_off()
    if shown is not None:
        panels[0].imshow(shown)
    for axes, one, grid, ends in zip(panels[count - len(grids) :], relevances, grids, scales, strict=False):
        if shown is None:
            axes.imshow(scores_drawn(grid), cmap=colour_map(ends.ramp(GROUND)), norm=norm(ends))
        else:
            axes.imshow(_blended(grid, shown, ends))
        _hatch_zeros(axes, grid, grid.shape if shown is None else (shown.height, shown.width))
        title(axes, title_with(one, f"layer {one.layers[-1]}"), width)
        if apart:
            _bar(figure, [axes], ends, width, height)
    if not apart:
        _bar(figure, panels, common, width, lines * height)
    which = "each map has a scale of its own" if apart else "all maps are on one scale"
    foot(figure, [*said_of(relevances, grids, scales), which], [])
    return figure


def _bar(figure: Figure, axes: list[Axes], ends: Scale, width: float, height: float) -> None:
    mesh = ScalarMappable(norm(ends), colour_map(ends.ramp(GROUND)))
    colour_bar(figure, mesh, ends, ax=axes, pad=0.02, fraction=min(0.3, BAR / width), aspect=height / BAR)


def blended(grid: NDArray[np.float64], image: Image.Image) -> Image.Image:
    """The map of the patches (row, column) with the photograph's edges, as in `overlay`, and nothing beside it."""
    return _blended(grid, image, patch_scale(grid))


def _blended(grid: NDArray[np.float64], image: Image.Image, ends: Scale) -> Image.Image:
    # What lies far beyond the scale would fill its neighbours' places too.
    clipped = Image.fromarray(np.clip(np.nan_to_num(grid), ends.low, ends.high).astype(np.float32))
    scores = np.asarray(clipped.resize(image.size, Image.Resampling.BILINEAR), dtype=np.float64)
    lab = oklab(ends.ramp(GROUND), np.clip((scores - ends.low) / (ends.high - ends.low or 1), 0, 1))
    lab[..., 0] += _detail(image)
    return Image.fromarray(np.rint(255 * srgb(lab)).astype(np.uint8))


def _detail(image: Image.Image) -> NDArray[np.float64]:
    """How much lighter or darker each pixel (row, column) is than what surrounds it, within `DETAIL` either way."""
    lightness = np.cbrt(luminance(np.asarray(image.convert("RGB")) / 255))
    around = gaussian_filter(lightness, BROAD * max(image.size))
    return DETAIL * np.tanh((lightness - around) / DETAIL)


def _hatch_zeros(axes: Axes, grid: NDArray[np.float64], shape: tuple[int, int]) -> None:
    """Hatch the patches that score exactly 0 over a photograph of `shape` (rows, columns)."""
    height, width = shape[0] / grid.shape[0], shape[1] / grid.shape[1]
    for row, column in np.argwhere(grid == 0).tolist():
        patch = Rectangle((column * width - 0.5, row * height - 0.5), width, height)
        hatch(patch)
        axes.add_patch(patch)


def _finish(
    figure: Figure,
    panels: Axes | NDArray[Any],
    mesh: Any,
    ends: Scale,
    relevance: Relevance,
    grid: NDArray[np.float64],
    size: tuple[float, float],
) -> None:
    every: list[Axes] = np.ravel(np.asarray(panels, dtype=object)).tolist()
    for axes in every:
        axes.tick_params(labelsize=8, length=0)
        axes.spines[:].set_visible(False)
    width, height = size
    place = {"ax": every, "pad": 0.02, "fraction": min(0.3, BAR / width), "aspect": height / BAR}
    colour_bar(figure, mesh, ends, **place)
    text = title_with(relevance, f"layer {relevance.layers[-1]}")
    head(figure, text)
    foot(figure, notes(relevance, grid, ends, zero="hatched"), [text])


def _panel(shape: tuple[int, ...]) -> tuple[float, float]:
    """Width and height in inches of a picture of `shape` (rows, columns); slivers are no thinner than a tenth."""
    rows, columns = shape
    longest = max(rows, columns)
    return PANEL * max(0.1, columns / longest), PANEL * max(0.1, rows / longest)


def _ticks(count: int) -> range:
    return range(0, count, max(1, count // 6))


def photograph(image: Any) -> NDArray[np.uint8]:
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
