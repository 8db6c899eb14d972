"""Where the tokens of each call stand in an image or a video: windows, frames, merged, shuffled or missing patches.

The model is asked. It runs some more times with numbers of our own in the place of its patches and with attention
switched off, so that what a token holds depends on its own patch alone; which patches are changed from run to run
spells their numbers in binary. So no family's way to roll, cut and merge windows needs to be known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.capturing.calls import Kept, LeftOut
from attnflow.capturing.examples import call_layer, misfit, seen_keys
from attnflow.capturing.recorder import Recorder, Recording
from attnflow.layers import Layer, MergingLayer, WindowLayer
from attnflow.trace import Grid

# How much of a token must change for it to have held a patch that was changed; what did not is the same to the bit.
_CHANGED = 1e-4

# The patches that a token holds, in binary, with ones where both values of a bit occur: "1?0" is (0b100, 0b010).
Patches: TypeAlias = tuple[int, int]


class Unplaceable(Exception):
    """What stands in the way of placing tokens on patches; `place` says it beside the calls of the model."""


@dataclass(frozen=True, eq=False)
class Placed:
    """One example's layers over its positions: first those that hold no patch (text, [CLS]), then patches in order.

    kept: of the former, True for those that are no padding. places: for each patch (row, column), or (frame, row,
    column).
    """

    layers: tuple[Layer, ...]
    kept: torch.Tensor
    places: tuple[tuple[int, ...], ...]

    @property
    def grid(self) -> Grid | None:
        """How many patches there are along each axis, if they fill a whole grid."""
        sizes = tuple(len(set(axis)) for axis in zip(*self.places, strict=True))
        whole = math.prod(sizes) == len(self.places) and len(sizes) in (2, 3)
        return sizes if whole else None  # pyright: ignore[reportReturnType]


class _Held(NamedTuple):
    """What the tokens of one call hold, (window, token) each: patches in binary, both-valued bits, any at all."""

    patches: NDArray[np.int64]
    both: NDArray[np.int64]
    some: NDArray[np.bool_]


def place(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording) -> list[Placed]:
    """The calls of a recording placed on the patches of the image or video that the model was given, per example.

    Raises ValueError where tokens do not stand for patches: channels, overlapping windows, convolutions between.
    """
    assert recording.patches is not None
    try:
        if recording.patches[0] % recording.batch:
            raise Unplaceable(f"the last convolution is over {recording.patches[0]}, of {recording.batch} examples")
        calls = _kept_calls(recording)
        held = _ask(model, args, kwargs, recording)
        if len(held) != len(calls):
            raise Unplaceable(f"{len(calls)} calls were recorded, and {len(held)} seen when the model ran again")
        return [_example(recording, calls, held, index) for index in range(recording.batch)]
    except Unplaceable as error:
        raise misfit(model, recording.calls, f"they cannot be placed on the image's patches: {error}") from None


def _kept_calls(recording: Recording) -> list[Kept]:
    calls = [call for call in recording.calls if not isinstance(call, LeftOut)]
    if len(calls) < len(recording.calls):
        raise Unplaceable("that takes every layer, so leave layers= out")
    return calls


class _Probe(Recorder):
    """Runs a model on patches of its own, of which some are changed, with attention that returns nothing but zeros."""

    def __init__(self, model: torch.nn.Module, first: Recording, changed: NDArray[np.bool_]) -> None:
        super().__init__(model, first.batch)
        self.values: list[torch.Tensor] = []
        self._first = first
        self._changed = torch.from_numpy(changed)

    def _convolved(self, output: torch.Tensor, axes: int) -> torch.Tensor:
        before = self.recording.convolutions
        output = super()._convolved(output, axes)
        if not before < self.recording.convolutions == self._first.convolutions:
            return output
        usual, other = torch.randn(2, *output.shape, generator=torch.Generator().manual_seed(0))
        changed = self._changed.unsqueeze(1) if output.ndim == axes + 2 else self._changed
        return torch.where(changed, other, usual).to(output)

    def _keep(self, call: Kept, output: torch.Tensor) -> None:
        assert call.v is not None
        self.values.append(call.v.float().cpu())
        super()._keep(call, output)
        output.zero_()


def _ask(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recording: Recording) -> list[_Held]:
    """What the tokens of every call hold, from runs of the model with changed patches."""
    assert recording.patches is not None
    assert recording.random_state is not None

    def run(changed: NDArray[np.bool_]) -> list[torch.Tensor]:
        probe = _Probe(model, recording, changed)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), probe:
            torch.set_rng_state(recording.random_state)  # pyright: ignore[reportArgumentType]
            model(*args, **kwargs)
        return probe.values

    numbers = _numbers(recording.patches)
    usual = run(np.zeros(recording.patches, dtype=bool))

    def holding(changed: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        pairs = zip(run(changed), usual, strict=True)
        return [
            ((v - before).square().sum((1, 3)) > _CHANGED**2 * before.square().sum((1, 3))).numpy()
            for v, before in pairs
        ]

    some = holding(numbers >= 0)
    held = [_Held(np.zeros(one.shape, np.int64), np.zeros(one.shape, np.int64), one) for one in some]
    for bit in range(int(numbers.max()).bit_length()):
        ones, zeros = (holding((numbers >> bit) & 1 == value) for value in (1, 0))
        for call, one, zero in zip(held, ones, zeros, strict=True):
            if (call.some & ~one & ~zero).any():
                raise Unplaceable("some tokens are changed by all patches together, and by no half of them")
            call.patches[:] |= (one & ~zero).astype(np.int64) << bit
            call.both[:] |= (one & zero).astype(np.int64) << bit
    return held


def _numbers(shape: Sequence[int]) -> NDArray[np.int64]:
    """A number for each patch, with bits of their own for each axis; in reading order."""
    numbers = np.zeros(shape, dtype=np.int64)
    for size, along in zip(shape, np.indices(shape), strict=True):
        numbers = (numbers << (size - 1).bit_length()) | along
    return numbers


def _place_of(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The indices of the patch of a number."""
    place: list[int] = []
    for size in reversed(shape):
        width = (size - 1).bit_length()
        place.append(number % (1 << width))
        number >>= width
    return tuple(reversed(place))


