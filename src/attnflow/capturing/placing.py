"""Where the tokens of each call stand in an image or a video: windows, frames, merged, shuffled or missing patches.

The model is asked. It runs some more times with other vectors in the place of some patches, and with every attention
call returning what it returned before, so that what a token holds depends on its own patch alone; which patches are
changed from run to run spells their numbers in binary. So no family's way to roll, cut and merge windows needs to be
known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.capturing.calls import Call, Kept, LeftOut
from attnflow.capturing.examples import call_layer, seen_keys
from attnflow.capturing.recorder import Recording, Source
from attnflow.capturing.replay import Change, Pass, Replay, replay
from attnflow.capturing.replay import changed as differing
from attnflow.layers import Layer, MergingLayer, Part, PlacedLayer
from attnflow.trace import Grid

# The patches that a token holds, in binary, with ones where both values of a bit occur: "1?0" is (0b100, 0b010).
Patches: TypeAlias = tuple[int, int]


class Unplaceable(ValueError):
    """What stands in the way of placing tokens on patches; `place` says it beside the calls of the model."""


class Mixed(Unplaceable):
    """Patches of several examples in one window."""


@dataclass(frozen=True, eq=False)
class Placed:
    """One example's layers over its positions.

    Where every call attends over all tokens in one order, that is the order of the positions; else those come first
    that hold no patch (text, [CLS]), then the patches in reading order.

    places: for each position (row, column), or (frame, row, column), or None if it holds no patch. kept: of the tokens
    that hold no patch, True for those that are no padding. loose: the kept ones of these by their number among the
    tokens of the calls, where that is the same in all of them.
    """

    layers: tuple[Layer, ...]
    places: tuple[tuple[int, ...] | None, ...]
    kept: torch.Tensor
    loose: tuple[int, ...] | None = None

    @property
    def grid(self) -> Grid | None:
        """How many patches there are along each axis, if they fill a whole grid in reading order."""
        patches = [place for place in self.places if place is not None]
        sizes = tuple(len(set(axis)) for axis in zip(*patches, strict=True))
        whole = math.prod(sizes) == len(patches) and len(sizes) in (2, 3) and patches == sorted(patches)
        return sizes if whole else None  # pyright: ignore[reportReturnType]


class Held(NamedTuple):
    """What the tokens of one call hold, (outer, outer, token) each: patches in binary, both-valued bits, any at all."""

    patches: NDArray[np.int64]
    both: NDArray[np.int64]
    some: NDArray[np.bool_]


class _Window(NamedTuple):
    """Rows of a call whose tokens hold the same patches, one for each head, and these patches."""

    rows: list[tuple[int, int]]
    holds: tuple[Patches | None, ...]


def ask(run: Pass, source: Source) -> list[Held]:
    """What the tokens of every call hold, from runs of the model with changed patches of a source."""

    def holding(changed: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        again = Replay(run, Change({(source.kind, source.number): torch.from_numpy(changed)}))
        return [changes["v"].numpy() for changes in replay(run, again)[0]]

    numbers = _numbers(source.plane)
    some = holding(numbers >= 0)
    held = [Held(np.zeros(one.shape, np.int64), np.zeros(one.shape, np.int64), one) for one in some]
    for bit in range(int(numbers.max()).bit_length()):
        ones, zeros = (holding((numbers >> bit) & 1 == value) for value in (1, 0))
        for call, one, zero in zip(held, ones, zeros, strict=True):
            if (call.some & ~one & ~zero).any():
                raise Unplaceable("some tokens are changed by all patches together, and by no half of them")
            call.patches[:] |= (one & ~zero).astype(np.int64) << bit
            call.both[:] |= (one & zero).astype(np.int64) << bit
    return held


def place(
    recording: Recording, held: Sequence[Held], source: Source, batch: int, *, in_order: bool = False
) -> list[Placed]:
    """The calls of a recording placed on the patches of the image or video that the model was given, per example.

    in_order: whether positions come in reading order even where every call attends over all tokens, since their own
    order is random.

    Raises Unplaceable where tokens do not stand for patches: channels, overlapping windows, convolutions between.
    """
    if source.plane[0] % batch:
        raise Unplaceable(f"the last convolution is over {source.plane[0]}, of {batch} examples")
    calls = [recording.calls[number] for number in recording.explained]
    per = source.plane[0] // batch  # frames of one example that were convolved one by one
    placed = [
        _example(calls, [held[number] for number in recording.explained], source.plane, per, index)
        for index in range(batch)
    ]
    return placed if in_order else [_as_the_calls_have_it(one) for one in placed]


def _as_the_calls_have_it(placed: Placed) -> Placed:
    """The same in the tokens' own order, if that is the order of all tokens in every call."""
    layers: list[Layer] = []
    order: tuple[int, ...] | None = None
    for layer in placed.layers:
        if not isinstance(layer, PlacedLayer) or len(layer.parts) != 1 or placed.loose is None:
            return placed
        (part,) = layer.parts
        if len(part.queries) < layer.size or order not in (None, part.queries):
            return placed
        order = part.queries
        layers.append(part.layer)
    assert order is not None
    return Placed(tuple(layers), tuple(placed.places[position] for position in order), placed.kept, placed.loose)


