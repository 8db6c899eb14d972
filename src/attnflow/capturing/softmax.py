"""Attention that a model computes itself: a softmax whose result is multiplied with values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from attnflow.capturing.calls import WeightedSum, refuse_dropout

_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)
_MULTIPLY = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm)
# What models do to weights between the softmax and the values: cast, drop, mask, cut a sink's column off, reshape.
_FOLLOWED = (
    F.dropout,
    torch.Tensor.to,
    torch.Tensor.type_as,
    torch.Tensor.float,
    torch.Tensor.half,
    torch.Tensor.bfloat16,
    torch.Tensor.contiguous,
    torch.Tensor.clone,
    torch.Tensor.masked_fill,
    torch.Tensor.mul,
    torch.Tensor.__mul__,
    torch.mul,
    torch.Tensor.__getitem__,
    torch.Tensor.view,
    torch.Tensor.reshape,
    torch.Tensor.flatten,
    torch.Tensor.unflatten,
)


class WeightsByHand:
    """Follows the results of softmaxes over the last axis until they are multiplied with values.

    batch: the number of examples, which tells (batch * head, query, key) from (batch, query, key).
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        # By id; the tensors are kept, so that no id is given out twice.
        self._followed: dict[int, tuple[str, torch.Tensor]] = {}
        self._used: set[str] = set()

    def see(
        self, module: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> WeightedSum | None:
        """Take note of one call; the weights and where they were computed, if it multiplies values with them."""
        if func in _SOFTMAX:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if output.ndim > 2 and dim in (-1, output.ndim - 1):
                self._followed[id(output)] = (module, output)
            return None
        if not args or id(args[0]) not in self._followed or not isinstance(output, torch.Tensor):
            return None
        module, _ = self._followed[id(args[0])]
        if func is F.dropout:
            refuse_dropout(module, *args[1:], **kwargs)
        if func in _FOLLOWED:
            self._followed[id(output)] = (module, output)
        if func not in _MULTIPLY:
            return None
        self._used.add(module)
        weights = self._with_heads(args[0].detach())
        values = args[1].detach().expand(*args[0].shape[:-2], -1, -1)
        return WeightedSum(module, weights, values.reshape(*weights.shape[:2], *values.shape[-2:]))

    def unused(self) -> list[tuple[str, tuple[int, ...]]]:
        """The modules whose softmaxes were never multiplied with anything, and the shapes of these."""
        seen = self._followed.values()
        return [(module, tuple(weights.shape)) for module, weights in seen if module not in self._used]

    def _with_heads(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.ndim > 4:
            raise ValueError(f"attention weights of shape {tuple(weights.shape)}; expected (batch, head, query, key)")
        if weights.ndim == 4:
            return weights
        heads = weights.shape[0] // self._batch if weights.shape[0] % self._batch == 0 else 1
        return weights.unflatten(0, (-1, heads))
