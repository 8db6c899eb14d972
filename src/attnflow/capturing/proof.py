"""Proofs: that a trace is what the model did, found out by asking the model and not by reading its names.

The model runs once more with some of its tokens changed, while every attention call returns what it returned before. So
nothing can move from one position to another, and where the queries, keys and values of a call differ from before shows
where the tokens stand in it: which axis is the batch, which patches are where. If they differ anywhere else, then
something that is no recorded call moves information between positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from attnflow.capturing.calls import LeftOut, Rows, WeightedSum
from attnflow.capturing.dataflow import Dataflow
from attnflow.capturing.inputs import fresh
from attnflow.capturing.labels import tensors_in
from attnflow.capturing.recorder import Attending, Kind, Recorder, Recording, Source, eagerly

# How much of a vector must change for it to be changed, beyond what rounding does in its precision.
_CHANGED = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CHANGED_IN_SINGLE = 2e-5
_MOST_TRIED = 3
_FEW = 8  # of so few tokens, those left alone at first are changed in a second run


# Where tokens begin, the likeliest first.
KINDS: tuple[Kind, ...] = ("embedding", "input", "convolution", "linear", "module")

# A source, by its kind and number.
Key: TypeAlias = tuple[str, int]


class Order(NamedTuple):
    """Which outer axis of a call holds the examples, and whether they are its slower index or its faster one."""

    axis: int
    slower: bool

    def rows(self, outer: Sequence[int], batch: int, example: int) -> Rows:
        """The rows of one example among the outer axes of a call."""
        share = outer[self.axis] // batch
        own = range(example * share, (example + 1) * share) if self.slower else range(example, outer[self.axis], batch)
        if self.axis == 0:
            return [(first, second) for first in own for second in range(outer[1])]
        return [(first, second) for first in range(outer[0]) for second in own]

    def examples(self, outer: Sequence[int], batch: int) -> torch.Tensor:
        """The example of every row, (outer, outer)."""
        found = torch.zeros(*outer[:2], dtype=torch.long)
        for example in range(batch):
            first, second = zip(*self.rows(outer, batch, example), strict=True)
            found[list(first), list(second)] = example
        return found


ORDERS = (Order(0, True), Order(1, True), Order(0, False), Order(1, False))


@dataclass(frozen=True, eq=False)
class Layout:
    """How the tokens of one stream lie: batch examples of size positions, of which the first `prefix` hold no token.

    source: where its tokens begin; None for learned queries. batch_axis: of the source's plane, None without one.
    past: how many of the first positions are keys alone, which no query of the pass stands for (a cache).
    """

    source: Source | None
    batch: int
    batch_axis: int | None
    size: int
    prefix: int
    past: int = 0

    def positions(self, plane: torch.Tensor) -> torch.Tensor:
        """What is known of each token of the source's plane as (example, position); False for the prefix."""
        flat = plane.reshape(1, -1) if self.batch_axis is None else plane.movedim(self.batch_axis, 0).flatten(1)
        return torch.cat([flat.new_zeros(self.batch, self.prefix), flat], 1)


def layouts(sources: Sequence[Source], size: int, past: int = 0) -> Iterator[Layout]:
    """The ways in which tokens of some sources can be `size` positions behind `past` others, the likeliest first.

    Tokens that are looked up come first, or given as vectors: what mixes these is no part of making them. Of a signal
    the last convolution comes first, then the last module before the calls. Where there are more positions than tokens,
    the rest stand first.
    """
    ranked = [source for kind in KINDS for source in _of_kind(sources, kind)]
    tokens = [source for source in ranked if source.kind in ("embedding", "input") and size in source.plane]
    for source in tokens or ranked:
        plane = source.plane
        axes = [None] if len(plane) < 2 else [0, 1] if len(plane) == 2 and source.kind != "convolution" else [0]
        for axis in axes:
            batch = 1 if axis is None else plane[axis]
            prefix = size - math.prod(plane) // max(batch, 1)
            if prefix == 0 or (0 < prefix < size and source.kind != "module"):
                yield Layout(source, batch, axis, size + past, prefix + past, past)


def _of_kind(sources: Sequence[Source], kind: Kind) -> list[Source]:
    own = [source for source in sources if source.kind == kind]
    return own[::-1] if kind in ("convolution", "module") else own


