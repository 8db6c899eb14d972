"""From a recorded batch to its examples: one example's layers among the positions that are no padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from attnflow.block import Block
from attnflow.capturing.calls import Kept, LeftOut, Rows
from attnflow.capturing.dataflow import Dataflow, Group
from attnflow.capturing.proof import Proof, rows_with_gradient
from attnflow.capturing.recorder import Recording
from attnflow.capturing.surroundings import check
from attnflow.layers import HIDDEN, AttentionCall, AttentionWeights, Carried, Layer, Part, PlacedLayer, WeightsGradient

# A weight on padding that is rounding, not attention.
_NEGLIGIBLE = 1e-6

# Weights (head, query, key) that exist at once where a block is checked.
_CHECKED = 2**22


# Masks that were reduced already: layers that share a mask share the reduced one, so that memory grows with n.
Reduced: TypeAlias = dict[Any, tuple["torch.Tensor | None", bool]]


@dataclass(frozen=True, eq=False)
class Stack:
    """The kept calls of a batch as layers over the positions of its joint streams.

    kept: of each joint stream (example, position), True for those that are no padding.
    """

    recording: Recording
    flow: Dataflow
    proof: Proof
    kept: Mapping[int, torch.Tensor]

    def example(self, index: int) -> tuple[Layer, ...]:
        """The layers of one example among its kept positions, in forward order.

        Raises ValueError for an example that is all padding, and for a call that lets a token attend to padding.
        """
        keep = {number: kept[index] for number, kept in self.kept.items()}
        if not all(bool(kept.any()) for kept in keep.values()):
            raise ValueError(f"example {index} holds nothing but padding")
        starts, size = dict[int, int](), 0
        for number, kept in keep.items():
            starts[number], size = size, size + int(kept.sum())
        masks: Reduced = {}
        layers: list[Layer] = []
        for number, step in enumerate(self.flow.steps):
            pools = self.flow.pools and number == len(self.flow.steps) - 1
            if all(isinstance(self.recording.calls[call], LeftOut) for group in step for call in group.calls):
                continue
            groups = [(group, self._heads(group, index, keep, masks, pools=pools)) for group in step]
            if len(keep) == 1 and not any(layout.past for layout in self.proof.layouts.values()):
                layers.append(replace(groups[0][1], pools=pools))
                continue
            parts = [
                Part(
                    layer,
                    _places(starts[group.of] + self._past(group.of, keep), layer.shape[1]),
                    _places(starts[group.on], layer.shape[2]),
                )
                for group, layer in groups
            ]
            layers.append(PlacedLayer(tuple(parts), size))
        return tuple(layers)

    def _past(self, stream: int, keep: Mapping[int, torch.Tensor]) -> int:
        """How many kept positions of a stream come before its first query."""
        return int(keep[stream][: self.proof.layouts[stream].past].sum())

    def reads(self, index: int) -> tuple[int, ...] | None:
        """The positions of one example's graph that the output is read from; None if that is not known, or all."""
        last = self.recording.explained[-1]
        call, found = self.recording.calls[last], self.proof.reads
        group, probes = self.flow.group_of(last)
        stream = group.of
        if not isinstance(call, LeftOut) and call.gradient is not None:  # the target says what it is read from itself
            found = rows_with_gradient(call, self.proof.orders[last], len(next(iter(self.kept.values()))))
        if found is None or probes or stream not in self.kept:
            return None
        kept = self.kept[stream][index]
        past = self.proof.layouts[stream].past
        place = kept.cumsum(0)[past:] - 1
        before = itertools.takewhile(lambda number: number != stream, self.kept)
        start = sum(int(self.kept[number][index].sum()) for number in before)
        positions = tuple(start + int(place[position]) for position in found[index] if kept[past + position])
        return positions or None  # none where the head has weights of 0

    def _heads(
        self, group: Group, index: int, keep: Mapping[int, torch.Tensor], masks: Reduced, *, pools: bool
    ) -> AttentionCall | AttentionWeights:
        """The calls of a group, of one example, as the heads of one layer."""
        heads: list[AttentionCall | AttentionWeights] = []
        batch = len(self.kept[group.on])
        for number in group.calls:
            call = self.recording.calls[number]
            if isinstance(call, LeftOut):
                raise ValueError(f"layers= takes apart what is one layer: {call.module} is one of its heads' modules")
            past = 0 if pools else self.proof.layouts[group.of].past
            queries = torch.ones(call.extent[2], dtype=torch.bool) if pools else keep[group.of][past:]
            rows = self.proof.orders[number].rows(call.extent, batch, index)
            own = self._past(group.of, keep) if group.of == group.on and not pools else None
            heads.append(call_layer(call, rows, queries, keep[group.on], masks, own))
        return heads[0] if len(heads) == 1 else _side_by_side(heads)


