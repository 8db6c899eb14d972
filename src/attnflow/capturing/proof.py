"""Proofs: that a trace is what the model did, found out by asking the model and not by reading its names.

The model runs once more with some of its tokens changed, while every attention call returns what it returned before. So
nothing can move from one position to another, and where the queries, keys and values of a call differ from before shows
where the tokens stand in it: which axis is the batch, which patches are where. If they differ anywhere else, then
something that is no recorded call moves information between positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnflow.capturing.calls import Kept, LeftOut, Rows
from attnflow.capturing.dataflow import Dataflow
from attnflow.capturing.labels import tensors_in
from attnflow.capturing.recorder import Kind, Recording, Source
from attnflow.capturing.replay import Change, Key, Pass, Replay, changed, replay

_MOST_TRIED = 3
_FEW = 32  # positions, of which every two are told apart


# Where tokens begin, the likeliest first.
KINDS: tuple[Kind, ...] = ("embedding", "input", "convolution", "linear", "module")


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

    def plane(self, positions: torch.Tensor) -> torch.Tensor:
        """The way back: what is known of each (example, position) as that of each token of the source's plane."""
        assert self.source is not None
        flat, shape, axis = positions[:, self.prefix :], self.source.plane, self.batch_axis
        if axis is None:
            return flat.reshape(shape)
        return flat.reshape(self.batch, *shape[:axis], *shape[axis + 1 :]).movedim(0, axis)


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
            if source.kind == "module" and batch != _last_convolved(sources):
                continue
            prefix = size - math.prod(plane) // max(batch, 1)
            if prefix == 0 or (0 < prefix < size and source.kind != "module"):
                yield Layout(source, batch, axis, size + past, prefix + past, past)


def _last_convolved(sources: Sequence[Source]) -> int:
    """Over how many signals the last convolution ran."""
    return next(source.plane[0] for source in reversed(sources) if source.kind == "convolution")


def _of_kind(sources: Sequence[Source], kind: Kind) -> list[Source]:
    own = [source for source in sources if source.kind == kind]
    return own[::-1] if kind in ("convolution", "module") else own


@dataclass(frozen=True, eq=False)
class Proof:
    """How the tokens of a pass lie in its calls, and what was found out about it.

    layouts: of each joint stream. orders: of each explained call. reads: for each example the positions of the last
    layer that a pooled output is read from, or None where that is not known. mixers: the module that moves information
    between positions beside the calls, if there is one. asked: whether the model was asked at all.
    """

    layouts: Mapping[int, Layout]
    orders: Mapping[int, Order]
    reads: tuple[tuple[int, ...], ...] | None = None
    mixers: str | None = None
    asked: bool = True


def assume(recording: Recording, flow: Dataflow) -> Proof | None:
    """How tokens lie if nothing is asked: the likeliest way that the sizes allow; None where they allow none."""
    found = next(_fitting(recording, flow, None, {}), None)
    return found and Proof(*found, asked=False)


def prove(run: Pass, flow: Dataflow, hidden: Mapping[int, torch.Tensor], *, modules: bool = False) -> Proof | None:
    """Ask the model where its tokens stand, whether anything else moves information, and what its output is read from.

    hidden: for streams with padding, (example, position), True where a token may be dropped. modules: whether it is
    asked about tokens that some module made of a signal, or about all others. Returns None where its tokens stand in no
    way that is known here, or something mixes them.
    """
    recording, tried = run.recording, list[set[Source]]()
    for candidate, _ in _fitting(recording, flow, None, {}):
        sources = {layout.source for layout in candidate.values() if layout.source is not None}
        other = modules != any(source.kind == "module" for source in sources)
        if other or sources in tried or len(tried) == _MOST_TRIED:
            continue
        tried.append(sources)
        change = Change(masks_over(flow, candidate))
        again = Replay(run, change, reads=True)
        seen, output = replay(run, again)
        found = next(_fitting(recording, flow, (change, seen), hidden), None)
        if found is None:
            continue
        chosen, orders = found
        reads = _positions_read(again, output, orders[recording.explained[-1]], chosen, flow)
        change = replace(change, due={stream: due_in(layout, change.masks) for stream, layout in chosen.items()})
        mixers = _mixed_after(again, chosen, change.due)
        for due in further_changes(chosen, change) if mixers is None else ():
            change = change_of(recording, flow, chosen, orders, due)
            again = Replay(run, change)
            seen, _ = replay(run, again)
            if not _stays(recording, flow, chosen, orders, change, seen):
                return None
            mixers = mixers or _mixed_after(again, chosen, due)
        return Proof(chosen, orders, reads, mixers)
    return None


