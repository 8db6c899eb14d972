"""Whether the routes that a method finds are those that the model uses: their edges are taken out of the running model.

A route is made of edges between different positions. What a position keeps of itself is no edge that could be taken out
by itself, and takes no part here, in the methods and in what they are compared with alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.capturing import capture
from attnflow.capturing.target import Target
from attnflow.graph import AttentionGraph, attention_graph
from attnflow.intervening import Edge, How, knockout
from attnflow.methods import METHODS, kept_for
from attnflow.propagate import cuts
from attnflow.propagate.carriers import CARRIERS, capacities
from attnflow.propagate.flow import flow
from attnflow.trace import Trace

# What every edge (layer, query, key) weighs, or carries.
Edges: TypeAlias = NDArray[np.float64]

# Routes of a flow to one token that count; more make up next to nothing of it.
_ROUTES = 200


class Taken(NamedTuple):
    """What taking some edges out did to the target: `change` is base - without them.

    edges: how many were taken out. random: the mean change of as many random edges, over several draws. same_queries:
    that of as many random edges of the same queries in the same layers, which tells whether it matters what a query
    loses, or only that one so near the output loses something.
    """

    edges: int
    change: float
    random: float
    same_queries: float


class RouteTest(NamedTuple):
    """The target's score of the model as it is; and by the name of a method what its edges did."""

    base: float
    taken: Mapping[str, Taken]


def route_test(
    model: torch.nn.Module,
    inputs: Any,
    tokenizer: Any = None,
    target: Target = "predicted",
    methods: Sequence[str] = ("raw", "rollout", "flow"),
    k: int = 10,
    seed: int = 0,
    *,
    draws: int = 10,
    how: How = "hide",
    batch_size: int = 32,
) -> RouteTest:
    """The change of the target when the k strongest edges of each method are knocked out, beside random edges.

    model, inputs, tokenizer, target: as `attnflow.intervening.knockout` takes them. methods: names in `METHODS`. The
    answer has, beside them, "raw", the largest attention of any layer, and "minimum cut": the edges, however many, of
    the minimum cut of attention flow from the read-out to the text token (or patch) with the largest flow.

    How strong an edge is: for raw, its weight. For a product, what arrives at its query from the read-out, times its
    weight, times what goes on from its key to the input. For a flow, what runs over it in a maximum flow from the
    read-out, along its 200 strongest routes, summed over the input tokens, each a flow of its own. For a sum over
    layers, the size of the edge. Edges that carry nothing are not taken. Random edges, drawn from seed, and the edges
    of methods are of the same kind: between different positions, visible, and in the last layer from positions that the
    output is read from.
    draws: of random edges, for each set.

    Raises ValueError for methods whose edges have no such strength, for k that is not between 1 and the number of
    edges, and as `capture` and `knockout` do.
    """
    wanted = list(dict.fromkeys((*methods, "raw")))
    for name in wanted:
        _check(name)
    if draws < 1:
        raise ValueError(f"draws must be 1 or more; it is {draws}")
    trace = capture(model, inputs, tokenizer=tokenizer, target=target, **kept_for(wanted))
    open_ = _between_positions(trace)
    edges = list(zip(*(axis.tolist() for axis in open_.nonzero()), strict=True))
    if not 1 <= k <= len(edges):
        raise ValueError(f"k must lie between 1 and {len(edges)}, the number of edges between positions; it is {k}")
    sets = {name: _strongest(np.where(open_, _carried(name, trace), 0), k) for name in wanted}
    sets["minimum cut"] = _cut(trace, open_)
    rng, every = np.random.default_rng(seed), list[Sequence[Edge]]()
    for own in sets.values():
        every.append(own)
        every += [[edges[one] for one in rng.choice(len(edges), len(own), replace=False)] for _ in range(draws)]
        every += [_other_keys(own, open_, rng) for _ in range(draws)]
    found = knockout(model, inputs, every, target=target, tokenizer=tokenizer, how=how, batch_size=batch_size)
    taken = dict[str, Taken]()
    for (name, own), changes in zip(sets.items(), found.changes.reshape(len(sets), -1), strict=True):
        random, same_queries = changes[1:].reshape(2, draws).mean(1).tolist()
        taken[name] = Taken(len(own), float(changes[0]), random, same_queries)
    return RouteTest(found.base, taken)


