"""What a model decides without some of its attention: `knockout` (Geva et al. 2023, attention knockout).

The model runs with some weights taken out, and the change of the target says what it drew from them. Every call goes
through untouched, and what it returned is made anew for the queries that lose a key, whatever kind of call it is.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.capturing import huggingface, structure
from attnflow.capturing.calls import FusedCall, Kept, Rows, WeightedSum
from attnflow.capturing.examples import Stack, kept_positions
from attnflow.capturing.inputs import arguments, fresh, module_of
from attnflow.capturing.proof import Order, Proof
from attnflow.capturing.recorder import Attending, Recorder, record
from attnflow.capturing.replay import Pass, as_before
from attnflow.capturing.structure import Structure
from attnflow.capturing.target import Target, TargetScores, resolved
from attnflow.layers import AttentionCall, AttentionLike, Layer, calls_of

How: TypeAlias = Literal["hide", "zero"]

# (layer, query, key), as in the trace of the example: its padding left out, counted from 0.
Edge: TypeAlias = tuple[int, int, int]

# Of one call: the keys that each query loses.
Lost: TypeAlias = Mapping[int, Sequence[int]]

# Of each call, by its number, what it loses.
Losses: TypeAlias = Mapping[int, Lost]

# What scores of one example may differ by, and rows of weights from 1, because of rounding; else 1e-3.
_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Knockout(NamedTuple):
    """What knocking out did: `base`, the target's score of the model as it is; the change base - score of each set.

    target: an index, or words. A positive change is what the edges of a set spoke for the target.
    """

    base: float
    changes: NDArray[np.float64]
    target: int | str


def knockout(
    model: torch.nn.Module,
    inputs: Any,
    edges: Sequence[Sequence[Edge]],
    *,
    target: Target,
    tokenizer: Any = None,
    how: How = "hide",
    batch_size: int = 32,
) -> Knockout:
    """The change of the target when a model runs without some edges of its attention, for several sets of edges.

    model, inputs, tokenizer, target: as `attnflow.capture` takes them, for one example; "predicted" is what the model
    as it is predicts. edges: sets of (layer, query, key), as numbered in the example's trace; in every head.
    how: "hide" takes the key out before the softmax, so that what the query has left takes over its weight; "zero" sets
    the weight to 0 after it, so that the query gets less. What a row that the model weighed by hand lacks of 1 is taken
    for the share of a sink, and stays one. batch_size: sets in one forward pass, each an example of a batch.

    Raises ValueError for edges that there are not, or that hide all that a query sees; for layers that are no single
    call over all positions (windows, merged patches, encoder and decoder, a cache of keys); where the model gives other
    scores in a batch; and as `attnflow.capture` does.
    """
    if how not in get_args(How):
        raise ValueError(f"how={how!r} is unknown; choose one of {', '.join(get_args(How))}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more; it is {batch_size}")
    sets = [_edges(own) for own in edges]
    module, bound = module_of(model)
    args, kwargs = arguments(module, inputs, tokenizer)
    kwargs = {**bound, **kwargs}
    chosen = TargetScores(resolved(target, module, huggingface.input_ids(args, kwargs)), kwargs.get("attention_mask"))
    seen = _seen(module, args, kwargs)
    scores = chosen(seen.output).detach().reshape(-1)
    if len(scores) != 1:
        raise ValueError(f"the model was given {len(scores)} examples, and knockout takes one")
    layers = seen.layers()
    for own in sets:
        _check(own, layers, how)
    base, changes = float(scores[0]), np.zeros(len(sets))
    # A set without edges is the model as it is, to the last bit: it does not run again.
    asked = [number for number, own in enumerate(sets) if own]
    if not asked:
        return Knockout(base, changes, chosen.facts(0)["target"])
    alone = batch_size == 1 or seen.batch_axis is None
    orders = seen.orders if alone else _seen(*seen.copies(2)[:3]).orders
    for start in range(0, len(asked), 1 if alone else batch_size):
        some = asked[start : start + (1 if alone else batch_size)]
        lost = [seen.lost(sets[number]) for number in some]
        if alone:
            changes[some] = base - _scores(seen.run, orders, lost, how, chosen)[0]
            continue
        # The first example of a batch loses nothing, and tells whether the others can be compared with it.
        first, *others = _scores(seen.copies(len(some) + 1), orders, [{}, *lost], how, chosen)
        if abs(first - base) > _ROUNDING.get(seen.run.recording.dtype, 1e-3) * max(1.0, abs(base)):
            raise ValueError(
                f"the score is {base:.6g} of one example, and {first:.6g} of the same in a batch: what the model does "
                "hangs on the other examples; give batch_size=1"
            )
        changes[some] = first - np.array(others)
    return Knockout(base, changes, chosen.facts(0)["target"])


@dataclass(frozen=True, eq=False)
class _Seen:
    """A pass of the model as it is, what it returned, and how its calls make up layers."""

    run: Pass
    output: Any
    structure: Structure

    def __post_init__(self) -> None:
        reason = None
        flow, proof = self.structure.flow, self.structure.proof
        if proof is None:
            reason = "its attention is in windows, frames or merged patches"
        elif len(flow.joint) > 1:
            reason = "its layers join several streams, such as encoder and decoder"
        elif any(len(step) > 1 for step in flow.steps):
            reason = "its layers are made of several calls that change different streams"
        elif any(layout.past for layout in proof.layouts.values()):
            reason = "it was given a cache, whose keys stand for no query"
        if reason is not None:
            raise ValueError(
                f"{type(self.run.model).__name__} cannot lose edges here: {reason}, and knockout needs layers that are "
                "one call over all positions"
            )

    @property
    def proof(self) -> Proof:
        """Where the positions stand."""
        assert self.structure.proof is not None  # checked above
        return self.structure.proof

    @property
    def orders(self) -> Mapping[int, Order]:
        """Where the examples stand in each call, by number."""
        return self.proof.orders

    @property
    def batch_axis(self) -> int | None:
        """The axis of the examples in the inputs; None for a model that takes a single one."""
        return self.proof.layouts[self.structure.flow.joint[0]].batch_axis

    def _kept(self) -> dict[int, torch.Tensor]:
        given = structure.masks_of(self.structure.flow, self.run.kwargs)
        return kept_positions(self.run.recording, self.structure.flow, self.proof, given)

    def layers(self) -> tuple[Layer, ...]:
        """The layers of the example's trace."""
        return Stack(self.run.recording, self.structure.flow, self.proof, self._kept()).example(0)

    def lost(self, edges: Sequence[Edge]) -> Losses:
        """What each call loses, by its number, with the positions of padded queries and keys."""
        flow, found = self.structure.flow, defaultdict[int, dict[int, list[int]]](lambda: defaultdict(list))
        places = self._kept()[flow.joint[0]][0].nonzero().flatten().tolist()
        for layer, query, key in dict.fromkeys(edges):
            pools = flow.pools and layer == len(flow.steps) - 1
            for call in flow.steps[layer][0].calls:
                found[call][query if pools else places[query]].append(places[key])
        return found

    def copies(self, count: int) -> Pass:
        """The same pass over several copies of the example."""
        axis = self.batch_axis

        def several(values: Any) -> Any:
            if isinstance(values, torch.Tensor):
                return _repeated(values, axis or 0, count)
            if isinstance(values, Mapping):
                return {name: several(value) for name, value in values.items()}
            return type(values)(several(value) for value in values) if type(values) in (tuple, list) else values

        return self.run._replace(args=several(self.run.args), kwargs=several(self.run.kwargs))


