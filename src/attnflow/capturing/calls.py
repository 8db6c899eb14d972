"""The calls by which models attend, in one form: fused kernels with their arguments, or ready weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F

from attnflow.layers import AttentionCall

# What a call's output may differ from weights times values, as a share of the largest: rounding in its precision.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_ROWS_CHECKED = 8


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call of a fused kernel over a batch.

    Shapes: q (batch, head, query, dim); k, v (batch, head, key, dim); mask broadcastable to (batch, head, query, key),
    True where attention is allowed if boolean, else added to the logits; gradient, of the target with respect to the
    weighted values, (batch, head, query, dim). cross: whether the
    keys are known to be of another stream. out_projection: what joined the heads before the call returned.
    """

    module: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    scale: float
    mask: torch.Tensor | None
    causal: bool
    cross: bool = False
    out_projection: torch.Tensor | None = None
    gradient: torch.Tensor | None = None

    @property
    def extent(self) -> tuple[int, int, int]:
        """(batch, query, key)."""
        return self.q.shape[0], self.q.shape[2], self.k.shape[2]

    def example(self, index: int) -> AttentionCall:
        """The call of one example, padding and all."""
        mask = None if self.mask is None else self.mask.expand(self.q.shape[0], -1, -1, -1)[index]
        return AttentionCall(self.module, self.q[index], self.k[index], self.scale, mask, self.causal)

    def with_gradient(self, gradient: torch.Tensor) -> FusedCall:
        """The call with the gradient with respect to what it returned."""
        if self.out_projection is not None:
            tokens_first = gradient if gradient.ndim == 3 else gradient[:, None]
            heads = (tokens_first @ self.out_projection.detach()).unflatten(-1, (self.q.shape[1], -1))
            return replace(self, gradient=heads.permute(1, 2, 0, 3))
        return replace(self, gradient=_four_axes(gradient))


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """Values multiplied by weights that a model computed itself.

    Shapes: weights (batch, head, query, key); v (batch, head, key, dim); gradient as in `FusedCall`.
    """

    module: str
    weights: torch.Tensor
    v: torch.Tensor | None
    gradient: torch.Tensor | None = None
    cross: ClassVar[bool] = False

    @property
    def extent(self) -> tuple[int, int, int]:
        """(batch, query, key)."""
        return self.weights.shape[0], self.weights.shape[2], self.weights.shape[3]

    def with_gradient(self, gradient: torch.Tensor) -> WeightedSum:
        """The call with the gradient with respect to what it returned."""
        return replace(self, gradient=gradient.reshape(*self.weights.shape[:3], -1))


@dataclass(frozen=True, eq=False)
class LeftOut:
    """A call of a layer that was not asked for: that it was made, and nothing of what it holds. As in `FusedCall`."""

    module: str
    extent: tuple[int, int, int]
    cross: bool = False


Kept: TypeAlias = FusedCall | WeightedSum
Call: TypeAlias = Kept | LeftOut


