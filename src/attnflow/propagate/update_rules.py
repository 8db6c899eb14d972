"""The update rules of Chefer et al. (ICCV 2021): relevance between positions, layer by layer from the input up.

R (position, input position) starts as the identity. Self-attention adds A R. A call whose queries s and keys q are of
two streams, such as cross-attention, adds to their block what the relevance within both streams says of it, and hands
on to the other inputs what its keys hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Crossed(Protocol):
    """The edges (query, key) of a layer with what each position keeps of itself, W + I."""

    @property
    def crossings(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """The positions of the queries and of the keys of each call that joins two streams."""
        ...

    def matrix(self) -> Any:
        """All edges (query, key)."""
        ...


def update(layer: Crossed, relevance: torch.Tensor | None) -> torch.Tensor:
    """R above a layer (query, input), from R below it, None at the input (equations 6, 7, 10 and 11 of the paper).

    Calls of one layer read what lies below it, whatever the others of that layer change.

    Raises ValueError where two streams meet above a layer that pools or merges positions, so that none stands for one
    position of the input.
    """
    import torch

    edges = layer.matrix()
    below = torch.eye(edges.shape[1], dtype=edges.dtype, device=edges.device) if relevance is None else relevance
    below, moved, added = below.to(edges.device), edges.clone(), list[tuple[Any, Any, torch.Tensor]]()
    for queries, keys in layer.crossings:
        if below.shape[0] != below.shape[1]:
            raise ValueError(
                f"two streams meet above a layer that makes {below.shape[0]} positions of {below.shape[1]}, and the "
                "update rules need the input's own there; use the product over layers"
            )
        rows, columns = torch.tensor(queries)[:, None], torch.tensor(keys)
        crossing = edges[rows, columns]
        within = [_normalised(below[torch.tensor(one)[:, None], torch.tensor(one)]) for one in (queries, keys)]
        handed_on = crossing @ below[columns]
        handed_on[:, columns] = within[0].mT @ crossing @ within[1]
        added.append((rows, torch.arange(below.shape[1]), handed_on))
        moved[rows, columns] = 0
    result = moved @ below
    for rows, columns, more in added:
        result[rows, columns] += more
    return result


def _normalised(within: torch.Tensor) -> torch.Tensor:
    """N(R) = R - I with each row divided by its sum, plus I (equations 8 and 9); rows of zeros stay zeros."""
    import torch

    kept = torch.eye(len(within), dtype=within.dtype, device=within.device)
    drawn = (within - kept).clamp_min(0)
    return drawn / drawn.sum(-1, keepdim=True).clamp_min(1e-300) + kept
