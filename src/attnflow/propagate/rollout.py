"""Raw attention and attention rollout."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Tiled(Protocol):
    """Edges (query, key) of one layer that come some queries at a time."""

    def tiles(self) -> Iterable[tuple[list[int], torch.Tensor]]: ...


def raw(top: torch.Tensor, below: Sequence[Tiled]) -> torch.Tensor:
    """The edges of one layer as they are: how its queries attend to its own keys, whatever lies below."""
    return top


def rollout(top: torch.Tensor, below: Sequence[Tiled]) -> torch.Tensor:
    """The product of the transitions from the queries down to the input (Abnar & Zuidema 2020, equation 1).

    R(l) = A(l) R(l - 1), with R(0) = A(0). Taken from the top, tile by tile, so that a few queries cost O(layers n^2)
    time and O(n) memory. Layers may lie on different devices (a model spread over several).
    """
    import torch

    carried = top
    for transition in reversed(below):
        parts = (carried[:, queries] @ edges.to(carried.device) for queries, edges in transition.tiles())
        carried = functools.reduce(torch.add, parts)
    return carried
