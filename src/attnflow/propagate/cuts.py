"""Where a maximum flow is squeezed, and which routes it takes: `min_cut` and `paths`.

Several queries may act as one source, and several tokens as one sink: edges from a common end to the same node are
one edge, with their capacities added up, and are told apart again in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnflow.propagate import _engine
from attnflow.propagate.layers import Array, chain, positions

# A maximum flow is not unique. This one keeps, as far as it can, to the widest routes through the graph, one after
# another: up to so many, and down to such a share of the widest.
_WIDEST, _SHARE = 64, 1e-3
# Less than this share of a flow on an edge is rounding.
_DUST = 2.0**-45


class CutEdge(NamedTuple):
    """An edge of a cut: what `key` of a layer hands to `query` of the same layer, counted from 0 at the input."""

    layer: int
    query: int
    key: int
    capacity: float


class Path(NamedTuple):
    """A route of a flow: how much runs along it, and its nodes, from the query in the explained layer to the token."""

    amount: float
    nodes: tuple[int, ...]


class Routes(NamedTuple):
    """A maximum flow and its routes, the strongest first; all routes add up to the flow."""

    flow: float
    paths: list[Path]


def min_cut(top: Any, below: Sequence[Any], query: int | Sequence[int], token: int | Sequence[int]) -> list[CutEdge]:
    """The edges of a minimum cut between a query and an input token: where the information is squeezed.

    Together they carry exactly the flow of the pair, and without them nothing reaches the token. Of all minimum cuts
    it is the one nearest the token; edges of capacity 0 are left out. The edges come from the top layer down.

    Arguments and errors as for `flow`; query is a row of top, token a column of the layer nearest the input; several
    are one source, or one sink.

    >>> min_cut([[0.6, 0.4]], [[[0.7, 0.3], [0.2, 0.8]]], 0, 0)
    [CutEdge(layer=1, query=0, key=0, capacity=0.6), CutEdge(layer=0, query=1, key=0, capacity=0.2)]
    """
    layers, queries, tokens = _ends(top, below, query, token)
    sides = _sides(layers)
    cut = list[CutEdge]()
    for number in reversed(range(len(layers))):
        crossing = ~sides[number + 1][:, None] & sides[number][None, :] & (layers[number] > 0)
        for i, j in np.argwhere(crossing).tolist():
            source = int(queries[i]) if number == len(layers) - 1 else i
            target = int(tokens[j]) if number == 0 else j
            cut.append(CutEdge(number, source, target, float(layers[number][i, j])))
    return cut


def paths(
    top: Any,
    below: Sequence[Any],
    query: int | Sequence[int],
    token: int | Sequence[int],
    *,
    count: int | None = None,
) -> Routes:
    """The routes of a maximum flow from a query to an input token, the strongest first.

    A maximum flow is not unique; this one keeps to the widest routes through the graph (those whose narrowest edge
    is the widest), one after another, and takes back of them only what a maximum flow asks for. It is then taken apart,
    always by the widest route that is left. count: how many are wanted, all if absent.

    The other arguments and errors are those of `min_cut`.

    >>> for path in paths([[0.6, 0.4]], [[[0.7, 0.3], [0.2, 0.8]]], 0, 0).paths:
    ...     print(path)
    Path(amount=0.6, nodes=(0, 0, 0))
    Path(amount=0.2, nodes=(0, 1, 0))
    """
    if count is not None and count < 0:
        raise ValueError(f"the number of paths must not be negative; it is {count}")
    layers, queries, tokens = _ends(top, below, query, token)
    value, carried = _carried(layers)
    found = list[Path]()
    for amount, (first, *between, last) in taken_apart(carried, count, value):
        found.append(Path(amount, (int(queries[first]), *between, int(tokens[last]))))
    return Routes(value, found)


def taken_apart(carried: Sequence[Array], count: int | None, value: float | None = None) -> list[Path]:
    """The routes of a flow from the nodes of the top level to those of the lowest, always the widest that is left.

    carried (query, key): what runs over the edges of each layer, the lowest first. count: how many are wanted, all if
    absent. value: of the flow, of which a part in 2^45 is rounding; by default all that the top level sends.
    """
    kernels = _engine.load_kernels("routes")
    least = (float(carried[-1].sum()) if value is None else value) * _DUST
    above, under, room = _edges(carried, least)
    most = len(room) if count is None else min(count, len(room))
    nodes, amounts = np.empty((most, len(carried) + 1), np.int64), np.empty(most)
    starts = np.cumsum([0, *(len(layer) for layer in carried[::-1]), carried[0].shape[1]])
    found = kernels.widest_routes(above, under, room, starts, least, 0.0, nodes, amounts)
    listed = zip(amounts[:found].tolist(), (nodes[:found] - starts[:-1]).tolist(), strict=True)
    return [Path(amount, tuple(route)) for amount, route in listed]


def _ends(
    top: Any, below: Sequence[Any], query: int | Sequence[int], token: int | Sequence[int]
) -> tuple[list[Array], NDArray[np.intp], NDArray[np.intp]]:
    """The layers with only the rows of the queries and only the columns of the tokens, and the positions of both."""
    layers = chain(top, below)
    queries = positions(np.atleast_1d(query).tolist(), len(layers[-1]), "query")
    tokens = positions(np.atleast_1d(token).tolist(), layers[0].shape[1])
    layers[-1] = layers[-1][queries]
    layers[0] = layers[0][:, tokens]
    return layers, queries, tokens


def _sides(layers: list[Array]) -> list[NDArray[np.bool_]]:
    """Which nodes lie on the tokens' side of the minimum cut: one array for the tokens, every level and the queries."""
    tokens, queries = np.ones(layers[0].shape[1], np.bool_), np.zeros(len(layers[-1]), np.bool_)
    if len(layers) == 1:
        return [tokens, queries]
    graph, work = _engine.single(*_joined(layers))
    _engine.solve_single("CUT", graph, work)
    levels = [work.distance[level, : len(layer)] >= 0 for level, layer in enumerate(layers[:-1])]
    return [tokens, *levels, queries]


