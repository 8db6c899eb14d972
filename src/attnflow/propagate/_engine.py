"""Many pairs at once: the arrays that the kernels share, threads, memory, and the wait for the compiler.

Everything here is about how the work is done; the values are those of `_maxflow`, whatever the number of threads.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from attnflow.memory import check_memory
from attnflow.propagate.layers import Array

if TYPE_CHECKING:
    from attnflow.propagate._maxflow import Graph

Progress: TypeAlias = Callable[[int, int], object]
Result = TypeVar("Result")

# How far to go with a pair: the names of constants of `_maxflow`, which this file loads only where there is work.
Effort: TypeAlias = Literal["BOUND", "FILL", "EXACT", "CUT"]
# The kernels of each are compiled when the first work needs them.
Part: TypeAlias = Literal["pairs", "half ways", "routes"]

# The least and the most that a thread solves before it looks up, in nodes of the pairs' graphs: about 1 ms, to be worth
# a thread, and 30 ms, so that Ctrl-C is heard and progress seen.
_NODES_PER_TASK = 10_000, 400_000
_ROWS_PER_TASK = 32
# How many queries are solved at a time, as a share of all of them, and how many at least.
_SHARE_AT_ONCE, _AT_ONCE = 0.25, 64
# Up to so many queries, and from so many edges x tokens (2 ms), what each node can send is left out where a sample of
# tokens says that it binds nothing.
_FEW_QUERIES, _WORTH_LEAVING_OUT, _SAMPLED_TOKENS = 4, 20_000_000, 8
# How much of the capacities the flow of a pair may touch, for the estimate of memory; 0.07 was seen on real attention.
_TOUCHED = 0.25
# Below this many edges x pairs / nodes all is done within milliseconds, and a sample is not worth its time.
_WORTH_A_SAMPLE = 200_000


class Solved(NamedTuple):
    """For each pair (query, token): a value, an upper bound, and how the value is known (see `FlowResult`)."""

    values: Array
    bounds: Array
    known: NDArray[np.uint8]


def solve(tops: Sequence[Array], below: Sequence[Array], effort: Effort, progress: Progress | None) -> list[Solved]:
    """Solve all pairs of several stacks that share their lowest layers.

    tops: for each stack the rows (query, node) of its explained layer, or None to leave it out; number k lies over the
    lowest k + 1 of the layers `below`, of which the first holds the tokens wanted as columns (node, token).
    effort: a name in `_maxflow`. What is shared is computed once: the edges, and what each node can send to each token.
    """
    kernels = load_kernels()
    count, tokens = _thread_count(), below[0].shape[1]
    refuse_too_much([top.shape[0] for top in tops], below, count if effort != "BOUND" else 0)
    stop = np.zeros(1, np.uint8)
    done, total, results = 0, sum(top.shape[0] for top in tops) * tokens, list[Solved]()
    with _threads(count, stop) as pool:
        stack = _stack(below, max(top.shape[1] for top in tops))
        if effort != "EXACT" or len(tops) > 1 or not _ends_bind(tops[0], stack, pool):
            stack = _with_lower(stack, pool)
        for top, depth in zip(tops, range(len(below) - len(tops) + 1, len(below) + 1), strict=True):
            pairs = top.shape[0] * tokens
            solved = Solved(np.empty(pairs), np.empty(pairs), np.empty(pairs, np.uint8))
            for more in _solve_pairs(
                top, _lowest(depth - 1, stack), getattr(kernels, effort), solved, count, pool, stop
            ):
                done += more
                if progress is not None:
                    progress(done, total)
            shape = top.shape[0], tokens
            results.append(Solved(*(cast(Any, array.reshape(shape)) for array in solved)))
    return results


def single(top: Array, below: Sequence[Array]) -> tuple[Graph, Any]:
    """The graph of one pair and memory to solve it: top (1, node), the first layer below (node, 1)."""
    kernels = load_kernels()
    refuse_too_much([1], below, 1)
    with _threads(1) as pool:
        graph = _with_upper(top, _with_lower(_stack(below, top.shape[1]), pool), pool)
    return graph, kernels.new_work(*graph.capacity.shape[:2])


def solve_single(effort: Effort, graph: Graph, work: Any) -> float:
    """The flow of the pair of `single`; work then holds how it runs, or for "CUT" the sides of a minimum cut."""
    kernels, none = load_kernels(), np.empty((0, 1))
    solved, stop = Solved(np.empty(1), np.empty(1), np.empty(1, np.uint8)), np.zeros(1, np.uint8)
    kernels.solve_pairs(0, getattr(kernels, effort), -1, none, none, graph, work, *solved, stop)
    return float(solved.values[0])


def refuse_too_much(queries: Sequence[int], below: Sequence[Array], threads: int) -> None:
    """Refuse work that cannot fit, before it starts; queries: how many of each stack, the lowest stack first.

    Raises MemoryError with the estimate and what to do.
    """
    nodes, tokens = max(width for layer in below for width in layer.shape[:2]), below[0].shape[1]
    layers, most = len(below) - 1, max(queries)
    edges, reach = 8 * layers * nodes * nodes, 8 * (layers + 1) * nodes
    bits = edges // 64
    # The capacities and their bits; for each thread what a flow touches, 4 bits an edge for where it is, and 4 more.
    needed = edges + bits + threads * (int(_TOUCHED * edges) + 4 * bits + 4 * bits)
    needed += reach * (tokens + min(most, _at_once(most))) + 8 * nodes * nodes
    needed += 17 * tokens * sum(queries)
    check_memory(
        needed,
        f"flow through {layers + 2} layers of up to {nodes:,} nodes, from {max(queries):,} queries to {tokens:,} "
        "tokens, beside its input,",
        "explain fewer queries or layers at a time, or use fewer threads (numba.set_num_threads(1))",
    )


def _thread_count() -> int:
    """How many threads numba would use. To answer it starts them, which changes how many torch uses: that is undone."""
    import numba

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    count = numba.get_num_threads()
    if torch:
        torch.set_num_threads(before)
    return count


@cache
def load_kernels(part: Part = "pairs") -> ModuleType:
    """The kernels, with those of a part compiled; says so through `logging` where numba does not find them on disk."""
    from numba.core import event

    class Note(event.Listener):
        """Says so once, when the first of them is begun."""

        said = False

        def on_start(self, event: Any) -> None:
            if not self.said:
                message = "attnflow is compiling its kernels for flow (%s): some seconds, the first time only"
                logging.getLogger("attnflow").warning(message, part)
            self.said = True

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Note()):
        from attnflow.propagate import _maxflow as kernels

        one, none, amounts = np.ones((1, 1)), np.empty((0, 1)), np.ones(1)
        with _threads(1) as pool:
            graph = _with_upper(one, _with_lower(_stack([one, one], 1), pool), pool)
        work, place, edge = kernels.new_work(1, 1), np.zeros(1, np.int64), np.zeros((1, 2), int)
        if part == "pairs":
            solved = np.empty(1), np.empty(1), *np.zeros((2, 1), np.uint8)
            kernels.solve_pairs(0, kernels.EXACT, -1, none, none, graph, work, *solved)
        elif part == "half ways":
            kernels.upper_bound(0, 0, graph, np.empty(2))
            kernels.half_ways(np.zeros(1, np.intp), False, 0, graph, work, one)
            kernels.meets(1.0, 0, amounts, amounts, graph, work)
        else:
            kernels.solve_around(1.0, edge, amounts, amounts, amounts, graph, work)
            kernels.widest_routes(place, place, amounts, np.arange(3), 2.0, 0.0, edge, amounts)
    return kernels


def _stack(below: Sequence[Array], width: int) -> Graph:
    """All that the stacks share, in the layout of the kernels: `upper` is empty, and of `lower` there is level 0."""
    from attnflow.propagate import _maxflow as kernels

    bottom, *between = below
    layers = len(between)
    nodes = max(width, bottom.shape[0], *(size for layer in between for size in layer.shape))
    capacity = np.zeros((layers, nodes, nodes))
    for number, layer in enumerate(between):
        capacity[number, : layer.shape[0], : layer.shape[1]] = layer
    usable = np.zeros((layers, nodes, (nodes + 63) // 64), np.uint64)
    kernels.usable_edges(capacity, usable)
    straight = capacity.diagonal(axis1=1, axis2=2).copy()
    lower = np.zeros((1, bottom.shape[1], nodes))
    lower[0, :, : bottom.shape[0]] = bottom.T
    return kernels.Graph(capacity, straight, usable, np.empty((0, 0, nodes)), lower)


def _lowest(layers: int, stack: Graph) -> Graph:
    """The lowest `layers` layers of a stack."""
    return stack._replace(
        capacity=stack.capacity[:layers],
        straight=stack.straight[:layers],
        usable=stack.usable[:layers],
        lower=stack.lower[: layers + 1],
    )


def _with_lower(stack: Graph, pool: ThreadPoolExecutor) -> Graph:
    """The same with all levels of lower (level, token, node).

    From the bottom up: D_(m+1)[t, i] = sum_j min(D_m[t, j], A[i, j]).
    """
    lower = np.empty((len(stack.capacity) + 1, *stack.lower.shape[1:]))
    lower[0] = stack.lower[0]
    under = np.ascontiguousarray(lower[0].T)
    for m, layer in enumerate(stack.capacity):
        reached = np.empty_like(under)
        _min_product(layer, under, reached, pool)
        lower[m + 1], under = reached.T, reached
    return stack._replace(lower=lower)


def _with_upper(top: Array, stack: Graph, pool: ThreadPoolExecutor) -> Graph:
    """The graph under the rows `top` (query, node).

    upper (level, query, node), from the top down: U_m[s, j] = sum_i min(U_(m+1)[s, i], A[i, j]).
    """
    layers = len(stack.capacity)
    upper = np.zeros((layers + 1, top.shape[0], stack.capacity.shape[2]))
    upper[layers, :, : top.shape[1]] = top
    for m in reversed(range(layers)):
        _min_product(upper[m + 1], stack.capacity[m], upper[m], pool)
    return stack._replace(upper=upper)


def _ends_bind(top: Array, stack: Graph, pool: ThreadPoolExecutor) -> bool:
    """Whether the flow to each token of a sample is found, and proved, by what is known without `lower`.

    For few queries that is worth more than `lower` above level 0, which costs as much as the search.
    """
    if len(top) > _FEW_QUERIES or stack.lower.shape[1] * stack.capacity.size < _WORTH_LEAVING_OUT:
        return False
    from attnflow.propagate import _maxflow as kernels

    tokens = np.unique(np.linspace(0, stack.lower.shape[1] - 1, _SAMPLED_TOKENS).astype(np.intp))
    graph = _with_upper(top, stack._replace(lower=stack.lower[:, tokens]), pool)
    solved, stop = Solved(np.empty(1), np.empty(1), np.empty(1, np.uint8)), np.zeros(1, np.uint8)
    work, none = kernels.new_work(*stack.capacity.shape[:2]), np.empty((0, 1))
    for pair in range(len(top) * len(tokens)):
        kernels.solve_pairs(pair, kernels.EXACT, -1, none, none, graph, work, *solved, stop)
        if solved.known[0] != kernels.BY_BOUND:
            return False
    return True


def _works(count: int, layers: int, nodes: int) -> SimpleQueue[Any]:
    """The memory of so many threads, to be taken from and put back."""
    from attnflow.propagate import _maxflow as kernels

    spare = SimpleQueue[Any]()
    for _ in range(count):
        spare.put(kernels.new_work(layers, nodes))
    return spare


def _solve_pairs(
    top: Array,
    stack: Graph,
    effort: int,
    solved: Solved,
    threads: int,
    pool: ThreadPoolExecutor,
    stop: NDArray[np.uint8],
) -> Iterator[int]:
    """Fill in `solved` (pair,), some queries at a time, and of them some pairs a task; yields how many are new."""
    from attnflow.propagate import _maxflow as kernels

    layers, nodes, _ = stack.capacity.shape
    spare, tokens = _works(threads, layers if effort else 0, nodes), stack.lower.shape[1]
    middle, pulled = _meeting(top, stack, spare, pool) if effort else (-1, np.empty((0, nodes)))
    least, most = (limit // (nodes * (layers + 1)) + 1 for limit in _NODES_PER_TASK)

    def solve(rows: Array, block: Sequence[NDArray[Any]]) -> Iterator[int]:
        graph = _with_upper(rows, stack, pool)
        pushed = _half_ways(np.arange(len(rows) if middle >= 0 else 0), False, middle, graph, spare, pool)
        size = max(least, min(most, -(-block[0].size // (4 * threads))))

        def task(first: int) -> int:
            work, part = spare.get(), [array[first : first + size] for array in block]
            kernels.solve_pairs(first, effort, middle, pushed, pulled, graph, work, *part, stop)
            spare.put(work)
            return part[0].size

        return _each(task, range(0, block[0].size, size), pool)

    for row in range(0, len(top), _at_once(len(top))):
        rows = slice(row, row + _at_once(len(top)))
        yield from solve(top[rows], [array[row * tokens : rows.stop * tokens] for array in solved])


def _at_once(queries: int) -> int:
    """How many queries are solved at a time: what they can bring to every node is kept for these only."""
    return max(_AT_ONCE, math.ceil(_SHARE_AT_ONCE * queries))


def _half_ways(
    which: NDArray[np.intp], pulling: bool, middle: int, graph: Graph, spare: SimpleQueue[Any], pool: ThreadPoolExecutor
) -> Array:
    """Flows of these queries pushed down to a layer, or of these tokens pulled up to it (query or token, node)."""
    from attnflow.propagate import _maxflow as kernels

    result = np.empty((len(which), graph.capacity.shape[2]))

    def solve(first: int) -> None:
        work, part = spare.get(), slice(first, first + 16)
        kernels.half_ways(which[part], pulling, middle, graph, work, result[part])
        spare.put(work)

    deque(_each(solve, range(0, len(which), 16), pool), maxlen=0)
    return result


def _meeting(top: Array, stack: Graph, spare: SimpleQueue[Any], pool: ThreadPoolExecutor) -> tuple[int, Array]:
    """The layer at which flows from all queries and from all tokens meet best, and those of the tokens (token, node).

    In deep stacks one flow per query and one per token prove nearly every pair: they are worth it if enough pairs of a
    sample meet. The layer is -1 if not. Values do not depend on it, for what meets is the bound that is met anyway.
    """
    (layers, nodes, _), queries, tokens = stack.capacity.shape, len(top), stack.lower.shape[1]
    none = -1, np.empty((0, nodes))
    if layers < 3 or queries * tokens * nodes * layers < _WORTH_A_SAMPLE:
        return none
    kernels = load_kernels("half ways")
    some = np.unique(np.linspace(0, queries - 1, 3).astype(np.intp))
    others = np.unique(np.linspace(0, tokens - 1, 5).astype(np.intp))
    graph = _with_upper(top[some], stack, pool)
    totals, shares = np.empty(layers + 1), dict[int, float]()
    bounds = [[kernels.upper_bound(query, token, graph, totals) for token in others] for query in range(len(some))]
    work = spare.get()
    spare.put(work)  # `meets` below runs while no task does
    for middle in range(max(0, layers // 2 - 2), min(layers, layers // 2 + 2)):
        pushed = _half_ways(np.arange(len(some)), False, middle, graph, spare, pool)
        pulled = _half_ways(others, True, middle, graph, spare, pool)
        met = [
            kernels.meets(bounds[q][t], middle, pushed[q], pulled[t], graph, work)
            for q, t in np.ndindex(len(some), len(others))
        ]
        shares[middle] = sum(met) / len(met)
    best = max(shares, key=lambda middle: shares[middle])
    # A half way costs 0.6 of a pair, an attempt to meet 0.06 (n = 512, L = 12).
    if shares[best] < 0.6 * (1 / queries + 1 / tokens) + 0.06:
        return none
    return best, _half_ways(np.arange(tokens), True, best, graph, spare, pool)


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
def _threads(count: int, stop: NDArray[np.uint8] | None = None) -> Generator[ThreadPoolExecutor]:
    """A pool of threads; an error or Ctrl-C drops the tasks that wait, and sets `stop` (1,) for those that run."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except BaseException:
            if stop is not None:
                stop[0] = 1
            pool.shutdown(wait=False, cancel_futures=True)
            raise
