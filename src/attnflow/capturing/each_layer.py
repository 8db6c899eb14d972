"""The target's score as each layer gives it: what stands behind the last block, run on what every block returned.

A block is the outermost run of a module that holds the calls of one layer and of no other. Whether all that goes on
from a block is the stream that it returns is read off the labels: the stream is cut loose behind every block, and no
label of anything below may show behind the cut. No name decides; a model that is built otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from attnflow.capturing.calls import LeftOut
from attnflow.capturing.dataflow import Dataflow, dataflow
from attnflow.capturing.entrance import Inputs
from attnflow.capturing.inputs import fresh
from attnflow.capturing.labels import replaced, tensors_in
from attnflow.capturing.recorder import Recorder, Visit, record
from attnflow.capturing.replay import Pass, as_before
from attnflow.capturing.rules import Rules
from attnflow.capturing.target import TargetScores

# What the score of the last block's stream may differ from the model's own, relative to it.
_SAME = 1e-3


def add_gradients(run: Pass, flow: Dataflow, target: TargetScores, rules: str | None) -> None:
    """Give every kept call of a recording the gradient of the score that its own layer's output gives.

    That is the target's score, for what it settled as, of what the model makes of the layer's output in the place of
    the last block's. Cost: one forward pass, the tail once for each layer, and as much backward.

    Raises ValueError with the reason where the model is not made of such blocks.
    """
    model, calls = run.model, run.recording.calls
    if len(flow.streams) > 1:
        raise _refusal(model, "its attention changes or pools several streams, which no one head reads")
    layers = [group.calls for (group,) in flow.steps]
    blocks = _blocks(run, layers)
    with as_before(run), torch.enable_grad():
        cut = _Cut(run, blocks)
        _scores(run, target, rules, cut)
        cut.check()
        for number, layer in enumerate(layers):
            last = replaced(cut.returned[-1], {cut.leaves[-1]: cut.streams[number]})
            _let_return(model, blocks, [*cut.returned[:-1], last])
            scores = _scores(run, target, rules).reshape(-1)
            if number == len(layers) - 1 and not torch.allclose(scores.detach(), target.scores.to(scores), rtol=_SAME):
                raise _refusal(model, "what stands behind its last block gives another score when it runs alone")
            outputs = [cut.outputs[call] for call in layer]
            found: Any = torch.autograd.grad(scores.sum(), outputs, allow_unused=True)
            for call, output, gradient in zip(layer, outputs, found, strict=True):
                kept = calls[call]
                if not isinstance(kept, LeftOut):
                    own = torch.zeros_like(output) if gradient is None else gradient
                    calls[call] = kept.with_gradient(own, at_layer=True)


def streams(
    model: torch.nn.Module, inputs: Inputs, run: Callable[[], Any] | None = None
) -> tuple[list[torch.Tensor], Any]:
    """The stream (example, token, width) that each block returns, with its graph, and what the model returns.

    run: the pass, where it is not the model's own on these inputs.

    Raises ValueError where the model is not made of such blocks.
    """
    args, kwargs = ((inputs,), {}) if isinstance(inputs, torch.Tensor) else ((), dict(inputs))
    recording, _ = record(model, args, kwargs)
    flow = dataflow(recording)
    if len(flow.streams) > 1:
        raise ValueError(f"{type(model).__name__} has no one stream: its attention changes or pools several")
    blocks = _blocks(Pass(model, args, kwargs, recording), [group.calls for (group,) in flow.steps])
    found: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, given: Any, output: Any) -> None:
        stream = next(x for x in tensors_in(output) if x.is_floating_point() and x.ndim == 3)
        found.append(stream if stream.requires_grad else stream.requires_grad_())

    hooks = [
        model.get_submodule(name).register_forward_hook(keep)
        for name in dict.fromkeys(block.module for block in blocks)
    ]
    try:
        with torch.enable_grad():
            return found, model(*args, **kwargs) if run is None else run()
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(run: Pass, layers: Sequence[tuple[int, ...]]) -> list[Visit]:
    """For each layer the outermost run of a module that holds its calls alone; they must follow each other directly."""
    model, visits = run.model, run.recording.visits
    blocks: list[Visit] = []
    for number, calls in enumerate(layers):
        own = [visit for visit in visits if set(visit.calls) == set(calls)]
        if not own or not own[-1].module:
            raise _refusal(model, f"no module of its own holds layer {number} of {len(layers)}")
        blocks.append(own[-1])  # of runs within each other the outermost ends last
    first, last = blocks[0], blocks[-1]
    for visit in visits:
        inside = any(block.begin <= visit.begin <= block.end for block in blocks)
        between = first.begin < visit.begin < last.begin and not inside
        if between and any(True for _ in model.get_submodule(visit.module).parameters()):
            raise _refusal(model, f"{visit.module} stands between its blocks")
    kinds = dict.fromkeys(type(model.get_submodule(block.module)).__name__ for block in blocks)
    if len(kinds) > 1:
        raise _refusal(model, f"its blocks are of several kinds, {', '.join(kinds)}")
    return blocks


class _Cut(Recorder):
    """A pass in which the stream that every block returns is cut loose from what it was made of.

    outputs: what every call returned. streams: what every block returned, made of the stream below it, which is a leaf.
    leaves: what the model got in their place. returned: all that every block returned, with these.
    """

    def __init__(self, run: Pass, blocks: Sequence[Visit]) -> None:
        super().__init__(run.model, gradients=True, layers=slice(0, 0), copies=True, tower=run.recording.tower)
        self._blocks = blocks
        self._cut, self._below = 0, 0  # the bit of the latest cut, and those of all that lies below it
        self.streams: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.returned: list[Any] = []

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What every call returned, with its graph."""
        assert self._outputs is not None
        return self._outputs

    def _left(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        changed = super()._left(name, module, args, kwargs, output)
        number = len(self.streams)
        if number == len(self._blocks) or self.recording.visits[-1] != self._blocks[number]:
            return changed
        output = output if changed is None else changed
        stream = next((x for x in tensors_in(output) if x.is_floating_point() and x.ndim == 3), None)
        alike = stream is not None and (not self.streams or stream.shape == self.streams[0].shape)
        if stream is None or not alike or not isinstance(output, torch.Tensor | tuple | list):
            raise _refusal(self._model, f"{name} returns no stream (batch, token, width) like that of the first block")
        calls = sum(self.recording.fed[call].bit for call in self._blocks[number].calls)
        label = self.recording.reached(self._labels.of(stream))
        if not label & calls or label & self._below:
            raise _refusal(self._model, f"what {name} returns is not all that goes on from the layer below it")
        leaf = stream.detach().clone().requires_grad_()
        self._below |= calls | self._cut
        self._cut = self._mark(None)
        self._labels.set(leaf, self._cut)
        self.streams.append(stream)
        self.leaves.append(leaf)
        self.returned.append(replaced(output, {stream: leaf}))
        return self.returned[-1]

    def check(self) -> None:
        """Raise ValueError unless the score was made of the last stream alone."""
        if len(self.streams) < len(self._blocks):
            raise _refusal(self._model, "it does something else when it runs again")
        read = self.recording.reached(self.recording.read)
        if not read & self._cut or read & self._below:
            raise _refusal(self._model, "the score is not made of what its last block returns alone")


def _let_return(model: torch.nn.Module, blocks: Sequence[Visit], returned: Sequence[Any]) -> None:
    """Let every block return what is given, without running, until `as_before` puts the model back."""
    waiting: dict[str, list[Any]] = {}
    for block, output in zip(blocks, returned, strict=True):
        waiting.setdefault(block.module, []).append(output)
    for name, outputs in waiting.items():
        model.get_submodule(name).forward = partial(_next, iter(outputs))


def _next(outputs: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
    return next(outputs)


def _scores(run: Pass, target: TargetScores, rules: str | None, recorder: _Cut | None = None) -> torch.Tensor:
    """The target's scores of a pass, by the rules, seen by a recorder."""
    mode, args, kwargs = None if rules is None else Rules(rules), fresh(run.args), fresh(run.kwargs)
    with nullcontext() if mode is None else mode.of(run.model), nullcontext() if recorder is None else recorder:
        if recorder is not None:
            args, kwargs = recorder.given(args, kwargs)
        output = run.model(*args, **kwargs)
        if recorder is not None:
            recorder.finish(output)
        scores = target.of_another(output) if mode is None else mode.scores(target.of_another, output)
        if recorder is not None:
            recorder.finish(scores)
    return scores


def _refusal(model: torch.nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"no layer of {type(model).__name__} has a stream of its own that the head could read: {reason}; use what "
        "looks at the score at the end, such as legrad-final-score, without at_each_layer="
    )
