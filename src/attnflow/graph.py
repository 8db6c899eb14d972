"""The attention graph: which layers of a trace are explained, and the transitions below each of them."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, TypedDict

from attnflow.edges import EDGES, Edges, Residual
from attnflow.layers import calls_of
from attnflow.memory import check_memory
from attnflow.mixing import HEAD_FUSIONS, HeadFusion, Mixing, Transition
from attnflow.trace import GENERATED, Query, Role, Trace, query_positions

if TYPE_CHECKING:
    import torch

LayerChoice: TypeAlias = int | Literal["all"]


class GraphSettings(TypedDict, total=False):
    """Which layers are taken in, and how the edges of each become one matrix.

    layer: the layer whose output is explained, counted from 0 at the input, negative from the top; "all" gives scores
    (layer, query, token). start_layer: the lowest layer taken in; scores are those of the positions that enter it.
    head: explain one head: its own matrix in the explained layer, the fusion of heads below (appendix A.1 of Abnar &
    Zuidema 2020). head_fusion: over heads, "mean" (the paper's), "max" or "min".
    residual: what a position keeps of itself: r for (1 - r) W + r I, or "add" for W + I. "measured" is an r for each
    query and layer: the length of what it kept over that and the length of what others added, from the block around
    attention (capture(..., keep="block")). None is what the edges ask for: of attention 0.5, the paper's, wherever it
    came from; of edges that hold the residual already, 0. 0 takes arrays as the edges of the graph as they stand.
    row_normalised: divide each row of a layer by its sum, after the residual. None is what the edges ask for.
    discard_ratio: the share of each layer's edges that is left out, the weakest first; edges to special and prefix
    tokens stay (vit-explain spares one edge, and the first example of a batch only).
    remove_column_mean: take from each edge the mean of what all queries send to its key, at 0 or more, and divide rows
    by their sum: what every query attends to alike, such as a sink, is left out.
    """

    layer: LayerChoice
    start_layer: int | None
    head: int | None
    head_fusion: HeadFusion
    residual: Residual | None
    row_normalised: bool | None
    discard_ratio: float
    remove_column_mean: bool


class Settings(GraphSettings, total=False):
    """The settings that every method takes: those of `GraphSettings`, and the queries.

    query: the queries to explain: a position, several, a token such as "[CLS]", or None for all; where the model wrote
    tokens itself, "generated" gives the rows that wrote each of them, under the name and place of what they wrote.
    """

    query: Query


@dataclass(frozen=True, eq=False)
class AttentionGraph:
    """The nodes and edges that a method carries down: what `attention_graph` makes of a trace and its settings.

    explained: numbers of the explained layers. queries: positions of the queries in them. query_tokens: their labels,
    and answers: the positions that these stand at, which are the queries', but where a query wrote the next token.
    tokens, roles: the positions that enter `bottom`, the lowest layer taken in, or None to take in each explained
    layer alone. settings: for the recipe, with every default filled in.
    """

    trace: Trace
    edges: Edges
    mixing: Mixing
    explained: tuple[int, ...]
    bottom: int | None
    queries: tuple[int, ...]
    answers: tuple[int, ...]
    query_tokens: tuple[str, ...]
    tokens: tuple[str, ...]
    roles: tuple[Role, ...]
    settings: dict[str, Any]

    def layer(self, number: int) -> Transition:
        """An explained layer with all its queries: of one head, if one was asked for."""
        return self._transition(number, self.mixing)

    def top(self, number: int) -> torch.Tensor:
        """The edges (query, key) of the queries in an explained layer."""
        return self.layer(number).matrix(self.queries)

    def below(self, number: int) -> list[Transition]:
        """The transitions of the layers under an explained layer, the lowest first."""
        bottom = number if self.bottom is None else self.bottom
        return [self._transition(below, replace(self.mixing, head=None)) for below in range(bottom, number)]

    def left_out(self, number: int) -> list[int]:
        """The rows of `top` whose queries the layer does not concern, so that each has 1 to its own position alone."""
        left_out = set(self.trace.layers[number].left_out)
        return [row for row, query in enumerate(self.queries) if query in left_out]

    def check_room(self, *, whole_layers: bool) -> None:
        """Refuse, before any work, edges that cannot fit where the trace lies.

        That is the rows of the queries, for each explained layer and twice on their way down; and with whole_layers
        all edges of every layer below at once. Raises MemoryError with the estimate and what to do.
        """
        below = self.below(self.explained[-1])
        widest = max(max(self.trace.layers[number].shape[1:]) for number in range(self.explained[-1] + 1))
        edges = len(self.queries) * widest * (len(self.explained) + 2) + whole_layers * len(below) * widest**2
        what = "all edges of" if whole_layers else "rows through"
        check_memory(
            8 * edges,
            f"{what} {len(below) + 1} layers of up to {widest:,} positions, for {len(self.queries):,} queries in "
            f"{len(self.explained)} of them,",
            "explain fewer queries at a time (query=...), or fewer layers (layer=..., start_layer=...)",
            self.trace.layers[-1].attention([]).device,
        )

    def uniform(self) -> AttentionGraph:
        """The same graph under uniform attention: its receptive field."""
        return replace(self, edges=EDGES["uniform"], mixing=replace(self.mixing, head=None))

    def _transition(self, number: int, mixing: Mixing) -> Transition:
        return Transition(self.trace.layers[number], number, self.edges, mixing)


def attention_graph(
    attention: Trace | Any,
    edges: str = "attention",
    *,
    query: Query = None,
    layer: LayerChoice = -1,
    start_layer: int | None = 0,
    head: int | None = None,
    head_fusion: HeadFusion = "mean",
    residual: Residual | None = None,
    row_normalised: bool | None = None,
    discard_ratio: float = 0.0,
    remove_column_mean: bool = False,
) -> AttentionGraph:
    """The attention graph of a trace, or of arrays in any layout that `Trace.from_arrays` takes.

    edges: a name in `EDGES`. The settings are those of `Settings`; start_layer None takes in each explained layer
    alone.

    Raises ValueError, before any work, for unknown edges, a setting out of range, and a trace without what the edges
    need.
    """
    as_edges = residual == 0 and start_layer is not None  # raw attention has a residual of 0 unless asked
    trace = attention if isinstance(attention, Trace) else Trace.from_arrays(attention, edges=as_edges)
    row = _edges(edges, trace)
    residual = row.residual if residual is None else residual
    if residual == "measured":
        _check_blocks("residual='measured'", trace)
    row_normalised = row.row_normalised if row_normalised is None else row_normalised
    for setting, value in (("row_normalised", row_normalised), ("remove_column_mean", remove_column_mean)):
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{setting} is True or False; it is {value!r}")
    count = len(trace.layers)
    bottom = None if start_layer is None else _layer_number("start_layer", start_layer, count)
    explained = tuple(range(bottom or 0, count)) if layer == "all" else (_layer_number("layer", layer, count),)
    if bottom is not None and explained[0] < bottom:
        raise ValueError(f"start_layer {bottom} lies above the explained layer {explained[0]}")
    lowest = explained[0] if bottom is None else bottom
    sizes = {trace.layers[number].shape[1] for number in explained}
    if len(sizes) > 1:
        raise ValueError(
            f"layer='all' needs as many queries in every layer; there are {sorted(sizes)}: explain one, such as -1"
        )
    labels, tokens = _labels(trace, sizes.pop()), _labels(trace, trace.layers[lowest].shape[2])
    roles = trace.roles if tokens is trace.tokens else ("text",) * len(tokens)
    mixing = Mixing(
        residual=residual if residual in ("add", "measured") else _between_0_and_1("residual", residual),
        head_fusion=head_fusion,
        head=_head(head, explained, trace),
        row_normalised=row_normalised,
        discard_ratio=_between_0_and_1("discard_ratio", discard_ratio),
        remove_column_mean=remove_column_mean,
        undiscarded=tuple(place for place, role in enumerate(roles) if role in ("special", "prefix")),
    )
    if head_fusion != "mean" and not row.heads:
        raise ValueError(f"head_fusion={head_fusion!r} has no part in {edges}, which has no heads of its own")
    if head_fusion not in HEAD_FUSIONS:
        raise ValueError(f"head_fusion {head_fusion!r} is unknown; choose one of {', '.join(HEAD_FUSIONS)}")
    if row.signed and (row_normalised or discard_ratio or remove_column_mean):
        raise ValueError(
            f"{edges} are signed, and row_normalised, discard_ratio and remove_column_mean are for edges of 0 or more"
        )
    if query == GENERATED and trace.generated_from is not None:
        answers = tuple(range(trace.generated_from, len(labels)))
        queries = tuple(place - 1 for place in answers)
    else:
        answers = queries = query_positions(query, labels)
    settings = {
        "query": GENERATED if answers != queries else list(queries) if len(queries) < len(labels) else "all",
        "layer": layer if layer == "all" else explained[0],
        "start_layer": bottom if layer == "all" else lowest,
        "head": mixing.head,
        "head_fusion": head_fusion,
        "residual": mixing.residual,
    }
    more = {
        "row_normalised": row_normalised,
        "discard_ratio": mixing.discard_ratio,
        "remove_column_mean": remove_column_mean,
    }
    return AttentionGraph(
        trace=trace,
        edges=row,
        mixing=mixing,
        explained=explained,
        bottom=bottom,
        queries=queries,
        answers=answers,
        query_tokens=tuple(labels[position] for position in answers),
        tokens=tokens,
        roles=roles,
        settings=settings | {name: value for name, value in more.items() if value},
    )


def _edges(name: str, trace: Trace) -> Edges:
    if name not in EDGES:
        raise ValueError(f"edges {name!r} are unknown; choose one of {', '.join(EDGES)}")
    if "gradient" in EDGES[name].needs and trace.target is None:
        raise ValueError(f"{name} needs the gradient of a target: capture(model, inputs, target=...)")
    if "relevance" in EDGES[name].needs:
        _check_relevance(name, trace)
    if "gradient at each layer" in EDGES[name].needs and not _at_each_layer(trace):
        raise ValueError(f"{name} needs the score at each layer: capture(model, inputs, target=, at_each_layer=True)")
    if {"values", "block"} & EDGES[name].needs:
        _check_blocks(name, trace)
    return EDGES[name]


def _check_relevance(what: str, trace: Trace) -> None:
    """Raise ValueError for a trace that does not hold relevance, or holds windows, in which it is not known."""
    if not holds_relevance(trace):
        raise ValueError(
            f"{what} needs the relevance that every block carries: capture(model, inputs, target=..., rules='cp-lrp', "
            "keep='relevance')"
        )


def holds_relevance(trace: Trace) -> bool:
    """Whether a trace holds the relevance that every block carries."""
    return all(getattr(layer, "carried", None) is not None for layer in trace.layers)


def _at_each_layer(trace: Trace) -> bool:
    """Whether a trace holds the gradients of the score that each layer gives."""
    calls = [call for layer in trace.layers for call in calls_of(layer)]
    return all(call.gradient is not None and call.gradient.at_layer is not None for call in calls)


def _check_blocks(what: str, trace: Trace) -> None:
    """Raise ValueError for a trace without the blocks around its calls."""
    if any(call.block is None for layer in trace.layers for call in calls_of(layer)):
        raise ValueError(f"{what} needs the block around attention: capture(model, inputs, keep='block')")


def _head(head: Any, explained: tuple[int, ...], trace: Trace) -> int | None:
    if head is None:
        return None
    for number in explained:
        heads = trace.layers[number].shape[0]
        if isinstance(head, bool) or not isinstance(head, SupportsIndex) or not -heads <= operator.index(head) < heads:
            raise ValueError(f"head {head!r} is out of range: layer {number} has {heads} heads, 0 to {heads - 1}")
    return operator.index(head)


def _between_0_and_1(setting: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise ValueError(f"{setting} must lie between 0 and 1; it is {value!r}")
    return number


def _layer_number(setting: str, layer: Any, count: int) -> int:
    if isinstance(layer, bool) or not isinstance(layer, SupportsIndex) or not -count <= operator.index(layer) < count:
        raise ValueError(f"{setting} {layer!r} is out of range: there are {count} layers, 0 to {count - 1}")
    return operator.index(layer) % count


def _labels(trace: Trace, count: int) -> tuple[str, ...]:
    """The trace's tokens where a layer has as many positions as the input, else plain numbers."""
    return trace.tokens if len(trace.tokens) == count else tuple(str(position) for position in range(count))