def from_sdpa(
    module: str,
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> FusedCall:
    """The call as torch documents it; without a head axis, or without a batch axis, those axes have size 1."""
    refuse_dropout(module, dropout_p)
    if query.ndim not in (2, 3, 4):
        raise ValueError(
            f"{module}: attention over tensors of shape {tuple(query.shape)}; expected (batch, head, token, dim)"
        )
    q, k, v = (_four_axes(x.detach()) for x in (query, key, value))
    if attn_mask is not None:
        attn_mask = _four_axes(attn_mask.detach(), head_axis=query.ndim == 4)
    call = FusedCall(module, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, attn_mask, is_causal)
    _check_reproduces(call, v, _four_axes(output.detach())[0])
    return call


def _four_axes(x: torch.Tensor, *, head_axis: bool = False) -> torch.Tensor:
    """(token, dim), (batch, token, dim) or, if it has a head axis, (head, token, dim), as (batch, head, token, dim)."""
    if x.ndim == 3:
        return x[None] if head_axis else x[:, None]
    return x if x.ndim == 4 else x[None, None]


def from_multi_head(
    module: str,
    output: tuple[torch.Tensor, torch.Tensor | None],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> FusedCall:
    """The call inside nn.MultiheadAttention: tokens first (token, batch, dim), before the input projections.

    `is_causal` is only a hint that `attn_mask` is causal, so the mask alone decides.
    """
    refuse_dropout(module, dropout_p, training)
    if bias_k is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise ValueError(
            f"{module}: nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys attends to keys that are "
            "no tokens, which the attention graph has no place for"
        )
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None  # torch's own contract for this call
        weights = in_proj_weight.chunk(3)
    biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)

    def heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x = F.linear(x if x.ndim == 3 else x[:, None], weight, bias).detach()
        return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)

    q, k, v = (
        heads(x, weight, bias)  # pyright: ignore[reportArgumentType]
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask = _multi_head_mask(attn_mask, key_padding_mask, batch=q.shape[0], heads=num_heads)
    cross = query is not key and not torch.equal(query, key)
    call = FusedCall(module, q, k, v, q.shape[-1] ** -0.5, mask, False, cross, out_proj_weight)
    first = output[0] if output[0].ndim == 2 else output[0][:, 0]
    _check_reproduces(
        call,
        v,
        first.detach(),
        lambda heads: F.linear(heads.transpose(0, 1).flatten(1), out_proj_weight, out_proj_bias),
    )
    return call


def _multi_head_mask(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, *, batch: int, heads: int
) -> torch.Tensor | None:
    """nn.MultiheadAttention's two masks, where True means hidden, as one where True means allowed (or one to add)."""
    masks: list[torch.Tensor] = []
    if attn_mask is not None:
        masks.append(attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask.reshape(batch, 1, 1, -1))
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~torch.stack(torch.broadcast_tensors(*masks)).any(0)
    added = [mask.float().masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask for mask in masks]
    return added[0] if len(added) == 1 else added[0] + added[1]


def given_weights(module: str, weights: torch.Tensor, batch: int) -> WeightedSum:
    """Weights (batch, head, query, key), or without the head axis, that the caller says are attention.

    Their gradient is that of a target with respect to themselves, which is dO V^T for values that are the identity.

    Raises ValueError for another shape, and for weights that are negative or not finite.
    """
    if not isinstance(weights, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"weights= gave a {type(weights).__name__} for {module!r}; expected a tensor, or None")
    if weights.ndim not in (3, 4) or weights.shape[0] != batch:
        raise ValueError(
            f"weights= gave a tensor of shape {tuple(weights.shape)} for {module!r}; expected (batch, head, query, "
            f"key) or (batch, query, key) with a batch of {batch}"
        )
    seen = weights.detach()
    if not bool((seen.isfinite() & (seen >= 0)).all()):
        raise ValueError(f"weights= gave weights for {module!r} that are negative or not finite: are they logits?")
    seen = seen if seen.ndim == 4 else seen[:, None]
    keys = seen.shape[-1]
    identity = torch.eye(keys, dtype=seen.dtype, device=seen.device).expand(*seen.shape[:2], keys, keys)
    return WeightedSum(module, seen, identity)


def refuse_dropout(module: str, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    """Raise ValueError for a dropout of attention weights (the arguments of torch.nn.functional.dropout)."""
    if p > 0 and training:
        raise ValueError(
            f"{module} drops attention weights at random (dropout {p:g}): the model is in training mode; call "
            "model.eval() first"
        )


def _check_reproduces(
    call: FusedCall,
    v: torch.Tensor,
    output: torch.Tensor,
    project: Callable[[torch.Tensor], torch.Tensor] = lambda heads: heads,
) -> None:
    """Raise ValueError unless weights times values, for a few queries of the first example, give the call's output.

    v: (batch, head, key, dim). output: of the first example, (head, query, dim), or (query, dim) after `project` joined
    the heads.
    """
    rows = torch.linspace(0, call.q.shape[2] - 1, _ROWS_CHECKED, device="cpu").long().unique().tolist()
    first = call.example(0)
    values = v[0].repeat_interleave(call.q.shape[1] // v.shape[1], dim=0)
    weighted = first.attention(rows) @ values.to(torch.promote_types(values.dtype, torch.float32))
    expected = project(weighted.to(values.dtype)).detach()
    # A query that may attend to nothing has no weights, and what a kernel makes of it is its own affair.
    seen = output[..., rows, :].to(expected.dtype)
    difference, scale = (float(x.abs().nan_to_num(0).max()) for x in (seen - expected, torch.cat([seen, expected])))
    if difference > _ROUNDING.get(output.dtype, 1e-3) * scale:
        raise ValueError(
            f"{call.module}: the recorded attention weights times the values do not give what the call returned (off "
            f"by {difference:.2g}); its kernel does something that capture does not know"
        )
