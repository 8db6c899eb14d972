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

    layers (query, key): what edges carry, the lowest first. taken (node,): what ends at the nodes of each level, the
    lowest first, so that the sums of a row and of the column above it differ by that. count: how many are wanted, all
    if absent.

    >>> layers = [np.array([[3.0, 0.0], [0.0, -1.0]]), np.array([[2.0, -1.0]])]
    >>> for route in routes(layers, [np.zeros(2), np.array([-1.0, 0.0]), np.zeros(1)]):
    ...     print(route)
    Route(amount=2.0, level=2, nodes=(0, 0, 0), end='token')
    Route(amount=1.0, level=1, nodes=(0, 0), end='token')
    Route(amount=-1.0, level=2, nodes=(0, 1, 1), end='token')
    Route(amount=-1.0, level=1, nodes=(0,), end='biases')
    """
    found = list[Route]()
    for sign in (1, -1):
        carried = _with_ends([sign * layer for layer in layers], [sign * ends for ends in taken])
        sizes = [*(len(layer) - 3 for layer in reversed(carried)), carried[0].shape[1] - 3]
        for amount, nodes in cuts.taken_apart(carried, count):
            found.append(_route(sign * amount, nodes, sizes))
    return sorted(found, key=lambda route: -abs(route.amount))[:count]


def _route(amount: float, nodes: Sequence[int], sizes: Sequence[int]) -> Route:
    """The part of a route that runs through nodes of the flow, without its step from the input to where it ends there.

    sizes: of the levels, from the top down, and of the ends of tokens below them.
    """
    own = [down for down, (node, size) in enumerate(zip(nodes, sizes[:-1], strict=False)) if node < size]
    end: End = "token"
    if (last := nodes[-1] - sizes[-1]) >= 0:
        end = "biases" if last == _BIASES else "cancelled"
    return Route(amount, len(sizes) - 2 - own[0], tuple(nodes[down] for down in own), end)


def _with_ends(layers: Sequence[Array], taken: Sequence[Array]) -> list[Array]:
    """What is carried above 0, as a flow from the top level down to the ends of tokens, through the nodes beside.

    A token keeps the sign that came to it, but for what is taken there: more than came of one sign leaves the other.
    """
    parts, ends = [np.maximum(layer, 0) for layer in layers], [np.maximum(one, 0) for one in taken]
    against = np.maximum(-taken[0], 0) - np.maximum(-layers[0], 0).sum(0)
    parts.insert(0, np.diag(np.maximum(parts[0].sum(0) - ends[0], 0) + np.maximum(against, 0)))
    going = [part.sum(1) + one for part, one in zip(parts, ends, strict=True)]
    coming = [*(part.sum(0) for part in parts[1:]), going[-1]]
    everything = sum(float(amount.sum()) for amount in going)
    result = list[Array]()
    for number, part in enumerate(parts):
        nodes, under = part.shape
        whole = np.zeros((nodes + 3, under + 3))
        whole[:nodes, :under] = part
        whole[:nodes, under + _BIASES] = ends[number]
        whole[:nodes, under + _CANCELLED] = np.maximum(coming[number] - going[number], 0)
        if number < len(parts) - 1:
            for end in (_BIASES, _CANCELLED):
                whole[nodes + end, under + end] = everything
        if number:
            whole[nodes + _BEGIN, under + _BEGIN] = everything
            whole[nodes + _BEGIN, :under] = np.maximum(going[number - 1] - coming[number - 1], 0)
        result.append(whole)
    return result