def _places(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


def _side_by_side(layers: Sequence[AttentionCall | AttentionWeights]) -> AttentionCall | AttentionWeights:
    """Calls that read the same as one layer with the heads of all."""
    if any(layer.values is not None or layer.carried is not None for layer in layers):
        raise ValueError(
            f"keep= takes layers of one attention call each; one is made of several, {layers[0].name} among them, as "
            "with a module for each head"
        )
    gradients = [layer.gradient for layer in layers if layer.gradient is not None]
    gradient = None
    if len(gradients) == len(layers):
        width = max(one.v.shape[-1] for one in gradients)

        def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([F.pad(part, (0, width - part.shape[-1])) for part in parts])

        values = [one.v.repeat_interleave(len(one.output) // len(one.v), 0) for one in gradients]
        at_layer = [one.at_layer for one in gradients if one.at_layer is not None]
        gradient = WeightsGradient(
            joined([one.output for one in gradients]), joined(values), joined(at_layer) if at_layer else None
        )
    fused = [layer for layer in layers if isinstance(layer, AttentionCall)]
    first = layers[0]
    alike = {(layer.q.shape[1:], layer.k.shape[1:], layer.causal, id(layer.mask), layer.scale) for layer in fused}
    if isinstance(first, AttentionCall) and len(fused) == len(layers) and len(alike) == 1 and _is_shared(first.mask):
        keys = [layer.k.repeat_interleave(len(layer.q) // len(layer.k), 0) for layer in fused]
        return replace(first, q=torch.cat([layer.q for layer in fused]), k=torch.cat(keys), gradient=gradient)
    weights = torch.cat([layer.attention() for layer in layers])
    return AttentionWeights(first.name, weights, captured=True, gradient=gradient)


def _is_shared(mask: torch.Tensor | None) -> bool:
    """Whether a mask (head, query, key) is the same for all heads."""
    return mask is None or len(mask) == 1


def kept_positions(
    recording: Recording, flow: Dataflow, proof: Proof, given: Mapping[int, Any]
) -> dict[int, torch.Tensor]:
    """For each joint stream (example, position), True for no padding: as a mask says, or where some query looks.

    given: what the inputs say of the padding of a stream, if they do.
    """
    found: dict[int, torch.Tensor] = {}
    for stream in flow.joint:
        layout = proof.layouts[stream]
        mask = given.get(stream)
        signal = layout.source is not None and layout.source.kind in ("convolution", "linear", "module")
        if not signal and isinstance(mask, torch.Tensor) and mask.shape == (layout.batch, layout.size):
            found[stream] = (mask != 0).cpu()
            continue
        numbers = [
            call for step in flow.steps for group in step if group.on == stream for call in group.calls
            if not isinstance(recording.calls[call], LeftOut) and recording.hides(call)
        ]  # fmt: skip
        visible = torch.full((layout.batch, layout.size), not numbers)
        for number in numbers:
            call = recording.calls[number]
            assert not isinstance(call, LeftOut)
            for example in range(layout.batch):
                visible[example] |= seen_keys(call, proof.orders[number].rows(call.extent, layout.batch, example))
        found[stream] = visible
    return found


def entered(x: torch.Tensor, index: int, count: int, kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Of what a batch of `count` examples entered as the part of one, without its padding; of a single one all.

    x: embeddings (example, token, dim), or pixels (example, ...). kept: as `kept_positions` gives it.

    Raises ValueError where the examples of embeddings may lie on another axis, or two streams are padded otherwise.
    """
    if count == 1:
        return x
    if len(x) != count or (x.ndim == 3 and x.shape[1] == count):
        raise ValueError(
            f"entered=True needs examples on the first axis of what enters the model, and {count} of them entered as "
            f"{tuple(x.shape)}; give one example"
        )
    own = x[index : index + 1]
    masks = [mask[index] for mask in kept.values() if x.ndim == 3 and mask.shape[1] == x.shape[1]]
    if any(not torch.equal(mask, masks[0]) for mask in masks):
        raise ValueError("entered=True cannot tell which of two streams of equal length entered; give one example")
    return own[:, masks[0].to(x.device)] if masks else own


def seen_keys(call: Kept, rows: Rows) -> torch.Tensor:
    """(key,), True where some query of some rows may attend to a key."""
    layer, keys = call.take(rows), call.extent[3]
    if isinstance(layer, AttentionWeights):
        return (layer.weights != 0).any(0).any(0).cpu()
    if layer.mask is None:
        return torch.ones(keys, dtype=torch.bool)
    return _allowed(layer.mask).any(0).any(0).expand(keys).cpu()


def call_layer(
    call: Kept, rows: Rows, queries: torch.Tensor, keys: torch.Tensor, seen: Reduced, own: int | None
) -> AttentionCall | AttentionWeights:
    """Some rows of one call as the heads of a layer, among its kept queries and keys.

    own: the number, among the kept keys, of that at which the first query stands; None where queries are no keys.
    """
    layer = _among_kept(call, call.take(rows), queries, keys, seen)
    if layer.values is not None:
        layer = replace(layer, values=_among(layer.values, keys))
    if layer.carried is not None:
        layer = replace(layer, carried=_carried(layer.carried, queries, call))
    if layer.block is not None:
        layer = replace(layer, block=_block(layer.block, queries, own))
        _check_block(layer)
    return layer


def _carried(carried: Carried, queries: torch.Tensor, call: Kept) -> Carried:
    """Relevance at the kept queries, where the rows of the stream are the queries, and the keys, of one example."""
    rows, count = len(carried.entering), call.extent[2]
    if not rows == count == call.extent[3]:
        raise ValueError(
            f"keep='relevance' takes one example whose attention is over all of its tokens; beside the {count} queries "
            f"and {call.extent[3]} keys of {call.module or 'the model'} stand {rows} rows of the stream: capture one "
            "example at a time"
        )
    queries = queries.to(carried.entering.device)
    return Carried(
        carried.entering[queries], carried.leaving[queries], carried.biases[queries], carried.key_biases[queries]
    )


def _block(block: Block, queries: torch.Tensor, own: int | None) -> Block:
    """A block among the kept queries, the first of which stands at some key."""
    at = queries.nonzero().flatten().to(block.stream.device)
    places = None if own is None else torch.arange(own, own + len(at), device=at.device)
    scale = None if block.second_scale is None else block.second_scale[at]
    return replace(block, added=block.added[at], stream=block.stream[at], own=places, second_scale=scale)


def _check_block(layer: AttentionCall | AttentionWeights) -> None:
    """Raise ValueError unless weights, values and projection give what was added to the stream, at every query."""
    assert layer.block is not None
    assert layer.values is not None
    heads, queries, keys = layer.shape
    values = layer.values.repeat_interleave(heads // len(layer.values), 0)
    step = max(1, _CHECKED // (heads * keys))
    for start in range(0, queries, step):
        rows = list(range(start, min(start + step, queries)))
        weights = layer.attention(rows)
        check(layer.block, rows, weights @ values.to(weights.dtype), layer.name)


def _among_kept(
    call: Kept, layer: AttentionCall | AttentionWeights, queries: torch.Tensor, keys: torch.Tensor, seen: Reduced
) -> AttentionCall | AttentionWeights:
    """Weights, or what they are made of, and their gradient, among the kept queries and keys."""
    gradient = layer.gradient
    if gradient is not None:
        at_layer = None if gradient.at_layer is None else _among(gradient.at_layer, queries)
        gradient = WeightsGradient(_among(gradient.output, queries), _among(gradient.v, keys), at_layer)
    if isinstance(layer, AttentionWeights):
        weights = _among(layer.weights, queries)
        if keys.all():
            return replace(layer, weights=weights, gradient=gradient)
        keys = keys.to(weights.device)
        if (weights[..., ~keys] > _NEGLIGIBLE).any():
            raise ValueError(f"{call.module} attends to padding: it gives weight to what the mask hides")
        return replace(layer, weights=weights[..., keys], gradient=gradient)
    mask = layer.mask
    shared = layer.causal if mask is None else (mask.data_ptr(), mask.shape, mask.stride())
    shared = (shared, queries.numpy().tobytes(), keys.numpy().tobytes())
    if shared not in seen:
        seen[shared] = _reduced_mask(layer, queries, keys)
    mask, causal = seen[shared]
    q, k = _among(layer.q, queries), _among(layer.k, keys)
    return replace(layer, q=q, k=k, mask=mask, causal=causal, gradient=gradient)


def _among(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """(head, token, dim) among the kept tokens."""
    return x if keep.all() else x[:, keep.to(x.device)]


def _reduced_mask(call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """(mask, causal) among the kept positions; a mask that hides nothing, or just the future, becomes None."""
    if call.mask is None:
        if not keys.all() and not (call.causal and keys.long().diff().le(0).all()):
            raise ValueError(f"{call.name} attends to padding: the model was given no mask that hides it")
        return None, call.causal
    queries, keys = queries.to(call.mask.device), keys.to(call.mask.device)
    mask = call.mask.expand(*call.mask.shape[:2], len(keys))
    if mask.shape[1] > 1:
        mask = mask[:, queries]
    if _allowed(mask)[..., ~keys].any():
        raise ValueError(f"{call.name} attends to padding: its mask shows what the inputs' mask hides")
    mask = mask[..., keys]
    allowed = _allowed(mask)
    rows, count = mask.shape[1:]
    past = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()
    causal = rows == count > 1 and not bool((allowed & ~past).any())
    if mask.dtype != torch.bool:
        if bool((allowed & (mask != 0)).any()):
            return mask, causal
        mask = allowed
    hides_nothing_more = mask.all() or (causal and bool((mask == past).all()))
    return (None if hides_nothing_more else mask), causal


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > HIDDEN