def _example(recording: Recording, calls: Sequence[Kept], held: Sequence[_Held], index: int) -> Placed:
    """The layers of one example; Unplaceable says what stands in the way."""
    assert recording.patches is not None
    per = recording.patches[0] // recording.batch  # frames of one example that were convolved one by one
    windows = [_windows_of(call, recording.patches, range(index * per, (index + 1) * per)) for call in held]
    kept = _kept_before(calls, held, windows)
    before = int(kept.sum())
    layers: list[Layer] = []
    first: list[Patches] = []
    level: list[Patches] = []
    for call, holds, own in zip(calls, held, windows, strict=True):
        seen = np.broadcast_to(seen_keys(call).numpy(), holds.some.shape)
        if (seen & ~holds.some)[own, _before(holds, own) :].any():
            raise Unplaceable(f"{call.module} attends to tokens behind its patches that hold none: padding, or text")
        tokens = [
            (window, token, (int(holds.patches[window, token]), int(holds.both[window, token])))
            for window in own
            for token in np.flatnonzero(holds.some[window] & seen[window]).tolist()
        ]
        now = sorted({patches for _, _, patches in tokens})
        if not level:
            if any(both for _, both in now):
                raise Unplaceable("the first layer's tokens hold several patches each, or are channels")
            first = now
        elif now != level:
            layers.append(_merging(level, now, before, call.module))
        if len(now) < len(tokens):
            raise Unplaceable(f"{call.module} has the same patch in several windows")
        level = now
        rank = {patches: before + number for number, patches in enumerate(now)}
        if call.extent[1] != call.extent[2]:
            raise Unplaceable(f"the queries of {call.module} are not its keys")
        places = {(window, token): rank[patches] for window, token, patches in tokens}
        layers.append(_layer(call, holds, own, places, kept, before + len(now)))
    indices = [_place_of(number, recording.patches) for number, _ in first]
    places = [(place[0] - index * per, *place[1:]) if per > 1 else place[1:] for place in indices]
    return Placed(tuple(layers), kept, tuple(places))


def _windows_of(holds: _Held, shape: Sequence[int], wanted: range) -> list[int]:
    """The windows of a call whose patches are of the wanted ones along the first axis."""
    below = sum((size - 1).bit_length() for size in shape[1:])
    windows: list[int] = []
    for window in range(len(holds.some)):
        some = holds.some[window]
        of = {int(number) >> below in wanted for number in holds.patches[window][some]}
        mixed = any(int(both) >> below for both in holds.both[window][some])
        if len(of) > 1 or mixed:
            raise Unplaceable("examples are mixed")
        if of == {True}:
            windows.append(window)
    return windows


def _before(holds: _Held, windows: Sequence[int]) -> int:
    """How many tokens of every window come before its first patch."""
    return min((int(holds.some[window].argmax()) for window in windows), default=0)


def _kept_before(calls: Sequence[Kept], held: Sequence[_Held], windows: Sequence[list[int]]) -> torch.Tensor:
    """(token,), True for the tokens before the patches that some query may attend to."""
    counts = [_before(holds, own) for holds, own in zip(held, windows, strict=True)]
    kept = torch.zeros(max(counts), dtype=torch.bool)
    for call, holds, own, count in zip(calls, held, windows, counts, strict=True):
        if count not in (0, len(kept)):
            raise Unplaceable(f"{call.module} has {count} tokens without a patch, where another has {len(kept)}")
        seen = seen_keys(call).expand(holds.some.shape)
        kept[:count] |= seen[own, :count].any(0)
    return kept


def _layer(
    call: Kept,
    holds: _Held,
    windows: Sequence[int],
    places: dict[tuple[int, int], int],
    kept: torch.Tensor,
    size: int,
) -> Layer:
    """One call of one example, its tokens at their places: (window, token) of patches, and those before them."""
    own = list(kept.nonzero().flatten().tolist()) if _before(holds, windows) else []
    layers, positions = [], []
    for window in windows:
        at = {token: number for number, token in enumerate(own)}
        at |= {token: place for (number, token), place in places.items() if number == window}
        keep = torch.zeros(call.extent[1], dtype=torch.bool)
        keep[list(at)] = True
        layers.append(call_layer(call, window, keep, keep, {}))
        positions.append(tuple(at[token] for token in sorted(at)))
    if positions == [tuple(range(size))]:
        return layers[0]
    return WindowLayer(tuple(layers), tuple(positions), size)


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
