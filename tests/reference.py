"""What rollout and flow are, said slowly and obviously: the tests compare the library with these.

top (query, key) and below [(query, key), ...], layer 0 nearest the input, as in the library.
"""

from dataclasses import dataclass, replace
from itertools import product

import igraph
import networkx as nx
import numpy as np
from networkx.algorithms.flow import edmonds_karp
from scipy.optimize import Bounds, minimize
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

SOURCE, SINK = "source", "sink"


def rollout(top, below):
    """The sum over all paths of the product of their edges."""
    rows = np.asarray(top, dtype=float)
    for layer in reversed(below):
        result = np.zeros((rows.shape[0], layer.shape[1]))
        for query in range(rows.shape[0]):
            for between in range(layer.shape[0]):
                for key in range(layer.shape[1]):
                    result[query, key] += rows[query, between] * layer[between, key]
        rows = result
    return rows


def edges(top, below, query, token):
    """(from, to, capacity) of every edge that can lie on a path from the query to the token."""
    layers = [*below, top]
    for number, layer in enumerate(layers):
        for i, j in product(*map(range, layer.shape)):
            if (number == len(layers) - 1 and i != query) or (number == 0 and j != token):
                continue
            above = SOURCE if number == len(layers) - 1 else (number + 1, i)
            yield above, SINK if number == 0 else (number, j), layer[i, j]


def numbered_edges(top, below, query, token):
    """The same edges where they carry anything, as arrays (from, to, capacity): the query is node 0, the token 1."""
    layers, parts, start = [*below, top], [], 2
    for number, layer in enumerate(layers):
        i, j = np.nonzero(layer)
        keep = (i == query) | (number < len(layers) - 1)
        keep &= (j == token) | (number > 0)
        i, j = i[keep], j[keep]
        under = np.ones_like(j) if number == 0 else start - layer.shape[1] + j
        above = np.zeros_like(i) if number == len(layers) - 1 else start + i
        parts.append((above, under, layer[i, j]))
        start += layer.shape[0]
    return [np.concatenate(part) for part in zip(*parts, strict=True)], start


def flow_by_networkx(top, below, query, token):
    """The maximum flow of one pair on floats; only for small graphs.

    By Edmonds-Karp, as in the paper: preflow-push, the default, fails on capacities as small as 1e-16 (networkx 3.6).
    """
    graph = nx.DiGraph()
    graph.add_nodes_from([SOURCE, SINK])
    for above, under, capacity in edges(top, below, query, token):
        if capacity > 0:
            graph.add_edge(above, under, capacity=float(capacity))
    return nx.maximum_flow_value(graph, SOURCE, SINK, flow_func=edmonds_karp)


def flow_by_scipy(top, below, query, token):
    """The maximum flow of one pair where every capacity is an integer below 2^31."""
    (above, under, capacity), nodes = numbered_edges(top, below, query, token)
    ends = tuple(np.asarray(end, dtype=np.int32) for end in (above, under))  # which older scipy asks for
    graph = csr_array((capacity.astype(np.int32), ends), shape=(nodes, nodes))
    return maximum_flow(graph, 0, 1).flow_value


def flow_by_igraph(top, below, query, token):
    """The maximum flow of one pair on floats, by push-relabel."""
    (above, under, capacity), nodes = numbered_edges(top, below, query, token)
    graph = igraph.Graph(nodes, np.stack([above, under], 1).tolist(), directed=True)
    return graph.maxflow_value(0, 1, capacity.tolist())


def flow_between_groups(top, below, queries, tokens):
    """The maximum flow from a source joined to all queries, to a sink joined to all tokens, by networkx."""
    layers = [*below, top]
    graph = nx.DiGraph()
    graph.add_nodes_from([SOURCE, SINK])
    for query in queries:
        graph.add_edge(SOURCE, (len(layers), query))  # without a capacity: without limit
    for token in tokens:
        graph.add_edge((0, token), SINK)
    for number, layer in enumerate(layers):
        for i, j in np.argwhere(layer > 0).tolist():
            graph.add_edge((number + 1, i), (number, j), capacity=float(layer[i, j]))
    return nx.maximum_flow_value(graph, SOURCE, SINK, flow_func=edmonds_karp)


