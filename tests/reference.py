"""What rollout and flow are, said slowly and obviously: the tests compare the library with these.

top (query, key) and below [(query, key), ...], layer 0 nearest the input, as in the library.
"""

from itertools import product

import igraph
import networkx as nx
import numpy as np
from networkx.algorithms.flow import edmonds_karp
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
    graph = csr_array((capacity.astype(np.int32), (above, under)), shape=(nodes, nodes))
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
