"""The attention graph: which layers of a trace are explained, and the transitions below each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias

from attnflow.memory import check_memory
from attnflow.mixing import HeadFusion, Transition
from attnflow.trace import GENERATED, Query, Role, Trace, query_positions

if TYPE_CHECKING:
    import torch

LayerChoice: TypeAlias = int | Literal["all"]


@dataclass(frozen=True, eq=False)
class AttentionGraph:
    """The nodes and edges that a method carries down: what `attention_graph` makes of a trace and its settings.

    explained: numbers of the explained layers. queries: positions of the queries in them. query_tokens: their labels,
    and answers: the positions that these stand at, which are the queries', but where a query wrote the next token.
    tokens, roles: the positions that enter `bottom`, the lowest layer taken in, or None to take in each explained
    layer alone. settings: for the recipe, with every default filled in.
    """

    trace: Trace
    explained: tuple[int, ...]
    bottom: int | None
    queries: tuple[int, ...]
    answers: tuple[int, ...]
    query_tokens: tuple[str, ...]
    tokens: tuple[str, ...]
    roles: tuple[Role, ...]
    head: int | None
    head_fusion: HeadFusion
    residual: float
    settings: dict[str, Any]

    def top(self, number: int) -> torch.Tensor:
        """The edges (query, key) of the queries in an explained layer: of one head, if one was asked for."""
        return self._transition(number, self.head).matrix(self.queries)

    def below(self, number: int) -> list[Transition]:
        """The transitions of the layers under an explained layer, the lowest first."""
        bottom = number if self.bottom is None else self.bottom
        return [self._transition(below, None) for below in range(bottom, number)]

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

    def evenly(self) -> AttentionGraph:
        """The same graph as if every layer attended evenly to all that it may attend to."""
        return replace(self, trace=self.trace.evenly(), head=None)

    def _transition(self, number: int, head: int | None) -> Transition:
        return Transition(self.trace.layers[number], number, self.head_fusion, self.residual, head)


def attention_graph(
    attention: Trace | Any,
    *,
    query: Query = None,
    layer: LayerChoice = -1,
    start_layer: int | None = 0,
    head: int | None = None,
    head_fusion: HeadFusion = "mean",
    residual: float | None = None,
) -> AttentionGraph:
    """The attention graph of a trace, or of arrays in any layout that `Trace.from_arrays` takes.

    The settings are those of `attnflow.rollout`; start_layer None takes in each explained layer alone.

    Raises ValueError for a setting out of range.
    """
    edges = residual == 0 and start_layer is not None  # raw attention has a residual of 0 unless asked
    trace = attention if isinstance(attention, Trace) else Trace.from_arrays(attention, edges=edges)
    residual = 0.5 if residual is None else residual
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
    if query == GENERATED and trace.generated_from is not None:
        answers = tuple(range(trace.generated_from, len(labels)))
        queries = tuple(place - 1 for place in answers)
    else:
        answers = queries = query_positions(query, labels)
    asked = GENERATED if answers != queries else list(queries) if len(queries) < len(labels) else "all"
    settings = {
        "query": asked,
        "layer": layer if layer == "all" else explained[0],
        "start_layer": bottom if layer == "all" else lowest,
        "head": head,
        "head_fusion": head_fusion,
        "residual": residual,
    }
    return AttentionGraph(
        trace=trace,
        explained=explained,
        bottom=bottom,
        queries=queries,
        answers=answers,
        query_tokens=tuple(labels[position] for position in answers),
        tokens=tokens,
        roles=trace.roles if tokens is trace.tokens else ("text",) * len(tokens),
        head=head,
        head_fusion=head_fusion,
        residual=residual,
        settings=settings,
    )


def _layer_number(setting: str, layer: Any, count: int) -> int:
    if not isinstance(layer, SupportsIndex) or not -count <= int(layer) < count:
        raise ValueError(f"{setting} {layer!r} is out of range: there are {count} layers, 0 to {count - 1}")
    return int(layer) % count


def _labels(trace: Trace, count: int) -> tuple[str, ...]:
    """The trace's tokens where a layer has as many positions as the input, else plain numbers."""
    return trace.tokens if len(trace.tokens) == count else tuple(str(position) for position in range(count))