def flow_by_cuts(top, below, query, token):
    """The least capacity of all ways to part the nodes between query and token; only for tiny graphs."""
    listed = list(edges(top, below, query, token))
    nodes = sorted({node for above, under, _ in listed for node in (above, under)} - {SOURCE, SINK})
    least = float("inf")
    for sides in product((True, False), repeat=len(nodes)):
        with_source = {SOURCE: True, SINK: False, **dict(zip(nodes, sides, strict=True))}
        cut = sum(c for above, under, c in listed if with_source[above] and not with_source[under])
        least = min(least, cut)
    return least


def carries(top, below, query, token, without):
    """Whether anything gets from the query to the token once the edges (layer, query, key) of `without` are gone."""
    layers = [*below, top]
    here = {query}
    for number in reversed(range(len(layers))):
        here = {
            key
            for i in here
            for key in range(layers[number].shape[1])
            if layers[number][i, key] > 0 and (number, i, key) not in without
        }
    return token in here


def gradient_x_attention(weights, gradients):
    """The mean over heads of what each weight (head, query, key) times its gradient is, where above 0."""
    heads, queries, keys = weights.shape
    mean = np.zeros((queries, keys))
    for head, query, key in np.ndindex(weights.shape):
        mean[query, key] += max(0.0, weights[head, query, key] * gradients[head, query, key]) / heads
    return mean


def rows_normalised(matrix):
    """Each row divided by its own sum; rows of zeros stay zeros."""
    result = np.zeros_like(matrix)
    for query, row in enumerate(matrix):
        if row.sum() > 0:
            result[query] = row / row.sum()
    return result


def gradient_rollout(weights, gradients):
    """The product of I + (A dA)+, each with its rows divided by their sums (vit-explain, with its faults mended)."""
    total = None
    for layer, gradient in zip(weights, gradients, strict=True):
        edges = rows_normalised(gradient_x_attention(layer, gradient) + np.eye(layer.shape[1]))
        total = edges if total is None else edges @ total
    return total


def legrad(gradients):
    """The mean over heads of gradients above 0, added up over queries and layers (Bousselham et al. 2025)."""
    scores = np.zeros(gradients[0].shape[2])
    for layer in gradients:
        for head in layer:
            scores += np.where(head > 0, head, 0).sum(0) / len(layer)
    return scores


def gmar(weights, gradients):
    """The product of 0.5 I + 0.5 sum of heads, each weighted by its share of the gradient's norms (Jo et al. 2025)."""
    total = np.eye(weights[0].shape[1])
    for layer, gradient in zip(weights, gradients, strict=True):
        norms = [np.sqrt((head**2).sum()) for head in gradient]
        mean = sum(norm / sum(norms) * head for norm, head in zip(norms, layer, strict=True))
        total = (0.5 * np.eye(len(total)) + 0.5 * mean) @ total
    return total


def without_weakest(edges, ratio, spared):
    """The edges with this share of all set to 0, the weakest first, but for those to the keys `spared`."""
    result = edges.copy()
    visible = [(edges[i, j], i, j) for i, j in np.ndindex(edges.shape) if edges[i, j] > 0]
    weakest = sorted(edge for edge in visible if edge[2] not in spared)
    for _, i, j in weakest[: int(ratio * len(visible))]:
        result[i, j] = 0
    return result


def without_column_mean(edges):
    """Each edge less the mean of what all queries send to its key, at 0 or more, and rows divided by their sums."""
    result = np.zeros_like(edges)
    for i, j in np.ndindex(edges.shape):
        result[i, j] = max(0.0, edges[i, j] - sum(edges[:, j]) / len(edges))
    return rows_normalised(result)


