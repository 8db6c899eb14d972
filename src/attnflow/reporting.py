"""Pages of HTML: one or several answers with the graph that they came from (`report`), and an evaluation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnflow import conserved
from attnflow.answer import PAGES, Relevance
from attnflow.edges import EDGES
from attnflow.faithfulness.results import Difference, Evaluation, MeanCurve, Summary
from attnflow.faithfulness.run import ALWAYS
from attnflow.graph import attention_graph, holds_relevance
from attnflow.methods import CARRIERS, LEAK, METHODS, Method, raw
from attnflow.relevance_flow import carried_relevance, carried_routes, relevance_graph
from attnflow.routes import min_cut, paths
from attnflow.run_page import save_run_page
from attnflow.running.results import Run
from attnflow.show.listing import Chart, Interval, Line, save_list
from attnflow.show.report import Carried, Graph, Heads, Start, holds_all, save_page
from attnflow.trace import Trace

ROUTES = 5  # of a graph that a page does not hold whole: tokens to which there are routes, and routes to each
CARRIED = 2000  # routes of conserved relevance that a page holds
HEADS = 1_000_000  # numbers of the heads' attention that a page holds, which are 5 MB
_CARRIERS = ("product", "flow")  # whose edges a graph can be drawn of
_GRAPH_SETTINGS = (
    "start_layer",
    "head",
    "head_fusion",
    "residual",
    "row_normalised",
    "discard_ratio",
    "remove_column_mean",
)


def report(
    relevance: Relevance | Sequence[Relevance] | Run,
    path: str | os.PathLike[str],
    *,
    names: Sequence[str] | None = None,
    trace: Trace | None = None,
    image: Any = None,
    command: str | None = None,
    start: Start | None = None,
) -> Path:
    """Write one page of HTML that shows everything about one or several relevances or a run, and works offline.

    relevance: of one input or of several; the page has a choice of them, and shows maps of one image side by side.
    Those of other inputs are listed, with how far the methods disagree on each; names: what each relevance is called
    there, by default the beginning of its text. A run (`read`) has a page without further settings: what its examples
    say together (`Run.overview`), mean maps of classes, and up to 90 examples.
    trace: what they came from; with it the page draws the graph: the edges of the first relevance that carries edges
    of 0 or more by product or flow, or what was really carried if it is relevance that the trace conserves (the method
    "cp-lrp", or edges that need capture(..., keep="relevance")), else attention with a residual of 0.5. The page works
    out the routes and the minimum cut between any query and any token. Of more than 200,000 edges it does not hold all;
    then they are worked out here, from the read-out (or the only query) to the five tokens that it draws on most.
    The page has also the raw attention of each head, of every query where that is a million numbers or fewer, else of
    the one that is shown first, and says so.
    image: the photograph that the patches tile, as for an overlay. command: the command line that made the page.
    start: what is shown first; by default the read-out of the trace, if it is one position.

    Raises ValueError for no relevance, other than one name each, a suffix that is not .html, scores that are not
    finite, an image without patches, and a trace of other tokens.
    """
    path = Path(path)
    if path.suffix.lower() not in PAGES:
        raise ValueError(f"cannot write {path.name!r}: the suffix of a page must be one of {', '.join(PAGES)}")
    if isinstance(relevance, Run):
        if any(one is not None for one in (names, trace, image, start)):
            raise ValueError("the page of a run has its own examples: leave out names, trace, image and start")
        return save_run_page(relevance, path)
    relevances = [relevance] if isinstance(relevance, Relevance) else list(relevance)
    if not relevances:
        raise ValueError("no relevance was given; a page shows at least one")
    if names is not None and len(names) != len(relevances):
        raise ValueError(f"{len(names)} names were given for {len(relevances)} relevances; give one for each")
    graph = None if trace is None else graph_of(trace, relevances)
    if start is None:
        readout = None if trace is None else trace.readout
        start = Start(query=readout if isinstance(readout, int) else None)
    heads = None if trace is None else heads_of(trace, start.query)
    more: dict[str, Any] = {"names": names, "image": image, "command": command, "start": start}
    return save_page(relevances, path, graph=graph, heads=heads, **more)


def heads_of(trace: Trace, query: int | None) -> Heads:
    """The raw attention of each head, as far as it fits: of every query, of one alone, or of none and why."""
    shapes = {layer.shape for layer in trace.layers}
    if len(shapes) > 1 or next(iter(shapes))[1:] != (len(trace.tokens),) * 2:
        return Heads(
            limit="no heads: the layers differ in their heads, or their queries and keys are not all the tokens"
        )
    heads, count, _ = next(iter(shapes))
    numbers = heads * len(trace.layers) * count
    if numbers * count <= HEADS:
        asked, limit = None, ""
    elif query is not None and numbers <= HEADS:
        asked, limit = (
            query,
            f"heads of the query at {query} alone: of every query they would be {numbers * count:,} numbers",
        )
    else:
        return Heads(limit=f"no heads: of every query they would be {numbers * count:,} numbers")
    return Heads([raw(trace, layer="all", head=head, query=asked) for head in range(heads)], limit)


class _Choice(NamedTuple):
    """Which edges a graph is of, and the settings of `attention_graph`, with layer and start_layer as numbers."""

    edges: str
    settings: dict[str, Any]


def graph_of(trace: Trace, relevances: Sequence[Relevance]) -> Graph:
    """The edges that a page draws, and the routes from the read-out to what it draws on most."""
    for one in relevances:
        if not _fits(one, trace):
            raise ValueError(
                f"a relevance by {one.recipe.get('method', 'unknown')} has other tokens than the trace; give the trace "
                "that all relevances came from, or leave it out"
            )
    chosen = _choice(trace, relevances)
    if EDGES[chosen.edges].flow:
        return _carried(trace, chosen)
    graph = attention_graph(trace, chosen.edges, **chosen.settings)
    graph.check_room(whole_layers=True)
    top = graph.explained[0]
    below = graph.below(top)
    layers = [layer.matrix().cpu().double().numpy() for layer in below]
    layers.append(graph.top(top).cpu().double().numpy())
    lowest = top - len(below)
    few = [] if holds_all(layers) else _routes(trace, chosen, _query(trace, relevances[0]), layers, lowest)
    return Graph(
        layers=layers,
        numbers=tuple(range(lowest, top + 1)),
        tokens=graph.tokens,
        edges=Method(chosen.edges, "product", "", graph.settings).formula,
        left_out=[list(layer.left_out) for layer in below] + [graph.left_out(top)],
        routes=list(few),
    )


def _carried(trace: Trace, chosen: _Choice) -> Graph:
    """What every layer carried of a score, and the largest routes that it makes up."""
    graph = relevance_graph(trace, chosen.edges, chosen.settings)
    layers, at_keys, at_queries = carried_relevance(graph)
    found = carried_routes(graph, None, CARRIED)
    assert trace.target is not None  # relevance is of one
    return Graph(
        layers=layers,
        numbers=tuple(range(len(layers))),
        tokens=graph.tokens,
        edges=graph.edges.formula,
        left_out=[[] for _ in layers],
        carried=Carried(
            score=trace.target["score"],
            leaving=float(layers[-1].sum() + at_queries[-1].sum()),
            biases=[float(keys.sum() + queries.sum()) for keys, queries in zip(at_keys, at_queries, strict=True)],
            received=(layers[0].sum(0) - at_keys[0]).tolist(),
            routes=[
                {"amount": one.amount, "level": one.level, "steps": list(one.nodes), "end": one.end} for one in found
            ],
            all_routes=len(found) < CARRIED,
        ),
    )


def _fits(relevance: Relevance, trace: Trace) -> bool:
    """Whether a relevance can be of a trace: of its tokens or, where a layer has others, of numbers, unless changed."""
    changed = "left_out" in relevance.recipe or "pieces" in relevance.recipe or relevance.rows == "group"
    numbers = tuple(map(str, range(len(relevance.tokens))))
    return changed or relevance.tokens in (trace.tokens, numbers)


def _choice(trace: Trace, relevances: Sequence[Relevance]) -> _Choice:
    for one in relevances:
        name, settings = one.recipe.get("method", ""), one.recipe.get("settings", {})
        if _is_conserved(name, trace):
            return _Choice("conserved-relevance", {})
        row = METHODS.get(name) or _cell(name)
        if (
            row is not None
            and row.carry in _CARRIERS
            and not EDGES[row.edges].signed
            and (trace.target is not None or not row.needs)
        ):
            given = {key: settings[key] for key in _GRAPH_SETTINGS if settings.get(key) is not None}
            return _Choice(row.edges, {"layer": one.layers[-1], **given})
    top = max(one.layers[-1] for one in relevances)
    return _Choice("attention", {"layer": min(top, len(trace.layers) - 1)})


def _cell(name: str) -> Method | None:
    """The edges and the carrier that a name such as "gradient by flow" is made of."""
    edges, _, carry = name.partition(" by ")
    return Method(edges, carry, "") if edges in EDGES and carry in CARRIERS else None


def _is_conserved(name: str, trace: Trace) -> bool:
    """Whether a method's answer is of the relevance that a trace holds and conserves."""
    own = EDGES.get(name.partition(" by ")[0])
    named = trace.target is not None and trace.target.get("rules") == name
    if not (named or (own is not None and "relevance" in own.needs)) or not holds_relevance(trace):
        return False
    return trace.target is not None and conserved.checks(trace.layers, trace.target["score"])["conservation"] <= LEAK


