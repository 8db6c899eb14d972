"""Attention flow: how much could reach each input token, as a maximum flow (Abnar & Zuidema 2020, section 3).

What flow means, the checks of its input and the threads are here; the algorithm is in `_maxflow`, arrays in, arrays
out, and docs/flow.md explains it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attnflow.propagate._maxflow import Graph

Array: TypeAlias = NDArray[np.float64]
Progress: TypeAlias = Callable[[int, int], object]
Result = TypeVar("Result")

# A value and its certificate agree to this share of the value; measured over the tests, they agree to 1e-11.
TOLERANCE = 1e-9

# The least and the most that a thread solves before it looks up, in nodes of the pairs' graphs: about 1 ms, to be worth
# a thread, and 30 ms, so that Ctrl-C is heard and progress seen.
_NODES_PER_TASK = 10_000, 400_000
_ROWS_PER_TASK = 32
# Below this many edges x pairs / nodes all is done within milliseconds, and a sample is not worth its time.
_WORTH_A_SAMPLE = 200_000


@dataclass(frozen=True, eq=False)
class FlowResult:
    """Maximum flows, and how each is known.

    values: float64 (query, token), in units of capacity, unnormalised.
    certificates: uint8 (query, token). 1: a flow of this value was found and meets an upper bound. 2: a flow of this
    value was found and no way is left to send more, so it equals a minimum cut.
    saturated: bool (query, token), where the value equals min(sum of the query's row in the explained layer, sum of
    the token's column in the layer nearest the input): as much as the two ends allow, whatever lies between.
    tolerance: the largest difference between a value and its certificate, as a share of the value.
    """

    values: Array
    certificates: NDArray[np.uint8]
    saturated: NDArray[np.bool_]
    tolerance: float = TOLERANCE

    def checks(self) -> dict[str, float]:
        """The facts that belong into a recipe: shares of pairs between 0 and 1, and the tolerance."""

        def share(pairs: NDArray[np.bool_]) -> float:
            return float(pairs.mean()) if pairs.size else 0.0

        return {
            "known_by_bound": share(self.certificates == 1),
            "known_by_cut": share(self.certificates == 2),
            "tolerance": self.tolerance,
            "saturated": share(self.saturated),
        }


class CutEdge(NamedTuple):
    """An edge of a cut: what `key` of a layer hands to `query` of the same layer, counted from 0 at the input."""

    layer: int
    query: int
    key: int
    capacity: float


def flow(
    top: Any, below: Sequence[Any], *, sinks: Sequence[int] | None = None, progress: Progress | None = None
) -> FlowResult:
    """The maximum flow from each query to each input token, every pair an independent problem.

    The edges are capacities; a query is the source, an input token the sink, and every node between passes on as
    much as it receives (Abnar & Zuidema 2020, section 3; like the paper, and unlike its code, not normalised).
    Without layers below, flow is the edge itself.

    top: (query, key) rows of the explained layer, tensor or array. below: the transitions (query, key) of the layers
    under it, layer 0 (nearest the input) first. Any shapes that chain, any rows, sums and zeros. Tensors on a GPU
    are copied to the CPU, where the work is done, in float64 and on as many threads as numba is set to use
    (`numba.set_num_threads`); the values do not depend on how many.
    sinks: the positions of the input tokens wanted, all if absent; the columns of the answer follow them.
    progress: called now and then with (pairs done, pairs in all).

    Raises ValueError for capacities that are NaN, infinite, negative or so large that their sums overflow, for
    arrays that are not matrices, layers that do not chain and sinks out of range.

    >>> flow([[0.6, 0.4]], [[[0.7, 0.3], [0.2, 0.8]]]).values
    array([[0.8, 0.7]])
    """
    layers = _chain(top, below)
    tokens = _positions(sinks, layers[0].shape[1])
    first, last = layers[0][:, tokens], layers[-1]
    if len(layers) == 1:
        shape = first.shape
        return FlowResult(first, np.ones(shape, np.uint8), np.zeros(shape, np.bool_))
    values, certificates = _solve(last, layers[1:-1], first, progress)
    ends = np.minimum(last.sum(axis=1)[:, None], first.sum(axis=0)[None, :])
    return FlowResult(values, certificates, values >= ends * (1 - TOLERANCE))


def min_cut(top: Any, below: Sequence[Any], query: int, token: int) -> list[CutEdge]:
    """The edges of a minimum cut between a query and an input token: where the information is squeezed.

    Together they carry exactly the flow of the pair, and without them nothing reaches the token. Of all minimum cuts
    it is the one nearest the token; edges of capacity 0 are left out. The edges come from the top layer down.

    Arguments and errors as for `flow`; query is a row of top, token a column of the layer nearest the input.
    """
    layers = _chain(top, below)
    (row,), (column,) = _positions([query], len(layers[-1]), "query"), _positions([token], layers[0].shape[1])
    if len(layers) == 1:
        sides = [np.array([True]), np.array([False])]
        edges = [layers[0][[row]][:, [column]]]
    else:
        edges = [layers[0][:, [column]], *layers[1:-1], layers[-1][[row]]]
        sides = _sides(edges)
    cut = []
    for number in reversed(range(len(edges))):
        crossing = ~sides[number + 1][:, None] & sides[number][None, :] & (edges[number] > 0)
        for i, j in np.argwhere(crossing).tolist():
            source = row if number == len(edges) - 1 else i
            target = column if number == 0 else j
            cut.append(CutEdge(number, int(source), int(target), float(edges[number][i, j])))
    return cut


def _chain(top: Any, below: Sequence[Any]) -> list[Array]:
    """All layers as float64 matrices, the one nearest the input first, checked to fit together."""
    layers = [_matrix(array, number, len(below)) for number, array in enumerate([*below, top])]
    for number in range(1, len(layers)):
        above, under = layers[number].shape[1], layers[number - 1].shape[0]
        if above != under:
            raise ValueError(
                f"layer {number} of shape {layers[number].shape} attends to {above} keys, but layer {number - 1} of "
                f"shape {layers[number - 1].shape} below it has {under} queries; give the layers in order, the one "
                "nearest the input first"
            )
    return layers


def _matrix(array: Any, number: int, top: int) -> Array:
    """A layer as a float64 matrix of capacities, checked."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    matrix: Array = np.asarray(array, dtype=np.float64)
    name = f"layer {number}" + (", the explained one," if number == top else "")
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(
            f"{name} has shape {matrix.shape}; expected a matrix (query, key) with at least one of each: fuse the "
            "heads and choose one example first"
        )
    # The sum of a whole layer must stay finite, for bounds are such sums.
    wrong = ~((matrix >= 0) & (matrix <= np.finfo(np.float64).max / (4 * matrix.size)))
    if wrong.any():
        query, key = (int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(
            f"capacities must be finite numbers that are not negative, nor so large that their sums overflow; "
            f"{name} query {query}, key {key} is {matrix[query, key]}"
        )
    return matrix


def _positions(wanted: Sequence[int] | None, count: int, what: str = "input token") -> NDArray[np.intp]:
    """Positions, counted from the end where negative; all if none are named."""
    if wanted is None:
        return np.arange(count)
    positions = np.asarray(wanted, dtype=np.intp).reshape(-1)
    wrong = positions[(positions < -count) | (positions >= count)]
    if wrong.size:
        raise ValueError(f"{what} {wrong[0]} is out of range: there are {count}, 0 to {count - 1}")
    return positions % count


def _solve(
    top: Array, between: list[Array], bottom: Array, progress: Progress | None
) -> tuple[Array, NDArray[np.uint8]]:
    """Values and certificates (query, token); top (query, node), bottom (node, token), `between` what joins them."""
    import numba

    from attnflow.propagate import _maxflow as kernels

    threads = numba.get_num_threads()
    pairs = top.shape[0] * bottom.shape[1]
    values, known = np.empty(pairs), np.empty(pairs, np.uint8)
    with _threads(threads) as pool:
        graph = _graph(top, between, bottom, pool)
        layers, nodes, _ = graph.capacity.shape
        spare: SimpleQueue[Any] = SimpleQueue()
        for _ in range(threads):
            spare.put(kernels.new_work(layers, nodes))
        middle, pushed, pulled = _half_ways(graph, spare, pool)
        least, most = (limit // (nodes * (layers + 1)) + 1 for limit in _NODES_PER_TASK)
        size = max(least, min(most, -(-pairs // (4 * threads))))

        def solve(first: int) -> int:
            work, done = spare.get(), slice(first, first + size)
            kernels.solve_pairs(first, middle, pushed, pulled, graph, work, values[done], known[done])
            spare.put(work)
            return len(values[done])

        finished = 0
        for done in _each(solve, range(0, pairs, size), pool):
            finished += done
            if progress is not None:
                progress(finished, pairs)
    shape = top.shape[0], bottom.shape[1]
    return values.reshape(shape), known.reshape(shape)


def _sides(edges: list[Array]) -> list[NDArray[np.bool_]]:
    """Which nodes lie on the token's side of the minimum cut: one array for the token, every level and the query."""
    from attnflow.propagate import _maxflow as kernels

    bottom, *between, top = edges
    with _threads(1) as pool:
        graph = _graph(top, between, bottom, pool)
    layers, nodes, _ = graph.capacity.shape
    work = kernels.new_work(layers, nodes)
    kernels.solve_pair(0, 0, graph, work, True)
    levels = [work.distance[level, : len(edges[level])] >= 0 for level in range(layers + 1)]
    return [np.array([True]), *levels, np.array([False])]


def _graph(top: Array, between: list[Array], bottom: Array, pool: ThreadPoolExecutor) -> Graph:
    """All that is common to the pairs, in the layout of the kernels.

    upper (level, query, node), from the top down: U_m[s, j] = sum_i min(U_(m+1)[s, i], A[i, j]).
    lower (level, token, node), from the bottom up: D_(m+1)[t, i] = sum_j min(D_m[t, j], A[i, j]).
    """
    from attnflow.propagate import _maxflow as kernels

    layers = len(between)
    nodes = max(top.shape[1], bottom.shape[0], *(width for layer in between for width in layer.shape))
    capacity = np.zeros((layers, nodes, nodes))
    for number, layer in enumerate(between):
        capacity[number, : layer.shape[0], : layer.shape[1]] = layer
    usable = np.zeros((layers, nodes, (nodes + 63) // 64), np.uint64)
    kernels.usable_edges(capacity, usable)
    straight = np.ascontiguousarray(capacity.diagonal(axis1=1, axis2=2))
    upper = np.zeros((layers + 1, top.shape[0], nodes))
    upper[layers, :, : top.shape[1]] = top
    for m in reversed(range(layers)):
        _min_product(upper[m + 1], capacity[m], upper[m], pool)
    lower = np.zeros((layers + 1, bottom.shape[1], nodes))
    lower[0, :, : bottom.shape[0]] = bottom.T
    for m in range(layers):
        _min_product(lower[m], np.ascontiguousarray(capacity[m].T), lower[m + 1], pool)
    return kernels.Graph(capacity, straight, usable, upper, lower)


def _half_ways(graph: Graph, spare: SimpleQueue[Any], pool: ThreadPoolExecutor) -> tuple[int, Array, Array]:
    """The layer at which flows from all queries and from all tokens meet best, and these flows (query or token, node).

    In deep stacks one flow per query and one per token prove nearly every pair: they are worth it if enough pairs of a
    sample meet. The layer is -1 if not. Values do not depend on it, for what meets is the bound that is met anyway.
    """
    from attnflow.propagate import _maxflow as kernels

    (levels, queries, nodes), tokens = graph.upper.shape, graph.lower.shape[1]
    layers, none = levels - 1, np.empty((0, nodes))
    if layers < 3 or queries * tokens * nodes * layers < _WORTH_A_SAMPLE:
        return -1, none, none

    def ways(which: NDArray[np.intp], pulling: bool, middle: int) -> Array:
        result = np.empty((len(which), nodes))

        def solve(first: int) -> None:
            work, part = spare.get(), slice(first, first + 16)
            kernels.half_ways(which[part], pulling, middle, graph, work, result[part])
            spare.put(work)

        deque(_each(solve, range(0, len(which), 16), pool), maxlen=0)
        return result

    some = np.unique(np.linspace(0, queries - 1, 3).astype(np.intp))
    others = np.unique(np.linspace(0, tokens - 1, 5).astype(np.intp))
    totals, shares = np.empty(levels), dict[int, float]()
    bounds = [[kernels.upper_bound(query, token, graph, totals) for token in others] for query in some]
    work = spare.get()
    spare.put(work)  # `meets` below runs while no task does
    for middle in range(max(0, layers // 2 - 2), min(layers, layers // 2 + 2)):
        pushed, pulled = ways(some, False, middle), ways(others, True, middle)
        met = [
            kernels.meets(bounds[q][t], middle, pushed[q], pulled[t], graph, work)
            for q, t in np.ndindex(len(some), len(others))
        ]
        shares[middle] = sum(met) / len(met)
    best = max(shares, key=lambda middle: shares[middle])
    # A half way costs 0.6 of a pair, an attempt to meet 0.06 (n = 512, L = 12).
    if shares[best] < 0.6 * (1 / queries + 1 / tokens) + 0.06:
        return -1, none, none
    return best, ways(np.arange(queries), False, best), ways(np.arange(tokens), True, best)


def _min_product(x: Array, y: Array, out: Array, pool: ThreadPoolExecutor) -> None:
    """The product of two matrices with min in place of times, a few rows a task."""
    from attnflow.propagate import _maxflow as kernels

    def solve(first: int) -> None:
        rows = slice(first, first + _ROWS_PER_TASK)
        kernels.min_product(x[rows], y, out[rows])

    deque(_each(solve, range(0, x.shape[0], _ROWS_PER_TASK), pool), maxlen=0)


def _each(call: Callable[[int], Result], tasks: Sequence[int], pool: ThreadPoolExecutor) -> Iterator[Result]:
    """The results of all tasks as they come. A single one is done in place: it takes less time than a thread."""
    if len(tasks) == 1:
        yield call(tasks[0])
        return
    for future in as_completed([pool.submit(call, task) for task in tasks]):
        yield future.result()


@contextmanager
def _threads(count: int) -> Generator[ThreadPoolExecutor]:
    """A pool of threads; an error or Ctrl-C drops the tasks that wait, so that only the running ones are awaited."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
