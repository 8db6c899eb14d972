"""What moves information between positions beside the recorded calls: the first module in which it shows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attnflow.capturing.dataflow import Dataflow
from attnflow.capturing.labels import tensors_in
from attnflow.capturing.proof import Layout, Proof, change_of, due_in, further_changes, masks_over
from attnflow.capturing.recorder import digest
from attnflow.capturing.replay import Change, Pass, Replay, changed, replay


class _Passing(NamedTuple):
    """A tensor that enters or leaves a module: digests of its vectors, (example or 1, position, ...), by its stream."""

    module: str
    enters: bool
    stream: int
    vectors: torch.Tensor


class _Watch(Replay):
    """A replay that notes every tensor with an axis of as many positions as a stream has, as it enters and leaves."""

    def __init__(
        self,
        run: Pass,
        change: Change,
        layouts: Mapping[int, Layout],
    ) -> None:
        super().__init__(run, change)
        self._layouts = layouts
        self.passing: list[_Passing] = []

    def _enter_module(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        super()._enter_module(name, module, args, kwargs)
        if threading.get_ident() == self._thread:
            with torch._C.DisableTorchFunction():  # pyright: ignore
                self._note(name, (args, kwargs), enters=True)

    def _left(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        super()._left(name, module, args, kwargs, output)
        self._note(name, output, enters=False)

    def _note(self, name: str, values: Any, *, enters: bool) -> None:
        for x in tensors_in(values):
            if not x.is_floating_point() or not self._labels.of(x):
                continue
            for stream, layout in self._layouts.items():
                vectors = _by_position(x.detach(), layout)
                if vectors is not None:
                    self.passing.append(_Passing(name, enters, stream, digest(vectors)))


def _by_position(x: torch.Tensor, layout: Layout) -> torch.Tensor | None:
    """A tensor as one vector per example and position; None if no axis is of the positions."""
    axes = [axis for axis in range(x.ndim) if x.shape[axis] == layout.size]
    batched = x.ndim > 2 and x.shape[0] == layout.batch
    axes = [axis for axis in axes if axis or not batched]
    if len(axes) != 1 or x.ndim < 2:  # with two such axes it is weights of attention
        return None
    return x.movedim(axes[0], 1).flatten(2) if batched else x.movedim(axes[0], 0).flatten(1)[None]


def first_mixer(run: Pass, flow: Dataflow, likely: Proof) -> str | None:
    """The first module out of which more positions come changed than went in; None where no module shows it.

    A module whose own parts had changed positions going in that it had not is itself what mixed them. likely: how the
    tokens lie, as far as sizes tell.
    """
    layouts, recording = likely.layouts, run.recording
    some = Change(masks_over(flow, layouts))
    some = replace(some, due={stream: due_in(layout, some.masks) for stream, layout in layouts.items()})
    nothing = _watched(run, layouts, Change({}))
    further = [change_of(recording, flow, layouts, likely.orders, due) for due in further_changes(layouts, some)]
    for change in (some, *further):
        again = _watched(run, layouts, change)
        for before, after in zip(nothing, again, strict=False):
            if before.vectors.shape != after.vectors.shape:
                continue
            due = change.due[before.stream]
            if len(before.vectors) == 1:
                due = due.any(0, keepdim=True)
            if (changed(before.vectors, after.vectors, recording.dtype) & ~due).any():
                return before.module.rpartition(".")[0] if before.enters else before.module
    return None


def _watched(run: Pass, layouts: Mapping[int, Layout], change: Change) -> list[_Passing]:
    """All that entered or left a module in a pass with a change."""
    again = _Watch(run, change, layouts)
    replay(run, again)
    return again.passing