def update_rules(layers, sizes):
    """Equations 5 to 11 of Chefer et al. (ICCV 2021), stream by stream.

    layers: for each the calls that run at once, (stream of the queries, stream of the keys, weights, gradients). sizes:
    the positions of each stream. Returned: R[s, t] for every two streams.
    """
    r = {(s, t): np.eye(sizes[s]) if s == t else np.zeros((sizes[s], sizes[t])) for s in sizes for t in sizes}
    for calls in layers:
        more = []
        for s, q, weights, gradients in calls:
            mean = gradient_x_attention(weights, gradients)
            if s == q:
                more += [((s, t), mean @ r[s, t]) for t in sizes]  # equations 6 and 7
            else:
                own, other = (rows_normalised(r[x, x] - np.eye(sizes[x])) + np.eye(sizes[x]) for x in (s, q))  # 8 and 9
                more.append(((s, q), own.T @ mean @ other))  # equation 10
                more.append(((s, s), mean @ r[q, s]))  # equation 11
        for block, added in more:
            r[block] = r[block] + added
    return r


def barrier_flow(layers, mu):
    """The flow of the largest value + mu * sum of log f + log(u - f) between all queries and all tokens.

    By a general solver of SciPy, edge by edge; only for tiny graphs. layers (query, key), the lowest first.
    """
    edges = [(m, i, j) for m, layer in enumerate(layers) for i, j in np.argwhere(layer > 0).tolist()]
    capacity = np.array([layers[m][i, j] for m, i, j in edges])
    top = np.array([m == len(layers) - 1 for m, _, _ in edges])
    nodes = [(m, i) for m in range(1, len(layers)) for i in range(layers[m].shape[1])]
    lost = np.array([[(n, i) == (m, j) for m, _, j in edges] for n, i in nodes], dtype=float) - np.array(
        [[(n, i) == (m + 1, k) for m, k, _ in edges] for n, i in nodes], dtype=float
    )
    lost = lost.reshape(len(nodes), len(edges))
    found = minimize(
        lambda flow: -(flow[top].sum() + mu * (np.log(flow) + np.log(capacity - flow)).sum()),
        capacity / 2,
        jac=lambda flow: -(top + mu / flow - mu / (capacity - flow)),
        bounds=Bounds(1e-6 * capacity, (1 - 1e-6) * capacity),
        constraints={"type": "eq", "fun": lambda flow: lost @ flow, "jac": lambda flow: lost} if nodes else (),
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 2000},
    )
    assert found.success, found.message
    result = [np.zeros(layer.shape) for layer in layers]
    for (m, i, j), amount in zip(edges, found.x, strict=True):
        result[m][i, j] = amount
    return result


@dataclass(frozen=True, eq=False)
class Parts:
    """What an attention block is made of, float64.

    attention (head, query, key), values (head, key, dim), weight (width, head * dim) and bias of the output projection,
    stream (query, width); norm and second as (weight, bias, eps, centred), and what went into the second norm.
    """

    attention: np.ndarray
    values: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    stream: np.ndarray
    norm: tuple | None = None
    second: tuple | None = None
    into_second: np.ndarray | None = None


def moved(parts):
    """(query, key, width): what each key adds to each query, head by head."""
    heads, queries, keys = parts.attention.shape
    vectors = np.zeros((queries, keys, len(parts.weight)))
    dim = parts.values.shape[-1]
    for head in range(heads):
        f = parts.values[head] @ parts.weight[:, head * dim : (head + 1) * dim].T
        vectors += parts.attention[head][:, :, None] * f[None]
    return vectors


def moved_and_kept(parts):
    vectors = moved(parts)
    for position in range(len(vectors)):
        vectors[position, position] += parts.stream[position]
    return vectors


def normed(x, norm, of=None, bias=True):
    """A norm of vectors (..., width), at the scale of others; without its bias on request."""
    weight, shift, eps, centred = norm
    of = x if of is None else of
    x, of = (one - one.mean(-1, keepdims=True) if centred else one for one in (x, of))
    result = x / np.sqrt((of**2).mean(-1, keepdims=True) + eps) * weight
    return result + shift if bias else result


