"""What each key gives to a query's vector: edges that look at values, at the block around attention, and at norms.

The sum over heads of A_h(i, j) f_h(x_j), with f_h the value and output projections of a head, is what key j adds to
the stream at query i. These vectors (query, key, width) never exist all at once. Lengths come from Gram matrices
(head, head) of each key, and what needs the vectors themselves takes some keys at a time.

None of these edges sees what the MLP does, or why the weights are what they are: queries and keys have no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from attnflow.block import Block, Norm
from attnflow.layers import AttentionLike

if TYPE_CHECKING:
    import torch

# Numbers in one tile of vectors: 32 MB in single precision.
TILE = 2**23


def value_norm(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The length of what a key adds: |sum over heads of A f(x_j)| (Kobayashi et al. 2020).

    As there the bias of the output projection is nobody's. Cost: O(n^2 heads^2). It cannot see what a position keeps of
    itself.
    """
    return _lengths(call, queries, 0, kept=False)


def value_norm_with_residual(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The same with the stream x_i added at j = i: |sum A f(x_j) + [i = j] x_i| (Kobayashi et al. 2021).

    Cost: as `value_norm`. It cannot see a norm behind the addition.
    """
    return _lengths(call, queries, 0, kept=True)


def value_norm_through_norm(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The same through the norm behind the addition, its scale taken as given (Kobayashi et al. 2021).

    |w * c(v)| / deviation of the sum, v the vector of `value_norm_with_residual`, c taking the mean off; the norm's
    bias is nobody's. An RMS norm takes no mean off. Cost: as `value_norm`.

    Raises ValueError for a model without such a norm (pre-norm), where `value_norm_with_residual` is all there is.
    """
    return _lengths(call, queries, 1, kept=True)


def globenc(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The same through the norm behind the MLP too, the MLP itself left out (Modarressi et al. 2022, GlobEnc).

    Both scales are those that the model had, with what its MLP added. Cost: as `value_norm`.

    Raises ValueError for a model without both norms.
    """
    return _lengths(call, queries, 2, kept=True)


def alti(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """By how much a key brings the output nearer: (|y_i| - |y_i - T_i(x_j)|)+ (Ferrando et al. 2022: ALTI).

    |.| is the sum of sizes. T_i(x_j) is the vector of `value_norm_through_norm`, or of `value_norm_with_residual` in a
    pre-norm model, and y_i what comes out of the addition and its norm, biases and all. Cost: O(n^2 heads width).
    """
    import torch

    block = _block(call)
    norms = 1 if block.norm is not None else 0
    total = block.total(queries)
    y = total if block.norm is None else block.norm(total)
    scale = block.scales(queries, norms).to(y)
    own, stream = _own(call, queries), block.through(block.stream[queries].to(y), norms) * scale
    sizes, nearer = y.abs(), y.new_zeros(call.shape[2], len(queries))
    for start, rest in _without_each(call, queries, y, norms, scale):
        here = (own >= start) & (own < start + len(rest))
        rest[own[here] - start, here.nonzero().flatten()] -= stream[here]
        # Number by number, since their sums are large and near each other.
        nearer[start : start + len(rest)] = torch.sub(sizes, rest.abs_(), out=rest).sum(-1)
    return nearer.clamp_min_(0).mT[None]


def value_zeroing(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """How far the output turns when the value v_j is 0: 1 - cos(y_i, y_i without v_j) (Mohebbi et al. 2023).

    y_i is what comes out of the addition and its norm, which is computed again; there it is what comes out of the
    whole layer, MLP and all. It cannot see the stream, which is the same with and without: so through a layer of
    cross-attention all comes from the encoder, and none from what the decoder's positions held.

    With S the sum and d what key j adds, and L the linear part of the norm, y_i = s L(S) + bias becomes
    s' (L(S) - L(d)) + bias, so that all follows from |d|^2, and the products of d with three vectors of query i. Cost:
    O(n^2 heads (heads + dim)).
    """
    block, weights = _block(call), call.attention(queries).double()
    total = block.total(queries).double()
    norm = block.norm if block.norm is not None else Norm(None, None, 0.0, centred=False)
    linear = norm.linear(total)
    bias = total.new_zeros(total.shape[-1]) if norm.bias is None else norm.bias.to(total)

    def products(vectors: torch.Tensor) -> torch.Tensor:
        return _products(call, weights, norm.centre(norm.weighted(vectors)))  # L(d) with v is d with this of v

    size, of_bias, square = linear.square().sum(-1, keepdim=True), (linear @ bias)[:, None], bias.square().sum()
    by_linear = products(linear)
    rest = (size - 2 * by_linear + _squares(call, weights, len(block.norms[:1]))).clamp_min_(0)  # |L(S) - L(d)|^2
    rest_of_bias = of_bias - products(bias.expand_as(linear))
    was = now = total.new_ones(())
    if block.norm is not None:
        centred = norm.centre(total)
        spread = centred.square().sum(-1, keepdim=True) - 2 * _products(call, weights, centred)
        spread = (spread + _squares(call, weights, "centre")).clamp_min_(0)
        was, now = norm.scale(total), (spread / total.shape[-1] + norm.eps).rsqrt_()
    together = was * now * (size - by_linear) + was * of_bias + now * rest_of_bias + square
    before, after = (
        scale**2 * one + 2 * scale * other + square
        for scale, one, other in ((was, size, of_bias), (now, rest, rest_of_bias))
    )
    return (1 - together / (before * after).clamp_min(1e-300).sqrt()).clamp_min_(0)[None]


def kept_share(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """The measured residual in equal parts over the keys: each row sums to |kept| / (|kept| + |mixed|).

    kept: the stream with the query's own value; mixed: what all other keys add (after Kobayashi et al. 2021, who
    measure the ratio). Where queries are no keys, the stream alone is kept. Cost: O(n^2).
    """
    block = _block(call)
    others = block.added[queries].double()
    if block.bias is not None:
        others = others - block.bias
    kept = block.stream[queries].double()
    if block.own is not None:
        own = _own_value(call, queries, call.attention(queries))
        kept, others = kept + own, others - own
    kept, mixed = kept.norm(dim=-1), others.norm(dim=-1)
    share = kept / (kept + mixed).clamp_min(1e-300)
    return (share / call.shape[2])[None, :, None].expand(1, -1, call.shape[2])


def _lengths(call: AttentionLike, queries: list[int], norms: int, *, kept: bool) -> torch.Tensor:
    """(1, query, key): the length of what each key gives, through the linear part of some norms, by Gram matrices."""
    block = _block(call)
    if len(block.norms) < norms:
        which = "no norm behind the addition" if not block.norms else "no norm behind the addition of its MLP"
        raise ValueError(
            f"{call.name} has {which}, as in a pre-norm model, so that these edges are not defined; use "
            f"{'value-norm-with-residual' if not block.norms else 'value-norm-through-norm'}, or alti"
        )
    weights = call.attention(queries).double()
    lengths = _squares(call, weights, norms).sqrt_()
    if kept:
        own = _own_value(call, queries, weights) + block.stream[queries]
        lengths[range(len(queries)), _own(call, queries)] = block.through(own, norms).norm(dim=-1)
    return (lengths * block.scales(queries, norms))[None]


def _products(call: AttentionLike, weights: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """(query, key), float64: the products of what each key adds with one vector (query, width) of each query."""
    import torch

    against = torch.einsum("qw,whd->hqd", vectors, _block(call).weight.to(vectors))
    return (against @ _values(call).to(vectors).mT).mul_(weights).sum(0)


def _squares(call: AttentionLike, weights: torch.Tensor, through: int | Literal["centre"]) -> torch.Tensor:
    """(query, key), float64: the squared length of what each key adds, through what `_gram` says."""
    by_key = weights.permute(2, 1, 0)  # (key, query, head)
    return (by_key @ _gram(call, through)).mul_(by_key).sum(-1).clamp_min_(0).mT


@lru_cache(maxsize=2)
def _gram(call: AttentionLike, through: int | Literal["centre"]) -> torch.Tensor:
    """(key, head, head), float64: products of what the heads of one key would add at weight 1.

    through: so many norms' linear parts, or the first one's centring alone. All queries of a layer need the same, and
    they come some at a time, so that the last ones are kept.
    """
    import torch

    block, values = _block(call), _values(call)
    step = max(1, TILE // (2 * values.shape[0] * block.weight.shape[0]))
    grams: list[torch.Tensor] = []
    for start in range(0, values.shape[1], step):
        each = block.of_each_head(values[:, start : start + step].double())
        if through == "centre":
            each = each if block.norm is None else block.norm.centre(each)
        else:
            each = block.through(each, through)
        grams.append(each @ each.mT)
    return torch.cat(grams)


def _without_each(
    call: AttentionLike, queries: list[int], base: torch.Tensor, norms: int, scale: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """A base (query, width) minus scale (query, 1) times what each key gives: (key, query, width), some keys at a time.

    With each tile comes the number of its first key.
    """
    import torch

    block, values = _block(call), _values(call).to(base)
    weights = (call.attention(queries).to(base) * -scale).permute(2, 1, 0)
    step = max(1, TILE // (max(len(queries), len(values)) * base.shape[1]))
    for start in range(0, values.shape[1], step):
        each = block.through(block.of_each_head(values[:, start : start + step]), norms)
        yield start, torch.baddbmm(base.expand(len(each), -1, -1), weights[start : start + step], each)


def _own_value(call: AttentionLike, queries: list[int], attention: torch.Tensor) -> torch.Tensor:
    """(query, width), float64: what each query's own key adds to its stream."""
    own = _own(call, queries)
    weights = attention[:, range(len(queries)), own].double()
    return _block(call).projected(weights[..., None] * _values(call)[:, own].double())


def _own(call: AttentionLike, queries: list[int]) -> torch.Tensor:
    """(query,): the key at which each query stands."""
    own = _block(call).own
    if own is None:
        raise ValueError(
            f"the queries of {call.name} are none of its keys (cross-attention, or probes), so that what they keep of "
            "themselves has no edge there; use attention edges with residual='measured', or value-norm"
        )
    return own[queries]


def _values(call: AttentionLike) -> torch.Tensor:
    """(head, key, dim), heads that share their values repeated."""
    assert call.values is not None
    return call.values.repeat_interleave(call.shape[0] // len(call.values), 0)


def _block(call: AttentionLike) -> Block:
    assert call.block is not None  # `attention_graph` refuses traces without
    return call.block
