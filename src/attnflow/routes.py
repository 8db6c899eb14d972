"""Where information is squeezed and which way it goes: minimum cuts, routes and flow between groups of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import numpy as np

from attnflow import conserved
from attnflow.answer import Relevance
from attnflow.edges import EDGES
from attnflow.graph import AttentionGraph, GraphSettings, LayerChoice
from attnflow.methods import check_one_layer, flow_graph, relevance_of, whole_graph
from attnflow.propagate import cuts, signed
from attnflow.propagate.carriers import capacities
from attnflow.propagate.flow import FlowResult, flow_of_layers
from attnflow.relevance_flow import carried_routes, relevance_graph
from attnflow.trace import Query, Trace, query_positions


class CutEdge(NamedTuple):
    """An edge of a minimum cut: `capacity` is what `key`, a position under the layer, can hand to `query` over it."""

    layer: int
    query: int
    key: int
    capacity: float
    query_token: str
    key_token: str

    def __str__(self) -> str:
        return f"{self.capacity:.4f}  layer {self.layer}: {self.query_token} <- {self.key_token}"


class Step(NamedTuple):
    """A node of a path: a position in the output of a layer; layer -1 is the input of the model."""

    layer: int
    position: int
    token: str

    def __str__(self) -> str:
        return f"{self.token} @ {'input' if self.layer < 0 else self.layer}"


class Path(NamedTuple):
    """One route of a flow: what runs along it, as an amount and as a share of the flow, and its steps down.

    end: whether it reaches an input token, as every route of a maximum flow does; one of conserved relevance may also
    be taken by "biases" at its last step, or be "cancelled" there by as much of the other sign.
    """

    amount: float
    share: float
    steps: tuple[Step, ...]
    end: signed.End = "token"

    def __str__(self) -> str:
        ends = [] if self.end == "token" else [self.end]
        return f"{self.amount:.4f}  " + " -> ".join([*map(str, self.steps), *ends])


def min_cut(
    attention: Trace | Any,
    query: Query,
    token: Query,
    *,
    edges: str = "attention",
    **settings: Unpack[GraphSettings],
) -> list[CutEdge]:
    """The edges of a minimum cut between a query and an input token: where the information is squeezed.

    Their capacities add up to the flow (max-flow min-cut theorem), and without them nothing gets from one to the
    other. Of all minimum cuts it is the one nearest the token. The edges come from the top layer down.

    query, token: a position, or a label that occurs once; several are one source, or one sink. The settings and errors
    are those of `attnflow.flow`. Conserved relevance, which has no capacities, is refused.

    >>> lower, upper = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]
    >>> for edge in min_cut([lower, upper], query=0, token=0, residual=0):
    ...     print(edge)
    0.6000  layer 1: 0 <- 0
    0.2000  layer 0: 1 <- 0
    """
    if _is_flow(edges):
        raise ValueError(f"{edges} is a flow already, and has no capacities that a cut could be of; see its paths")
    graph = flow_graph(attention, edges, {**settings, "query": query})
    (top,), below = capacities(graph, sources=len(graph.queries))
    cut = cuts.min_cut(top, below, range(len(graph.queries)), _tokens(token, graph))
    lowest = graph.explained[0] - len(below)
    result = list[CutEdge]()
    for number, row, key, capacity in cut:
        position = graph.queries[row] if number == len(below) else row
        label = graph.query_tokens[row] if number == len(below) else _label(graph, lowest + number, row)
        result.append(CutEdge(lowest + number, position, key, capacity, label, _label(graph, lowest + number - 1, key)))
    return result


def paths(
    attention: Trace | Any,
    query: Query = None,
    token: Query = None,
    *,
    top: int | None = 5,
    edges: str = "attention",
    **settings: Unpack[GraphSettings],
) -> list[Path]:
    """The strongest routes of a maximum flow from a query down to an input token, the strongest first.

    A maximum flow is not unique, and neither is its decomposition: here it is built from the widest routes of the
    graph (whose narrowest edge is the widest), completed to the maximum, and taken apart by the widest route that is
    left. With top=None all are returned, and their amounts add up to the flow; there may be thousands.

    query, token, settings and errors are those of `min_cut`; None stands for all.

    Relevance under rules that hold attention weights constant is a flow already, with edges="conserved-relevance" and
    a trace of capture(..., target=, rules="cp-lrp", keep="relevance"). Its routes are what was carried, signed, from
    the score down; shares are of the score. They are taken apart in the same way, what speaks for the score and what
    speaks against it each by itself, so that no route carries more than its edges do. Such a route begins at the top,
    or where more goes on of both signs than came in. It ends at a token, in biases, or where it is cancelled by as much
    of the other sign. With top=None those to a token add up to the relevance that enters the lowest layer there, those
    over an edge to the edge, and all to what leaves the explained layer: the score, but for what biases above it took.
    This is one way to take a flow apart, for edges do not tell which part of what came in went on where. Multiplying
    the share that each edge has in its node would split it too, but shares pass any bound where large parts cancel
    (docs/rules.md). Of the settings only layer and start_layer have a part, and query those that the score is read
    from; without a token the routes that end on the way are among the answer.

    Raises ValueError as well where rules do not conserve relevance (to 0.1 per cent of what enters a block), and for a
    query that holds a part of what leaves the explained layer, whose way down no edge knows.

    >>> lower, upper = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]
    >>> for path in paths([lower, upper], query=0, token=0, residual=0):
    ...     print(path)
    0.6000  0 @ 1 -> 0 @ 0 -> 0 @ input
    0.2000  0 @ 1 -> 1 @ 0 -> 0 @ input
    """
    if _is_flow(edges):
        check_one_layer(settings)
        return _paths_of_relevance(relevance_graph(attention, edges, {**settings, "query": query}), token, top)
    graph = flow_graph(attention, edges, {**settings, "query": query})
    (rows,), below = capacities(graph, sources=len(graph.queries))
    total, found = cuts.paths(rows, below, range(len(graph.queries)), _tokens(token, graph), count=top)
    highest, result = graph.explained[0], list[Path]()
    for amount, (first, *nodes) in found:
        steps = [Step(highest, graph.queries[first], graph.query_tokens[first])]
        steps += [Step(number, node, _label(graph, number, node)) for number, node in _down(highest - 1, nodes)]
        result.append(Path(amount, amount / total, tuple(steps)))
    return result


def _paths_of_relevance(graph: AttentionGraph, token: Query, top: int | None) -> list[Path]:
    found = carried_routes(graph, None if token is None else _tokens(token, graph), top)
    lowest, score, result = graph.bottom or 0, (graph.trace.target or {})["score"], list[Path]()
    for amount, level, nodes, end in found:
        numbered = _down(lowest + level - 1, nodes)
        steps = tuple(Step(number, node, _label(graph, number, node)) for number, node in numbered)
        result.append(Path(amount, amount / score if score else float("nan"), steps, end))
    return result


def group_flow(
    attention: Trace | Any,
    groups: Mapping[str, Sequence[int]] | None = None,
    *,
    edges: str = "attention",
    progress: Callable[[int, int], object] | None = None,
    **settings: Unpack[GraphSettings],
) -> Relevance:
    """The maximum flow between groups of tokens: scores (layer, group, group), exact, in units of capacity.

    Each value is one maximum flow from a source joined to all queries of the row's group to a sink joined to all inputs
    of the column's group, by edges without limit. A group is a word of several pieces, a modality, an image region;
    groups may overlap and need not cover everything. In the answer, groups stand where tokens do.

    With edges="conserved-relevance" a value is what the layer really carried, signed, from the queries of the row's
    group to the keys of the column's: the sum of its edges, in units of the score, whatever lies below. Groups that
    cover every token once have scores that add up to what leaves the layer, less what its biases took before attention
    handed it on ("bias_shares" in the checks holds all that they took). start_layer has no part in it.

    groups: names and positions, which count both as queries and as inputs; those of the trace (`Trace.groups`) if none
    are given. The settings and checks are those of `attnflow.flow`. Flow between different groups as a share of all
    flow, layer by layer, is one reading of the inter-modality flow of Xue et al. 2021.

    Raises ValueError for no groups, an empty one, positions out of range or given twice, and wrong settings.

    >>> lower, upper = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]
    >>> group_flow([lower, upper], {"all": [0, 1], "last": [1]}, residual=0).scores.round(2).tolist()
    [[[2.0, 1.1], [1.0, 0.8]], [[1.9, 1.1], [1.0, 0.8]]]
    """
    layer = settings.get("layer", "all")
    if _is_flow(edges):
        return _group_relevance(attention, groups, edges, {**settings, "layer": layer})
    graph = whole_graph(attention, edges, {**settings, "layer": layer})
    members = _members(graph.trace.groups if groups is None else groups, len(graph.queries), len(graph.tokens))
    # Edges from a common end to the same node are one edge: a group's queries are one row, its inputs one column.
    tops, below = capacities(graph, sources=len(graph.queries))
    tops = [np.stack([_array(top)[positions].sum(axis=0) for positions in members.values()]) for top in tops]
    if below:
        below[0] = _columns(_array(below[0]), members)
    if len(tops) > len(below):
        tops[0] = _columns(tops[0], members)
    results = flow_of_layers(tops, below, progress=progress)
    relevance = relevance_of(_named(edges), _of_groups(graph, members), [one.values for one in results], rows="group")
    return relevance.with_checks(_checks(results, layer))


def _group_relevance(
    attention: Trace | Any, groups: Mapping[str, Sequence[int]] | None, edges: str, settings: Mapping[str, Any]
) -> Relevance:
    if settings.get("start_layer") is not None:
        raise ValueError(f"{edges} between groups is of one layer alone, so that start_layer has no part in it")
    graph = relevance_graph(attention, edges, {**settings, "start_layer": None})
    members = _members(graph.trace.groups if groups is None else groups, len(graph.queries), len(graph.tokens))
    layers = [graph.layer(number).matrix().cpu().double().numpy() for number in graph.explained]
    scores = [
        [[float(layer[np.ix_(queries, keys)].sum()) for keys in members.values()] for queries in members.values()]
        for layer in layers
    ]
    found = relevance_of(_named(edges), _of_groups(graph, members), scores, rows="group")
    return found.with_checks(conserved.checks(graph.trace.layers, (graph.trace.target or {})["score"]))


def _named(edges: str) -> str:
    """The method of a recipe, by which the edges are known again."""
    return "group flow" if edges == "attention" else f"group flow of {edges}"


def _is_flow(edges: str) -> bool:
    """Whether edges are amounts of a flow already; unknown names are for `attention_graph` to refuse."""
    return edges in EDGES and EDGES[edges].flow


def _checks(results: Sequence[FlowResult], layer: LayerChoice) -> dict[str, Any]:
    checks = [result.checks() for result in results]
    return {"layers": checks} if layer == "all" else checks[0]


def _members(groups: Mapping[str, Sequence[int]], queries: int, inputs: int) -> dict[str, list[int]]:
    """The positions of each group, counted from 0 and checked."""
    if queries != inputs:
        raise ValueError(
            f"groups are positions both of queries and of inputs, but there are {queries} queries and {inputs} inputs"
        )
    if not groups:
        raise ValueError("there are no groups; give at least one name with its positions, such as {'image': range(9)}")
    members = dict[str, list[int]]()
    for name, positions in groups.items():
        if not all(isinstance(position, int | np.integer) for position in positions):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"group {name!r} holds positions, whole numbers; it is {list(positions)}")
        wrong = [position for position in positions if not -inputs <= position < inputs]
        if wrong:
            raise ValueError(f"group {name!r}: position {wrong[0]} is out of range: there are {inputs} tokens")
        members[name] = [int(position) % inputs for position in positions]
        if not members[name] or len(set(members[name])) < len(members[name]):
            raise ValueError(f"group {name!r} must hold at least one position, and none twice; it is {members[name]}")
    return members


def _of_groups(graph: AttentionGraph, members: Mapping[str, list[int]]) -> AttentionGraph:
    """The same graph with groups in the place of queries and tokens."""
    names = tuple(members)
    settings = {name: value for name, value in graph.settings.items() if name != "query"} | {"groups": dict(members)}
    return replace(
        graph,
        queries=tuple(range(len(names))),
        answers=tuple(range(len(names))),
        query_tokens=names,
        tokens=names,
        roles=("text",) * len(names),
        settings=settings,
    )


def _array(edges: Any) -> Any:
    return edges.detach().cpu().double().numpy() if hasattr(edges, "detach") else edges


def _columns(edges: Any, members: Mapping[str, list[int]]) -> Any:
    """The edges (query, group) to all inputs of a group together."""
    return np.stack([edges[:, positions].sum(axis=1) for positions in members.values()], axis=1)


def _tokens(token: Query, graph: AttentionGraph) -> list[int]:
    try:
        return list(query_positions(token, graph.tokens))
    except ValueError as error:
        raise ValueError(f"token {token!r} is not an input: {error}") from None


def _label(graph: AttentionGraph, layer: int, position: int) -> str:
    """The label of a position in the output of a layer; -1 is the input of the model."""
    trace = graph.trace
    count = trace.layers[layer].shape[1] if layer >= 0 else trace.layers[0].shape[2]
    return trace.tokens[position] if len(trace.tokens) == count else str(position)


def _down(layer: int, nodes: Sequence[int]) -> list[tuple[int, int]]:
    return [(layer - step, node) for step, node in enumerate(nodes)]