def _repeated(x: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """A tensor with the one example along its batch axis repeated; what has no such axis is shared."""
    for dim in (axis, 0):
        if x.ndim > dim and x.shape[dim] == 1:
            return x.repeat_interleave(count, dim)
    return x


def _seen(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Seen:
    """Run a model once as it is, and find out how its calls make up layers, unless that is known."""
    known = structure.known(model, args, kwargs, None)
    recording, output = record(model, args, kwargs, compared=True)
    run = Pass(model, args, kwargs, recording)
    found = None if known is None else structure.recall(known, model, recording, "refuse")
    return _Seen(run, output, found or structure.find(run, asks=True, mixers="refuse"))


def _edges(edges: Sequence[Edge]) -> list[Edge]:
    """One set of edges, each of three whole numbers."""
    found = list[Edge]()
    for one in edges:
        try:
            layer, query, key = map(operator.index, one)
        except (TypeError, ValueError):
            raise ValueError(
                f"edges are sets of (layer, query, key), such as [[(0, 1, 2), (0, 1, 3)]]; a set holds {one!r}"
            ) from None
        found.append((layer, query, key))
    return found


def _check(edges: Sequence[Edge], layers: Sequence[Layer], how: How) -> None:
    """Raise ValueError for an edge that is not there, and for a query that has nothing left to attend to."""
    lost = defaultdict[tuple[int, int], set[int]](set)
    for layer, query, key in edges:
        shape = layers[layer].shape[1:] if 0 <= layer < len(layers) else (0, 0)
        if not (0 <= query < shape[0] and 0 <= key < shape[1]):
            sizes = f"of {shape[0]} queries and {shape[1]} keys" if shape[0] else f"among {len(layers)}"
            raise ValueError(
                f"edge {(layer, query, key)} (layer, query, key) is out of range: the layer is one {sizes}"
            )
        lost[layer, query].add(key)
    for (layer, query), keys in lost.items():
        (call,) = calls_of(layers[layer])
        seen = set(call.visible([query])[0, 0].nonzero().flatten().tolist())
        if hidden := sorted(keys - seen):
            raise ValueError(f"there is no edge {(layer, query, hidden[0])}: the query sees nothing of this key")
        if how == "hide" and keys == seen:
            raise ValueError(
                f"in layer {layer} query {query} would have no key left to attend to: leave it one, or give how='zero'"
            )


class _Without(Recorder):
    """Runs a model in which some queries of each example do without some keys.

    orders: where the examples stand in each call of the first pass. lost: of each example, what its calls lose.
    """

    def __init__(self, run: Pass, orders: Mapping[int, Order], lost: Sequence[Losses], how: How) -> None:
        super().__init__(run.model)
        self._first, self._orders, self._lost = run.recording, orders, lost
        self._how: How = how

    def _check_room(self, call: WeightedSum) -> None:
        """Nothing: no call is kept."""

    def _certainly_left_out(self) -> set[int]:
        """All calls."""
        return set(range(len(self.recording.calls)))

    def _attend(self, attending: Attending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, number, output = attending.make(), len(self.recording.calls), func(*args, **kwargs)
        calls, count = self._first.calls, len(self._lost)
        if number >= len(calls) or math.prod(call.extent) != count * math.prod(calls[number].extent):
            raise ValueError(
                f"{call.module or 'the model'} attends in another way when the model runs again: what it does depends "
                "on chance, or on what ran before"
            )
        main = output[0] if attending.in_tuple else output
        for example, lost in enumerate(self._lost):
            if number in lost:
                rows = self._orders[number].rows(call.extent, count, example)
                main = _without(call, main, rows, lost[number], self._how)
        main = self._keep(call, main, attending.labels)
        return (main, *output[1:]) if attending.in_tuple else main


def _scores(
    run: Pass, orders: Mapping[int, Order], lost: Sequence[Losses], how: How, chosen: TargetScores
) -> list[float]:
    """The target's score of every example of a batch, each without what it loses. chosen: settled on one example."""
    recorder, mask = _Without(run, orders, lost, how), run.kwargs.get("attention_mask")
    with as_before(run):
        with recorder:
            args, kwargs = recorder.given(fresh(run.args), fresh(run.kwargs))
            output = run.model(*args, **kwargs)
            recorder.finish(output)
        scores = TargetScores(chosen.settled.of(0), mask)(output).reshape(-1).double().cpu()
    if len(recorder.recording.calls) != len(run.recording.calls) or len(scores) != len(lost):
        raise ValueError(
            f"{type(run.model).__name__} made {len(recorder.recording.calls)} calls and {len(scores)} scores of "
            f"{len(lost)} examples, and {len(run.recording.calls)} calls of one; give batch_size=1"
        )
    if not bool(scores.isfinite().all()):
        raise ValueError("without these edges the target is not finite: some head has nothing left to attend to")
    return scores.tolist()


def _without(call: Kept, output: torch.Tensor, rows: Rows, lost: Lost, how: How) -> torch.Tensor:
    """What a call returned, made anew for the queries of one example that lose keys. rows: the example's heads."""
    heads = replace(call, keeps_values=True, around=None, gradient=None).take(rows)
    assert heads.values is not None
    queries = list(lost)
    gone = torch.zeros(len(queries), heads.shape[2], dtype=torch.bool, device=output.device)
    for row, query in enumerate(queries):
        gone[row, lost[query]] = True
    weights = _weights(heads, queries, gone, how)
    values = heads.values.repeat_interleave(len(weights) // len(heads.values), 0)
    made = weights @ values.to(weights.dtype)
    numbers = call.rows_of(torch.arange(output.numel(), device=output.device).reshape(output.shape))
    if isinstance(call, FusedCall) and call.out_projection is not None:
        made = call.out_projection.joined(made.to(output.dtype))
        places = numbers[rows[0][0], 0, queries]
    else:
        places = numbers[[first for first, _ in rows], [second for _, second in rows]][:, queries]
    changed = output.clone()  # which keeps its strides, on which models rely
    changed[torch.unravel_index(places, output.shape)] = made.to(output.dtype)
    return changed


def _weights(heads: AttentionLike, queries: list[int], gone: torch.Tensor, how: How) -> torch.Tensor:
    """The weights (head, query, key) of some queries without the keys (query, key) that are gone."""
    if isinstance(heads, AttentionCall) and how == "hide":
        seen = torch.ones(1, heads.shape[1], heads.shape[2], dtype=torch.bool, device=gone.device)
        seen[0, queries] = ~gone
        mask = heads.mask
        if mask is not None:
            seen = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
        return replace(heads, mask=seen).attention(queries)
    weights = heads.attention(queries)
    left = weights.masked_fill(gone, 0)
    if how == "zero":
        return left
    # After the softmax: what is left of each row is divided by its sum, to which a sink adds what the row lacks of 1.
    rounding = _ROUNDING.get(weights.dtype, 1e-3)
    lacks = 1 - weights.double().sum(-1)
    if bool((lacks < -rounding).any()):
        raise ValueError(
            f"the rows of {heads.name} sum to more than 1, so that they are no softmax from which a key could be "
            "hidden; give how='zero'"
        )
    total = left.double().sum(-1) + lacks.where(lacks > rounding, 0)
    if bool((total <= 0).any()):
        raise ValueError(f"in {heads.name} a query has given all its weight to the keys that would be hidden from it")
    return (left / total[..., None]).to(torch.promote_types(weights.dtype, torch.float32))