def check_copies(run: Pass, held: Sequence[Held]) -> None:
    """Raise Unplaceable if a token without a patch that stands in several windows is another token in each.

    What the first call with such tokens returns for those of one window is changed: where a model joins what the copies
    of a [CLS] become, those in the other windows of later calls change too.
    """
    copied = [number for number in run.recording.explained if _is_copied(held[number])]
    if len(copied) < 2:
        return
    first, *later = copied
    loose = ~held[first].some
    rows = np.zeros_like(loose)
    rows[0] = loose[0]  # all heads of the first window along the first axis
    changes, _ = replay(run, Replay(run, Change({}, {first: torch.from_numpy(rows)})))
    if not any((changes[number]["v"].numpy() & ~held[number].some)[1:].any() for number in later):
        name = run.recording.calls[first].module or "the model"
        raise Unplaceable(f"the tokens without a patch in the windows of {name} are others in each window")


def first_mixed(run: Pass, held: Sequence[Held], source: Source, texts: Sequence[Source]) -> str | None:
    """What moves information between positions beside the calls, where patches were placed: a call, or a module behind
    the last one. None if nothing does.

    Every other patch is changed, and with it every other token that was looked up beside the patches, then some of
    these by chance. They stand where they do among the tokens of a call, or if they are fewer before all others.
    """
    generator = torch.Generator().manual_seed(0)
    every_other = {text: (torch.arange(text.plane[1]) % 2 == 1).expand(text.plane) for text in texts}
    some = {text: torch.rand(text.plane, generator=generator) < 0.5 for text in texts}
    found = (_mixed(run, held, source, words) for words in ([every_other, some] if texts else [{}]))
    return next((name for name in found if name is not None), None)


def _mixed(run: Pass, held: Sequence[Held], source: Source, words: Mapping[Source, torch.Tensor]) -> str | None:
    """What changes more than is due when every other patch changes, and some tokens that were looked up."""
    odd = (_numbers(source.plane) & 1).astype(bool)
    masks = {(text.kind, text.number): mask for text, mask in words.items()}
    again = Replay(run, Change({(source.kind, source.number): torch.from_numpy(odd), **masks}))
    changes, _ = replay(run, again)
    recording = run.recording
    for number in recording.explained:
        if (changes[number]["v"].numpy() & ~_due(held[number], words)).any():
            return recording.calls[number].module
    due = _due(held[recording.explained[-1]], words).any(1)
    for (name, before), (_, after) in zip(recording.tail, again.recording.tail, strict=False):
        alike = before.shape == after.shape and before.shape[:2] == due.shape
        if alike and (differing(before, after, recording.dtype).numpy() & ~due).any():
            return name
    return None


def _due(held: Held, words: Mapping[Source, torch.Tensor]) -> NDArray[np.bool_]:
    """(outer, outer, token), True where a change of every other patch and of some tokens that were looked up is due."""
    due = held.some & (((held.patches | held.both) & 1) > 0)
    for mask in words.values():
        batch, count = mask.shape
        if batch == len(due) and count <= due.shape[2]:
            due[:, :, :count] |= mask.numpy()[:, None] & ~held.some[:, :, :count]
    return due


def _is_copied(held: Held) -> bool:
    """Whether tokens without a patch stand in several windows along the first axis of a call."""
    return len(held.some) > 1 and bool((~held.some).any()) and bool(held.some.any())


