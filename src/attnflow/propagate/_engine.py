"""Many pairs at once: the arrays that the kernels share, threads, memory, and the wait for the compiler.

Everything here is about how the work is done; the values are those of `_maxflow`, whatever the number of threads.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from attnflow.memory import check_memory
from attnflow.propagate.layers import Array

if TYPE_CHECKING:
    from attnflow.propagate._maxflow import Graph

Progress: TypeAlias = Callable[[int, int], object]
Result = TypeVar("Result")

# How far to go with a pair: its upper bound; a flow in bulk; the maximum flow; a search to the end, for its cut.
BOUND, FILL, EXACT, CUT = range(4)

# The least and the most that a thread solves before it looks up, in nodes of the pairs' graphs: about 1 ms, to be worth
# a thread, and 30 ms, so that Ctrl-C is heard and progress seen.
_NODES_PER_TASK = 10_000, 400_000
_ROWS_PER_TASK = 32
# Up to so many queries, and from so many edges x tokens (2 ms), what each node can send is left out where a sample of
# tokens says that it binds nothing.
_FEW_QUERIES, _WORTH_LEAVING_OUT, _SAMPLED_TOKENS = 4, 20_000_000, 8
# Below this many edges x pairs / nodes all is done within milliseconds, and a sample is not worth its time.
_WORTH_A_SAMPLE = 200_000
# Loading the compiled kernels takes half a second; what takes longer than this is compiling them.
_COMPILING_SECONDS = 2.0


class Solved(NamedTuple):
    """For each pair (query, token): a value, an upper bound, and how the value is known (see `FlowResult`)."""

    values: Array
    bounds: Array
    known: NDArray[np.uint8]


def solve(tops: Sequence[Array], below: Sequence[Array], effort: int, progress: Progress | None) -> list[Solved]:
    """Solve all pairs of several stacks that share their lowest layers.

    tops: for each stack the rows (query, node) of its explained layer, or None to leave it out; number k lies over the
    lowest k + 1 of the layers `below`, of which the first holds the tokens wanted as columns (node, token).
    effort: of `_maxflow`. What is shared is computed once: the edges, and what each node can send to each token.
    """
    import numba

    kernels = load_kernels()
    count, tokens = numba.get_num_threads(), below[0].shape[1]
    refuse_too_much([top.shape[0] for top in tops], below, count if effort else 0)
    total, results = sum(top.shape[0] for top in tops) * tokens, list[Solved]()
    with _threads(count) as pool:
        stack = _stack(below, max(top.shape[1] for top in tops), pool)
        if effort == EXACT and len(tops) == 1 and _ends_bind(tops[0], stack, pool):
            stack.lower[1:] = stack.lower[0].sum(axis=1)[:, None]
        else:
            _fill_lower(stack, pool)
        for top, depth in zip(tops, range(len(below) - len(tops) + 1, len(below) + 1), strict=True):
            graph = _with_upper(top, depth - 1, stack, pool)
            pairs, done = top.shape[0] * tokens, sum(result.values.size for result in results)
            solved = Solved(np.empty(pairs), np.empty(pairs), np.empty(pairs, np.uint8))
            for finished in _solve_pairs(graph, effort, solved, count, pool, kernels):
                if progress is not None:
                    progress(done + finished, total)
            shape = top.shape[0], tokens
            results.append(Solved(*(cast(Any, array.reshape(shape)) for array in solved)))
    return results


def single(top: Array, below: Sequence[Array]) -> tuple[Graph, Any]:
    """The graph of one pair and memory to solve it: top (1, node), the first layer below (node, 1)."""
    kernels = load_kernels()
    refuse_too_much([1], below, 1)
    with _threads(1) as pool:
        stack = _stack(below, top.shape[1], pool)
        _fill_lower(stack, pool)
        graph = _with_upper(top, len(below) - 1, stack, pool)
    return graph, kernels.new_work(*graph.capacity.shape[:2])


def refuse_too_much(queries: Sequence[int], below: Sequence[Array], threads: int) -> None:
    """Refuse work that cannot fit, before it starts; queries: how many of each stack, the lowest stack first.

    Raises MemoryError with the estimate and what to do.
    """
    nodes, tokens = max(width for layer in below for width in layer.shape[:2]), below[0].shape[1]
    layers = len(below) - 1
    edges, reach = 8 * layers * nodes * nodes, 8 * (layers + 1) * nodes
    bits = edges // 64
    needed = edges + bits + threads * (edges + 4 * bits) + reach * (tokens + max(queries)) + 8 * nodes * nodes
    needed += 17 * tokens * sum(queries)
    check_memory(
        needed,
        f"flow through {layers + 2} layers of up to {nodes:,} nodes, from {max(queries):,} queries to {tokens:,} "
        "tokens, beside its input,",
        "explain fewer queries or layers at a time, or use fewer threads (numba.set_num_threads(1))",
    )


@cache
def load_kernels() -> ModuleType:
    """The kernels, compiled; says so through `logging` where that takes long, as at the first call ever."""
    message = "attnflow is compiling its flow kernels: up to half a minute, the first time only"
    note = threading.Timer(_COMPILING_SECONDS, logging.getLogger("attnflow").warning, [message])
    note.daemon = True
    note.start()
    try:
        from attnflow.propagate import _maxflow as kernels

        one, none = np.ones((1, 1)), np.empty((0, 1))
        with _threads(1) as pool:
            graph = _with_upper(one, 1, _stack([one, one], 1, pool), pool)
        work, ends = kernels.new_work(1, 1), np.ones((1, 1))
        solved = np.empty(1), np.empty(1), np.empty(1, np.uint8)
        kernels.solve_pairs(0, EXACT, -1, none, none, graph, work, *solved)
        kernels.half_ways(np.zeros(1, np.intp), False, 0, graph, work, ends)
    finally:
        note.cancel()
    return kernels


def _stack(below: Sequence[Array], width: int, pool: ThreadPoolExecutor) -> Graph:
    """All that the stacks share, in the layout of the kernels; `upper` is left empty, and `lower` above level 0."""
    from attnflow.propagate import _maxflow as kernels

    bottom, *between = below
    layers = len(between)
    nodes = max(width, bottom.shape[0], *(size for layer in between for size in layer.shape))
    capacity = np.zeros((layers, nodes, nodes))
    for number, layer in enumerate(between):
        capacity[number, : layer.shape[0], : layer.shape[1]] = layer
    usable = np.zeros((layers, nodes, (nodes + 63) // 64), np.uint64)
    kernels.usable_edges(capacity, usable)
    straight = np.ascontiguousarray(capacity.diagonal(axis1=1, axis2=2))
    lower = np.zeros((layers + 1, bottom.shape[1], nodes))
    lower[0, :, : bottom.shape[0]] = bottom.T
    return kernels.Graph(capacity, straight, usable, np.empty((0, 0, nodes)), lower)


def _fill_lower(graph: Graph, pool: ThreadPoolExecutor) -> None:
    """Fill in `lower` (level, token, node) from the bottom up: D_(m+1)[t, i] = sum_j min(D_m[t, j], A[i, j])."""
    under = np.ascontiguousarray(graph.lower[0].T)
    for m, layer in enumerate(graph.capacity):
        reached = np.empty_like(under)
        _min_product(layer, under, reached, pool)
        graph.lower[m + 1], under = reached.T, reached


def _ends_bind(top: Array, stack: Graph, pool: ThreadPoolExecutor) -> bool:
    """Whether, in a sample of the tokens, no level binds the flow more than the query's row and the token's column do.

    Then `lower` above level 0 is worth less than it costs, for few queries: the search is as fast with the token's
    column alone as what any node can send, and proves what the bound does not.
    """
    from attnflow.propagate import _maxflow as kernels

    if len(top) > _FEW_QUERIES or stack.lower.shape[1] * stack.capacity.size < _WORTH_LEAVING_OUT:
        return False
    tokens = np.unique(np.linspace(0, stack.lower.shape[1] - 1, _SAMPLED_TOKENS).astype(np.intp))
    graph = _with_upper(top, len(stack.capacity), stack._replace(lower=stack.lower[:, tokens]), pool)
    _fill_lower(graph, pool)
    totals = np.empty(len(graph.lower))
    for query, token in np.ndindex(len(top), len(tokens)):
        bound = kernels.upper_bound(query, token, graph, totals)
        if bound < min(totals[0], top[query].sum()) * (1.0 - kernels.MET):
            return False
    return True


def _with_upper(top: Array, layers: int, stack: Graph, pool: ThreadPoolExecutor) -> Graph:
    """The graph of the lowest `layers` layers between top and bottom, under the rows `top` (query, node).

    upper (level, query, node), from the top down: U_m[s, j] = sum_i min(U_(m+1)[s, i], A[i, j]).
    """
    upper = np.zeros((layers + 1, top.shape[0], stack.capacity.shape[2]))
    upper[layers, :, : top.shape[1]] = top
    for m in reversed(range(layers)):
        _min_product(upper[m + 1], stack.capacity[m], upper[m], pool)
    return type(stack)(
        stack.capacity[:layers], stack.straight[:layers], stack.usable[:layers], upper, stack.lower[: layers + 1]
    )


def _solve_pairs(
    graph: Graph, effort: int, solved: Solved, threads: int, pool: ThreadPoolExecutor, kernels: ModuleType
) -> Iterator[int]:
    """Fill in `solved` (pair,), some pairs a task; yields how many are done."""
    layers, nodes, _ = graph.capacity.shape
    spare, pairs = SimpleQueue[Any](), solved.values.size
    for _ in range(threads):
        spare.put(kernels.new_work(layers if effort else 0, nodes))
    middle, pushed, pulled = _half_ways(graph, spare, pool) if effort else (-1, *(np.empty((0, nodes)),) * 2)
    least, most = (limit // (nodes * (layers + 1)) + 1 for limit in _NODES_PER_TASK)
    size = max(least, min(most, -(-pairs // (4 * threads))))

    def task(first: int) -> int:
        work, part = spare.get(), [array[first : first + size] for array in solved]
        kernels.solve_pairs(first, effort, middle, pushed, pulled, graph, work, *part)
        spare.put(work)
        return part[0].size

    finished = 0
    for done in _each(task, range(0, pairs, size), pool):
        finished += done
        yield finished


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
