"""Passes that run again: every attention call returns what it returned before, but for a change."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from attnflow.capturing.calls import Kept, WeightedSum
from attnflow.capturing.inputs import fresh
from attnflow.capturing.labels import replaced, tensors_in
from attnflow.capturing.recorder import Attending, Recorder, Recording, Source, digest, eagerly

# How much of a vector must change for it to be changed, beyond what rounding does in its precision.
_CHANGED = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CHANGED_IN_SINGLE = 2e-5

# A source, by its kind and number.
Key: TypeAlias = tuple[str, int]


class Pass(NamedTuple):
    """A forward pass that was recorded, with what it takes to run it again."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recording: Recording


@dataclass(frozen=True, eq=False)
class Change:
    """What is changed in a pass that runs again.

    masks: for sources, by kind and number, True where a token gets another vector. rows: for calls, by number,
    (outer, outer, query), True where what they return is changed as well. due: for each joint stream (example,
    position), True where a change may show.
    """

    masks: Mapping[Key, torch.Tensor]
    rows: Mapping[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    due: Mapping[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])


class Replay(Recorder):
    """Runs a model again with every attention call returning what it returned before, but for a change.

    reads: whether gradients run from the last call on, so that what the output is read from can be told.
    """

    def __init__(self, run: Pass, change: Change, *, reads: bool = False) -> None:
        super().__init__(run.model, compared=True, tower=run.recording.tower)
        self.first, self.change, self._masks = run.recording, change, change.masks
        self._reads = reads and not any(parameter.is_inference() for parameter in run.model.parameters())
        self.last: torch.Tensor | None = None

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, with other vectors for the tokens that are to be changed."""
        inputs = list(dict.fromkeys(tensors_in((args, kwargs))))
        others = {
            x: another(x, self._masks["input", number], -1)
            for number, x in enumerate(inputs)
            if ("input", number) in self._masks
        }
        args, kwargs = replaced((args, kwargs), others)
        return super().given(args, kwargs)

    def _changed(self, source: Source, output: torch.Tensor) -> torch.Tensor:
        mask = self._masks.get((source.kind, source.number))
        if mask is None:
            return output
        channels = -len(source.plane) if source.kind == "convolution" else -1
        return another(output, mask[0] if mask.ndim == output.ndim else mask, channels)

    def _check_room(self, call: WeightedSum) -> None:
        """Nothing: the pass that runs again kept as much."""

    def _certainly_left_out(self) -> set[int]:
        """All calls but the last that is explained, from which the output is read."""
        return set(range(len(self.recording.calls))) - {self.first.explained[-1]}

    def _attend(self, attending: Attending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, number = attending.make(), len(self.recording.calls)
        if number >= len(self.first.calls) or call.extent != self.first.calls[number].extent:
            raise ValueError(
                f"{call.module or 'the model'} attends in another way when the model runs again: what it does depends "
                "on chance, or on what ran before"
            )
        output = self.first.outputs[number].clone()
        if number in self.change.rows:
            output = _with_other_rows(call, output, self.change.rows[number])
        if self._reads and number == self.first.explained[-1]:
            torch._C._set_grad_enabled(True)  # pyright: ignore[reportPrivateUsage]
            self.last = output.requires_grad_()
            output = output.clone()
        output = self._keep(call, output, attending.labels)
        return (output, *func(*args, **kwargs)[1:]) if attending.in_tuple else output


def another(x: torch.Tensor, mask: torch.Tensor, channels: int) -> torch.Tensor:
    """A tensor with other vectors along its axis of channels where a mask over the other axes says so."""
    return torch.where(mask.to(x.device).unsqueeze(channels), x + _noise(x), x)


def _noise(x: torch.Tensor) -> torch.Tensor:
    """Random numbers as far apart as those of a tensor are, or of size 1 where these are all (nearly) the same."""
    spread = float(x.detach().float().std(correction=0))
    size = spread if spread > 1e-6 else 1.0
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * size


def _with_other_rows(call: Kept, output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What a call returned, with other vectors for some queries. rows (outer, outer, query)."""
    numbers = call.rows_of(torch.arange(output.numel(), device=output.device).reshape(output.shape))
    wanted = rows.to(output.device)[:, : numbers.shape[1], :, None].expand(numbers.shape)
    flat = output.reshape(-1).clone()
    chosen = numbers[wanted]
    flat[chosen] += _noise(flat)[chosen]
    return flat.reshape(output.shape)


@contextmanager
def as_before(run: Pass) -> Generator[None]:
    """The model as the first pass found it, its random numbers too; no gradients, and nothing left on it."""
    assert run.recording.random_state is not None
    with (
        untouched(run.model),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.no_grad(),
        eagerly(),
    ):
        torch.set_rng_state(run.recording.random_state)
        yield


def replay(run: Pass, again: Replay) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """Run a pass again: for every call how much its queries, keys and values changed, and what the model returned.

    Each (outer, outer, token), True where the vector of a token changed.
    """
    first = run.recording
    with as_before(run):
        with again:
            own_args, own_kwargs = again.given(fresh(run.args), fresh(run.kwargs))
            output = run.model(*own_args, **own_kwargs)
            again.finish(output)
        if len(again.recording.digests) != len(first.digests):
            raise ValueError(
                f"{type(run.model).__name__} makes {len(first.digests)} attention calls, and "
                f"{len(again.recording.digests)} when it runs again: what it does depends on chance, or on what ran "
                "before"
            )
        pairs = zip(first.digests, again.recording.digests, strict=True)
        again.recording.tail = [(name, digest(x)) for name, x in again.recording.tail]
        changes = [{name: changed(one[name], other[name], first.dtype) for name in one} for one, other in pairs]
        return changes, output


@contextmanager
def untouched(model: torch.nn.Module) -> Generator[None]:
    """Put back what the modules of a model hold themselves (the weights of the last pass, a cache) on leaving."""
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    before = [(held, dict(held)) for module in modules for held in (module.__dict__, module._buffers)]  # pyright: ignore[reportPrivateUsage]
    buffers = [(buffer, version_of(buffer), buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for held, values in before:
            for name in [name for name in held if name not in values]:
                del held[name]
            held.update({name: value for name, value in values.items() if held.get(name) is not value})
        for buffer, version, content in buffers:
            if version_of(buffer) != version:
                buffer.copy_(content)


def version_of(x: torch.Tensor) -> int:
    """How often a tensor was written into; in inference mode nobody counts."""
    return 0 if x.is_inference() else x._version  # pyright: ignore[reportPrivateUsage]


def changed(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where vectors differ, of which these are the digests, beyond what rounding does in a precision."""
    length = torch.maximum(before[..., -1], after[..., -1])
    least = length.mean() * 1e-3  # a vector of nothing is compared with its likes
    tolerance = _CHANGED.get(dtype, _CHANGED_IN_SINGLE)
    difference = (before - after)[..., :-1].abs().amax(-1)
    return (difference > tolerance * torch.maximum(length, least)).cpu()