def _numbers(shape: Sequence[int]) -> NDArray[np.int64]:
    """A number for each patch, with bits of their own for each axis; in reading order."""
    numbers = np.zeros(shape, dtype=np.int64)
    for size, along in zip(shape, np.indices(shape), strict=True):
        numbers = (numbers << (size - 1).bit_length()) | along
    return numbers


def _number_of(first: int, shape: Sequence[int]) -> int:
    """The number of the patch that is the first of some index along the first axis."""
    return first << sum((size - 1).bit_length() for size in shape[1:])


def _place_of(patches: Patches, shape: Sequence[int]) -> tuple[int, ...]:
    """The indices of a patch, or of a block of patches that were merged before the first call, counted in blocks."""
    number, both = patches
    place: list[int] = []
    for size in reversed(shape):
        width = (size - 1).bit_length()
        merged = both % (1 << width)
        if merged & (merged + 1) or merged >= max(size - 1, 1):
            raise Unplaceable("the first layer's tokens hold several patches each that are no block, or are channels")
        place.append(number % (1 << width) >> merged.bit_length())
        number, both = number >> width, both >> width
    return tuple(reversed(place))


def _example(calls: Sequence[Call], held: Sequence[Held], shape: Sequence[int], per: int, index: int) -> Placed:
    """The layers of one example; Unplaceable says what stands in the way.

    per: how many frames of one example were convolved one by one.
    """
    wanted = range(index * per, (index + 1) * per)
    windows = [_windows_of(call, holds, shape, wanted) for call, holds in zip(calls, held, strict=True)]
    kept = _kept_without_patch(calls, windows)
    before = int(kept.sum())
    layers: list[Layer] = []
    first: list[Patches] = []
    level: list[Patches] = []
    for call, own in zip(calls, windows, strict=True):
        if not own:
            raise Unplaceable(f"{call.module or 'the model'} attends to no patch of example {index}")
        seen = [_seen(call, window).tolist() for window in own]
        tokens = [
            (number, token, patches)
            for number, window in enumerate(own)
            for token, patches in enumerate(window.holds)
            if patches is not None and seen[number][token]
        ]
        now = sorted({patches for _, _, patches in tokens})
        if not level:
            if len({both for _, both in now}) > 1:
                raise Unplaceable("some of the first layer's tokens hold more patches than others")
            first = now
        elif now != level:
            if any(isinstance(one, LeftOut) for one in calls):
                raise Unplaceable("patches are merged, which takes every layer: leave layers= out")
            layers.append(_merging(level, now, before, call.module))
        if len(now) == 1 < len(tokens):
            raise Unplaceable(
                f"the tokens of {call.module or 'the model'} all hold the same patches: mixed before it, or they are "
                "channels"
            )
        if len(now) < len(tokens):
            raise Unplaceable(f"{call.module} has the same patch in several windows")
        level = now
        rank = {patches: before + number for number, patches in enumerate(now)}
        if call.extent[2] != call.extent[3]:
            raise Unplaceable(f"the queries of {call.module} are not its keys")
        if isinstance(call, LeftOut):
            continue
        places = {(window, token): rank[patches] for window, token, patches in tokens}
        layers.append(_layer(call, own, places, kept, before + len(now)))
    indices = [_place_of(patches, shape) for patches in first]
    if per > 1:  # frames, or patches that were given one by one and stand along no other axis
        start = _place_of((_number_of(index * per, shape), first[0][1]), shape)[0]
        along = [axis for axis, size in enumerate(shape) if axis == 0 or size > 1]
        places = [tuple(place[axis] - (start if axis == 0 else 0) for axis in along) for place in indices]
    else:
        places = [place[1:] for place in indices]
    alike = {tuple(_without_patch(window)) for own in windows for window in own}
    loose = None
    if len(alike) == 1 and all(len(own) == 1 for own in windows):
        loose = tuple(token for token, keep in zip(alike.pop(), kept.tolist(), strict=True) if keep)
    return Placed(tuple(layers), (*[None] * before, *places), kept, loose)


