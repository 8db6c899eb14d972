"""Conserved relevance as one flow through all layers: what every edge carried, and the routes that it makes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnflow import conserved
from attnflow.graph import AttentionGraph, attention_graph
from attnflow.layers import calls_of
from attnflow.methods import LEAK
from attnflow.propagate import signed
from attnflow.trace import Trace

# The routes that are looked at first for those to a token; if too few of them are, four times as many.
_FIRST = 1024


class CarriedRelevance(NamedTuple):
    """What the edges (query, key) of each layer carried, and what biases took at each position, the lowest first.

    at_keys, at_queries: by the biases of each layer. taken: of the input, and of what each layer gives: at the queries
    of that layer and at the keys of the one above it.
    """

    layers: list[NDArray[np.float64]]
    at_keys: list[NDArray[np.float64]]
    at_queries: list[NDArray[np.float64]]

    @property
    def taken(self) -> list[NDArray[np.float64]]:
        between = [under + above for under, above in zip(self.at_queries, self.at_keys[1:], strict=False)]
        return [self.at_keys[0], *between, self.at_queries[-1]]


def relevance_graph(attention: Trace | Any, edges: str, settings: Mapping[str, Any]) -> AttentionGraph:
    """The graph of edges that are conserved relevance, checked to be so, with room for all of its layers.

    Raises ValueError for a trace without it, settings that have no part in it, and rules that lose some of it.
    """
    graph = attention_graph(attention, edges, **settings)
    if wrong := [name for name, plain in (("head", None), ("residual", 0)) if graph.settings[name] != plain]:
        raise ValueError(f"{wrong[0]} has no part in {edges}, which is what all heads carried and what went past them")
    target = graph.trace.target or {}
    leak = conserved.checks(graph.trace.layers, target["score"])["conservation"]
    if leak > LEAK:
        raise ValueError(
            f"{edges} under rules={target.get('rules')!r} misses up to {leak:.1%} of what enters a block at a token, "
            "so that no routes add up; take rules='cp-lrp', with a rule for every function"
        )
    graph.check_room(whole_layers=True)
    return graph


def carried_relevance(graph: AttentionGraph) -> CarriedRelevance:
    """What a graph of `relevance_graph`, of one explained layer, carries down from it.

    Raises ValueError where some of what leaves the explained layer is not from the graph's queries.
    """
    (highest,), bottom = graph.explained, graph.bottom or 0
    layers = [layer.matrix().cpu().double().numpy() for layer in (*graph.below(highest), graph.layer(highest))]
    own = [conserved.carried(call) for layer in graph.trace.layers[bottom : highest + 1] for call in calls_of(layer)]
    leaving = own[-1].leaving.abs()
    if others := [place for place in range(len(leaving)) if place not in graph.queries and leaving[place] > 0]:
        share = float(leaving[others].sum() / leaving.sum())
        raise ValueError(
            f"{share:.1%} of what leaves layer {highest} is from other positions than the query, such as {others[0]}, "
            "and no edge tells which of it goes where: leave query out"
        )
    taken = [[part.cpu().double().numpy() for part in (one.key_biases, one.biases)] for one in own]
    return CarriedRelevance(layers, [keys for keys, _ in taken], [queries for _, queries in taken])


def carried_routes(graph: AttentionGraph, tokens: Sequence[int] | None, top: int | None) -> list[signed.Route]:
    """The largest routes of a graph of `relevance_graph`, those to some tokens or, with None, to any end."""
    if top is not None and not (isinstance(top, int) and top >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the number of paths must be whole, and must not be negative; it is {top}")
    carried = carried_relevance(graph)
    if tokens is None or top is None:
        found = signed.routes(carried.layers, carried.taken, count=top if tokens is None else None)
        return [one for one in found if tokens is None or _reaches(one, tokens)]
    count = _FIRST
    while True:
        found = signed.routes(carried.layers, carried.taken, count=count)
        fitting = [one for one in found if _reaches(one, tokens)]
        if len(fitting) >= top or len(found) < count:
            return fitting[:top]
        count *= 4


def _reaches(route: signed.Route, tokens: Sequence[int]) -> bool:
    return route.end == "token" and route.nodes[-1] in tokens
