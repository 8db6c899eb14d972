"""Generalized attention flow: one maximum flow over all queries and tokens, made unique by a log barrier.

Azarkhalili & Libbrecht (ACL 2025). One source supplies all queries, one sink takes what comes to any token. A maximum
flow is not unique, and neither is what each token receives of it; the flow that maximises value + mu * sum over edges
of log f + log(u - f) is, where f is the flow along an edge and u its capacity.

It is found together with a potential of every node, 1 at the queries and 0 at the tokens. With a the fall of the
potential along an edge and (z, w) its two prices, the optimum has f z = mu, (u - f) w = mu and a = w - z, and nodes
between pass on as much as they receive. These equations are solved by Newton steps (a primal-dual interior-point
method). Edges join neighbouring levels only, so each step solves a block tridiagonal system, in O(layers n^3) time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from attnflow.memory import check_memory
from attnflow.propagate.flow import flow
from attnflow.propagate.layers import Array, chain

# What the barrier may take from the value, as a share of the maximum flow.
GAP = 1e-6
# The equations hold when every product is this close to mu, as a share, and the nodes lose no more than this share.
_CENTRED, _LOST = 1e-6, 1e-9
# A step aims at a barrier this much weaker, and goes so far of the way to where the first edge is empty or full.
_WEAKER, _SAFE = 0.1, 0.99
_STEPS = 500
# An edge that can carry less than this share of the maximum flow is none: that is less than rounding.
_NOTHING = 2.0**-54
_ROUNDING = 2.0**-46
# How many numbers for each edge exist at once.
_NUMBERS = 20


class BarrierFlow(NamedTuple):
    """The flow into each token (token,), in units of capacity, and how far it is known.

    maximum: the value of a maximum flow, without a barrier. mu: the weight of the barrier, in units of capacity. edges:
    how many may carry anything. The value lies below the maximum by no more than 2 edges mu.
    """

    received: Array
    maximum: float
    mu: float
    edges: int

    def checks(self) -> dict[str, float | int]:
        """The facts that belong into a recipe; gap and gap_bound are shares of the maximum."""
        share = 1 / self.maximum if self.maximum else 0.0
        return {
            "maximum": self.maximum,
            "gap": share * (self.maximum - float(self.received.sum())),
            "gap_bound": share * 2 * self.edges * self.mu,
            "mu": self.mu,
            "edges": self.edges,
        }


class _Edges(NamedTuple):
    """Edges (edge,) from node `above` to node `under` with their capacity; level m holds nodes m width to
    (m + 1) width, level 0 the tokens and level `depth` the queries.
    """

    above: NDArray[np.intp]
    under: NDArray[np.intp]
    capacity: Array
    depth: int
    width: int

    def falls(self, potential: Array) -> Array:
        """How far the potential (level, node) falls along each edge."""
        levels = potential.ravel()
        return levels[self.above] - levels[self.under]

    def out(self, amount: Array) -> Array:
        """The amounts of the edges (edge,) that leave each node (level, node)."""
        return self._summed(self.above, amount)

    def into(self, amount: Array) -> Array:
        """The amounts of the edges (edge,) that come to each node (level, node)."""
        return self._summed(self.under, amount)

    def dense(self, amount: Array) -> Array:
        """The amounts as matrices (layer, query, key)."""
        matrices = np.zeros((self.depth, self.width, self.width))
        matrices.reshape(-1)[(self.above - self.width) * self.width + self.under % self.width] = amount
        return matrices

    def _summed(self, ends: NDArray[np.intp], amount: Array) -> Array:
        total = np.bincount(ends, amount, (self.depth + 1) * self.width)
        return total.astype(np.float64, copy=False).reshape(-1, self.width)


def barrier_flow(top: Any, below: Sequence[Any]) -> BarrierFlow:
    """The flow from all rows of `top` to all tokens; arguments and errors as for `flow.flow`.

    >>> barrier_flow([[0.6, 0.4]], [[[0.7, 0.3], [0.2, 0.8]]]).received.round(3)
    array([0.528, 0.472])
    """
    layers = chain(top, below)
    maximum, tokens = maximum_between(layers), layers[0].shape[1]
    if maximum == 0.0:
        return BarrierFlow(np.zeros(tokens), 0.0, 0.0, 0)
    edges = _edges(_on_the_way(layers, maximum * _NOTHING), maximum)
    mu = GAP / (2 * len(edges.capacity))
    received = edges.into(_solve(edges, mu))[0, :tokens]
    return BarrierFlow(received * maximum, maximum, mu * maximum, len(edges.capacity))


def maximum_between(layers: Sequence[Array]) -> float:
    """The maximum flow from all queries to all tokens: both as one, whose edges are the sums of theirs."""
    lowest, *others = layers
    if not others:
        return float(lowest.sum())
    *between, highest = others
    whole = flow(highest.sum(0, keepdims=True), [lowest.sum(1, keepdims=True), *between])
    return float(whole.values[0, 0])


def _on_the_way(layers: Sequence[Array], least: float) -> list[Array]:
    """The layers without the edges of no more than `least`, and those that lie on no way from a query to a token."""
    kept: list[NDArray[np.bool_]] = [np.greater(layer, least) for layer in layers]
    for under, above in pairwise(kept):
        above &= under.any(1)
    for above, under in pairwise(kept[::-1]):
        under &= above.any(0, keepdims=True).T
    return [np.where(usable, layer, 0.0) for usable, layer in zip(kept, layers, strict=True)]


def _edges(layers: Sequence[Array], unit: float) -> _Edges:
    """The edges with a capacity, in this unit."""
    width = max(size for layer in layers for size in layer.shape)
    check_memory(
        8 * _NUMBERS * len(layers) * width**2,
        f"a flow with a barrier through {len(layers)} layers of up to {width:,} positions",
        "take in fewer layers (start_layer=...)",
    )
    ends = [np.nonzero(layer) for layer in layers]
    return _Edges(
        above=np.concatenate([(m + 1) * width + queries for m, (queries, _) in enumerate(ends)]),
        under=np.concatenate([m * width + keys for m, (_, keys) in enumerate(ends)]),
        capacity=np.concatenate([layer[at] / unit for layer, at in zip(layers, ends, strict=True)]),
        depth=len(layers),
        width=width,
    )


def _solve(edges: _Edges, mu: float) -> Array:
    """The flow (edge,) under a barrier of weight mu, of capacities in units of the maximum flow."""
    capacity, between = edges.capacity, slice(1, edges.depth)
    potential = np.repeat(np.linspace(0, 1, edges.depth + 1)[:, None], edges.width, axis=1)
    # Half full to begin with, at prices that differ by the fall. The room of an edge is kept beside its flow, because
    # the difference to the capacity has too few digits once the edge is nearly full.
    carried = np.minimum(capacity, 1) / 2
    room = capacity - carried
    low = np.full_like(carried, 1 / edges.depth)
    high = low + edges.falls(potential)
    for _ in range(_STEPS):
        lost = np.abs((edges.out(carried) - edges.into(carried))[between]).sum()
        off = max(np.abs(carried * low - mu).max(), np.abs(room * high - mu).max())
        if off <= _CENTRED * mu and lost <= _LOST:
            return carried
        aim = max(mu, _WEAKER * (carried @ low + room @ high) / (2 * len(carried)))
        ease = 1 / (low / carried + high / room)
        pull = edges.falls(potential) + aim / carried - aim / room
        moved = carried + ease * pull
        missing = (edges.into(moved) - edges.out(moved))[between]
        turn = np.zeros_like(potential)
        turn[between] = _balanced(edges, ease, missing)
        step = ease * (edges.falls(turn) + pull)
        lower, higher = (aim - low * step) / carried - low, (aim + high * step) / room - high
        far = _share((carried, step), (room, -step))
        carried, room = carried + far * step, room - far * step
        far = _share((low, lower), (high, higher))
        low, high, potential = low + far * lower, high + far * higher, potential + far * turn
    raise np.linalg.LinAlgError(f"the flow with a barrier was not found in {_STEPS} steps; please report its edges")


def _share(*moves: tuple[Array, Array]) -> float:
    """How much of a step the amounts can take, each (amount, step), and stay above 0: at most 1."""
    worst = max(float((-step / amount).max()) for amount, step in moves)
    return min(1.0, _SAFE / worst) if worst > 0 else 1.0


def _balanced(edges: _Edges, ease: Array, missing: Array) -> Array:
    """The potentials (level, node) that move what is missing at the nodes between, where each edge carries its ease
    times the fall: levels are eliminated from the lowest up.
    """
    joins = edges.dense(ease)
    # What rounding takes from the diagonal of nodes that hardly anything joins to the ends is put back beforehand.
    own = (edges.out(ease) + edges.into(ease))[1:-1] * (1 + _ROUNDING)
    own[own == 0] = 1.0  # a node without edges
    factors, reached, right = list[Any](), list[Array](), list[Array]()
    result = np.empty_like(missing)
    for m in range(len(missing)):
        block, amount = np.diag(own[m]), missing[m]
        if m > 0:
            block -= reached[-1].T @ reached[-1]
            amount = amount + joins[m] @ cho_solve(factors[-1], right[-1])
        factors.append(cho_factor(block, lower=True))
        right.append(amount)
        if m + 1 < len(missing):
            reached.append(solve_triangular(factors[-1][0], joins[m + 1].T, lower=True))
    for m in reversed(range(len(missing))):
        above = joins[m + 1].T @ result[m + 1] if m + 1 < len(missing) else 0.0
        result[m] = cho_solve(factors[m], right[m] + above)
    return result