def _joined(layers: list[Array]) -> tuple[Array, list[Array]]:
    """The same with all queries as one and all tokens as one: the top (1, node) and what lies below it."""
    return layers[-1].sum(axis=0, keepdims=True), [layers[0].sum(axis=1, keepdims=True), *layers[1:-1]]


def _carried(layers: list[Array]) -> tuple[float, list[Array]]:
    """The value of a maximum flow, and what it sends over every edge of every layer."""
    if len(layers) == 1:
        return float(layers[0].sum()), layers
    kernels = _engine.load_kernels("routes")
    top, below = _joined(layers)
    graph, work = _engine.single(top, below)
    routes, amounts = _widest(graph)
    value = _engine.solve_single("EXACT", graph, work)
    # Twice the flow limits nothing, and keeps its digits where the ends are far wider.
    supply, demand = np.minimum(np.minimum(graph.upper[[-1, 0], 0], graph.lower[[-1, 0], 0]), 2 * value)
    kernels.solve_around(value, routes, amounts, supply, demand, graph, work)
    if len(below) == 1:
        sent = received = np.minimum(supply, demand)
    else:
        sent, received = supply - work.excess[-1], demand - work.need[0]
    count, nodes, _ = graph.capacity.shape
    flow = work.flow[work.line].reshape(count, nodes, (nodes + 7) // 8 * 8)
    inner = [flow[m, : len(layer), : layer.shape[1]] for m, layer in enumerate(layers[1:-1])]
    first = _shares(layers[0].T).T * received[: len(layers[0]), None]
    last = _shares(layers[-1]) * sent[: layers[-1].shape[1]]
    return value, [first, *inner, last]


def _widest(graph: Any) -> tuple[NDArray[np.int64], Array]:
    """The widest routes of a pair (route, node on each level from the top down), none of which takes from another."""
    kernels = _engine.load_kernels("routes")
    ends = graph.upper[-1, :1], graph.lower[0, :1].T
    layers = [ends[1], *graph.capacity, ends[0]]
    above, under, room = _edges(layers, 0.0)
    nodes, amounts = np.empty((_WIDEST, len(layers) + 1), np.int64), np.empty(_WIDEST)
    starts = np.cumsum([0, *(len(layer) for layer in layers[::-1]), 1])
    found = kernels.widest_routes(above, under, room, starts, 0.0, _SHARE, nodes, amounts)
    return np.ascontiguousarray((nodes[:found] - starts[:-1])[:, 1:-1]), amounts[:found]


def _shares(edges: Array) -> Array:
    """The share (end, node) that each end has in what they give to, or take from, a node together."""
    total = edges.sum(axis=0)
    return np.divide(edges, total, out=np.zeros_like(edges), where=total > 0)


def _edges(layers: Sequence[Array], least: float) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
    """(above, under, amount) of the edges with more than `least`, from the top down, nodes numbered from the top."""
    above, under, amounts, start = list[Any](), list[Any](), list[Any](), 0
    for layer in reversed(layers):
        i, j = np.nonzero(layer > least)
        above.append(start + i)
        under.append(start + len(layer) + j)
        amounts.append(layer[i, j])
        start += len(layer)
    return np.concatenate(above), np.concatenate(under), np.concatenate(amounts)
