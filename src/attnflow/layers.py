"""The layers of a trace: attention as the arguments of a call, as ready weights, or placed in a larger graph.

Arrays are ordered (head, query, key).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from attnflow.block import Block

if TYPE_CHECKING:
    import torch

# A mask is added to logits; exp(-1e4) is 0 in every precision, and -65504 is what half precision models use.
HIDDEN = -1e4


@dataclass(frozen=True, eq=False)
class WeightsGradient:
    """The gradient of a target with respect to one layer's attention weights, kept as its two factors.

    The weighted values are W V, so dW = dO V^T per head, exactly, with no graph through the weights.
    Shapes: output (head, query, dim), the gradient dO with respect to the weighted values; v (head, key, dim).
    at_layer (head, query, dim): as output, of the score that the layer's own output gives, if that was asked for.
    """

    output: torch.Tensor
    v: torch.Tensor
    at_layer: torch.Tensor | None = None

    def of(self, queries: slice | list[int], *, at_layer: bool = False) -> torch.Tensor:
        """The gradient (head, query, key) for some queries, in float32 or better."""
        import torch

        output = self.at_layer if at_layer else self.output
        assert output is not None  # `attention_graph` refuses traces without
        precision = torch.promote_types(self.v.dtype, torch.float32)
        v = self.v.to(precision).repeat_interleave(output.shape[0] // self.v.shape[0], dim=0)
        return output[:, queries].to(precision) @ v.mT


@dataclass(frozen=True, eq=False)
class Carried:
    """The relevance of a target, token by token (position,), in units of its score: x times its gradient under rules.

    entering: of what enters the block around a call. leaving: of what leaves it, which enters the block above. biases:
    what biases took of the latter before the queries handed it on to keys: those added behind the call. key_biases:
    what the others, added before the call, took at the keys. (Those inside nn.MultiheadAttention count as behind it.)
    """

    entering: torch.Tensor
    leaving: torch.Tensor
    biases: torch.Tensor
    key_biases: torch.Tensor


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention call, kept instead of its weights: memory grows with n, not with n squared.

    The weights are softmax(scale * q k^T + mask), head by head, computed on the device of `q` when asked for.

    Shapes: q (head, query, dim); k (head, key, dim), where fewer key heads than query heads mean grouped-query
    attention; mask broadcastable to (head, query, key), True where attention is allowed if boolean, else added to
    the logits. `causal` lets query i see keys 0 to i. gradient: of the trace's target, if it has one.
    pools: whether the queries are learned probes that gather the layer below, and no positions of it.
    values (head or fewer, key, dim), block, carried: what the weights are multiplied with, what becomes of it, and the
    relevance that the block carries, if they were asked for.
    """

    name: str
    q: torch.Tensor
    k: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None
    causal: bool = False
    gradient: WeightsGradient | None = None
    pools: bool = False
    values: torch.Tensor | None = None
    block: Block | None = None
    carried: Carried | None = None

    left_out: tuple[int, ...] = field(default=(), init=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, query, key)."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The attention weights (head, query, key) of some queries, in float32 or better; rows sum to 1."""
        import torch

        precision = torch.promote_types(self.q.dtype, torch.float32)
        wanted = torch.arange(self.shape[1], device=self.q.device)[queries]
        count = self.shape[2]
        # Of a causal layer only the keys that the last of the queries sees are looked at: half the work over all tiles.
        seen = min(count, int(wanted.max()) + 1) if self.causal and len(wanted) else count
        q = (self.q[:, wanted].to(precision) * self.scale).unflatten(0, (self.k.shape[0], -1))
        k = self.k[:, :seen].to(precision)
        logits = (q.flatten(1, 2) @ k.mT).view(self.q.shape[0], len(wanted), seen)
        if self.mask is not None:
            mask = (self.mask[:, wanted] if self.mask.shape[1] > 1 else self.mask)[..., :seen]
            logits = logits.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        if self.causal:
            logits.masked_fill_(torch.arange(seen, device=logits.device) > wanted[:, None], float("-inf"))
        weights = logits.softmax(-1)
        return weights if seen == count else torch.nn.functional.pad(weights, (0, count - seen))

    def visible(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """Bool (1, query, key), True where any head lets a query attend."""
        import torch

        wanted = torch.arange(self.shape[1], device=self.q.device)[queries]
        keys = torch.arange(self.shape[2], device=self.q.device)
        allowed = (keys <= (wanted[:, None] if self.causal else len(keys)))[None]
        if self.mask is None:
            return allowed.expand(1, len(wanted), -1)
        mask = self.mask[:, wanted] if self.mask.shape[1] > 1 else self.mask
        return allowed & (mask if mask.dtype == torch.bool else mask > HIDDEN).any(0, keepdim=True)

    def edges(self, weigh: Weigh, queries: list[int], *, shares: bool) -> torch.Tensor:
        """As `Layer.edges`."""
        return weigh(self, queries)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Ready attention weights (head, query, key) of one layer.

    captured: whether a model computed them before our eyes, so that rows that do not sum to 1 are its way (a sink that
    takes a share and is left out), and not a mistake in an array that somebody gave. pools, values, block, carried: as
    in `AttentionCall`.
    """

    name: str
    weights: torch.Tensor
    captured: bool = False
    gradient: WeightsGradient | None = None
    pools: bool = False
    values: torch.Tensor | None = None
    block: Block | None = None
    carried: Carried | None = None

    left_out: tuple[int, ...] = field(default=(), init=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, query, key)."""
        head, query, key = self.weights.shape
        return head, query, key

    @property
    def causal(self) -> bool:
        """Whether the layer is square, of more than one position, and never looks ahead."""
        _, queries, keys = self.shape
        return queries == keys > 1 and not bool(self.weights.triu(1).any())

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The attention weights (head, query, key) of some queries, as they were given."""
        return self.weights[:, queries]

    def visible(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """Bool (1, query, key), True where any head of a query attends."""
        return (self.weights[:, queries] != 0).any(0, keepdim=True)

    def edges(self, weigh: Weigh, queries: list[int], *, shares: bool) -> torch.Tensor:
        """As `Layer.edges`."""
        return weigh(self, queries)


# One call of a model, and a function that weighs the edges (head or 1, query, key) of some of its queries.
AttentionLike: TypeAlias = AttentionCall | AttentionWeights
Weigh: TypeAlias = Callable[[AttentionLike, list[int]], "torch.Tensor"]


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a `PlacedLayer`: the positions of its queries and of its keys, in their order."""

    layer: AttentionLike
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PlacedLayer:
    """A layer of calls that each concern some positions of a larger graph.

    So stand the streams of an encoder-decoder in one joint graph, the windows of an image, the frames of a video, and
    calls that join two streams both ways at once. A position that is the query of no part has an identity row (it
    attends to itself alone), so that a product of such layers, or a flow through them, is the one through all streams.
    A position that is the query of several parts, such as a [CLS] that is copied into every frame, attends to the mean
    of what its copies attend to, as models average what the copies become (TimeSformer).

    parts: calls with as many heads each. size: of all positions.
    """

    parts: tuple[Part, ...]
    size: int

    @property
    def name(self) -> str:
        """The module's name."""
        return self.parts[0].layer.name

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, query, key)."""
        return self.parts[0].layer.shape[0], self.size, self.size

    @property
    def left_out(self) -> tuple[int, ...]:
        """The positions that are the query of no part, in order."""
        return tuple(sorted(set(range(self.size)).difference(*(part.queries for part in self.parts))))

    @property
    def causal(self) -> bool:
        """Whether all positions that ask are the last ones, behind a past of keys, and none looks ahead."""
        part, *others = self.parts
        if others:
            return False
        queries, keys = len(part.queries), len(part.keys)
        if part.keys != tuple(range(self.size)) or part.queries != part.keys[keys - queries :]:
            return False
        rows = sorted({0, (queries - 1) // 2})
        ahead = [part.layer.attention([row])[..., part.queries[row] + 1 :] for row in rows]
        return not any(bool(weights.any()) for weights in ahead)

    pools: bool = field(default=False, init=False)

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The weights (head, query, key) of some queries; those that are left out attend to themselves."""
        wanted = list(range(self.size))[queries] if isinstance(queries, slice) else queries
        return self.edges(lambda call, rows: call.attention(rows), wanted, shares=True)

    def edges(self, weigh: Weigh, queries: list[int], *, shares: bool) -> torch.Tensor:
        """As `Layer.edges`."""
        placed: torch.Tensor | None = None
        copies = [0] * len(queries)
        for part in self.parts:
            own = {position: token for token, position in enumerate(part.queries)}
            rows = [row for row, query in enumerate(queries) if query in own]
            weights = weigh(part.layer, [own[queries[row]] for row in rows])
            if placed is None:
                placed = weights.new_zeros(weights.shape[0], len(queries), self.size)
            if rows:
                placed[:, [[row] for row in rows], list(part.keys)] += weights
                copies = [count + (query in own) for count, query in zip(copies, queries, strict=True)]
        assert placed is not None  # a layer has parts
        outside = [row for row, count in enumerate(copies) if not count]
        placed[:, outside, [queries[row] for row in outside]] = 1
        if shares and max(copies, default=0) > 1:
            placed = placed / placed.new_tensor(copies).clamp(min=1)[:, None]
        return placed


