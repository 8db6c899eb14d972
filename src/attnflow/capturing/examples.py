"""From a recorded batch to its examples: which positions are padding, and each example's own calls without them."""

from __future__ import annotations

from typing import Any

import torch

from attnflow.capturing.calls import HIDDEN, Call, FusedCall, WeightedSum
from attnflow.capturing.recorder import Recording
from attnflow.trace import AttentionCall, AttentionWeights, Layer, WeightsGradient

# A weight on padding that is rounding, not attention.
_NEGLIGIBLE = 1e-6


def one_stack(recording: Recording, model: torch.nn.Module) -> tuple[int, int]:
    """The batch size and the number of tokens that all calls share; ValueError if they share none."""
    extents = list(dict.fromkeys(call.extent for call in recording.calls))
    batch, queries, keys = extents[0]
    if len(extents) > 1 or queries != keys:
        shown = ", ".join(f"{b} x {q} x {k}" for b, q, k in extents[:4]) + (", ..." if len(extents) > 4 else "")
        raise ValueError(
            f"the attention calls of {type(model).__name__} are not one stack of square layers; (batch x query x key) "
            f"is {shown}: windows, pooling by attention, cross-attention or several towers, which capture does not "
            "place yet; capture one tower (for instance model.vision_model)"
        )
    return batch, queries


def kept(recording: Recording, attention_mask: Any) -> torch.Tensor:
    """(batch, token), True where a token is no padding."""
    batch, count, _ = recording.calls[0].extent
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == (batch, count):
        return attention_mask != 0
    visible = torch.zeros(batch, count, dtype=torch.bool)
    for call in recording.calls:
        visible |= _seen_keys(call)
    return visible


def _seen_keys(call: Call) -> torch.Tensor:
    """(batch, key) or (1, 1), True where some query may attend to a key."""
    if isinstance(call, WeightedSum):
        return (call.weights != 0).any(1).any(1).cpu()
    return torch.ones(1, 1, dtype=torch.bool) if call.mask is None else _allowed(call.mask).any(1).any(1).cpu()


def split(recording: Recording, keep: torch.Tensor) -> list[tuple[Layer, ...]]:
    """The calls of each example among its kept positions; `keep` is (batch, token).

    Layers that share a mask tensor share the reduced mask too, so that memory grows with n, not with n squared.
    Raises ValueError for an example that is all padding, and for a call that lets a token attend to padding.
    """
    return [_example(recording.calls, index, keep[index]) for index in range(len(keep))]


def _example(calls: list[Call], index: int, keep: torch.Tensor) -> tuple[Layer, ...]:
    if not keep.any():
        raise ValueError(f"example {index} holds nothing but padding")
    reduced: dict[Any, tuple[torch.Tensor | None, bool]] = {}
    layers: list[Layer] = []
    for call in calls:
        if isinstance(call, WeightedSum):
            layers.append(_kept_weights(call, index, keep.to(call.weights.device)))
            continue
        mine = keep.to(call.q.device)
        key = call.causal if call.mask is None else (call.mask.data_ptr(), call.mask.shape, call.mask.stride())
        if key not in reduced:
            reduced[key] = _reduced_mask(call, index, mine)
        mask, causal = reduced[key]
        q, k = _kept_rows(call.q, index, mine), _kept_rows(call.k, index, mine)
        layers.append(AttentionCall(call.module, q, k, call.scale, mask, causal, _gradient(call, index, mine)))
    return tuple(layers)


def _kept_weights(call: WeightedSum, index: int, keep: torch.Tensor) -> AttentionWeights:
    weights = call.weights[index]
    if not keep.all():
        weights = weights[:, keep]
        if (weights[..., ~keep] > _NEGLIGIBLE).any():
            raise ValueError(f"{call.module} attends to padding: it gives weight to what attention_mask hides")
        weights = weights[..., keep]
    return AttentionWeights(call.module, weights, captured=True, gradient=_gradient(call, index, keep))


def _gradient(call: Call, index: int, keep: torch.Tensor) -> WeightsGradient | None:
    if call.v is None or call.gradient is None:
        return None
    return WeightsGradient(_kept_rows(call.gradient, index, keep), _kept_rows(call.v, index, keep))


def _kept_rows(x: torch.Tensor, index: int, keep: torch.Tensor) -> torch.Tensor:
    """(head, token, dim) of one example among its kept tokens."""
    return x[index] if keep.all() else x[index][:, keep]


def _reduced_mask(call: FusedCall, index: int, keep: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """(mask, causal) among the kept tokens of one example; a mask that hides nothing, or just the future, is None."""
    if call.mask is None:
        if not keep.all() and not (call.causal and keep.long().diff().le(0).all()):
            raise ValueError(f"{call.module} attends to padding: the model was given no mask that hides it")
        return None, call.causal
    mask = call.mask.expand(call.q.shape[0], -1, -1, -1)[index]
    if _allowed(mask).expand(-1, len(keep), -1)[:, keep][..., ~keep].any():
        raise ValueError(f"{call.module} attends to padding: its mask shows what attention_mask hides")
    mask = mask[..., keep]
    if mask.shape[1] > 1:
        mask = mask[:, keep]
    allowed = _allowed(mask)
    if mask.dtype != torch.bool:
        if bool((allowed & (mask != 0)).any()):
            return mask, False
        mask = allowed
    if mask.all():
        return None, False
    count = mask.shape[-1]
    past = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()
    if count > 1 and mask.shape[1] == count and bool((mask == past).all()):
        return None, True
    return mask, False


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > HIDDEN
