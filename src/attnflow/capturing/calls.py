"""The calls by which models attend, in one form: fused kernels with their arguments, or ready weights.

Every tensor of a call has two outer axes before (query, dim), (key, dim) or (query, key). What they are, batch, heads,
windows, or several at once, is for `layout` to find out: models differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F

from attnflow.layers import AttentionCall, AttentionWeights, Carried, WeightsGradient

# What a call's output may differ from weights times values, as a share of the largest: rounding in its precision.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_ROWS_CHECKED = 8
# The same of what stands behind a call: a projection, an addition, a norm.
_BEHIND = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

# What to do about a model that is in training mode, or behaves so.
EVALUATE = "call model.eval() first; where that changes nothing, the module itself asks for training=True"

if TYPE_CHECKING:
    from attnflow.capturing.surroundings import Surroundings

# What a trace holds of every call beside its weights: its values, or these and the block around it; or the relevance
# that enters and leaves the block.
Keep: TypeAlias = Literal["values", "block", "relevance"]

# Where rows of a call stand along its two outer axes.
Rows: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class OutProjection:
    """What joined the heads before a call returned: weight (width, heads * dim), bias (width)."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def joined(self, heads: torch.Tensor) -> torch.Tensor:
        """(head, query, dim) as (query, width)."""
        return F.linear(heads.transpose(0, 1).flatten(1), self.weight, self.bias)

    def parted(self, gradient: torch.Tensor, heads: int) -> torch.Tensor:
        """The gradient of (query, batch, width), or without the batch, as that of (batch, head, query, dim)."""
        tokens_first = gradient if gradient.ndim == 3 else gradient[:, None]
        return (tokens_first @ self.weight).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class FusedCall:
    """One call of a fused kernel.

    Shapes: q (outer, outer, query, dim); k, v (outer, fewer or as many, key, dim), where fewer are grouped-query
    attention; mask broadcastable to (outer, outer, query, key), True where attention is allowed if boolean, else added
    to the logits; gradient, of the target with respect to the weighted values, (outer, outer, query, dim).
    at_layer: the same of the score that the layer's own output gives, if that was asked for. keeps_values: whether the
    layers that are made of it hold their values. around, carried: the block, and the relevance of all rows of the
    stream beside it, if they were asked for.
    """

    module: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    scale: float
    mask: torch.Tensor | None
    causal: bool
    out_projection: OutProjection | None = None
    gradient: torch.Tensor | None = None
    at_layer: torch.Tensor | None = None
    keeps_values: bool = False
    around: Surroundings | None = None
    carried: Carried | None = None

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """(outer, outer, query, key)."""
        return *self.q.shape[:3], self.k.shape[2]  # pyright: ignore[reportReturnType]

    def take(self, rows: Rows) -> AttentionCall:
        """Some rows of the outer axes as the heads of one layer, padding and all."""
        group = self.q.shape[1] // self.k.shape[1]
        shared = list(dict.fromkeys((first, second // group) for first, second in rows))
        repeats = group if len(shared) * group == len(rows) else 1
        of_keys = shared if repeats == group else [(first, second // group) for first, second in rows]
        gradient = None
        if self.gradient is not None and self.v is not None:
            gradient = WeightsGradient(_take(self.gradient, rows), _take(self.v, of_keys), _taken(self.at_layer, rows))
        mask = None if self.mask is None else _take(self.mask, rows)
        q, k = _take(self.q, rows), _take(self.k, of_keys)
        values = _take(self.v, of_keys) if self.keeps_values and self.v is not None else None
        block = None if self.around is None else self.around.take(rows)
        return AttentionCall(
            self.module, q, k, self.scale, mask, self.causal, gradient, False, values, block, self.carried
        )

    def rows_of(self, output: torch.Tensor) -> torch.Tensor:
        """What the call returned as (outer, outer or 1, query, dim)."""
        if self.out_projection is None:
            return output.reshape(*self.q.shape[:3], -1)
        return output.transpose(0, 1)[:, None] if output.ndim == 3 else output[None, None]

    def with_gradient(self, gradient: torch.Tensor, *, at_layer: bool = False) -> FusedCall:
        """The call with the gradient with respect to what it returned."""
        joined = self.out_projection
        own = self.rows_of(gradient) if joined is None else joined.parted(gradient, self.q.shape[1])
        return replace(self, at_layer=own) if at_layer else replace(self, gradient=own)


@dataclass(frozen=True, eq=False)
class WeightedSum:
    """Values multiplied by weights that a model computed itself.

    Shapes: weights (outer, outer, query, key); v (outer, outer, key, dim); gradient as in `FusedCall`. arrange: from
    what the multiplication returned to (outer, outer, query, dim). at_layer, keeps_values, around, carried: as in
    `FusedCall`.
    """

    module: str
    weights: torch.Tensor
    v: torch.Tensor | None
    arrange: Callable[[torch.Tensor], torch.Tensor]
    gradient: torch.Tensor | None = None
    at_layer: torch.Tensor | None = None
    keeps_values: bool = False
    around: Surroundings | None = None
    carried: Carried | None = None

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """(outer, outer, query, key)."""
        return self.weights.shape  # pyright: ignore[reportReturnType]

    def take(self, rows: Rows) -> AttentionWeights:
        """As `FusedCall.take`."""
        gradient = None
        if self.gradient is not None and self.v is not None:
            gradient = WeightsGradient(_take(self.gradient, rows), _take(self.v, rows), _taken(self.at_layer, rows))
        values = _take(self.v, rows) if self.keeps_values and self.v is not None else None
        block = None if self.around is None else self.around.take(rows)
        weights = _take(self.weights, rows)
        return AttentionWeights(self.module, weights, True, gradient, False, values, block, self.carried)

    def rows_of(self, output: torch.Tensor) -> torch.Tensor:
        """What the call returned as (outer, outer, query, dim)."""
        return self.arrange(output)

    def with_gradient(self, gradient: torch.Tensor, *, at_layer: bool = False) -> WeightedSum:
        """The call with the gradient with respect to what it returned."""
        own = self.rows_of(gradient)
        return replace(self, at_layer=own) if at_layer else replace(self, gradient=own)


@dataclass(frozen=True, eq=False)
class LeftOut:
    """A call of a layer that was not asked for: that it was made, and nothing of what it holds. As in `FusedCall`."""

    module: str
    extent: tuple[int, int, int, int]


Kept: TypeAlias = FusedCall | WeightedSum
Call: TypeAlias = Kept | LeftOut


def _taken(x: torch.Tensor | None, rows: Rows) -> torch.Tensor | None:
    return None if x is None else _take(x, rows)


def _take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Some rows of the two outer axes as one axis, a view of equally spaced ones. An axis of 1 is any number."""
    firsts, seconds = ([row[axis] if x.shape[axis] > 1 else 0 for row in rows] for axis in (0, 1))
    if len(set(firsts)) == 1:
        return x[firsts[0]][_span(seconds)]
    if len(set(seconds)) == 1:
        return x[:, seconds[0]][_span(firsts)]
    return x[firsts, seconds]


def _span(indices: list[int]) -> slice | list[int]:
    """Indices as a slice where they are equally spaced; the same one again and again stands for any number."""
    start, step = indices[0], indices[1] - indices[0] if len(indices) > 1 else 1
    if len(set(indices)) == 1:
        return slice(start, start + 1)
    even = step > 0 and indices == list(range(start, start + step * len(indices), step))
    return slice(start, indices[-1] + 1, step) if even else indices


def from_sdpa(
    module: str,
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
    q, k, v = (_two_outer(x.detach()) for x in (query, key, value))
    if attn_mask is not None:
        mask = attn_mask.detach()
        mask = mask[(None,) * (query.ndim - mask.ndim)]
        attn_mask = _two_outer(mask.expand(*query.shape[:-2], *mask.shape[-2:]) if query.ndim > 4 else mask)
    return FusedCall(module, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, attn_mask, is_causal)


def _two_outer(x: torch.Tensor) -> torch.Tensor:
    """A tensor with two axes before its last two: further ones flattened into the first, missing ones of size 1."""
    if x.ndim > 4:
        return x.flatten(0, x.ndim - 4)
    return x if x.ndim == 4 else x[:, None] if x.ndim == 3 else x[None, None]


def from_multi_head(
    module: str,
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
    mask = multi_head_mask(attn_mask, key_padding_mask, batch=q.shape[0], heads=num_heads)
    projection = OutProjection(out_proj_weight.detach(), None if out_proj_bias is None else out_proj_bias.detach())
    return FusedCall(module, q, k, v, q.shape[-1] ** -0.5, mask, False, projection)


def multi_head_mask(
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


def given_weights(module: str, weights: torch.Tensor) -> WeightedSum:
    """Weights (batch, head, query, key), or without the head axis, that the caller says are attention.

    Their gradient is that of a target with respect to themselves, which is dO V^T for values that are the identity.

    Raises ValueError for another shape, and for weights that are negative or not finite.
    """
    if not isinstance(weights, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"weights= gave a {type(weights).__name__} for {module!r}; expected a tensor, or None")
    if weights.ndim not in (3, 4):
        raise ValueError(
            f"weights= gave a tensor of shape {tuple(weights.shape)} for {module!r}; expected (batch, head, query, "
            "key) or (batch, query, key)"
        )
    seen = weights.detach()
    if not bool((seen.isfinite() & (seen >= 0)).all()):
        raise ValueError(f"weights= gave weights for {module!r} that are negative or not finite: are they logits?")
    seen = seen if seen.ndim == 4 else seen[:, None]
    keys = seen.shape[-1]
    identity = torch.eye(keys, dtype=seen.dtype, device=seen.device).expand(*seen.shape[:2], keys, keys)
    return WeightedSum(module, seen, identity, lambda gradient: gradient if gradient.ndim == 4 else gradient[:, None])


def refuse_dropout(module: str, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    """Raise ValueError for a dropout of attention weights (the arguments of torch.nn.functional.dropout)."""
    if p > 0 and training:
        raise ValueError(f"{module or 'the model'} drops attention weights at random (dropout {p:g}); {EVALUATE}")


def tolerance(dtype: torch.dtype) -> float:
    """What numbers behind a call may differ from those computed again, as a share of the largest."""
    return _BEHIND.get(dtype, 1e-4)


def check_reproduces(call: Kept, output: torch.Tensor) -> None:
    """Raise ValueError unless weights times values give what a call returned.

    Of a fused call a few queries at both ends of the first outer axis are looked at. Weights by hand are what the model
    multiplied itself.
    """
    if isinstance(call, WeightedSum):
        return
    assert call.v is not None
    output = output.detach()
    rows = torch.linspace(0, call.q.shape[2] - 1, _ROWS_CHECKED, device="cpu").long().unique().tolist()
    for first in {0, call.q.shape[0] - 1}:
        heads = call.take([(first, second) for second in range(call.q.shape[1])])
        values = call.v[first].repeat_interleave(call.q.shape[1] // call.v.shape[1], dim=0)
        weighted = (heads.attention(rows) @ values.to(torch.promote_types(values.dtype, torch.float32))).to(
            values.dtype
        )
        if call.out_projection is not None:
            expected = call.out_projection.joined(weighted)
            seen = output[rows, first] if output.ndim == 3 else output[rows]
        else:
            expected, seen = weighted, output.reshape(*call.q.shape[:3], -1)[first][:, rows]
        # A query that may attend to nothing has no weights, and what a kernel makes of it is its own affair.
        seen = seen.to(expected.dtype)
        difference, scale = (float(x.abs().nan_to_num(0).max()) for x in (seen - expected, torch.cat([seen, expected])))
        if difference > _ROUNDING.get(call.q.dtype, 1e-3) * scale:
            raise ValueError(
                f"{call.module}: the recorded attention weights times the values do not give what the call returned "
                f"(off by {difference:.2g}); its kernel does something that capture does not know"
            )
