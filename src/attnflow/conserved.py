"""Relevance that is conserved: what attention hands from token to token, what stays, and what biases take.

Under rules that hold attention weights constant ("cp-lrp") all of the score comes down through the layers: what leaves
a block at a token went to the keys of its attention, stayed at its place (the identity, and an MLP), or was taken by
biases. So the edges of a layer are a signed flow in units of the score, and not shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnflow.layers import AttentionLike, Carried, Layer, calls_of

if TYPE_CHECKING:
    import torch

# Queries whose edges exist at once where a layer is checked.
_ROWS = 256


def conserved(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """R(i, j) = sum over heads of A dA, and on the diagonal also what goes past attention; (1, query, key).

    A row sums to what leaves the block at the query but for what biases took there (`Carried.biases`), a column to what
    enters at the key and what biases took at the key (`Carried.key_biases`), as those of a norm before attention do.
    """
    own, gradient = carried(call), call.gradient
    assert gradient is not None  # a trace that holds relevance holds gradients
    edges = (call.attention(queries) * gradient.of(queries)).sum(0, keepdim=True)
    kept = (own.leaving - own.biases)[queries] - edges[0].sum(-1)
    edges[0, range(len(queries)), queries] += kept
    return edges


def entering(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The relevance that enters the block at each token, at its own place; (1, query, key)."""
    own = carried(call).entering
    return own.diag()[None, queries]


def carried(call: AttentionLike) -> Carried:
    """What the block around a call carries; `attention_graph` refuses traces without."""
    assert call.carried is not None
    return call.carried


def checks(layers: Sequence[Layer], score: float) -> dict[str, Any]:
    """How well relevance is conserved, and the share of the score that biases took in each layer.

    conservation: the largest difference at a token between what the edges bring, less what biases took there, and what
    enters the block, x times its gradient, over the largest relevance that enters the block. It is rounding where rules
    hold attention weights constant; elsewhere relevance also goes through queries and keys, which no edge shows.
    """
    worst, shares = 0.0, list[float]()
    for layer in layers:
        for call in calls_of(layer):
            own, count = carried(call), call.shape[1]
            rows = range(count)
            tiles = [list(rows[start : start + _ROWS]) for start in range(0, count, _ROWS)]
            brought = sum(conserved(call, tile)[0].sum(0) for tile in tiles)
            largest = float(own.entering.abs().max()) or 1.0
            worst = max(worst, float((brought - own.key_biases - own.entering).abs().max()) / largest)
            shares.append(float((own.biases + own.key_biases).sum()) / score if score else 0.0)
    return {"conservation": worst, "bias_shares": shares}