def _check(name: str) -> None:
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    if METHODS[name].carry == "barrier-flow":
        raise ValueError(f"{name} says what reaches each token, and not what runs over an edge; leave it out")


def _between_positions(trace: Trace) -> NDArray[np.bool_]:
    """(layer, query, key), True for edges between different positions, of the last layer where the output is read."""
    sizes = {layer.shape[1:] for layer in trace.layers}
    if len(sizes) > 1 or len(set(sizes.pop())) > 1:
        raise ValueError("routes need layers of the same positions, as queries and as keys")
    seen = _stacked(attention_graph(trace, "uniform", residual=0)) > 0
    read = set(attention_graph(trace, query=trace.readout).queries)
    seen[-1, [query for query in range(seen.shape[1]) if query not in read]] = False
    return seen & ~np.eye(seen.shape[1], dtype=bool)


def _strongest(carried: Edges, k: int) -> list[Edge]:
    """The k edges that carry most, or as many as carry anything; of equal ones those of lower layers first."""
    order = np.argsort(-carried, axis=None, kind="stable")[:k]
    places = zip(*(axis.tolist() for axis in np.unravel_index(order, carried.shape)), strict=True)
    return [edge for edge in places if carried[edge] > 0]


def _other_keys(edges: Sequence[Edge], open_: NDArray[np.bool_], rng: np.random.Generator) -> list[Edge]:
    """As many edges of the same queries in the same layers, to random keys."""
    found = list[Edge]()
    for (layer, query), count in Counter((layer, query) for layer, query, _ in edges).items():
        keys = rng.choice(open_[layer, query].nonzero()[0], count, replace=False)
        found += [(layer, query, key) for key in keys.tolist()]
    return found


def _carried(name: str, trace: Trace) -> Edges:
    """What each edge carries towards the read-out, by a method."""
    method = METHODS[name]
    settings: dict[str, Any] = {"residual": "add"} if CARRIERS[method.carry].adds else dict(method.settings)
    graph = attention_graph(trace, method.edges, query=trace.readout, **settings)
    if method.carry == "flow":
        return _of_flow(graph)
    layers = _stacked(graph)
    if method.carry in ("layer", "sum"):
        return np.abs(layers)
    arriving = np.zeros(layers.shape[1])
    arriving[list(graph.queries)] = 1 / len(graph.queries)
    going_on = [np.ones(layers.shape[1])]
    for layer in layers[:-1]:
        going_on.append(layer @ going_on[-1])
    found = np.zeros_like(layers)
    for number in reversed(range(len(layers))):
        found[number] = arriving[:, None] * layers[number] * going_on[number]
        arriving = arriving @ layers[number]
    return found


def _of_flow(graph: AttentionGraph) -> Edges:
    """What runs over each edge in a maximum flow from the queries to each token, summed over the tokens."""
    (top,), below = capacities(graph, sources=len(graph.queries))
    size = len(graph.tokens)
    found = np.zeros((len(below) + 1, size, size))
    for token in range(size):
        for amount, (first, *nodes) in cuts.paths(top, below, range(len(graph.queries)), token, count=_ROUTES).paths:
            route = [graph.queries[first], *nodes]
            for number, (query, key) in enumerate(pairwise(route)):
                found[len(below) - number, query, key] += amount
    return found


def _cut(trace: Trace, open_: NDArray[np.bool_]) -> list[Edge]:
    """The edges of the minimum cut of attention flow between the read-out and the token with the largest flow."""
    graph = attention_graph(trace, query=trace.readout)
    (top,), below = capacities(graph, sources=len(graph.queries))
    rows = range(len(graph.queries))
    flows = flow(top.sum(0, keepdims=True), below).values[0]
    plain = np.array([role in ("text", "patch") for role in trace.roles])
    token = int(np.where(plain, flows, -np.inf).argmax())
    found = cuts.min_cut(top, below, rows, token)
    edges = [
        (edge.layer, graph.queries[edge.query] if edge.layer == len(below) else edge.query, edge.key) for edge in found
    ]
    return [edge for edge in edges if open_[edge]]


def _stacked(graph: AttentionGraph) -> Edges:
    """The edges (layer, query, key) of every layer, with what positions keep."""
    highest = graph.explained[-1]
    layers = [*graph.below(highest), graph.layer(highest)]
    return np.stack([layer.matrix().cpu().numpy() for layer in layers])
