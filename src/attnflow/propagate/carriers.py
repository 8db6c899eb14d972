"""How edges are carried from the explained layer to the input: `CARRIERS`, and the one contract that they share.

A carrier takes an attention graph, whose rows are made when it asks for them, and returns the scores of each explained
layer with what is known about them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from attnflow.propagate import flow as _flow
from attnflow.propagate import rollout as _rollout
from attnflow.propagate import update_rules as _update_rules
from attnflow.propagate._engine import Progress
from attnflow.propagate.barrier import barrier_flow as _barrier_flow


class Layer(Protocol):
    """The edges (query, key) of one layer, of all its queries."""

    @property
    def left_out(self) -> Sequence[int]:
        """The positions that the layer does not concern, each with 1 to itself alone."""
        ...

    @property
    def crossings(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """The positions of the queries and of the keys of each call whose queries are none of its keys."""
        ...

    def matrix(self) -> Any:
        """All edges (query, key)."""
        ...

    def tiles(self) -> Iterable[tuple[list[int], Any]]:
        """The edges of some queries at a time, with their positions."""
        ...


class Graph(Protocol):
    """What a carrier sees of an attention graph (`attnflow.graph.AttentionGraph`)."""

    @property
    def explained(self) -> Sequence[int]:
        """The numbers of the explained layers, the topmost last."""
        ...

    @property
    def queries(self) -> Sequence[int]:
        """The positions of the queries in them."""
        ...

    def layer(self, number: int) -> Layer:
        """An explained layer with all its queries."""
        ...

    def top(self, number: int) -> Any:
        """The edges (query, key) of the queries in an explained layer."""
        ...

    def left_out(self, number: int) -> Sequence[int]:
        """The rows of `top` that have 1 to their own position alone, since the layer does not concern them."""
        ...

    def below(self, number: int) -> Sequence[Layer]:
        """The layers under an explained layer, the lowest first."""
        ...


class Carried(NamedTuple):
    """For each explained layer the scores (row, token), and facts about how far they can be trusted."""

    scores: list[Any]
    checks: list[dict[str, Any]]


Carry: TypeAlias = Callable[[Graph, "Progress | None"], Carried]


@dataclass(frozen=True)
class Carrier:
    """One row of the table.

    carry: the function. what: in words. one_layer: whether it takes in the explained layer alone. whole: whether it
    needs all edges of every layer at once. signed: whether it can carry edges below 0. adds: whether it adds what an
    edge brings to what a position has, so that the residual is "add" and rows keep their sums. rows: whether the answer
    has a row for each query, or one for the target, of which all queries are part.
    """

    carry: Carry
    what: str
    source: str
    one_layer: bool = False
    whole: bool = False
    signed: bool = True
    adds: bool = False
    rows: Literal["query", "target"] = "query"


def one_layer(graph: Graph, progress: Progress | None) -> Carried:
    """The edges of one layer as they are: how its queries attend to its own keys, whatever lies below."""
    return _row_by_row(_rollout.raw, graph)


def product(graph: Graph, progress: Progress | None) -> Carried:
    """The product of the transitions from the queries down to the input; O(layers n^2) time, O(n) memory a query."""
    return _row_by_row(_rollout.rollout, graph)


def maximum_flow(graph: Graph, progress: Progress | None) -> Carried:
    """The maximum flow from each query to each token, with the edges as capacities, every pair a problem of its own."""
    results = _flow.flow_of_layers(*capacities(graph), queries=graph.queries, progress=progress)
    return Carried([result.values for result in results], [result.checks() for result in results])


def sum_over_layers(graph: Graph, progress: Progress | None) -> Carried:
    """The sum over layers of what all queries send to each token: of the explained layer the chosen queries alone.

    Positions that a layer does not concern send nothing in it. A key between two layers is counted for the token at its
    position, so that every layer must have as many.
    """
    scores = list[Any]()
    for number in graph.explained:
        top = graph.top(number)
        top[list(graph.left_out(number))] = 0
        total = top.sum(0)
        for layer in graph.below(number):
            left_out = set(layer.left_out)
            for queries, rows in layer.tiles():
                rows[[row for row, query in enumerate(queries) if query in left_out]] = 0
                if rows.shape[1] != len(total):
                    raise ValueError(
                        f"a sum over layers needs as many positions in each; there are {len(total)} and {rows.shape[1]}"
                    )
                total = total + rows.sum(0).to(total.device)
        scores.append(total[None])
    return Carried(scores, [{} for _ in scores])


def update_rules(graph: Graph, progress: Progress | None) -> Carried:
    """The update rules of Chefer et al. 2021: the product over layers within a stream, and rules for where two meet.

    O(layers n^3) time where a layer joins two streams, such as cross-attention; elsewhere the product itself.
    """
    topmost = graph.explained[-1]
    below = graph.below(topmost)
    first = topmost - len(below)
    explained = {number: graph.layer(number) for number in graph.explained}
    if not any(layer.crossings for layer in (*below, *explained.values())):
        return product(graph, progress)
    scores, relevance = list[Any](), None
    for number in range(first, topmost + 1):
        if number in explained:
            scores.append(_update_rules.update(explained[number], relevance)[list(graph.queries)])
        if number < topmost:
            relevance = _update_rules.update(below[number - first], relevance)
    return Carried(scores, [{} for _ in scores])


def barrier_flow(graph: Graph, progress: Progress | None) -> Carried:
    """The flow into each token of one maximum flow from all queries to all tokens, made unique by a log barrier.

    Queries that the explained layer does not concern are no part of the source, unless all are such. The value lies
    below the maximum by no more than gap_bound, a share of it, and by `gap` as it was found.
    """
    tops, below = capacities(graph, sources=len(graph.queries))
    for top, number in zip(tops, graph.explained, strict=True):
        left_out = graph.left_out(number)
        if len(left_out) < len(top):
            top[list(left_out)] = 0
    first = len(below) - graph.explained[-1]
    found = [_barrier_flow(top, below[: number + first]) for top, number in zip(tops, graph.explained, strict=True)]
    return Carried([one.received[None] for one in found], [one.checks() for one in found])


def _row_by_row(carry: Callable[[Any, Sequence[Any]], Any], graph: Graph) -> Carried:
    scores = [carry(graph.top(number), graph.below(number)) for number in graph.explained]
    return Carried(scores, [{} for _ in scores])


def capacities(graph: Graph, sources: int = 1) -> tuple[list[Any], list[Any]]:
    """The rows (query, key) of each explained layer, and the layers below the topmost, as `flow_of_layers` takes them.

    Where a layer does not concern a position, what arrives there goes on without a limit: as much as the rows of any
    layer hold, times the number of queries that act as one source.
    """
    below = graph.below(graph.explained[-1])
    layers = [_array(layer.matrix()) for layer in below]
    tops = [_array(graph.top(number)) for number in graph.explained]
    limit = sources * max(float(rows.sum(-1).max()) for rows in (*layers, *tops))
    for rows, layer in zip(layers, below, strict=True):
        places = list(layer.left_out)
        rows[places, places] = limit
    for rows, number in zip(tops, graph.explained, strict=True):
        left_out = list(graph.left_out(number))
        rows[left_out] = np.where(rows[left_out] > 0, limit, 0.0)
    return tops, layers


def _array(rows: Any) -> Any:
    return rows.detach().cpu().numpy().astype(np.float64) if hasattr(rows, "detach") else rows


CARRIERS: Mapping[str, Carrier] = {
    "layer": Carrier(one_layer, "one layer", "", one_layer=True),
    "product": Carrier(product, "product over layers", "Abnar & Zuidema 2020, equation 1"),
    "flow": Carrier(maximum_flow, "maximum flow", "Abnar & Zuidema 2020, section 3", whole=True, signed=False),
    "barrier-flow": Carrier(
        barrier_flow,
        "maximum flow from all queries to all tokens, made unique by a log barrier",
        "Azarkhalili & Libbrecht 2025",
        whole=True,
        signed=False,
        rows="target",
    ),
    "update-rules": Carrier(
        update_rules,
        "update rules of self-attention and of attention between two streams",
        "Chefer et al. 2021 (ICCV), equations 6 to 11",
        whole=True,
        signed=False,
        adds=True,
    ),
    "received": Carrier(
        sum_over_layers, "what all queries of one layer send to each token", "", one_layer=True, rows="target"
    ),
    "sum": Carrier(sum_over_layers, "sum over layers", "Bousselham et al. 2025", rows="target"),
}