class Replay(Recorder):
    """Runs a model again with every attention call returning what it returned before, and with some tokens changed.

    changed: for sources, by kind and number, True where a token gets another vector. reads: whether gradients run from
    the last call on, so that what the output is read from can be told.
    """

    def __init__(
        self, model: torch.nn.Module, first: Recording, changed: Mapping[Key, torch.Tensor], *, reads: bool = False
    ) -> None:
        super().__init__(model, compared=True)
        self.first, self._masks, self._reads = first, changed, reads
        self.last: torch.Tensor | None = None

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, with other vectors for the tokens that are to be changed."""
        inputs = list(dict.fromkeys(tensors_in((args, kwargs))))
        others = {
            x: another(x, self._masks["input", number], -1)
            for number, x in enumerate(inputs)
            if ("input", number) in self._masks
        }
        args, kwargs = _replaced((args, kwargs), others)
        return super().given(args, kwargs)

    def _changed(self, source: Source, output: torch.Tensor) -> torch.Tensor:
        mask = self._masks.get((source.kind, source.number))
        if mask is None:
            return output
        channels = -len(source.plane) if source.kind == "convolution" else -1
        return another(output, mask[0] if mask.ndim == output.ndim else mask, channels)

    def _check_room(self, call: WeightedSum) -> None:
        """Nothing: the pass that runs again kept as much."""

    def _attend(self, attending: Attending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, number = attending.make(), len(self.recording.calls)
        if number >= len(self.first.calls) or call.extent != self.first.calls[number].extent:
            raise ValueError(
                f"{call.module or 'the model'} attends in another way when the model runs again: what it does depends "
                "on chance, or on what ran before"
            )
        output = self.first.outputs[number].clone()
        if self._reads and number == len(self.first.calls) - 1:
            torch._C._set_grad_enabled(True)  # pyright: ignore[reportPrivateUsage]
            self.last = output.requires_grad_()
            output = output.clone()
        output = self._keep(call, output, attending.labels)
        return (output, *func(*args, **kwargs)[1:]) if attending.in_tuple else output


def another(x: torch.Tensor, mask: torch.Tensor, channels: int) -> torch.Tensor:
    """A tensor with other vectors along its axis of channels where a mask over the other axes says so."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator).to(x) * x.detach().float().std().to(x)
    return torch.where(mask.to(x.device).unsqueeze(channels), x + noise, x)


def _replaced(values: Any, others: Mapping[torch.Tensor, torch.Tensor]) -> Any:
    if isinstance(values, torch.Tensor):
        return others.get(values, values)
    if isinstance(values, dict):
        return {name: _replaced(value, others) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_replaced(value, others) for value in values)
    return values


def replay(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: Replay
) -> tuple[list[dict[str, torch.Tensor]], Any]:
    """Run a model again: for every call how much its queries, keys and values changed, and what the model returned.

    Each (outer, outer, token), True where the vector of a token changed.
    """
    first = again.first
    with untouched(model), torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad(), eagerly():
        assert first.random_state is not None
        torch.set_rng_state(first.random_state)
        with again:
            own_args, own_kwargs = again.given(fresh(args), fresh(kwargs))
            output = model(*own_args, **own_kwargs)
            again.finish(output)
        if len(again.recording.digests) != len(first.digests):
            raise ValueError(
                f"{type(model).__name__} makes {len(first.digests)} attention calls, and "
                f"{len(again.recording.digests)} when it runs again: what it does depends on chance, or on what ran "
                "before"
            )
        pairs = zip(first.digests, again.recording.digests, strict=True)
        changes = [{name: changed(one[name], other[name], first.dtype) for name in one} for one, other in pairs]
        return changes, output


@contextmanager
def untouched(model: torch.nn.Module) -> Generator[None]:
    """Put back what the modules of a model hold themselves (the weights of the last pass, a cache) on leaving."""
    before = [(held, dict(held)) for module in model.modules() for held in (module.__dict__, module._buffers)]  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        for held, values in before:
            for name in [name for name in held if name not in values]:
                del held[name]
            held.update({name: value for name, value in values.items() if held.get(name) is not value})


