"""Exact maximum flow through a stack of layers, one (query, token) pair after another: numba kernels.

The graph of a pair. Level `layers` holds the nodes under the explained query, level 0 those over the input token;
layer m joins level m + 1 (its queries) to level m (its keys). The query supplies the topmost level, the token
demands from level 0, so neither is a node. Levels narrower than the widest are padded with nodes without edges.

    capacity  (layer, query, key)    what an edge carries; read only, shared by all pairs
    straight  (layer, node)          what the edge from a query to the key at its own place carries, side by side
    flow      (line, 8)              what 8 neighbouring edges of a query carry for this pair, only where any does
    line      (layer query key/8,)   the line of each 8 edges in `flow`; 0, whose flow is always 0, where none carries
    owner     (line,)                the reverse: the place in `line` that refers to a line; owner[0] counts the lines
    down      (layer, query, word)   bit k of a row: the edge to key k has room left
    up        (layer, key, word)     bit q of a row: the edge from query q carries flow, which could be taken back
    excess    (level, node)          flow that has come to a node and not gone on; on top, what is not sent yet
    need      (level, node)          flow that a node has sent on, and still has to receive; at 0, the demand
    upper     (level, query, node)   how much each query alone can bring to a node
    lower     (level, token, node)   how much each node alone can send to a token; above level 0 it may be left out

Words are 64 bits. How it works, and what was tried and did not win, is in docs/flow.md. All that kernels use is
in this file, which imports nothing of ours, because numba's cache on disk notices only changes of the file that a
kernel is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

Array = NDArray[np.float64]
Bits = NDArray[np.uint64]
Ints = NDArray[Any]
Known = NDArray[np.uint8]

# How far to go with a pair: its upper bound; a flow in bulk; the maximum flow; a search to the end, for its cut.
BOUND, FILL, EXACT, CUT = range(4)
BY_BOUND, BY_CUT = 1, 2
ONE = np.uint64(1)
# Places are masked with this where it changes nothing but tells the compiler that they are not negative: numba then
# leaves out its step for places counted from the end, which took 11 % of the time of sharp heads.
PLACE = 2**31 - 1
# A node is heavy with so many times the mean of its level to give; to look for them costs more than it brings on levels
# of one word.
HEAVY = 16.0

# Amounts below this share of a pair's upper bound are the dust of rounding, not flow (float64 has 2^-52).
DUST = 2.0**-50
# A flow that comes this close to its upper bound, as a share of it, meets it: room for the dust of 2^15 nodes.
MET = 2.0**-35
# A flow below this share of its bound is solved again with amounts of its own size, or rounding would show in it.
FAR_BELOW = 2.0**-10
# How far above an even spread the nodes of a level may be filled, attempt by attempt; the last has no limit but the
# bounds. Measured on MiniLM, n = 512, L = 12: with (inf,) alone half of the flow arrives, with these all of it.
EVENNESS = np.array([1.05, 1.2, 1.5, 4.0, np.inf])
# Where a search follows and mends what crowds, two attempts are enough: gradient edges, which are narrow beside the
# identity, take 0.8 times as long, plain attention as long as with all five.
BEFORE_A_SEARCH = np.array([1.5, np.inf])

# Where flow can wait, nodes with more to give than so many times the mean go first, step by step.
SHARES = (4.0, 2.0, 1.0, 0.5, 0.0)


class Graph(NamedTuple):
    """What holds for all pairs; see the layout above. Read only, shared by all threads."""

    capacity: Array
    straight: Array
    usable: Bits
    upper: Array
    lower: Array


class Work(NamedTuple):
    """The memory of one thread; see the layout above, and `distances` and `send` for the rest."""

    flow: Array
    line: Ints
    owner: Ints
    down: Bits
    up: Bits
    excess: Array
    need: Array
    take: Array
    open: Bits
    distance: Ints
    unseen: Bits
    slot: Ints
    ring: Bits
    path: Ints
    amount: Array


def new_work(layers: int, nodes: int) -> Work:
    """Memory for one thread: O(layers nodes^2) bits, and what the flow of a pair touches.

    The rest of `flow`, which could hold every edge, is never written, and the system then gives no memory for it.
    """
    words, total = (nodes + 63) // 64, (layers + 1) * nodes
    lines = layers * nodes * ((nodes + 7) // 8)
    return Work(
        flow=np.zeros((lines + 1, 8)),
        line=np.zeros(lines, np.int32),
        owner=np.zeros(lines + 1, np.int32),
        down=np.zeros((layers, nodes, words), np.uint64),
        up=np.zeros((layers, nodes, words), np.uint64),
        excess=np.zeros((layers + 1, nodes)),
        need=np.zeros((layers + 1, nodes)),
        take=np.zeros((4, nodes)),
        open=np.zeros(words, np.uint64),
        distance=np.zeros((layers + 1, nodes), np.int32),
        unseen=np.zeros((layers + 1, words), np.uint64),
        slot=np.zeros((total + 2, layers + 1), np.int32),
        ring=np.zeros((total + layers + 2, words), np.uint64),
        path=np.zeros((total + 2, 4), np.int64),
        amount=np.zeros((total + 2, 3)),
    )


def _lowest_bit(typingctx: Any, word: Any) -> Any:
    """The index of the lowest bit set in a word that is not 0: one machine instruction, which numba lacks."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.cttz(args[0], ir.Constant(ir.IntType(1), 1)), ir.IntType(64))

    return types.int64(types.uint64), generate