@dataclass(frozen=True, eq=False)
class MergingLayer:
    """Patches merged into fewer positions, between layers: each draws in equal parts on those it was made of.

    That is a convention: merging concatenates its patches and projects them, and has no weights to read.

    parts: for each position above, the positions below that it was made of. size: of all positions below.
    """

    name: str
    parts: tuple[tuple[int, ...], ...]
    size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, query, key), of one head."""
        return 1, len(self.parts), self.size

    causal: bool = field(default=False, init=False)
    pools: bool = field(default=True, init=False)
    left_out: tuple[int, ...] = field(default=(), init=False)

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The shares (head, query, key) of some queries; rows sum to 1."""
        import torch

        wanted = list(range(len(self.parts)))[queries] if isinstance(queries, slice) else queries
        shares = torch.zeros(1, len(wanted), self.size)
        for row, query in enumerate(wanted):
            shares[0, row, list(self.parts[query])] = 1 / len(self.parts[query])
        return shares

    def edges(self, weigh: Weigh, queries: list[int], *, shares: bool) -> torch.Tensor:
        """The shares, whatever weighs the edges of attention."""
        return self.attention(queries)


def calls_of(layer: Layer) -> list[AttentionLike]:
    """The calls of the model that a layer is made of."""
    if isinstance(layer, PlacedLayer):
        return [part.layer for part in layer.parts]
    return [layer] if isinstance(layer, AttentionCall | AttentionWeights) else []


class Layer(Protocol):
    """What a trace, an attention graph and its methods know of a layer.

    name: of the module. shape: (head, query, key). causal: whether it is square and never looks ahead. pools: whether
    its queries are no positions of the layer below, so that no residual joins them. left_out: positions that the layer
    does not concern: what they hold goes on as it is.
    """

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def causal(self) -> bool: ...
    @property
    def pools(self) -> bool: ...
    @property
    def left_out(self) -> tuple[int, ...]: ...

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The attention weights (head, query, key) of some queries."""
        ...

    def edges(self, weigh: Weigh, queries: list[int], *, shares: bool) -> torch.Tensor:
        """The edges (head or 1, query, key) of some queries as a function of single calls weighs them.

        Positions that are left out have 1 to themselves. shares: a position that several calls concern, as copies of it
        do, has the mean of their edges, else the sum.
        """
        ...