def due_in(layout: Layout, masks: Mapping[Key, torch.Tensor]) -> torch.Tensor:
    """(example, position), True for the positions that hold a token of which the masks say that it is changed."""
    mask = None if layout.source is None else masks.get((layout.source.kind, layout.source.number))
    return torch.zeros(layout.batch, layout.size, dtype=torch.bool) if mask is None else layout.positions(mask)


def further_changes(chosen: Mapping[int, Layout], change: Change) -> list[dict[int, torch.Tensor]]:
    """For each stream (example, position), what is due in further passes: the tokens that a change left alone.

    With them half of the positions that hold no token. Of few positions, those with a bit in their number are due and
    then those without, so that any two are told apart.
    """
    count = sum(layout.batch * layout.size for layout in chosen.values())
    if count <= _FEW:
        bits = range((count - 1).bit_length())
        found: list[dict[int, torch.Tensor]] = []
        for bit, value in itertools.product(bits, (0, 1)):
            due, start = dict[int, torch.Tensor](), 0
            for stream, layout in chosen.items():
                numbers = torch.arange(start, start + layout.batch * layout.size).view(layout.batch, layout.size)
                due[stream], start = (numbers >> bit & 1) == value, start + numbers.numel()
            found.append(due)
        return found
    due = dict[int, torch.Tensor]()
    for stream, layout in chosen.items():
        half = torch.rand(layout.batch, layout.size, generator=torch.Generator().manual_seed(stream)) < 0.5
        half[:, 0] = True
        due[stream] = torch.cat([half[:, : layout.prefix], ~change.due[stream][:, layout.prefix :]], 1)
    return [due]


def change_of(
    recording: Recording,
    flow: Dataflow,
    chosen: Mapping[int, Layout],
    orders: Mapping[int, Order],
    due: Mapping[int, torch.Tensor],
) -> Change:
    """The change of some positions: of the tokens that they hold, and of what the calls return for them."""
    masks: dict[Key, torch.Tensor] = {}
    for stream, layout in chosen.items():
        for source in _alike(flow, stream, layout):
            masks.setdefault((source.kind, source.number), layout.plane(due[stream]))
    rows: dict[int, torch.Tensor] = {}
    for number, order in orders.items():
        group, probes = flow.group_of(number)
        if not probes:
            layout = chosen[group.of]
            examples = order.examples(recording.calls[number].extent[:2], layout.batch)
            rows[number] = due[group.of][:, layout.past :][examples]
    return Change(masks, rows, due)


def _stays(
    recording: Recording,
    flow: Dataflow,
    chosen: Mapping[int, Layout],
    orders: Mapping[int, Order],
    change: Change,
    seen: Sequence[Mapping[str, torch.Tensor]],
) -> bool:
    """Whether nothing changed in any call but where a change is due."""
    for number, order in orders.items():
        for name, stream in _sides(flow, number).items():
            if name in seen[number] and stream is not None:
                layout, due = chosen[stream], change.due[stream]
                if not _matches(seen[number][name], due, layout, order, None):
                    return False
    return True


def _sides(flow: Dataflow, call: int) -> dict[str, int | None]:
    """The streams of the queries, keys and values of a call; None for probes."""
    group, probes = flow.group_of(call)
    return {"q": None if probes else group.of, "k": group.on, "v": group.on}


def masks_over(flow: Dataflow, layouts: Mapping[int, Layout]) -> dict[Key, torch.Tensor]:
    """Some tokens of each stream, as masks over its sources."""
    masks: dict[Key, torch.Tensor] = {}
    for seed, (number, layout) in enumerate(layouts.items()):
        if (own := layout.source) is not None:
            mask = masks.get((own.kind, own.number), some_tokens(own, seed))
            for source in _alike(flow, number, layout):
                masks.setdefault((source.kind, source.number), mask)
    return masks