lowest_bit: Any = intrinsic(_lowest_bit)


def kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Compile at the first call, and keep the code on disk; where nothing can be written, compile in each process."""
    try:
        return njit(cache=True, nogil=True, no_cfunc_wrapper=True, **options)(function)  # pyright: ignore[reportCallIssue]
    except RuntimeError:
        return njit(nogil=True, no_cfunc_wrapper=True, **options)(function)  # pyright: ignore[reportCallIssue]


def inner(function: Callable[..., Any]) -> Any:
    """The same for what only kernels call: without a way in for Python, which takes a third of a second to compile."""
    return kernel(function, no_cpython_wrapper=True, _nrt=False)


@kernel
def min_product(x: Array, y: Array, out: Array) -> None:
    """out[i, j] = sum over k of min(x[i, k], y[k, j]): a matrix product with min in place of times.

    Four k at a time, and 32 while they are in the cache: 12 ms for 512 x 512 x 512, a plain loop takes 18. Columns
    before the first and after the last that these 32 reach are left out: a third of the work is left where all
    layers are causal. They are left out by views: a loop over range(begin, end) is not vectorised and takes 50 ms.
    """
    rows, inner = x.shape
    columns = y.shape[1]
    out[:] = 0.0
    for start in range(0, inner, 32):
        stop = min(start + 32, inner)
        fours = start + (stop - start) // 4 * 4
        begin, end = columns, 0
        for k in range(start, stop):
            j = 0
            while j < begin and y[k, j] == 0.0:
                j += 1
            begin = min(begin, j)
            j = columns
            while j > end and y[k, j - 1] == 0.0:
                j -= 1
            end = max(end, j)
        for i in range(rows):
            sums = out[i, begin:end]
            for k in range(start, fours, 4):
                a, b, c, d = x[i, k], x[i, k + 1], x[i, k + 2], x[i, k + 3]
                if a + b + c + d > 0.0:
                    p, q, r, s = y[k, begin:end], y[k + 1, begin:end], y[k + 2, begin:end], y[k + 3, begin:end]
                    for j in range(sums.size):
                        sums[j] += (min(a, p[j]) + min(b, q[j])) + (min(c, r[j]) + min(d, s[j]))
            for k in range(fours, stop):
                for j in range(begin, end):
                    out[i, j] += min(x[i, k], y[k, j])


@kernel
def usable_edges(capacity: Array, down: Bits) -> None:
    """Set the bits of the edges that carry anything."""
    layers, nodes, _ = capacity.shape
    for m in range(layers):
        for i in range(nodes):
            down[m, i, :] = 0
            for j in range(nodes):
                if capacity[m, i, j] > 0.0:
                    down[m, i, j >> 6] |= ONE << np.uint64(j & 63)


@inner
def total(amounts: Array) -> float:
    """Their sum. numba compiles the `sum` of arrays ten times as long."""
    result = 0.0
    for amount in amounts:
        result += amount
    return result


@inner
def alone(level: int, query: int, token: int, graph: Graph, result: Array) -> Array:
    """How much of a pair's flow each node of a level could carry if it were alone there: into result (node,)."""
    for i in range(result.shape[0]):
        result[i] = graph.upper[level, query, i]
        if level < graph.lower.shape[0]:
            result[i] = min(result[i], graph.lower[level, token, i])
    return result


