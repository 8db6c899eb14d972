"""The methods of the field: each chooses its edges and how they are carried, and `METHODS` is their table."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attnflow.graph import AttentionGraph, LayerChoice, attention_graph
from attnflow.layers import PlacedLayer
from attnflow.mixing import ROW_SUM_TOLERANCE, HeadFusion, Transition
from attnflow.propagate import flow as _flow
from attnflow.propagate import rollout as _rollout
from attnflow.relevance import Relevance
from attnflow.trace import Query, Trace

Carry: TypeAlias = Callable[[Any, Sequence[Transition]], Any]


def raw(
    attention: Trace | Any,
    *,
    query: Query = None,
    layer: LayerChoice = -1,
    head: int | None = None,
    head_fusion: HeadFusion = "mean",
    residual: float = 0.0,
    receptive_field: bool = False,
) -> Relevance:
    """Raw attention: the weights of one layer, whatever the layers below it did.

    The settings are those of `rollout`, but a residual is added on request only. Scores are those of the layer's own
    keys; rows sum to 1 for the mean over heads.
    """
    return _explain(
        "raw",
        _rollout.raw,
        attention,
        query=query,
        layer=layer,
        start_layer=None,
        head=head,
        head_fusion=head_fusion,
        residual=residual,
        receptive_field=receptive_field,
    )


def rollout(
    attention: Trace | Any,
    *,
    query: Query = None,
    layer: LayerChoice = -1,
    start_layer: int = 0,
    head: int | None = None,
    head_fusion: HeadFusion = "mean",
    residual: float | None = None,
    receptive_field: bool = False,
) -> Relevance:
    """Attention rollout: the product of the layers' transitions (Abnar & Zuidema 2020, section 3, equation 1).

    attention: a `Trace`, or arrays in any layout that `Trace.from_arrays` takes.
    query: the queries to explain: a position, several, a token such as "[CLS]", or None for all; where the model wrote
    tokens itself, "generated" gives the rows that wrote each of them, under the name and place of what they wrote.
    layer: the layer whose output is explained, counted from 0 at the input, negative from the top; "all" gives scores
    (layer, query, token). start_layer: the lowest layer taken in; scores are those of the positions that enter it.
    head: explain one head: its own matrix in the explained layer, the fusion of heads below (appendix A.1).
    head_fusion: over heads, "mean" (the paper's), "max" or "min".
    residual: the weight of the identity in each transition. None is 0.5, the paper's, whatever the attention came from;
    0 takes the arrays as the edges of the graph as they stand.
    receptive_field: divide each score R(q, t) by R0(q, t), the score it would have if every layer attended evenly to
    all that its mask lets it see: A0(i, j) = 1 / |visible(i)| for visible j. In a causal model early tokens are reached
    over more routes and score high wherever the model looks (section 6 asks for such a normalisation and
    gives no formula; this one is ours): 1 then means as much as the place alone explains. Rows no longer sum to 1.

    Rows sum to 1 where the transitions' rows do; nothing is renormalised, where the official code divides again.

    Raises ValueError for a setting out of range, or attention on which the method is not defined; MemoryError, before
    any work, for more rows than fit into memory.

    >>> import attnflow
    >>> lower, upper = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]
    >>> attnflow.rollout([lower, upper], query=0, residual=0).scores.round(2).tolist()
    [[0.5, 0.5]]
    """
    return _explain(
        "rollout",
        _rollout.rollout,
        attention,
        query=query,
        layer=layer,
        start_layer=start_layer,
        head=head,
        head_fusion=head_fusion,
        residual=residual,
        receptive_field=receptive_field,
    )


def flow(
    attention: Trace | Any,
    *,
    query: Query = None,
    layer: LayerChoice = -1,
    start_layer: int = 0,
    head: int | None = None,
    head_fusion: HeadFusion = "mean",
    residual: float | None = None,
    receptive_field: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Relevance:
    """Attention flow: the maximum flow from each query to each input token (Abnar & Zuidema 2020, section 3).

    Nodes are the positions at every layer, edges run one layer down with the transitions as capacities, and each pair
    of query and token is a problem of its own. Values are exact, in units of capacity, and not normalised (the official
    code divides each query's row by its sum). How they are known, and the share that is saturated, so that the
    layers between no longer matter, stand in `recipe["checks"]`, per layer for layer="all". It runs on the CPU.

    The settings are those of `rollout`. progress: called now and then with the pairs done and the pairs in all.
    Raises MemoryError, before any work, for more than fits into memory; `flow_bounds` takes far less time.

    >>> import attnflow
    >>> lower, upper = [[0.1], [0.1], [0.0]], [[0.1, 0.1, 0.8]]
    >>> attnflow.flow([lower, upper], residual=0).scores.round(2).tolist()
    [[0.2]]
    """
    graph = attention_graph(
        attention,
        query=query,
        layer=layer,
        start_layer=start_layer,
        head=head,
        head_fusion=head_fusion,
        residual=residual,
    )
    results = _flow.flow_of_layers(*capacities(graph), progress=progress)
    checks = [result.checks() for result in results]
    relevance = relevance_of("flow", graph, [result.values for result in results])
    if receptive_field:
        field = _flow.flow_of_layers(*capacities(graph.evenly()), progress=progress)
        relevance = relevance.by_receptive_field(relevance_of("flow", graph, [result.values for result in field]))
    return relevance.with_checks({"layers": checks} if layer == "all" else checks[0])


def flow_bounds(
    attention: Trace | Any,
    *,
    query: Query = None,
    layer: int = -1,
    start_layer: int = 0,
    head: int | None = None,
    head_fusion: HeadFusion = "mean",
    residual: float | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> FlowBounds:
    """What attention flow lies between, for thousands of tokens: `flow` without its search.

    lower: the values of flows that were found in bulk. upper: bounds that need no flow, and that deep real attention
    nearly always meets. Where both are equal, that is the flow; `lower.recipe["checks"]` tells the share of such pairs
    ("exact"), and the mean and the widest gap as shares of the upper bound. The settings are those of `flow`.

    >>> lower, upper = [[0.1], [0.1], [0.0]], [[0.1, 0.1, 0.8]]
    >>> bounds = flow_bounds([lower, upper], residual=0)
    >>> bounds.lower.scores.round(2).tolist(), bounds.upper.scores.round(2).tolist()
    ([[0.2]], [[0.2]])
    """
    graph = attention_graph(
        attention,
        query=query,
        layer=layer,
        start_layer=start_layer,
        head=head,
        head_fusion=head_fusion,
        residual=residual,
    )
    (top,), below = capacities(graph)
    lower, upper = _flow.flow_bounds(top, below, progress=progress)
    gap = np.divide(upper - lower, upper, out=np.zeros_like(upper), where=upper > 0)
    checks = {
        "exact": float((gap <= _flow.TOLERANCE).mean()),
        "mean_gap": float(gap.mean()),
        "widest_gap": float(gap.max()),
    }
    return FlowBounds(
        *(
            relevance_of(f"flow, {name} bound", graph, [scores]).with_checks(checks)
            for name, scores in (("lower", lower), ("upper", upper))
        )
    )


class FlowBounds(NamedTuple):
    """Two answers that the flow lies between; see `flow_bounds`."""

    lower: Relevance
    upper: Relevance


@dataclass(frozen=True)
class Method:
    """One row of the table: what an edge weighs, how edges are carried to the input, and where it was published."""

    function: Callable[..., Relevance]
    edges: str
    carried: str
    source: str


METHODS: dict[str, Method] = {
    "raw": Method(raw, "mean over heads of A", "one layer", "Vaswani et al. 2017"),
    "rollout": Method(rollout, "0.5 (mean over heads of A) + 0.5 I", "product", "Abnar & Zuidema 2020"),
    "flow": Method(flow, "0.5 (mean over heads of A) + 0.5 I", "maximum flow", "Abnar & Zuidema 2020"),
}


def _explain(
    method: str,
    carry: Carry,
    attention: Trace | Any,
    *,
    query: Query,
    layer: LayerChoice,
    start_layer: int | None,
    head: int | None,
    head_fusion: HeadFusion,
    residual: float | None,
    receptive_field: bool,
) -> Relevance:
    """Carry the edges of the explained layers down through the graph below them, and write the recipe."""
    graph = attention_graph(
        attention,
        query=query,
        layer=layer,
        start_layer=start_layer,
        head=head,
        head_fusion=head_fusion,
        residual=residual,
    )
    relevance = relevance_of(method, graph, _carried(carry, graph))
    if receptive_field:
        return relevance.by_receptive_field(relevance_of(method, graph, _carried(carry, graph.evenly())))
    return relevance


def _carried(carry: Carry, graph: AttentionGraph) -> list[Any]:
    """The scores (query, token) of each explained layer."""
    graph.check_room(whole_layers=False)
    return [carry(graph.top(number), graph.below(number)) for number in graph.explained]


def capacities(graph: AttentionGraph) -> tuple[list[Any], list[Any]]:
    """The rows (query, key) of each explained layer, and the layers below the topmost, as `flow_of_layers` takes them.

    Raises MemoryError where they cannot fit; ValueError where positions that pass on 1, since a layer below leaves them
    out, would limit a flow.
    """
    graph.check_room(whole_layers=True)
    below = graph.below(graph.explained[-1])
    tops = [graph.top(number) for number in graph.explained]
    highest = max(float(top.sum(-1).max()) for top in tops)
    if highest > 1 + ROW_SUM_TOLERANCE and any(
        isinstance(one.layer, PlacedLayer) and one.layer.passes_on for one in below
    ):
        raise ValueError(
            f"a row of the explained layer sums to {highest:.4g}, more than the 1 that positions left out of a "
            "layer pass on; use a residual, or head_fusion='mean'"
        )
    return tops, [transition.matrix() for transition in below]


def relevance_of(method: str, graph: AttentionGraph, rows: Sequence[Any]) -> Relevance:
    """The answer of a method, from the scores (query, token) of each explained layer, with its recipe."""
    scores = np.stack([np.asarray(row.cpu() if hasattr(row, "cpu") else row, dtype=np.float64) for row in rows])
    return Relevance(
        scores=scores if graph.settings["layer"] == "all" else scores[0],
        tokens=graph.tokens,
        roles=graph.roles,
        queries=graph.answers,
        query_tokens=graph.query_tokens,
        layers=graph.explained,
        grid=graph.trace.grid if graph.tokens is graph.trace.tokens else None,
        words=graph.trace.words if graph.tokens is graph.trace.tokens else None,
        recipe=recipe(method, graph),
    )


def recipe(method: str, graph: AttentionGraph) -> dict[str, Any]:
    """What is needed to make scores again: method, settings, model and versions; checks are added later."""
    facts = graph.trace.model
    model = {name: fact for name, fact in facts.items() if name != "versions"}
    versions = {"attnflow": version("attnflow"), "python": platform.python_version(), "numpy": np.__version__}
    layers = graph.trace.layers
    return {
        "method": method,
        "settings": graph.settings,
        "model": {**model, "layers": len(layers), "heads": layers[0].shape[0]},
        "versions": versions | facts.get("versions", {}),
        "checks": {},
    }