def _alike(flow: Dataflow, stream: int, layout: Layout) -> list[Source]:
    """The source of a layout, and those that are looked up or given for the same tokens (types, positions)."""
    own = layout.source
    if own is None:
        return []
    sources = flow.streams[stream].sources
    others = [source for source in sources if (source.kind, source.plane) == (own.kind, own.plane)]
    return others if own.kind in ("embedding", "input") else [own]


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
    seen: tuple[Change, Sequence[Mapping[str, torch.Tensor]]] | None,
    hidden: Mapping[int, torch.Tensor],
) -> Iterator[tuple[dict[int, Layout], dict[int, Order]]]:
    """The layouts of the joint streams, and the order of each call, that the sizes allow and that fit what was seen.

    seen: what was changed, and what changed in every call.
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
    seen: tuple[Change, Sequence[Mapping[str, torch.Tensor]]] | None,
    hidden: Mapping[int, torch.Tensor],
) -> dict[int, Order] | None:
    """The order of each call in some layouts of the streams; None if one fits in no order."""
    orders: dict[int, Order] = {}
    for number in recording.explained:
        call = recording.calls[number]
        fed, sides = recording.fed[number], _sides(flow, number)
        begins = {"q": fed.queries, "k": fed.keys, "v": fed.values}
        batch = chosen[flow.group_of(number)[0].on].batch
        for order in ORDERS:
            if call.extent[order.axis] % batch:
                continue
            for name, stream in sides.items():
                if seen is None or stream is None or name not in seen[1][number]:
                    continue
                due = due_in(chosen[stream], seen[0].masks)
                certain = None
                if not recording.callers(begins[name]):
                    certain = due & ~hidden[stream] if hidden.get(stream, due[:0]).shape == due.shape else due
                if not _matches(seen[1][number][name], due, chosen[stream], order, certain):
                    break
            else:
                orders[number] = order
                break
        else:
            return None
    return orders


def _matches(
    changes: torch.Tensor, due: torch.Tensor, layout: Layout, order: Order, certain: torch.Tensor | None
) -> bool:
    """Whether no vectors changed but those at positions that are due, and those that are certain in some head each.

    Where a stream begins all that are due are certain, but for padding; in deep layers a change may be lost in rounding
    beside what attention added. due, certain (example, position).
    """
    outer = changes.shape[:2]
    past = layout.size - changes.shape[2]  # queries stand for no keys of the past
    if past not in (0, layout.past) or outer[order.axis] % layout.batch:
        return False
    examples = order.examples(outer, layout.batch)
    if bool((changes & ~due[:, past:][examples]).any()):
        return False
    if certain is None:
        return True
    found = torch.stack([changes[examples == example].any(0) for example in range(layout.batch)])
    return not bool((certain[:, past:] & ~found).any())


def _mixed_after(again: Replay, chosen: Mapping[int, Layout], due: Mapping[int, torch.Tensor]) -> str | None:
    """The first module after the last call in which other positions changed than are due in any stream, or None."""
    for (name, before), (_, after) in zip(again.first.tail, again.recording.tail, strict=False):
        if before.shape != after.shape:
            continue
        differs = changed(before, after, again.first.dtype)
        found: list[bool] = []
        for stream, layout in chosen.items():
            own = due[stream][:, layout.past :]
            seen = differs.T if layout.batch_axis == 1 and differs.shape == own.T.shape else differs
            if seen.shape == own.shape:
                found.append(bool((seen & ~own).any()))
        if found and all(found):
            return name
    return None


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
    weights = torch.randn(pooled[0].shape, generator=torch.Generator().manual_seed(0)).to(pooled[0])
    with torch.inference_mode(False), torch.enable_grad():
        (gradient,) = torch.autograd.grad(pooled[0], last, weights, allow_unused=True)
    if gradient is None:  # pyright: ignore[reportUnnecessaryComparison]
        return None
    call = again.recording.calls[again.first.explained[-1]]
    assert not isinstance(call, LeftOut)
    return rows_with_gradient(call.with_gradient(gradient), order, batch)


def rows_with_gradient(call: Kept, order: Order, batch: int) -> tuple[tuple[int, ...], ...]:
    """For each example the queries of a call whose gradient is not 0."""
    assert call.gradient is not None
    reads = (call.gradient != 0).any(-1)
    rows = [order.rows(reads.shape[:2], batch, example) for example in range(batch)]
    return tuple(
        tuple(torch.stack([reads[first, second] for first, second in own]).any(0).nonzero().flatten().tolist())
        for own in rows
    )