@inner
def transfer(
    m: int,
    give: Array,
    take: Array,
    capacity: Array,
    straight: Array,
    flow: Array,
    line: Ints,
    owner: Ints,
    down: Bits,
    up: Bits,
    open_: Bits,
    dust: float,
) -> None:
    """Move what level m + 1 gives to what level m takes: heavy nodes first, then straight down, then whatever is open.

    A heavy node needs nearly all of its edges, and they must still find something open. Straight down, because the
    residual connection makes that edge wide: most nodes are done with one edge.
    """
    nodes, words, m = take.shape[0], open_.shape[0], m & PLACE
    lines = (nodes + 7) // 8
    open_[:] = 0
    sum_ = widest = 0.0
    for j in range(nodes):
        sum_ += give[j]
        widest = max(widest, give[j])
        if take[j] > dust:
            open_[j >> 6] |= ONE << np.uint64(j & 63)
    least = max(dust, HEAVY * sum_ / nodes)
    for second in range(0 if words > 1 and widest > least else 1, 2):
        if second == 1:
            least = dust
            for j in range(nodes):
                if take[j] > dust and give[j] > dust:
                    at = ((m * nodes + j) * lines + (j >> 3)) & PLACE
                    place = line[at] & PLACE
                    room = straight[m, j] - flow[place, j & 7]
                    amount = min(give[j], take[j], room)
                    if amount > 0.0:
                        bit = ONE << np.uint64(j & 63)
                        if place == 0:
                            place = (owner[0] + 1) & PLACE
                            owner[0] = line[at] = place
                            owner[place] = at
                        flow[place, j & 7] += amount
                        up[m, j, j >> 6] |= bit
                        if room - amount <= dust:
                            down[m, j, j >> 6] &= ~bit
                        give[j] -= amount
                        take[j] -= amount
                if take[j] <= dust:
                    open_[j >> 6] &= ~(ONE << np.uint64(j & 63))
        first, end = 0, words
        for i in range(nodes):
            if give[i] <= least:
                continue
            # Often few are open, or a single one: the rest of the words need not be looked at for each node.
            while first < end and open_[first] == 0:
                first += 1
            while first < end and open_[end - 1] == 0:
                end -= 1
            if first == end:
                break
            left, word, bit = give[i], first, ONE << np.uint64(i & 63)
            while left > dust and word < end:
                word &= PLACE
                found = down[m, i, word] & open_[word]
                while found != 0 and left > dust:
                    j = (word << 6) + lowest_bit(found)
                    lowest = found & (~found + ONE)
                    found ^= lowest
                    at = ((m * nodes + i) * lines + (j >> 3)) & PLACE
                    place = line[at] & PLACE
                    if place == 0:
                        place = (owner[0] + 1) & PLACE
                        owner[0] = line[at] = place
                        owner[place] = at
                    room = capacity[m, i, j] - flow[place, j & 7]
                    amount = min(left, take[j], room)
                    flow[place, j & 7] += amount
                    up[m, j, i >> 6] |= bit
                    if room - amount <= dust:
                        down[m, i, word] ^= lowest
                    left -= amount
                    take[j] -= amount
                    if take[j] <= dust:
                        open_[word] ^= lowest
                word += 1
            give[i] = left


@inner
def fill_level(
    m: int, pulling: bool, target: Array, amount: float, evenness: Array, graph: Graph, work: Work, dust: float
) -> None:
    """Move flow across layer m so that the level it comes to holds it in proportion to `target`, or nearly.

    evenness (attempt,): as `EVENNESS`. Pushing fills level m from the excess above it; pulling fills level m + 1 with
    the need below it.
    """
    held, moved = (work.need[m + 1], work.need[m]) if pulling else (work.excess[m], work.excess[m + 1])
    rooms, before = work.take[0], work.take[1]
    capacity, straight, flow, line, owner = graph.capacity, graph.straight, work.flow, work.line, work.owner
    down, up, open_ = work.down, work.up, work.open
    room = total(target)
    if room == 0.0:
        return
    for even in evenness:
        share = min(1.0, even * (amount / room))
        for i in range(held.shape[0]):
            before[i] = max(0.0, target[i] * share - held[i])
            rooms[i] = before[i]
        if pulling:
            transfer(m, rooms, moved, capacity, straight, flow, line, owner, down, up, open_, dust)
        else:
            transfer(m, moved, rooms, capacity, straight, flow, line, owner, down, up, open_, dust)
        rest = 0.0
        for i in range(held.shape[0]):
            held[i] += before[i] - rooms[i]
            rest = max(rest, moved[i])
        if share == 1.0 or rest <= dust:
            break


@inner
def fill_evenly(query: int, token: int, bound: float, evenness: Array, graph: Graph, work: Work, dust: float) -> None:
    """A first flow in bulk: the query pushes from above, the token pulls from below, and they meet half way.

    Each level is filled in proportion to what its nodes could carry alone, min(upper, lower): nothing then crowds
    where later layers cannot carry it on. What does not fit is left as excess or need, for `send` to mend.
    """
    layers = graph.capacity.shape[0]
    pulls = layers // 2
    for step in range(layers - 1):
        pulling = step < pulls
        m = step if pulling else layers - 1 - (step - pulls)
        level = m + 1 if pulling else m
        fill_level(m, pulling, alone(level, query, token, graph, work.take[2]), bound, evenness, graph, work, dust)
    give, take = work.excess[pulls + 1], work.need[pulls]
    flow, line, owner, down, up, open_ = work.flow, work.line, work.owner, work.down, work.up, work.open
    transfer(pulls, give, take, graph.capacity, graph.straight, flow, line, owner, down, up, open_, dust)