def _query(trace: Trace, relevance: Relevance) -> int:
    """The query whose routes are worked out: the only one that was explained, else the read-out or the first of it."""
    if relevance.rows == "query" and len(relevance.queries) == 1:
        return relevance.queries[0]
    match trace.readout:
        case int(position):
            return position
        case str():  # what the model wrote: the row that wrote its first token
            return (trace.generated_from or 1) - 1
        case several:
            return several[0] if several else 0


def _routes(trace: Trace, chosen: _Choice, query: int, layers: Sequence[Any], lowest: int) -> Iterator[dict[str, Any]]:
    """Routes and minimum cuts from a query to the tokens that it draws on most, by the product of the edges."""
    carried = layers[-1][query]
    for layer in reversed(layers[:-1]):
        carried = carried @ layer
    for token in np.argsort(-carried, kind="stable")[:ROUTES].tolist():
        if carried[token] <= 0:
            return
        cut = min_cut(trace, query, token, edges=chosen.edges, **chosen.settings)
        found = paths(trace, query, token, top=ROUTES, edges=chosen.edges, **chosen.settings)
        yield {
            "query": query,
            "token": token,
            "flow": sum(edge.capacity for edge in cut),
            "paths": [
                {"amount": one.amount, "share": one.share, "steps": [step.position for step in one.steps]}
                for one in found
            ],
            "cut": [
                {"layer": edge.layer - lowest, "query": edge.query, "key": edge.key, "capacity": edge.capacity}
                for edge in cut
            ],
        }


