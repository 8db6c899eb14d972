"""A signed flow taken apart into routes, each of one sign.

A signed flow has no capacities: its edges say what was carried, and at every node what comes in equals what goes on or
ends there. More may go on with either sign than came in, where for and against part, or less, where they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from attnflow.propagate import cuts
from attnflow.propagate.layers import Array

# Where a route ends: at an input token, in what was taken on the way, or where it met as much of the other sign.
End: TypeAlias = Literal["token", "biases", "cancelled"]

# Beside its own nodes every level has three, through which routes run on that have ended, or have not begun yet.
_BIASES, _CANCELLED, _BEGIN = range(3)


class Route(NamedTuple):
    """What runs along a route, signed, its nodes from the top down, and where it ends; level: that of its first node.

    Level 0 is the input, level l + 1 the output of layer l.
    """

    amount: float
    level: int
    nodes: tuple[int, ...]
    end: End


def routes(layers: Sequence[Array], taken: Sequence[Array], *, count: int | None = None) -> list[Route]:
    """The routes of a signed flow, the largest first; of every edge they add up to what it carries.

    What is positive and what is negative is taken apart by itself, always by the widest route that is left (whose
    smallest amount on an edge is the largest). A route begins at the top, or at a node where more goes on than came
    in; it ends at a token, in what was taken at a node, or at a node where less goes on than came in. What begins and
    what is cancelled within the graph adds up to 0 over both signs, so that all routes add up to what goes on at the
    top, and those to a token to what it receives. No route carries more than its edges do.

    layers (query, key): what edges carry, the lowest first. taken (query,): what ends at the queries of each layer, so
    that the sums of a row and of the column above it differ by that. count: how many are wanted, all if absent.

    >>> layers = [np.array([[3.0, 0.0], [0.0, -1.0]]), np.array([[2.0, -1.0]])]
    >>> for route in routes(layers, [np.array([-1.0, 0.0]), np.zeros(1)]):
    ...     print(route)
    Route(amount=2.0, level=2, nodes=(0, 0, 0), end='token')
    Route(amount=1.0, level=1, nodes=(0, 0), end='token')
    Route(amount=-1.0, level=2, nodes=(0, 1, 1), end='token')
    Route(amount=-1.0, level=1, nodes=(0,), end='biases')
    """
    sizes = [*(len(layer) for layer in reversed(layers)), layers[0].shape[1]]
    found = list[Route]()
    for sign in (1, -1):
        for amount, nodes in cuts.taken_apart(_with_ends(layers, taken, sign), count):
            found.append(_route(sign * amount, nodes, sizes))
    return sorted(found, key=lambda route: -abs(route.amount))[:count]


def _route(amount: float, nodes: Sequence[int], sizes: Sequence[int]) -> Route:
    """The part of a route that runs through nodes of the flow. sizes: of the levels, from the top down."""
    own = [node for node, size in zip(nodes, sizes, strict=True) if node < size]
    level = next(level for level, (node, size) in enumerate(zip(nodes, sizes, strict=True)) if node < size)
    end: End = "token"
    if (last := nodes[-1] - sizes[-1]) >= 0:
        end = "biases" if last == _BIASES else "cancelled"
    return Route(amount, len(sizes) - 1 - level, tuple(own), end)


def _with_ends(layers: Sequence[Array], taken: Sequence[Array], sign: int) -> list[Array]:
    """What is carried with one sign, as a flow from the top level to the lowest through the nodes beside."""
    parts = [np.maximum(sign * layer, 0) for layer in layers]
    ends = [np.maximum(sign * biases, 0) for biases in taken]
    going = [part.sum(1) + biases for part, biases in zip(parts, ends, strict=True)]
    coming = [*(part.sum(0) for part in parts[1:]), going[-1]]
    everything = sum(float(amount.sum()) for amount in going)
    result = list[Array]()
    for number, part in enumerate(parts):
        queries, keys = part.shape
        whole = np.zeros((queries + 3, keys + 3))
        whole[:queries, :keys] = part
        whole[:queries, keys + _BIASES] = ends[number]
        whole[:queries, keys + _CANCELLED] = np.maximum(coming[number] - going[number], 0)
        if number < len(parts) - 1:
            for end in (_BIASES, _CANCELLED):
                whole[queries + end, keys + end] = everything
        if number:
            whole[queries + _BEGIN, keys + _BEGIN] = everything
            whole[queries + _BEGIN, :keys] = np.maximum(going[number - 1] - coming[number - 1], 0)
        result.append(whole)
    return result
