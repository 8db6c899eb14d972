"""Raw attention and attention rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def raw(top: torch.Tensor, below: Sequence[torch.Tensor]) -> torch.Tensor:
    """The edges of one layer as they are: how its queries attend to its own keys, whatever lies below."""
    return top


def rollout(top: torch.Tensor, below: Sequence[torch.Tensor]) -> torch.Tensor:
    """The product of the transitions from the queries down to the input (Abnar & Zuidema 2020, equation 1).

    R(l) = A(l) R(l - 1), with R(0) = A(0). Taken from the top, so that a few queries cost O(layers n^2).
    """
    rows = top
    for transition in reversed(below):
        rows = rows @ transition
    return rows