@kernel
def half_ways(which: Ints, pulling: bool, middle: int, graph: Graph, work: Work, out: Array) -> None:
    """What queries can have pushed to level `middle` + 1, or tokens pulled from level `middle`: out (which, node).

    A flow that knows one end only, so that one of it serves all pairs of a query, or of a token.
    """
    reach, layers = graph.lower if pulling else graph.upper, graph.capacity.shape[0]
    for k in range(which.shape[0]):
        start_pair(graph.usable, work)
        ends = reach[0 if pulling else layers, which[k]]
        amount, given = total(ends), work.need[0] if pulling else work.excess[layers]
        for i in range(ends.shape[0]):
            given[i] = ends[i]
        if amount > 0.0:
            for step in range(middle if pulling else layers - 1 - middle):
                m = step if pulling else layers - 1 - step
                level = m + 1 if pulling else m
                target = reach[level, which[k]] if level < reach.shape[0] else np.ones(ends.shape[0])
                fill_level(m, pulling, target, amount, EVENNESS, graph, work, amount * DUST)
        arrived = work.need[middle] if pulling else work.excess[middle + 1]
        for i in range(ends.shape[0]):
            out[k, i] = arrived[i]


@kernel
def meets(bound: float, m: int, pushed: Array, pulled: Array, graph: Graph, work: Work) -> bool:
    """Whether layer m can carry `bound` from what a query pushed to what a token pulls, first come, first served.

    Then the bound is the flow, and nothing has to be written down: 15 us a pair where a flow takes 280 (MiniLM,
    n = 512, L = 12, where 0.997 of all pairs meet).
    """
    capacity, straight, usable = graph.capacity, graph.straight, graph.usable
    nodes, words = pushed.shape[0], work.open.shape[0]
    give, take, open_ = work.take[0], work.take[1], work.open
    dust, missing = bound * DUST, bound * (1.0 - MET)
    open_[:] = 0
    in_all, out_all = 0.0, 0.0
    for j in range(nodes):
        amount = min(pushed[j], pulled[j], straight[m, j])
        give[j], take[j] = pushed[j] - amount, pulled[j] - amount
        missing -= amount
        in_all += pushed[j]
        out_all += pulled[j]
        if take[j] > dust:
            open_[j >> 6] |= ONE << np.uint64(j & 63)
    # Rounding is relative to all that was pushed or pulled; where the bound is far less, this is no proof.
    if bound * 2.0**10 < max(in_all, out_all):
        return False
    for i in range(nodes):
        left, word = give[i], 0
        if missing <= 0.0:
            break
        while left > dust and word < words:
            found = usable[m, i, word] & open_[word]
            if word == i >> 6:
                found &= ~(ONE << np.uint64(i & 63))
            while found != 0 and left > dust:
                j = (word << 6) + lowest_bit(found)
                lowest = found & (~found + ONE)
                found ^= lowest
                amount = min(left, take[j], capacity[m, i, j])
                left -= amount
                take[j] -= amount
                missing -= amount
                if take[j] <= dust:
                    open_[word] ^= lowest
            word += 1
    return missing <= 0.0


@inner
def largest(amounts: Array) -> int:
    """The place of the largest."""
    best = 0
    for i in range(amounts.shape[0]):
        if amounts[i] > amounts[best]:
            best = i
    return best


@inner
def waits(bound: float, query: int, token: int, narrowest: float, graph: Graph, work: Work) -> bool:
    """Whether a flow of `bound` is found where each edge straight down could carry all of it: flow can wait anywhere.

    narrowest: the least edge straight down. The place that the query has its largest edge to gives to all others on
    every level; the place that the token has its largest edge from takes from all others. What a place was given goes
    to the token from there, on that level or a lower one; what is left goes over one edge more. No other edge is used
    twice, so all is added up and nothing written down. Edges straight down are not looked at: the flow, scaled to the
    bound, fits into them.
    """
    capacity, usable, top, bottom = graph.capacity, graph.usable, graph.upper[-1, query], graph.lower[0, token]
    layers, nodes, words = usable.shape
    source, sink = largest(top), largest(bottom)
    if source == sink or bound > min(narrowest, min(top[source], bottom[sink])):
        return False
    excess, need, open_, give, take, sent = work.excess, work.need, work.open, work.take[0], work.take[1], work.take[2]
    for j in range(nodes):
        excess[layers, j], need[0, j] = top[j], bottom[j]
    for m in range(layers):
        for j in range(nodes):
            excess[m, j], need[m + 1, j] = capacity[m, source, j], capacity[m, j, sink]
    given = taken = 0.0
    for level in range(layers + 1):
        excess[level, source] = need[level, sink] = 0.0
        given += total(excess[level])
        taken += total(need[level])
    # Rounding is relative to all that is given or taken; where the bound is far less, this is no proof.
    if bound * 2.0**10 < max(given, taken):
        return False
    arrived, dust = need[0, source], bound * DUST
    for level in range(layers + 1):
        arrived += excess[level, sink]
        excess[level, sink] = need[level, source] = 0.0
    for j in range(nodes):
        sent[j] = 0.0
    for level in range(layers, -1, -1):
        for above in range(level, layers + 1):
            from_, to = excess[above], need[level]
            for j in range(nodes):
                amount = min(from_[j], to[j])
                from_[j] -= amount
                to[j] -= amount
                sent[j] += amount
    arrived += total(sent)
    # From the lowest layer up, with what came latest and what is wanted latest: those have the fewest layers to cross.
    for level in range(layers - 1, 0, -1):
        for j in range(nodes):
            excess[level, j] += excess[level + 1, j]
    for j in range(nodes):
        give[j], take[j] = np.inf, 0.0
    for m in range(layers):
        if arrived >= bound * (1.0 - MET):
            return True
        open_[:], mean = 0, 0.0
        for j in range(nodes):
            give[j] = sent[j] = min(give[j], excess[m + 1, j])
            mean += give[j] / nodes
            take[j] += need[m, j]
            if take[j] > dust:
                open_[j >> 6] |= ONE << np.uint64(j & 63)
        # Those with most to give go first, each once, for they need nearly all of their edges.
        most = np.inf
        for share in SHARES:
            least = max(dust, share * mean)
            for i in range(nodes):
                if sent[i] <= least or sent[i] > most:
                    continue
                left, word = give[i], 0
                while left > dust and word < words:
                    found = usable[m, i, word] & open_[word]
                    if word == i >> 6:
                        found &= ~(ONE << np.uint64(i & 63))
                    while found != 0 and left > dust:
                        j = (word << 6) + lowest_bit(found)
                        lowest = found & (~found + ONE)
                        found ^= lowest
                        amount = min(left, take[j], capacity[m, i, j])
                        left -= amount
                        take[j] -= amount
                        arrived += amount
                        if take[j] <= dust:
                            open_[word] ^= lowest
                    word += 1
                give[i] = left
            most = least
    return arrived >= bound * (1.0 - MET)


