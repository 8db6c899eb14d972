"""The methods of the field: each chooses its edges and how they are carried, and `METHODS` is their table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import numpy as np

from attnflow import conserved
from attnflow.answer import Relevance, Rows
from attnflow.edges import EDGES
from attnflow.graph import AttentionGraph, Settings, attention_graph
from attnflow.propagate import flow as _flow
from attnflow.propagate.carriers import CARRIERS, capacities
from attnflow.trace import Query, Trace


@dataclass(frozen=True)
class Method:
    """One row of the table: what an edge weighs, how edges are carried to the input, and where it was published.

    edges: a name in `EDGES`; carry: a name in `CARRIERS`; settings: where they differ from those of the edges.
    """

    edges: str
    carry: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def needs(self) -> frozenset[str]:
        """What a trace must hold, as `EDGES` names it; the "block" also where the residual is measured."""
        measured = self.settings.get("residual") == "measured"
        return EDGES[self.edges].needs | (frozenset({"block"}) if measured else frozenset())

    @property
    def carried(self) -> str:
        """How edges are carried, in words."""
        return CARRIERS[self.carry].what

    @property
    def formula(self) -> str:
        """The edges with what stands beside them."""
        edges = EDGES[self.edges]
        residual = self.settings.get("residual", edges.residual)
        whole = edges.formula.startswith("abs") or not edges.heads
        mean = edges.formula if whole else f"mean over heads of {edges.formula}"
        if residual == "add":
            mean = f"I + {mean}"
        elif residual == "measured":
            mean = f"(1 - r) ({mean}) + r I, r = kept / (kept + mixed)"
        elif residual:
            mean = f"{1 - residual:g} ({mean}) + {residual:g} I"
        return f"{mean}, rows normalised" if self.settings.get("row_normalised", edges.row_normalised) else mean


METHODS: dict[str, Method] = {
    "raw": Method("attention", "layer", "Vaswani et al. 2017", {"residual": 0.0}),
    "rollout": Method("attention", "product", "Abnar & Zuidema 2020"),
    "flow": Method("attention", "flow", "Abnar & Zuidema 2020"),
    "gradient-flow": Method("gradient-x-attention", "flow", "attnflow"),
    "gradient-sum-over-layers": Method("gradient-x-attention", "sum", "attnflow", {"residual": 0.0}),
    "signed-gradient-sum-over-layers": Method("signed-gradient-x-attention", "sum", "attnflow", {"residual": 0.0}),
    "size-of-gradient-sum-over-layers": Method("size-of-gradient-x-attention", "sum", "attnflow", {"residual": 0.0}),
    "gradient-rollout": Method(
        "gradient-x-attention", "product", "Gildenblat 2020 (vit-explain)", {"row_normalised": True}
    ),
    "chefer": Method("gradient-x-attention", "update-rules", "Chefer et al. 2021 (ICCV)"),
    "generalized-attention-flow": Method(
        "gradient-x-attention", "barrier-flow", "Azarkhalili & Libbrecht 2025", {"residual": 0.0}
    ),
    "legrad": Method("gradient-at-layer", "sum", "Bousselham et al. 2025", {"residual": 0.0}),
    "legrad-final-score": Method("gradient", "sum", "after Bousselham et al. 2025", {"residual": 0.0}),
    "gmar": Method("gradient-weighted-heads", "product", "Jo et al. 2025"),
    "measured-rollout": Method("attention", "product", "after Kobayashi et al. 2021", {"residual": "measured"}),
    "measured-flow": Method("attention", "flow", "after Kobayashi et al. 2021", {"residual": "measured"}),
    "value-norm": Method("value-norm", "product", "Kobayashi et al. 2020"),
    "value-norm-with-residual": Method("value-norm-with-residual", "product", "Kobayashi et al. 2021"),
    "value-norm-through-norm": Method("value-norm-through-norm", "product", "Kobayashi et al. 2021"),
    "globenc": Method("globenc", "product", "Modarressi et al. 2022"),
    "alti": Method("alti", "product", "Ferrando et al. 2022"),
    "value-zeroing": Method("value-zeroing", "product", "Mohebbi et al. 2023"),
}


# A difference of conserved relevance, over the largest at a token, above which a warning says so.
LEAK = 1e-3

# What a job takes unless told otherwise (docs/leaderboard.md). Where there is a target, the rules that all tasks of the
# leaderboard bear out; without one no method wins, and raw attention asks least of a model; given arrays have no model,
# and have the paper's method.
DEFAULTS: dict[str, str] = {"target": "lrp", "text": "raw", "image": "raw", "written": "raw", "array": "rollout"}


def relevance(
    attention: Trace | Any,
    method: str | None = None,
    *,
    edges: str | None = None,
    carry: str | None = None,
    receptive_field: bool = False,
    progress: Callable[[int, int], object] | None = None,
    **settings: Unpack[Settings],
) -> Relevance:
    """The relevance of each input token, by a method of `METHODS`, or by any edges carried in any way.

    attention: a `Trace`, or arrays in any layout that `Trace.from_arrays` takes.
    method: a row of `METHODS`. edges, carry: names in `EDGES` and `CARRIERS`, instead of a method or of its own.
    receptive_field: divide each score R(q, t) by R0(q, t), the score under uniform attention within the same masks:
    A0(i, j) = 1 / |visible(i)| for visible j. In a causal model early tokens are reached over more routes and score
    high wherever the model looks (section 6 of Abnar & Zuidema asks for such a normalisation and gives no formula; this
    one is ours): 1 then means as much as the place alone explains. Rows no longer sum to 1.
    progress: called now and then with the pairs done and the pairs in all. settings: see `Settings`.

    Scores are (query, token), or (layer, query, token) for layer="all", not normalised.

    Raises ValueError, before any work, for unknown names and settings out of range, for edges that need what the trace
    does not hold, and for attention on which the method is not defined; MemoryError for more than fits into memory.

    >>> lower, upper = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]
    >>> relevance([lower, upper], edges="attention", carry="product", query=0, residual=0).scores.round(2).tolist()
    [[0.5, 0.5]]
    """
    row = _row(method, edges, carry)
    carrier, weighed = CARRIERS[row.carry], EDGES[row.edges]
    if weighed.signed and not carrier.signed:
        raise ValueError(
            f"{row.edges} edges may be negative, which {carrier.what} cannot carry; use edges of 0 or more"
        )
    if receptive_field and row.edges != "attention":
        raise ValueError(f"receptive_field compares attention with uniform attention; {row.edges} has no such field")
    if carrier.one_layer:
        if "start_layer" in settings:
            raise ValueError(f"{method or row.carry} takes in one layer alone, so that start_layer has no part in it")
        settings["start_layer"] = None
    given: dict[str, Any] = {**row.settings, **settings}
    if settings.get("residual") is None:
        given["residual"] = row.settings.get("residual")
    if carrier.adds:
        if given.get("residual") not in (None, "add") or given.get("row_normalised"):
            raise ValueError(
                f"{method or row.carry} adds to what a position has: leave residual and row_normalised out, or use "
                'carry="product"'
            )
        if weighed.row_normalised and given.get("row_normalised") is None:
            raise ValueError(
                f"{row.edges} edges are shares only once rows are divided by their sum, and {method or row.carry} adds "
                'to what a position has: use carry="product", or row_normalised=False to add them as they are'
            )
        given["residual"] = "add"
    graph = attention_graph(attention, row.edges, **given)  # pyright: ignore[reportArgumentType]
    graph.check_room(whole_layers=carrier.whole)
    name = method if edges is None and carry is None and method else f"{row.edges} by {row.carry}"
    carried = carrier.carry(graph, progress)
    found = relevance_of(name, graph, carried.scores, rows=carrier.rows)
    if not found.scores.any():
        warnings.warn(f"every score of {name} is 0: nothing that was explained draws on these layers", stacklevel=2)
    if receptive_field:
        even = carrier.carry(graph.uniform(), progress)
        found = found.by_receptive_field(relevance_of(name, graph, even.scores, rows=carrier.rows))
    if "relevance" in weighed.needs and graph.trace.target is not None:
        facts = conserved.checks(graph.trace.layers, graph.trace.target["score"])
        found = found.with_checks(facts)
        if row.edges == "conserved-relevance" and facts["conservation"] > LEAK:
            warnings.warn(
                f"the edges of {name} miss up to {facts['conservation']:.1%} of what enters a block at a token; only "
                "under rules='cp-lrp', with a rule for every function, do edges carry all relevance",
                stacklevel=2,
            )
    if not any(carried.checks):
        return found
    return found.with_checks({"layers": carried.checks} if graph.settings["layer"] == "all" else carried.checks[0])


def kept_for(methods: Iterable[str], residual: Any = None) -> dict[str, Any]:
    """The settings of `capture` by which a trace holds what some methods need, beside the gradients of a target.

    methods: those of `METHODS` count. residual: that they are given.
    """
    needs = frozenset[str]().union(*(METHODS[name].needs for name in methods if name in METHODS))
    kept: dict[str, Any] = {"keep": "block"} if "block" in needs or residual == "measured" else {}
    return kept | ({"at_each_layer": True} if "gradient at each layer" in needs else {})


def read_out(method: str, trace: Trace) -> Query:
    """The query that a method explains unless another is asked for: the read-out, or of a target all."""
    return None if CARRIERS[METHODS[method].carry].rows == "target" else trace.readout


def raw(attention: Trace | Any, *, receptive_field: bool = False, **settings: Unpack[Settings]) -> Relevance:
    """Raw attention: the weights of one layer, whatever the layers below it did.

    The settings are those of `Settings`, but a residual is added on request only, and start_layer has no part. Scores
    are those of the layer's own keys; rows sum to 1 for the mean over heads.
    """
    return relevance(attention, "raw", receptive_field=receptive_field, **settings)


def rollout(attention: Trace | Any, *, receptive_field: bool = False, **settings: Unpack[Settings]) -> Relevance:
    """Attention rollout: the product of the layers' transitions (Abnar & Zuidema 2020, section 3, equation 1).

    attention: a `Trace`, or arrays in any layout that `Trace.from_arrays` takes. The settings are those of `Settings`;
    receptive_field and errors are those of `relevance`.

    Rows sum to 1 where the transitions' rows do; nothing is renormalised, where the official code divides again.

    >>> import attnflow
    >>> lower, upper = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]
    >>> attnflow.rollout([lower, upper], query=0, residual=0).scores.round(2).tolist()
    [[0.5, 0.5]]
    """
    return relevance(attention, "rollout", receptive_field=receptive_field, **settings)


def flow(
    attention: Trace | Any,
    *,
    receptive_field: bool = False,
    progress: Callable[[int, int], object] | None = None,
    **settings: Unpack[Settings],
) -> Relevance:
    """Attention flow: the maximum flow from each query to each input token (Abnar & Zuidema 2020, section 3).

    Nodes are the positions at every layer, edges run one layer down with the transitions as capacities, and each pair
    of query and token is a problem of its own. Values are exact, in units of capacity, and not normalised (the official
    code divides each query's row by its sum). How they are known, and the share that is saturated, so that the
    layers between no longer matter, stand in `recipe["checks"]`, per layer for layer="all". It runs on the CPU.

    The settings are those of `Settings`. progress: called now and then with the pairs done and the pairs in all.
    Raises MemoryError, before any work, for more than fits into memory; `flow_bounds` takes far less time.

    >>> import attnflow
    >>> lower, upper = [[0.1], [0.1], [0.0]], [[0.1, 0.1, 0.8]]
    >>> attnflow.flow([lower, upper], residual=0).scores.round(2).tolist()
    [[0.2]]
    """
    return relevance(attention, "flow", receptive_field=receptive_field, progress=progress, **settings)


class FlowBounds(NamedTuple):
    """Two answers that the flow lies between; see `flow_bounds`."""

    lower: Relevance
    upper: Relevance


def flow_bounds(
    attention: Trace | Any,
    *,
    edges: str = "attention",
    progress: Callable[[int, int], object] | None = None,
    **settings: Unpack[Settings],
) -> FlowBounds:
    """What attention flow lies between, for thousands of tokens: `flow` without its search.

    lower: the values of flows that were found in bulk. upper: bounds that need no flow, and that deep real attention
    nearly always meets. Where both are equal, that is the flow; `lower.recipe["checks"]` tells the share of such pairs
    ("exact"), and the mean and the widest gap as shares of the upper bound. edges: a name in `EDGES`. The settings are
    those of `flow`, for one layer.

    >>> lower, upper = [[0.1], [0.1], [0.0]], [[0.1, 0.1, 0.8]]
    >>> bounds = flow_bounds([lower, upper], residual=0)
    >>> bounds.lower.scores.round(2).tolist(), bounds.upper.scores.round(2).tolist()
    ([[0.2]], [[0.2]])
    """
    graph = flow_graph(attention, edges, settings)
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


def flow_graph(attention: Trace | Any, edges: str, settings: Settings) -> AttentionGraph:
    """The graph of edges that can be capacities, of one explained layer, with room for all of its layers."""
    check_one_layer(settings)
    return whole_graph(attention, edges, settings)


def check_one_layer(settings: Mapping[str, Any]) -> None:
    """Refuse every layer at once."""
    if settings.get("layer") == "all":
        raise ValueError('layer="all" cannot be had here: give one layer, such as -1')


def whole_graph(attention: Trace | Any, edges: str, settings: Settings) -> AttentionGraph:
    """The graph of edges that can be capacities, with room for all of its layers."""
    graph = attention_graph(attention, edges, **settings)
    if graph.edges.signed:
        raise ValueError(f"{edges} edges may be negative, which {CARRIERS['flow'].what} cannot carry")
    graph.check_room(whole_layers=True)
    return graph


def _row(method: str | None, edges: str | None, carry: str | None) -> Method:
    """The row that is asked for, all names checked."""
    if method is None and (edges is None or carry is None):
        raise ValueError("give a method, or edges and carry; attnflow.METHODS, EDGES and CARRIERS list them")
    for what, name, table in (("method", method, METHODS), ("edges", edges, EDGES), ("carry", carry, CARRIERS)):
        if name is not None and name not in table:
            raise ValueError(f"{what} {name!r} is unknown; choose one of {', '.join(table)}")
    own = METHODS[method] if method is not None else None
    if own is None or edges is not None:  # other edges have residuals of their own
        return Method(edges or own.edges, carry or own.carry, "")  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    return own if carry is None else Method(own.edges, carry, "", own.settings)


def relevance_of(method: str, graph: AttentionGraph, scores: Sequence[Any], rows: Rows = "query") -> Relevance:
    """The answer of a method, from the scores (row, token) of each explained layer, with its recipe."""
    stacked = np.stack([np.asarray(x.cpu() if hasattr(x, "cpu") else x, dtype=np.float64) for x in scores])
    own = graph.tokens is graph.trace.tokens
    target = dict(graph.trace.target or {}) if "gradient" in graph.edges.needs else None
    if target is not None and "gradient at each layer" in graph.edges.needs:
        target["at_each_layer"] = True
    parts = graph.trace.parts if own else None
    needs = graph.edges.needs | ({"block"} if graph.settings["residual"] == "measured" else set())
    keep = next((one for one in ("relevance", "block") if one in needs), None)
    kind = "generated" if rows == "query" and graph.answers != graph.queries else rows
    return Relevance(
        scores=stacked if graph.settings["layer"] == "all" else stacked[0],
        tokens=graph.tokens,
        roles=graph.roles,
        queries=(0,) if rows == "target" else graph.answers,
        query_tokens=("target",) if rows == "target" else graph.query_tokens,
        layers=graph.explained,
        grid=graph.trace.grid if own else None,
        words=graph.trace.words if own else None,
        recipe=graph.trace.recipe(
            method, graph.settings, edges=graph.edges.formula, target=target, parts=parts, keep=keep
        ),
        rows=kind,
    )