def changed(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where vectors differ, of which these are the digests, beyond what rounding does in a precision."""
    length = torch.maximum(before[..., -1], after[..., -1])
    least = length.mean() * 1e-3  # a vector of nothing is compared with its likes
    tolerance = _CHANGED.get(dtype, _CHANGED_IN_SINGLE)
    difference = (before - after)[..., :-1].abs().amax(-1)
    return (difference > tolerance * torch.maximum(length, least)).cpu()


@dataclass(frozen=True, eq=False)
class Proof:
    """How the tokens of a pass lie in its calls, and what was found out about it.

    layouts: of each joint stream. orders: of each call. reads: what the output is read from: the last position, all of
    them, some of each example, or None where each position has an output of its own. mixers: the module that moves
    information between positions beside the calls, if there is one. asked: whether the model was asked at all.
    """

    layouts: Mapping[int, Layout]
    orders: Sequence[Order]
    reads: Literal["last", "all"] | tuple[tuple[int, ...], ...] | None = None
    mixers: str | None = None
    asked: bool = True


def assume(recording: Recording, flow: Dataflow) -> Proof | None:
    """How tokens lie if nothing is asked: the likeliest way that the sizes allow; None where they allow none."""
    found = next(_fitting(recording, flow, None, {}), None)
    return found and Proof(*found, asked=False)


def prove(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recording: Recording,
    flow: Dataflow,
    hidden: Mapping[int, torch.Tensor],
    kinds: Sequence[Kind] = KINDS,
) -> Proof | None:
    """Ask the model where its tokens stand, whether anything else moves information, and what its output is read from.

    hidden: for streams with padding, (example, position), True where a token may be dropped. kinds: of the sources
    that are asked about. Returns None where its tokens stand in no way that is known here, or something mixes them.
    """
    tried = list[set[Source]]()
    for candidate, _ in _fitting(recording, flow, None, {}):
        sources = {layout.source for layout in candidate.values() if layout.source is not None}
        other = any(source.kind not in kinds for source in sources)
        if other or sources in tried or len(tried) == _MOST_TRIED:
            continue
        tried.append(sources)
        masks = masks_over(flow, candidate)
        again = Replay(model, recording, masks, reads=True)
        changes, output = replay(model, args, kwargs, again)
        seen = [(masks, changes)]
        if any(mask.numel() <= _FEW for mask in masks.values()):
            others = {key: ~mask for key, mask in masks.items()}
            seen.append((others, replay(model, args, kwargs, Replay(model, recording, others))[0]))
        if (found := next(_fitting(recording, flow, seen, hidden), None)) is not None:
            chosen, orders = found
            return Proof(chosen, orders, _positions_read(again, output, orders[-1], chosen, flow))
    return None


def masks_over(flow: Dataflow, layouts: Mapping[int, Layout]) -> dict[Key, torch.Tensor]:
    """Some tokens of each stream, as masks over its sources of one kind and plane: words, their types, positions."""
    masks: dict[Key, torch.Tensor] = {}
    for seed, (number, layout) in enumerate(layouts.items()):
        if (own := layout.source) is not None:
            mask = masks.get((own.kind, own.number), some_tokens(own, seed))
            for source in flow.streams[number].sources:
                if (source.kind, source.plane) == (own.kind, own.plane) and own.kind in ("embedding", "input"):
                    masks.setdefault((source.kind, source.number), mask)
            masks.setdefault((own.kind, own.number), mask)
    return masks


def some_tokens(source: Source, seed: int) -> torch.Tensor:
    """Some tokens of a source, about half of them, chosen by a seed: the first, never the last, if there are two."""
    mask = torch.rand(source.plane, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask.view(-1)[0] = True
    if mask.numel() > 1:
        mask.view(-1)[-1] = False
    return mask


def _fitting(
    recording: Recording,
    flow: Dataflow,
    seen: Sequence[tuple[Mapping[Key, torch.Tensor], Sequence[Mapping[str, torch.Tensor]]]] | None,
    hidden: Mapping[int, torch.Tensor],
) -> Iterator[tuple[dict[int, Layout], list[Order]]]:
    """The layouts of the joint streams, and the order of each call, that the sizes allow and that fit what was seen.

    seen: which tokens of which sources were changed, and what changed in every call.
    """
    sizes = sizes_of(recording, flow)
    if sizes is None:
        return
    options: list[list[Layout | None]] = []
    for number in flow.joint:
        sources = flow.streams[number].sources
        options.append(list(layouts(sources, *sizes[number])) if sources else [None])
    for chosen in itertools.product(*options):
        batches = {layout.batch for layout in chosen if layout is not None}
        if len(batches) != 1:
            continue
        (batch,) = batches
        filled = {
            number: layout or Layout(None, batch, None, sum(sizes[number]), sum(sizes[number]), sizes[number][1])
            for number, layout in zip(flow.joint, chosen, strict=True)
        }
        orders = _orders(recording, flow, filled, seen, hidden)
        if orders is not None:
            yield filled, orders


def sizes_of(recording: Recording, flow: Dataflow) -> dict[int, tuple[int, int]] | None:
    """How many tokens each joint stream has, and how many keys before them that no query stands for.

    None if a stream has more in some calls than in others.
    """
    queries: dict[int, set[int]] = {}
    keys: dict[int, set[int]] = {}
    for number, step in enumerate(flow.steps):
        for group in step:
            for call in group.calls:
                extent = recording.calls[call].extent
                keys.setdefault(group.on, set()).add(extent[3])
                if not (flow.pools and number == len(flow.steps) - 1):
                    queries.setdefault(group.of, set()).add(extent[2])
    sizes: dict[int, tuple[int, int]] = {}
    for stream in queries | keys:
        asking, asked = queries.get(stream) or keys[stream], keys.get(stream) or queries[stream]
        if len(asking) > 1 or len(asked) > 1 or min(asked) < min(asking):
            return None
        sizes[stream] = min(asking), min(asked) - min(asking)
    return sizes


def _orders(
    recording: Recording,
    flow: Dataflow,
    chosen: Mapping[int, Layout],
    seen: Sequence[tuple[Mapping[Key, torch.Tensor], Sequence[Mapping[str, torch.Tensor]]]] | None,
    hidden: Mapping[int, torch.Tensor],
) -> list[Order] | None:
    """The order of each call in some layouts of the streams; None if one fits in no order."""
    orders: list[Order] = []
    for number, call in enumerate(recording.calls):
        group, probes = flow.group_of(number)
        batch = chosen[group.on].batch
        for order in ORDERS:
            if call.extent[order.axis] % batch:
                continue
            sides = {"q": None if probes else group.of, "k": group.on, "v": group.on}
            begins = {"q": recording.fed[number].queries, "k": recording.fed[number].keys}
            begins |= {"v": recording.fed[number].values}
            if all(
                _matches(
                    changes[number][name],
                    mask,
                    chosen[stream],
                    order,
                    hidden.get(stream),
                    fresh=not recording.callers(begins[name]),
                )
                for mask, changes in seen or ()
                for name, stream in sides.items()
                if stream is not None and name in changes[number]
            ):
                orders.append(order)
                break
        else:
            return None
    return orders


def _matches(
    changes: torch.Tensor,
    masks: Mapping[Key, torch.Tensor],
    layout: Layout,
    order: Order,
    hidden: torch.Tensor | None,
    *,
    fresh: bool,
) -> bool:
    """Whether no tokens changed but those that hold what was changed, and in a fresh stream these in some head each.

    In deep layers a change may be lost in rounding beside what attention added. hidden (example, position): those that
    need not change.
    """
    outer = changes.shape[:2]
    past = layout.size - changes.shape[2]  # queries stand for no keys of the past
    if past not in (0, layout.past) or outer[order.axis] % layout.batch:
        return False
    source = layout.source
    mask = None if source is None else masks.get((source.kind, source.number))
    due = torch.zeros(layout.batch, layout.size, dtype=torch.bool) if mask is None else layout.positions(mask)
    missing = due if hidden is None or hidden.shape != due.shape else due & ~hidden
    due, missing = due[:, past:], missing[:, past:]
    examples = order.examples(outer, layout.batch)
    if bool((changes & ~due[examples]).any()):
        return False
    if not fresh:
        return True
    found = torch.stack([changes[examples == example].any(0) for example in range(layout.batch)])
    return not bool((missing & ~found).any())


def _positions_read(
    again: Replay, output: Any, order: Order, chosen: Mapping[int, Layout], flow: Dataflow
) -> tuple[tuple[int, ...], ...] | None:
    """For each example the positions of the last call that a pooled output depends on, by its gradient.

    None where no output is one vector per example, or no gradient reaches it.
    """
    last = again.last
    batch = next(iter(chosen.values())).batch
    pooled = [x for x in tensors_in(output) if x.requires_grad and x.ndim in (1, 2) and len(x) == batch]
    if last is None or not pooled:
        return None
    target = pooled[0].float()
    weights = torch.randn(target.shape, generator=torch.Generator().manual_seed(0)).to(target)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((target * weights).sum(), last, allow_unused=True)
    if gradient is None:  # pyright: ignore[reportUnnecessaryComparison]
        return None
    call = again.recording.calls[-1]
    assert not isinstance(call, LeftOut)
    found = call.with_gradient(gradient).gradient
    assert found is not None
    reads = (found != 0).any(-1)
    rows = [order.rows(reads.shape[:2], batch, example) for example in range(batch)]
    return tuple(
        tuple(torch.stack([reads[first, second] for first, second in own]).any(0).nonzero().flatten().tolist())
        for own in rows
    )
