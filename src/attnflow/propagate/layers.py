"""The layers that propagation is given, checked: float64 matrices (query, key) that chain, and positions in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


def chain(top: Any, below: Sequence[Any]) -> list[Array]:
    """All layers as float64 matrices, the one nearest the input first, checked to fit together."""
    layers = [matrix(array, number, len(below)) for number, array in enumerate([*below, top])]
    for number in range(1, len(layers)):
        fit(layers[number - 1], layers[number], number)
    return layers


def fit(under: Array, above: Array, number: int) -> None:
    """Refuse a layer of this number whose keys are not the queries of the layer under it."""
    if above.shape[1] != under.shape[0]:
        raise ValueError(
            f"layer {number} of shape {above.shape} attends to {above.shape[1]} keys, but layer {number - 1} of "
            f"shape {under.shape} below it has {under.shape[0]} queries; give the layers in order, the one nearest the "
            "input first"
        )


def matrix(array: Any, number: int, top: int) -> Array:
    """A layer as a float64 matrix of capacities, checked."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    edges: Array = np.asarray(array, dtype=np.float64)
    name = f"layer {number}" + (", the explained one," if number == top else "")
    if edges.ndim != 2 or 0 in edges.shape:
        raise ValueError(
            f"{name} has shape {edges.shape}; expected a matrix (query, key) with at least one of each: fuse the "
            "heads and choose one example first"
        )
    # The sum of a whole layer must stay finite, for bounds are such sums. NaN is the least and the greatest of all.
    limit = np.finfo(np.float64).max / (4 * edges.size)
    if not (edges.min() >= 0 and edges.max() <= limit):
        query, key = (int(index) for index in np.argwhere(~((edges >= 0) & (edges <= limit)))[0])
        raise ValueError(
            f"capacities must be finite numbers that are not negative, nor so large that their sums overflow; "
            f"{name} query {query}, key {key} is {edges[query, key]}"
        )
    return edges


def positions(wanted: Sequence[int] | None, count: int, what: str = "input token") -> NDArray[np.intp]:
    """Positions, counted from the end where negative; all if none are named."""
    if wanted is None:
        return np.arange(count)
    found = np.asarray(wanted, dtype=np.intp).reshape(-1)
    wrong = found[(found < -count) | (found >= count)]
    if wrong.size:
        raise ValueError(f"{what} {wrong[0]} is out of range: there are {count}, 0 to {count - 1}")
    return found % count