@inner
def distances(work: Work, dust: float) -> None:
    """How many edges with room lie between each node and the nearest need: breadth first, from the needs up.

    It ends where every excess is found, and goes on to the end where one is out of reach, or there is none: then the
    distances are the sides of a cut.

    distance (level, node), -1 out of reach; unseen (level, word): the nodes that have none yet. ring[slot[d, level]]
    holds the nodes of a level at distance d as bits (slot -1: none), so that `send` finds the next edge of a shortest
    way with one `and` per 64 edges.
    """
    ring, slot, distance, need, down, up = work.ring, work.slot, work.distance, work.need, work.down, work.up
    (levels, nodes), words = need.shape, ring.shape[1]
    distance[:] = -1
    waiting, excess, unseen = 0, work.excess, work.unseen
    unseen[:] = 0
    for level in range(levels):
        for i in range(nodes):
            waiting += excess[level, i] > dust
            unseen[level, i >> 6] |= ONE << np.uint64(i & 63)
    if waiting == 0:
        waiting = -1
    used, d, found = 0, 0, True
    while found and waiting != 0:
        d, found = d & PLACE, False
        for level in range(levels):
            slot[d, level] = -1
            below = slot[d - 1, level - 1] if d > 0 and level > 0 else -1
            above = slot[d - 1, level + 1] if d > 0 and level + 1 < levels else -1
            if d > 0 and below < 0 and above < 0:
                continue
            ring[used] = 0
            for place in range(words):
                left = unseen[level, place]
                while left != 0:
                    i = ((place & PLACE) << 6) + lowest_bit(left)
                    lowest = left & (~left + ONE)
                    left ^= lowest
                    common = np.uint64(d == 0 and need[level, i] > dust)
                    if below >= 0:
                        for word in range(words):
                            common |= down[level - 1, i, word] & ring[below, word]
                    if above >= 0 and common == 0:
                        for word in range(words):
                            common |= up[level, i, word] & ring[above, word]
                    if common != 0:
                        distance[level, i] = d
                        waiting -= excess[level, i] > dust
                        ring[used, place] |= lowest
                        unseen[level, place] ^= lowest
                        slot[d, level] = used
            if slot[d, level] >= 0:
                used += 1
                found = True
        d += 1