def report_evaluation(evaluation: Evaluation, path: Path) -> Path:
    """Write what `Evaluation.summary`, `.curves` and `.differences` say as one page of HTML.

    Random scores and the gradient's norm are set apart, with a line through all others. Raises ValueError for an
    evaluation without values.
    """
    summary = evaluation.summary()
    if not summary:
        raise ValueError("this evaluation holds no value, so there is nothing to draw; its failures say why")
    curves = evaluation.curves()
    charts = [
        Chart(
            metric,
            "up" if block[0].direction == "up" else "down",
            [Interval(_label(one), one.mean, one.low, one.high, one.n, one.undefined) for one in block],
            ALWAYS,
            [_line(one) for one in curves if one.metric == metric],
            _across(metric),
        )
        for metric in dict.fromkeys(one.metric for one in summary)
        for block in [[one for one in summary if one.metric == metric]]
    ]
    return save_list(path, "How faithful the methods are", charts=charts, words=[*_words(evaluation)])


def draw_curves(evaluation: Evaluation, metric: str = "deletion", *, ax: Any = None) -> Any:
    """Draw the mean curves of one metric of all methods, with their intervals, as matplotlib's axes, and return these.

    metric: one that is the area of a curve, such as "deletion" or "insertion"; the legend says the areas. Random scores
    and the gradient's norm are grey. ax: axes to draw on; by default those of a new figure.

    Raises ValueError where the evaluation holds no curve of the metric.
    """
    from attnflow.show.curves import curves

    found = [one for one in evaluation.curves() if one.metric == metric]
    if not found:
        known = dict.fromkeys(one.metric for one in evaluation.curves())
        raise ValueError(
            f"this evaluation holds no curve of {metric!r}; it has those of {', '.join(known) or 'no metric'}: measure "
            "it again with a metric that is the area of a curve, such as deletion"
        )
    return curves([_line(one) for one in found], _across(metric), marks=ALWAYS, ax=ax)


def _line(one: MeanCurve) -> Line:
    return Line(_label(one), one.shares, one.mean, one.low, one.high)


def _across(metric: str) -> str:
    """What the shares of a metric's curve are of."""
    return {
        "deletion": "tokens removed, the most relevant first",
        "least-first-deletion": "tokens removed, the least relevant first",
        "insertion": "tokens shown, the most relevant first",
    }.get(metric, "")


def _label(one: Summary | Difference | MeanCurve) -> str:
    return one.method if one.layer is None else f"{one.method}, layer {one.layer}"


def _words(evaluation: Evaluation) -> Iterator[str]:
    recipe = evaluation.recipe
    examples = len({row.example for row in evaluation.rows})
    model = recipe.get("model", {}).get("class", "the model")
    yield f"{model} on {examples} examples, target {recipe.get('target')}; dots are means, lines 95 % intervals."
    yield f"Set apart, with a line through all: {' and '.join(ALWAYS)}. A method that does not beat both finds little."
    if any(row.curve is not None for row in evaluation.rows):
        yield "Curves are means over examples of the score that tests watch, bands their 95 % intervals at each share."
    if evaluation.failures:
        yield f"{len(evaluation.failures)} failures are left out; the first: {evaluation.failures[0].error}"
    differences = evaluation.differences()
    for metric in dict.fromkeys(one.metric for one in differences):
        block = [one for one in differences if one.metric == metric]
        close = [_label(one) for one in block if not (one.low > 0 or one.high < 0)]
        said = f"not told apart from it: {', '.join(close)}" if close else "all others are told apart from it"
        yield f"{metric}: {block[0].than} has the best mean; example by example, {said}."
