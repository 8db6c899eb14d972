"""What an edge weighs: one function per idea, and `EDGES`, their table.

A function takes one attention call of a model and some of its queries, and returns the edges (head or 1, query, key)
from these queries to the keys. Where a layer stands in a larger graph, how heads are fused, and what a position keeps
of itself beside the edges is for `mixing` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from attnflow import contributions
from attnflow.conserved import conserved, entering
from attnflow.layers import AttentionLike, Weigh

if TYPE_CHECKING:
    import torch

# Queries whose gradients are looked at together, where all of them are.
_ROWS = 256

# What a trace must hold for some edges: gradients of a target, `capture(..., target=)`, also of the score that each
# layer gives, `capture(..., at_each_layer=True)`; the values, the block around each call, or the relevance that the
# block carries, `capture(..., keep=)`.
Need: TypeAlias = Literal["gradient", "gradient at each layer", "values", "block", "relevance"]

# What a position keeps of itself: the weight r of the identity in (1 - r) W + r I, which "measured" takes from the
# block around attention, query by query (`contributions.kept_share`); or "add" for W + I.
Residual: TypeAlias = float | Literal["add", "measured"]


@dataclass(frozen=True)
class Edges:
    """One row of the table.

    weigh: the function. formula: A is attention, dA its gradient for the target, + is clamped at 0. residual: what a
    position keeps of itself unless told otherwise. needs: what a trace must hold. shares: whether the mean over heads
    has rows that sum to 1, as attention does: then copies of a position have the mean of their edges, and rows that no
    longer sum to 1 are divided by their sum before a residual is mixed in. signed: whether an edge may be negative.
    row_normalised: whether rows are divided by their sum unless told otherwise. heads: whether each head has its own.
    flow: whether edges are what was carried, a flow already, and no weights or capacities.
    """

    weigh: Weigh
    formula: str
    source: str
    residual: Residual
    needs: frozenset[Need] = field(default_factory=frozenset[Need])
    shares: bool = False
    signed: bool = False
    row_normalised: bool = False
    heads: bool = True
    flow: bool = False


def attention(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The model's own weights A; rows sum to 1."""
    return call.attention(queries)


def uniform(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """Uniform attention: 1 / n for the n keys that any head lets a query see, whatever the model prefers among them."""
    import torch

    visible = call.visible(queries)
    return visible.to(torch.float64 if visible.device.type != "mps" else torch.float32) / visible.sum(
        -1, keepdim=True
    ).clamp_min(1)


def gradient(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The gradient of the target with respect to the weights, at 0 or more; none to keys that a query may not see."""
    return _gradient(call, queries).clamp_min(0) * call.visible(queries)


def gradient_at_layer(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The same of the target's score as the layer's own output gives it, in the place of the last block's output."""
    return _known(call).of(queries, at_layer=True).clamp_min(0) * call.visible(queries)


def gradient_x_attention(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """Attention times its gradient at 0 or more: by how much each weight speaks for the target, to first order."""
    return signed_gradient_x_attention(call, queries).clamp_min(0)


def signed_gradient_x_attention(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """Attention times its gradient: for the target where positive, against it where negative."""
    return call.attention(queries) * _gradient(call, queries)


def size_of_gradient_x_attention(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The size of attention times its gradient, after the mean over heads, in which they may cancel."""
    return signed_gradient_x_attention(call, queries).mean(0, keepdim=True).abs()


def gradient_weighted_heads(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """Attention of each head times heads * |dA| of the head / the sum of |dA| over heads, |.| the Euclidean norm.

    So their mean is the sum over heads weighted by gradients. Where no gradient is, heads count alike.
    """
    sizes = _norms(call)
    shares = sizes * len(sizes) / sizes.sum() if bool(sizes.sum() > 0) else sizes.new_ones(len(sizes))
    weights = call.attention(queries)
    return weights * shares.to(weights)[:, None, None]


def _norms(call: AttentionLike) -> torch.Tensor:
    """(head,): the Euclidean norm of the gradient of each head over all that its queries may see."""
    import torch

    rows = range(call.shape[1])
    parts = [list(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
    squares = [(_gradient(call, part) * call.visible(part)).double().square().sum((1, 2)) for part in parts]
    return torch.stack(squares).sum(0).sqrt()


def _gradient(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    return _known(call).of(queries)


def _known(call: AttentionLike):
    assert call.gradient is not None  # `attention_graph` refuses traces without
    return call.gradient


def of_block(weigh: Weigh, formula: str, source: str) -> Edges:
    """A row of edges of a whole layer, that hold what a position keeps of itself already, if they hold it at all."""
    return Edges(weigh, formula, source, 0.0, frozenset({"block"}), row_normalised=True, heads=False)


_GRADIENT: frozenset[Need] = frozenset({"gradient"})
_RELEVANCE: frozenset[Need] = frozenset({"gradient", "relevance"})

EDGES: dict[str, Edges] = {
    "attention": Edges(attention, "A", "Vaswani et al. 2017", 0.5, shares=True),
    "uniform": Edges(uniform, "1 / visible keys", "attnflow", 0.5, shares=True),
    "gradient": Edges(gradient, "dA+", "Azarkhalili & Libbrecht 2025", 0.0, _GRADIENT),
    "gradient-at-layer": Edges(
        gradient_at_layer,
        "(dA of the layer's own score)+",
        "Bousselham et al. 2025 (LeGrad)",
        0.0,
        frozenset({"gradient", "gradient at each layer"}),
    ),
    "gradient-x-attention": Edges(gradient_x_attention, "(A dA)+", "Chefer et al. 2021 (ICCV)", "add", _GRADIENT),
    "signed-gradient-x-attention": Edges(
        signed_gradient_x_attention, "A dA", "Hao et al. 2021, at the input itself", "add", _GRADIENT, signed=True
    ),
    "size-of-gradient-x-attention": Edges(
        size_of_gradient_x_attention, "abs(mean over heads of A dA)", "attnflow", "add", _GRADIENT
    ),
    "gradient-weighted-heads": Edges(
        gradient_weighted_heads, "A weighted by the norm of dA", "Jo et al. 2025 (GMAR)", 0.5, _GRADIENT, shares=True
    ),
    "conserved-relevance": Edges(
        conserved,
        "sum over heads of A dA, and what goes past",
        "after Ali et al. 2022",
        0.0,
        _RELEVANCE,
        signed=True,
        heads=False,
        flow=True,
    ),
    "entering-relevance": Edges(
        entering, "x dx of what enters the block", "after Ali et al. 2022", 0.0, _RELEVANCE, signed=True, heads=False
    ),
    "value-norm": of_block(contributions.value_norm, "norm of the sum over heads of A f(x)", "Kobayashi et al. 2020"),
    "value-norm-with-residual": of_block(
        contributions.value_norm_with_residual, "norm of the sum over heads of A f(x) + I x", "Kobayashi et al. 2021"
    ),
    "value-norm-through-norm": of_block(
        contributions.value_norm_through_norm, "norm of LN(sum over heads of A f(x) + I x)", "Kobayashi et al. 2021"
    ),
    "globenc": of_block(
        contributions.globenc, "norm of LN(LN(sum over heads of A f(x) + I x))", "Modarressi et al. 2022 (GlobEnc)"
    ),
    "alti": of_block(contributions.alti, "(abs(y) - abs(y - T(x)))+", "Ferrando et al. 2022 (ALTI)"),
    "value-zeroing": of_block(contributions.value_zeroing, "1 - cos(y, y without v)", "Mohebbi et al. 2023"),
}