@inner
def send(
    level: int,
    i: int,
    d: int,
    given: float,
    capacity: Array,
    flow: Array,
    line: Ints,
    owner: Ints,
    down: Bits,
    up: Bits,
    need: Array,
    ring: Bits,
    slot: Ints,
    path: Ints,
    amount: Array,
    dust: float,
) -> float:
    """Send up to `given` from a node at distance d over shortest ways to needs, depth first; returns what is left.

    A visit passes on as much as it was given before it returns, so an edge is booked once per visit and not once
    per way. A node that could not is struck from its ring: nothing goes through it again in this phase.
    path (depth, [level, node, word, place in `line` of the edge to it]): words from the number of words on are those
    of `up`. amount (depth, [given, left, room of the edge to it]). One long body with the arrays as arguments: cut
    into functions over `work` it took 1.5 times as long.
    """
    nodes, words, depth = need.shape[1], ring.shape[1], 0
    lines = (nodes + 7) // 8
    path[0, 0], path[0, 1], path[0, 2] = level, i, 0
    amount[0, 0] = amount[0, 1] = given
    while True:
        depth, d = depth & PLACE, d & PLACE
        level, i, word = path[depth, 0] & PLACE, path[depth, 1] & PLACE, path[depth, 2] & PLACE
        found = np.uint64(0)
        if amount[depth, 1] > dust:
            below = slot[d - 1, level - 1] if level > 0 else -1
            above = slot[d - 1, level + 1] if level + 1 < slot.shape[1] else -1
            if below >= 0:
                while word < words and found == 0:
                    found = down[level - 1, i, word] & ring[below, word]
                    word += 1
            if found == 0 and above >= 0:
                word = max(word, words)
                while word < 2 * words and found == 0:
                    found = up[level, i, word - words] & ring[above, word - words]
                    word += 1
            if found == 0:
                ring[slot[d, level], i >> 6] &= ~(ONE << np.uint64(i & 63))
        if found != 0:
            word = (word - 1) & PLACE
            path[depth, 2] = word
            if word < words:
                to_level, j = (level - 1) & PLACE, (word << 6) + lowest_bit(found)
                at = ((to_level * nodes + i) * lines + (j >> 3)) & PLACE
                room = capacity[to_level, i, j] - flow[line[at] & PLACE, j & 7]
            else:
                to_level, j = level + 1, (((word - words) & PLACE) << 6) + lowest_bit(found)
                at = ((level * nodes + j) * lines + (i >> 3)) & PLACE
                room = flow[line[at] & PLACE, i & 7]
            sent = min(room, amount[depth, 1])
            if d > 1:
                depth += 1
                d -= 1
                path[depth, 0], path[depth, 1], path[depth, 2], path[depth, 3] = to_level, j, 0, at
                amount[depth, 0], amount[depth, 1], amount[depth, 2] = sent, sent, room
                continue
            sent = min(sent, need[to_level, j])
            need[to_level, j] -= sent
            if need[to_level, j] <= dust:
                ring[slot[0, to_level], j >> 6] &= ~(ONE << np.uint64(j & 63))
        elif depth == 0:
            return amount[0, 1]
        else:
            sent, room, at = amount[depth, 0] - amount[depth, 1], amount[depth, 2], path[depth, 3] & PLACE
            depth = (depth - 1) & PLACE
            d += 1
            if sent == 0.0 and room > dust:
                continue
            to_level, j, level, i = level, i, path[depth, 0] & PLACE, path[depth, 1] & PLACE
        amount[depth, 1] -= sent
        i_bit, j_bit = ONE << np.uint64(i & 63), ONE << np.uint64(j & 63)
        place = line[at] & PLACE
        if to_level < level:
            if sent > 0.0:
                if place == 0:
                    place = (owner[0] + 1) & PLACE
                    owner[0] = line[at] = place
                    owner[place] = at
                flow[place, j & 7] += sent
                up[to_level, j, i >> 6] |= i_bit
            if room - sent <= dust:
                down[to_level, i, j >> 6] &= ~j_bit
        else:
            flow[place, i & 7] -= sent
            if sent > 0.0:
                down[level, j, i >> 6] |= i_bit
            if flow[place, i & 7] <= dust:
                flow[place, i & 7] = 0.0
                up[level, i, j >> 6] &= ~j_bit


@inner
def send_all(capacity: Array, work: Work, enough: float, dust: float) -> float:
    """One phase: a blocking flow from every excess over shortest ways to needs, or until `enough` is sent.

    Returns what was sent; -1 if no excess can reach a need, and then the edges from the nodes out of reach to those
    within reach are a minimum cut.
    """
    distances(work, dust)
    excess, need, distance, flow, line, owner = work.excess, work.need, work.distance, work.flow, work.line, work.owner
    down, up, ring, slot, path, amount = work.down, work.up, work.ring, work.slot, work.path, work.amount
    arrived, reachable = 0.0, False
    levels, nodes = excess.shape
    for level in range(levels):
        for i in range(nodes):
            given, d = excess[level, i], distance[level, i]
            if given <= dust or d < 0:
                continue
            if arrived >= enough:
                return arrived
            reachable = True
            if d == 0:
                sent = min(given, need[level, i])
                need[level, i] -= sent
                left = given - sent
            else:
                left = send(
                    level, i, d, given, capacity, flow, line, owner, down, up, need, ring, slot, path, amount, dust
                )
            excess[level, i] = left
            arrived += given - left
    return arrived if reachable else -1.0


@inner
def start_pair(usable: Bits, work: Work) -> None:
    """Forget the flow of the pair before."""
    flow, line, owner = work.flow, work.line, work.owner
    for place in range(1, owner[0] + 1):
        line[owner[place]] = 0
        for k in range(8):
            flow[place, k] = 0.0
    owner[0] = 0
    work.up[:] = 0
    layers, nodes, words = usable.shape
    for m in range(layers):
        for i in range(nodes):
            for word in range(words):
                work.down[m, i, word] = usable[m, i, word]
    work.excess[:] = 0.0
    work.need[:] = 0.0


