"""Attention flow: how much could reach each input token, as a maximum flow (Abnar & Zuidema 2020, section 3).

What flow means is here; which edges it is squeezed through and which routes it takes, in `cuts`. The algorithm is in
`_maxflow`, arrays in, arrays out, and docs/flow.md explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnflow.propagate import _engine
from attnflow.propagate._engine import Progress
from attnflow.propagate.layers import Array, chain, fit, matrix, positions

# A value and its certificate agree to this share of the value; measured over the tests, they agree to 1e-11.
TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class FlowResult:
    """Maximum flows, and how each is known.

    values: float64 (query, token), in units of capacity, unnormalised.
    certificates: uint8 (query, token). 1: a flow of this value was found and meets an upper bound. 2: a flow of this
    value was found and no way is left to send more, so it equals a minimum cut.
    saturated: bool (query, token), where the value equals min(sum of the query's row in the explained layer, sum of
    the token's column in the layer nearest the input): as much as the two ends allow, whatever lies between.
    fixed: bool (query, token), where the value equals `bound_by_lowest`, which is no more than that: set by the layer
    nearest the input, and by how much the query keeps to itself above it.
    tolerance: the largest difference between a value and its certificate, as a share of the value.
    """

    values: Array
    certificates: NDArray[np.uint8]
    saturated: NDArray[np.bool_]
    fixed: NDArray[np.bool_]
    tolerance: float = TOLERANCE

    def checks(self) -> dict[str, Any]:
        """The facts that belong into a recipe: shares of pairs between 0 and 1, and the tolerance.

        fixed_by_layer_0: that of pairs which are `fixed`. saturated_by_query, fixed_by_layer_0_by_query: the shares of
        such tokens for each query, in the order of the rows.
        """

        def share(pairs: NDArray[np.bool_]) -> float:
            return float(pairs.mean()) if pairs.size else 0.0

        return {
            "known_by_bound": share(self.certificates == 1),
            "known_by_cut": share(self.certificates == 2),
            "tolerance": self.tolerance,
            "saturated": share(self.saturated),
            "saturated_by_query": [share(row) for row in self.saturated],
            "fixed_by_layer_0": share(self.fixed),
            "fixed_by_layer_0_by_query": [share(row) for row in self.fixed],
        }


class Bounds(NamedTuple):
    """What each flow lies between, both float64 (query, token): lower is the value of a flow that was found."""

    lower: Array
    upper: Array


def flow(
    top: Any,
    below: Sequence[Any],
    *,
    queries: Sequence[int] | None = None,
    sinks: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> FlowResult:
    """The maximum flow from each query to each input token, every pair an independent problem.

    The edges are capacities; a query is the source, an input token the sink, and every node between passes on as
    much as it receives (Abnar & Zuidema 2020, section 3; like the paper, and unlike its code, not normalised).
    Without layers below, flow is the edge itself.

    top: (query, key) rows of the explained layer, tensor or array. below: the transitions (query, key) of the layers
    under it, layer 0 (nearest the input) first. Any shapes that chain, any rows, sums and zeros. Tensors on a GPU
    are copied to the CPU, where the work is done, in float64 and on as many threads as numba is set to use
    (`numba.set_num_threads`); the values do not depend on how many.
    queries: the positions of the rows, for what they keep to themselves (`bound_by_lowest`).
    sinks: the positions of the input tokens wanted, all if absent; the columns of the answer follow them.
    progress: called now and then with (pairs done, pairs in all).

    Several queries as one source, or several tokens as one sink, are their rows, or columns, added up: edges from a
    common end to the same node are one edge.

    Raises ValueError for capacities that are NaN, infinite, negative or so large that their sums overflow, for
    arrays that are not matrices, layers that do not chain and sinks out of range; MemoryError, before any work, for
    more than fits into memory.

    >>> flow([[0.6, 0.4]], [[[0.7, 0.3], [0.2, 0.8]]]).values
    array([[0.8, 0.7]])
    """
    return flow_of_layers([top], below, queries=queries, sinks=sinks, progress=progress)[0]


def flow_of_layers(
    tops: Sequence[Any],
    below: Sequence[Any],
    *,
    queries: Sequence[int] | None = None,
    sinks: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> list[FlowResult]:
    """The flow of several layers in turn, the topmost last: what they have in common is computed once.

    tops: the rows (query, key) of consecutive explained layers; the last lies over all of `below`, the one before
    over all but the last of it, and so on, at least one over none. queries: the positions of the rows, for what they
    keep to themselves (`bound_by_lowest`). The rest is as for `flow`.
    """
    rows, layers = _layers(tops, below, sinks)
    results = list[FlowResult]()
    if len(rows) > len(layers):
        (direct, *rows), shape = rows, rows[0].shape
        nothing_between = np.zeros(shape, np.bool_)
        results.append(FlowResult(direct, np.ones(shape, np.uint8), nothing_between, nothing_between))
    if rows:
        solutions = _engine.solve(rows, layers, "EXACT", progress)
        for depth, (top, solved) in enumerate(zip(rows, solutions, strict=True), len(layers) - len(rows) + 1):
            through = layers[:depth]
            least = solved.values / (1 - TOLERANCE)
            saturated = least >= _ends(top, through)
            fixed = least >= bound_by_lowest(top, through, queries)
            results.append(FlowResult(solved.values, solved.known, saturated, fixed))
    return results


def bound_by_lowest(top: Array, below: Sequence[Array], queries: Sequence[int] | None) -> Array:
    """An upper bound of each flow (query, token) in O(1) a pair, which the layers between cannot change.

    It is min(row sum of the query, column sum of the token in layer 0, A_0[q, t] + the sum over the layers above of
    what q gives to others there), where q is the query's position, and 0 the layer nearest the input. The third is a
    cut: the query's own copies on every level lie on one side, all other nodes on the other. Rows whose positions are
    not known, or are no node of some level, have the two ends alone.

    >>> low, middle, top = np.full((2, 2), 0.5), np.array([[0.9, 0.1], [0.5, 0.5]]), np.array([[0.8, 0.2]])
    >>> bound_by_lowest(top, [low, middle], [0]).round(2)
    array([[0.8, 0.8]])
    """
    bound = _ends(top, below)
    nodes = min(len(layer) for layer in below)
    for row, query in enumerate(queries or ()):
        if query < nodes:
            rows = (top[row], *(layer[query] for layer in below[1:]))
            given = sum(np.delete(one, query).sum() for one in rows)
            np.minimum(bound[row], below[0][query] + given, out=bound[row])
    return bound


def _ends(top: Array, below: Sequence[Array]) -> Array:
    """The smaller of what a query's row and a token's column hold, (query, token)."""
    return np.minimum(top.sum(axis=1)[:, None], below[0].sum(axis=0)[None, :])


def flow_bounds(
    top: Any,
    below: Sequence[Any],
    *,
    sinks: Sequence[int] | None = None,
    progress: Progress | None = None,
    found: bool = True,
) -> Bounds:
    """What each flow lies between, for far more tokens than `flow` can take: nothing is searched.

    The upper bound is that of docs/flow.md, met by nearly all pairs of deep real attention; the lower one is a flow
    filled in bulk. found: whether to look for such flows; without, lower is 0, and all that is done is O(n) a pair.
    The rest is as for `flow`.

    >>> flow_bounds([[0.6, 0.4]], [[[0.7, 0.3], [0.2, 0.8]]])
    Bounds(lower=array([[0.8, 0.7]]), upper=array([[0.8, 0.7]]))
    """
    (rows,), layers = _layers([top], below, sinks)
    if not layers:
        return Bounds(rows, rows.copy())
    solved = _engine.solve([rows], layers, "FILL" if found else "BOUND", progress)[0]
    return Bounds(solved.values if found else np.zeros_like(solved.bounds), solved.bounds)


def _layers(tops: Sequence[Any], below: Sequence[Any], sinks: Sequence[int] | None) -> tuple[list[Array], list[Array]]:
    """The explained rows and the layers below them, checked; of the tokens, those wanted alone are left."""
    *layers, highest = chain(tops[-1], below)
    first = len(layers) - len(tops) + 1
    rows = [matrix(top, number, number) for number, top in enumerate(tops[:-1], first)] + [highest]
    for number, top in enumerate(rows[:-1], first):
        if number > 0:
            fit(layers[number - 1], top, number)
    tokens = positions(sinks, (layers or rows)[0].shape[1])
    if first == 0:
        rows[0] = rows[0][:, tokens]
    if layers and sinks is not None:
        layers[0] = layers[0][:, tokens]
    return rows, layers