def _windows_of(call: Call, holds: Held, shape: Sequence[int], wanted: range) -> list[_Window]:
    """The windows of a call whose patches are of the wanted ones along the first axis, with a row for each head."""
    group = call.extent[1] // holds.some.shape[1]  # heads that share their values
    below = sum((size - 1).bit_length() for size in shape[1:])
    windows: dict[tuple[Patches | None, ...], list[tuple[int, int]]] = {}
    for row in np.ndindex(*holds.some.shape[:2]):
        some = holds.some[row]
        least, most = holds.patches[row][some] >> below, (holds.patches[row][some] | holds.both[row][some]) >> below
        of = {int(number) in wanted for number in (*least, *np.minimum(most, shape[0] - 1))}
        if len(of) > 1:
            raise Mixed("examples are mixed")
        if of == {True}:
            pairs = zip(holds.patches[row].tolist(), holds.both[row].tolist(), some.tolist(), strict=True)
            tokens = tuple((number, both) if held else None for number, both, held in pairs)
            windows.setdefault(tokens, []).extend((row[0], row[1] * group + member) for member in range(group))
    return [_Window(rows, tokens) for tokens, rows in windows.items()]


def _seen(call: Call, window: _Window) -> torch.Tensor:
    """(token,), True where some query of a window may attend to a token; anywhere, if that was not kept."""
    return torch.ones(call.extent[3], dtype=torch.bool) if isinstance(call, LeftOut) else seen_keys(call, window.rows)


def _without_patch(window: _Window) -> list[int]:
    """The tokens of a window that hold no patch."""
    return [token for token, patches in enumerate(window.holds) if patches is None]


def _kept_without_patch(calls: Sequence[Call], windows: Sequence[list[_Window]]) -> torch.Tensor:
    """(token,), of those that hold no patch True for those that some query may attend to.

    They are the same tokens in every window, as a [CLS] is that is copied into every frame.
    """
    most = max((len(_without_patch(window)) for own in windows for window in own), default=0)
    kept = torch.zeros(most, dtype=torch.bool)
    for call, own in zip(calls, windows, strict=True):
        for window in own:
            tokens = _without_patch(window)
            seen = _seen(call, window)[tokens]
            leading = tokens == list(range(len(tokens)))
            patches = [token for token, one in enumerate(window.holds) if one is not None]
            whole = patches == list(range(patches[0], patches[-1] + 1))
            same = len(tokens) in (0, len(kept)) and len({len(_without_patch(one)) for one in own}) == 1
            if seen.any() and not (same and (leading if len(own) > 1 else whole)):
                raise Unplaceable(
                    f"{call.module} attends to tokens behind its patches that hold none: padding, or text"
                )
            kept[: len(tokens)] |= seen
    return kept


def _layer(
    call: Kept, windows: Sequence[_Window], places: dict[tuple[int, int], int], kept: torch.Tensor, size: int
) -> Layer:
    """One call of one example, its tokens at their places: (window, token) of patches, and those that hold none."""
    rank = (kept.cumsum(0) - 1).tolist()
    parts: list[Part] = []
    for number, window in enumerate(windows):
        at = {token: rank[place] for place, token in enumerate(_without_patch(window)) if kept[place]}
        at |= {token: place for (of, token), place in places.items() if of == number}
        keep = torch.zeros(call.extent[2], dtype=torch.bool)
        keep[list(at)] = True
        positions = tuple(at[token] for token in sorted(at))
        parts.append(Part(call_layer(call, window.rows, keep, keep, {}, 0), positions, positions))
    if len(parts) == 1 and parts[0].queries == tuple(range(size)):
        return parts[0].layer
    return PlacedLayer(tuple(parts), size)


def _merging(below: list[Patches], above: list[Patches], before: int, module: str) -> MergingLayer:
    """The layer between tokens that hold some patches each and tokens that hold several of these together."""
    parts: dict[Patches, list[int]] = {patches: [] for patches in above}
    kinds = {both for _, both in above}
    for number, (patches, both) in enumerate(below):
        found = [(patches & ~kind, kind) for kind in kinds if (patches & ~kind, kind) in parts and not both & ~kind]
        if len(found) != 1:
            raise Unplaceable(f"before {module} patches overlap, or are left out")
        parts[found[0]].append(before + number)
    if not all(parts.values()):
        raise Unplaceable(f"before {module} tokens appear that hold no patches of the layer below")
    merged = tuple((number,) for number in range(before)) + tuple(map(tuple, parts.values()))
    return MergingLayer(f"merging before {module}", merged, before + len(below))