@kernel
def upper_bound(query: int, token: int, graph: Graph, totals: Array) -> float:
    """What can come to a node and go on from it, added over each level: the least level bounds the flow.

    Four sums at a time, for one would wait for each addition to end.
    """
    upper, lower, nodes = graph.upper, graph.lower, graph.upper.shape[2]
    for level in range(totals.shape[0]):
        if level >= lower.shape[0]:
            totals[level] = total(upper[level, query])
            continue
        a = b = c = d = 0.0
        for i in range(0, nodes - 3, 4):
            a += min(upper[level, query, i], lower[level, token, i])
            b += min(upper[level, query, i + 1], lower[level, token, i + 1])
            c += min(upper[level, query, i + 2], lower[level, token, i + 2])
            d += min(upper[level, query, i + 3], lower[level, token, i + 3])
        for i in range(nodes // 4 * 4, nodes):
            a += min(upper[level, query, i], lower[level, token, i])
        totals[level] = (a + b) + (c + d)
    least = np.inf
    for level in range(totals.shape[0]):
        least = min(least, totals[level])
    return least


@inner
def finish(value: float, enough: float, graph: Graph, work: Work, dust: float) -> tuple[float, int]:
    """Send on what still can be sent, until `enough` has arrived or no way is left."""
    while value < enough * (1.0 - MET):
        arrived = send_all(graph.capacity, work, enough - value, dust)
        if arrived < 0.0:
            return value, BY_CUT
        value += arrived
    return enough, BY_BOUND


@inner
def solve_in_bulk(query: int, token: int, bound: float, totals: Array, effort: int, graph: Graph, work: Work) -> float:
    """Find most of a pair's flow by filling evenly, and leave the rest as excess and need for `finish`.

    totals (level,): from `upper_bound`.
    """
    upper, lower, layers, nodes = graph.upper, graph.lower, graph.capacity.shape[0], graph.upper.shape[2]
    start_pair(graph.usable, work)
    top, bottom = work.excess[layers], work.need[0]
    supply = alone(layers, query, token, graph, work.take[3])
    # Both ends are scaled to the bound first, and the rest is held back: what cannot arrive only gets in the way.
    sent = bound / totals[layers] if bound > 0.0 else 0.0
    wanted = bound / totals[0] if bound > 0.0 else 0.0
    for i in range(nodes):
        top[i] = supply[i] * sent
        bottom[i] = min(upper[0, query, i], lower[0, token, i]) * wanted
    if layers > 0 and bound > 0.0:
        evenness = EVENNESS if effort == FILL else BEFORE_A_SEARCH
        fill_evenly(query, token, bound, evenness, graph, work, bound * DUST)
    value = bound
    for level in range(layers + 1):
        value -= total(work.excess[level])
    # Edges wider than the bound are in no minimum cut; at more than twice the bound, its digits would be lost in them.
    widest = 2.0 * bound if bound > 0.0 else np.inf
    for i in range(nodes):
        top[i] += (min(upper[layers, query, i], widest) if effort == CUT else supply[i]) - supply[i] * sent
        demand = min(upper[0, query, i], lower[0, token, i])
        bottom[i] += (min(lower[0, token, i], widest) if effort == CUT else demand) - demand * wanted
    return value


@inner
def solve_small(query: int, token: int, value: float, bound: float, graph: Graph, work: Work) -> float:
    """A maximum flow far below its bound, to all its digits: no amount is much larger than the flow itself.

    value: what it is but for rounding at the scale of the bound. Edges wider than the flow are in no minimum cut, so
    what the ends send and take can be limited to a little more.
    """
    layers, limit = graph.capacity.shape[0], 2.0 * bound
    while value < limit * FAR_BELOW and limit > 1e-290:
        limit = 2.0 * max(value, limit * 2.0**-40)
        start_pair(graph.usable, work)
        for i in range(graph.upper.shape[2]):
            work.excess[layers, i] = min(graph.upper[layers, query, i], limit)
            work.need[0, i] = min(graph.lower[0, token, i], limit)
        value, _ = finish(0.0, np.inf, graph, work, limit * DUST)
    return value


@inner
def solve_pair(
    query: int, token: int, bound: float, totals: Array, effort: int, graph: Graph, work: Work
) -> tuple[float, int]:
    """The maximum flow of one pair and how it is known; for FILL, the value of a flow that may not be maximum.

    bound, totals (level,): from `upper_bound`.
    """
    if effort != CUT and (graph.capacity.shape[0] == 0 or bound == 0.0):
        return bound, BY_BOUND
    value = solve_in_bulk(query, token, bound, totals, effort, graph, work)
    if effort == FILL:
        if value < bound * (1.0 - MET):
            value += max(0.0, send_all(graph.capacity, work, bound - value, bound * DUST))
        return max(0.0, min(value, bound)), BY_BOUND
    value, known = finish(value, np.inf if effort == CUT else bound, graph, work, bound * DUST)
    if known == BY_CUT and value < bound * FAR_BELOW:
        value = solve_small(query, token, value, bound, graph, work)
    return value, known


@kernel
def solve_pairs(
    first: int,
    effort: int,
    middle: int,
    pushed: Array,
    pulled: Array,
    graph: Graph,
    work: Work,
    values: Array,
    bounds: Array,
    known: Known,
    stop: Known,
) -> None:
    """The pairs `first`, `first` + 1, ... in reading order of (query, token), into values, bounds and known (pair,).

    pushed (query, node), pulled (token, node) from `half_ways` to try first; middle -1: there are none.
    stop (1,): set by another thread, the rest is left undone.
    """
    totals, narrowest = np.empty(graph.upper.shape[0]), np.inf
    for m in range(graph.straight.shape[0]):
        for i in range(graph.straight.shape[1]):
            narrowest = min(narrowest, graph.straight[m, i])
    for k in range(values.shape[0]):
        if stop[0]:
            return
        query, token = divmod(first + k, graph.lower.shape[1])
        bounds[k] = values[k] = upper_bound(query, token, graph, totals)
        known[k] = BY_BOUND
        met = middle >= 0 and meets(bounds[k], middle, pushed[query], pulled[token], graph, work)
        if BOUND < effort < CUT and not met:
            met = waits(bounds[k], query, token, narrowest, graph, work)
        if effort != BOUND and not met:
            values[k], known[k] = solve_pair(query, token, bounds[k], totals, effort, graph, work)


@inner
def line_of(m: int, i: int, j: int, work: Work) -> int:
    """The line of an edge in `flow`, a new one if it has none. `transfer` and `send` do the same in place."""
    line, owner, nodes = work.line, work.owner, work.need.shape[1]
    at = (m * nodes + i) * ((nodes + 7) // 8) + (j >> 3)
    if line[at] == 0:
        owner[0] += 1
        line[at] = owner[0]
        owner[owner[0]] = at
    return int(line[at])


@kernel
def solve_around(
    maximum: float, routes: Ints, amounts: Array, supply: Array, demand: Array, graph: Graph, work: Work
) -> None:
    """A flow of known value that starts from given routes (route, node on each level from the top down).

    It may take some of them back. supply (node,) and demand (node,) limit what enters and leaves; work.flow, and the
    excess and need that are left at the ends, then say how it runs.
    """
    capacity, layers = graph.capacity, graph.capacity.shape[0]
    dust, value = maximum * DUST, 0.0
    start_pair(graph.usable, work)
    for i in range(supply.shape[0]):
        work.excess[layers, i] = supply[i]
        work.need[0, i] = demand[i]
    for k in range(routes.shape[0]):
        for m in range(layers):
            i, j = routes[k, layers - 1 - m], routes[k, layers - m]
            work.flow[line_of(m, i, j, work), j & 7] += amounts[k]
            work.up[m, j, i >> 6] |= ONE << np.uint64(i & 63)
            if capacity[m, i, j] - work.flow[line_of(m, i, j, work), j & 7] <= dust:
                work.down[m, i, j >> 6] &= ~(ONE << np.uint64(j & 63))
        work.excess[layers, routes[k, 0]] = max(0.0, work.excess[layers, routes[k, 0]] - amounts[k])
        work.need[0, routes[k, layers]] = max(0.0, work.need[0, routes[k, layers]] - amounts[k])
        value += amounts[k]
    finish(value, maximum, graph, work, dust)


@kernel
def widest_routes(
    above: Ints, under: Ints, room: Array, starts: Ints, least: float, share: float, routes: Ints, amounts: Array
) -> int:
    """Take the widest route again and again, until it is no wider than `least` or `share` of the first: how many.

    Edges (edge,) lead from node `above` to node `under` and come from the top level down; `room` is what is left of
    them. starts (level,): the first node of each level, the last entry that of the lowest. The widest route is the
    one whose narrowest edge is the widest. Written: routes (route, level) and amounts (route,).
    """
    levels = routes.shape[1]
    ends = starts[levels - 1], starts[levels]
    width, via = np.empty(ends[1]), np.empty(ends[1], np.int64)
    for k in range(routes.shape[0]):
        width[:] = 0.0
        width[: starts[1]] = np.inf
        for edge in range(room.shape[0]):
            wide = min(width[above[edge]], room[edge])
            if wide > width[under[edge]]:
                width[under[edge]], via[under[edge]] = wide, edge
        node = ends[0] + np.argmax(width[ends[0] :])
        amount = width[node]
        if amount <= least or (k > 0 and amount < share * amounts[0]):
            return k
        amounts[k] = amount
        for level in range(levels - 1, 0, -1):
            routes[k, level] = node
            room[via[node]] -= amount
            node = above[via[node]]
        routes[k, 0] = node
    return routes.shape[0]
