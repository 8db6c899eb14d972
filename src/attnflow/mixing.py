"""What an edge weighs: head fusion and the residual turn a trace into the transitions of the attention graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from attnflow.trace import Layer

if TYPE_CHECKING:
    import torch

HeadFusion: TypeAlias = Literal["mean", "max", "min"]

HEAD_FUSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda attention: attention.mean(0),
    "max": lambda attention: attention.amax(0),
    "min": lambda attention: attention.amin(0),
}

# How far a row of attention may be from 1 before a residual beside it loses its meaning: half precision
# attention strays by 1e-3.
ROW_SUM_TOLERANCE = 5e-3


def transition(
    layer: Layer, number: int, *, head_fusion: HeadFusion = "mean", residual: float = 0.5, head: int | None = None
) -> torch.Tensor:
    """The edges (query, key) of one layer, float64, on the device of the layer.

    (1 - residual) * W + residual * I, where W is the fusion over heads, or one head alone. With residual 0.5 and the
    mean this is A = 0.5 W_att + 0.5 I (Abnar & Zuidema 2020, section 3). The maximum or minimum over heads does not
    sum to 1, so before a residual is added its rows are divided by their sum; without one it stays as it is.

    Raises ValueError for attention that is negative, not finite, or (with a residual) not square with rows that sum
    to 1, and for an unknown fusion, head or residual. `number` is the layer's number, for these messages.
    """
    import torch

    if head_fusion not in HEAD_FUSIONS:
        raise ValueError(f"head_fusion {head_fusion!r} is unknown; choose one of {', '.join(HEAD_FUSIONS)}")
    if not 0 <= residual <= 1:
        raise ValueError(f"residual must lie between 0 and 1; it is {residual}")
    heads, queries, keys = layer.shape
    if head is not None and not -heads <= head < heads:
        raise ValueError(f"head {head} is out of range: layer {number} has {heads} heads, 0 to {heads - 1}")
    attention = layer.attention()
    if attention.device.type != "mps":  # which has no float64
        attention = attention.double()
    _check_weights(attention, number)
    fused = attention[head] if head is not None else HEAD_FUSIONS[head_fusion](attention)
    if residual == 0:
        return fused
    if queries != keys:
        raise ValueError(
            f"layer {number} has {queries} queries and {keys} keys: a residual joins each query to the key at its "
            "own place, so it needs as many of both; pass residual=0"
        )
    _check_rows(attention, number)
    if head is None and head_fusion != "mean":
        fused = fused / fused.sum(-1, keepdim=True).clamp_min(torch.finfo(fused.dtype).tiny)
    return (1 - residual) * fused + residual * torch.eye(queries, dtype=fused.dtype, device=fused.device)


def _check_weights(attention: torch.Tensor, number: int) -> None:
    wrong = ~attention.isfinite() | (attention < 0)
    if wrong.any():
        head, query, key = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"attention must be finite and not negative; layer {number}, head {head}, query {query}, key {key} is "
            f"{attention[head, query, key].item()}"
        )


def _check_rows(attention: torch.Tensor, number: int) -> None:
    sums = attention.sum(-1)
    wrong = (sums - 1).abs() > ROW_SUM_TOLERANCE
    if wrong.any():
        head, query = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"with a residual the rows of attention must sum to 1; layer {number}, head {head}, query {query} sums "
            f"to {sums[head, query].item():.6g}; pass residual=0 to take the matrices as they are"
        )