def total(parts):
    """(query, width): what goes into the norm behind the addition."""
    return moved_and_kept(parts).sum(1) + parts.bias


def output(parts):
    return total(parts) if parts.norm is None else normed(total(parts), parts.norm)


def through(parts, vectors):
    """Vectors (query, key, width) through the norm behind the addition, as parts of its output."""
    return vectors if parts.norm is None else normed(vectors, parts.norm, total(parts)[:, None], bias=False)


def value_norm(parts):
    return shares(np.linalg.norm(moved(parts), axis=-1))


def value_norm_with_residual(parts):
    return shares(np.linalg.norm(moved_and_kept(parts), axis=-1))


def value_norm_through_norm(parts):
    return shares(np.linalg.norm(through(parts, moved_and_kept(parts)), axis=-1))


def globenc(parts):
    vectors = through(parts, moved_and_kept(parts))
    return shares(np.linalg.norm(normed(vectors, parts.second, parts.into_second[:, None], bias=False), axis=-1))


def alti(parts):
    y = output(parts)
    near = np.abs(y[:, None] - through(parts, moved_and_kept(parts))).sum(-1)
    return shares(np.maximum(0, np.abs(y).sum(-1)[:, None] - near))


def value_zeroing(parts):
    y = output(parts)
    distances = np.zeros(parts.attention.shape[1:])
    for key in range(parts.values.shape[1]):
        values = parts.values.copy()
        values[:, key] = 0
        without = output(replace(parts, values=values))
        cosine = (y * without).sum(-1) / np.linalg.norm(y, axis=-1) / np.linalg.norm(without, axis=-1)
        distances[:, key] = 1 - cosine
    return shares(distances)


def kept_share(parts):
    """(query,): the length of stream and own value over that and the length of what the others add."""
    vectors = moved_and_kept(parts)
    own = np.eye(len(vectors), dtype=bool)
    kept = np.linalg.norm(vectors[own], axis=-1)
    mixed = np.linalg.norm(np.where(own[..., None], 0, vectors).sum(1), axis=-1)
    return kept / (kept + mixed)


def shares(rows):
    return rows / rows.sum(-1, keepdims=True)


def room_of_signed(layers, taken, sign):
    """What a signed flow carries with one sign between nodes (level, position), as {(above, under): amount}.

    layers (query, key), the lowest first, with what ends at the nodes of each level. A route begins at "begin", and
    ends at ("token", position), at "biases" or at "cancelled".
    """
    room, into, out, top = {}, {}, {}, len(layers)
    for number, layer in enumerate(layers):
        for i, j in np.ndindex(layer.shape):
            room[(number + 1, i), (number, j)] = max(0, sign * layer[i, j])
    for level, ends in enumerate(taken):
        for i, biases in enumerate(ends):
            room[(level, i), "biases"] = max(0, sign * biases)
    for j, biases in enumerate(sign * taken[0]):
        came, against = (sum(max(0, one * amount) for amount in layers[0][:, j]) for one in (sign, -sign))
        kept = came - biases if biases > 0 else came + max(0, -biases - against)
        room[(0, j), ("token", j)] = max(0, kept)
    for (above, under), amount in room.items():
        out[above] = out.get(above, 0) + amount
        into[under] = into.get(under, 0) + amount
    for level, ends in enumerate(taken):
        for i in range(len(ends)):
            node = level, i
            more = out[node] - (into[node] if level < top else 0)
            room["begin", node] = max(0, more)
            room[node, "cancelled"] = max(0, -more)
    return room


def widest(node, room):
    """The route from a node whose narrowest edge is the widest, to a token or where something ends: (width, nodes)."""
    following = [under for above, under in room if above == node]
    if node in ("biases", "cancelled") or node[0] == "token":
        return float("inf"), [node]
    best = 0.0, [node]
    for under in following:
        width, nodes = widest(under, room)
        if min(width, room[node, under]) > best[0]:
            best = min(width, room[node, under]), [node, *nodes]
    return best
