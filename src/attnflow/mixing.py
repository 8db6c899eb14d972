"""From edges to transitions of the attention graph: head fusion, and what a position keeps of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from attnflow.contributions import kept_share
from attnflow.edges import Edges, Residual
from attnflow.layers import AttentionWeights, Layer, PlacedLayer

if TYPE_CHECKING:
    import torch

HeadFusion: TypeAlias = Literal["mean", "max", "min"]

HEAD_FUSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda weights: _mean(weights),
    "max": lambda weights: weights.amax(0),
    "min": lambda weights: weights.amin(0),
}

# How far a row of attention may be from 1 before a residual beside it loses its meaning: half precision strays by 1e-3.
ROW_SUM_TOLERANCE = 5e-3

# Edges (head, query, key) in one tile: 16 MB in single precision; twice or half of it is no faster.
TILE = 2**22


@dataclass(frozen=True)
class Mixing:
    """How the edges of a layer become one matrix, and what stands beside them.

    head_fusion: over heads, unless `head` alone is wanted. residual: r for (1 - r) W + r I, "add" for W + I; "measured"
    is an r for each query, |kept| / (|kept| + |mixed|) (`contributions.kept_share`).
    row_normalised: divide each row by its sum at the end. discard_ratio: the share of a layer's edges that is set to 0,
    the weakest first, but never those to the positions `undiscarded`. remove_column_mean: take from each edge the mean
    of what all queries send to its key, at 0 or more, and divide rows by their sum.
    """

    residual: Residual
    head_fusion: HeadFusion = "mean"
    head: int | None = None
    row_normalised: bool = False
    discard_ratio: float = 0.0
    remove_column_mean: bool = False
    undiscarded: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Transition:
    """The edges (query, key) of one layer, float64, made tile by tile when they are asked for.

    (1 - residual) * W + residual * I, where W is the fusion over heads, or one head alone. With residual 0.5 and the
    mean this is A = 0.5 W_att + 0.5 I (Abnar & Zuidema 2020, section 3). Shares whose rows no longer sum to 1 (of the
    maximum or minimum over heads, or with edges left out) are divided by their sum before a residual is mixed in, as
    are lengths.
    A position that the layer leaves out has 1 to itself, whatever the edges and the residual are.

    layer: from a trace; number: its number, for messages. Where a layer pools, no residual joins its queries to keys.

    Raises ValueError for a head that the layer does not have, and a residual on a layer that is not square; and when
    the edges are made, for edges that are not finite, and of attention in arrays that were given, that are negative, or
    (with a residual) have rows that do not sum to 1.
    """

    layer: Layer
    number: int
    edges: Edges
    mixing: Mixing

    def __post_init__(self) -> None:
        heads, queries, keys = self.layer.shape
        head = self.mixing.head
        if head is not None and not -heads <= head < heads:
            raise ValueError(f"head {head} is out of range: layer {self.number} has {heads} heads, 0 to {heads - 1}")
        if self.mixing.residual and queries != keys and not self.layer.pools:
            raise ValueError(
                f"layer {self.number} has {queries} queries and {keys} keys: a residual joins each query to the key at "
                "its own place, so it needs as many of both; pass residual=0"
            )

    @property
    def left_out(self) -> tuple[int, ...]:
        """The positions that the layer does not concern."""
        return self.layer.left_out

    @property
    def crossings(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The positions of the queries and of the keys of each call whose queries are none of its keys."""
        parts = self.layer.parts if isinstance(self.layer, PlacedLayer) else ()
        ends = dict.fromkeys((part.queries, part.keys) for part in parts)
        return tuple((queries, keys) for queries, keys in ends if set(queries).isdisjoint(keys))

    def matrix(self, queries: Sequence[int] | None = None) -> torch.Tensor:
        """The edges (query, key) of all queries, or of those at the given positions."""
        import torch

        return torch.cat([rows for _, rows in self.tiles(queries)])

    def tiles(self, queries: Sequence[int] | None = None) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The same some queries at a time, with their positions, so that nothing of size (head, query, key) exists."""
        heads, count, keys = self.layer.shape
        step = max(1, TILE // (heads * keys))
        wanted = list(range(count) if queries is None else queries)
        for start in range(0, len(wanted), step):
            yield wanted[start : start + step], self._rows(wanted[start : start + step])

    def _rows(self, queries: list[int]) -> torch.Tensor:
        how, rows = self.mixing, self._fused(queries)
        if how.remove_column_mean:
            rows = _row_normalised((rows - self._column_mean).clamp_min_(0))
        if how.discard_ratio:
            rows = self._without_weakest(rows)
        if not self.layer.pools and how.residual:
            share, kept = self._shares(queries)
            fused = how.head is None and how.head_fusion != "mean"
            uneven = self.edges.shares and (fused or how.discard_ratio) and how.residual != "add"
            if uneven or (self.edges.row_normalised and how.row_normalised):
                rows = _row_normalised(rows)
            rows = share * rows
            rows[range(len(queries)), queries] += kept
        if how.row_normalised:
            rows = _row_normalised(rows)
        left_out = set(self.layer.left_out)
        for row, query in enumerate(queries):
            if query in left_out:
                rows[row] = 0
                rows[row, query] = 1
        return rows

    def _shares(self, queries: list[int]) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        """What the edges are multiplied with, (query, 1), and what is added at each query's own place, (query,)."""
        residual = self.mixing.residual
        if residual == "add":
            return 1.0, 1.0
        if residual == "measured":
            kept = self.layer.edges(kept_share, queries, shares=True)[0].sum(-1)
            return 1 - kept[:, None], kept
        return 1 - residual, residual

    def _fused(self, queries: list[int]) -> torch.Tensor:
        """(query, key), float64: one head, or the fusion of all."""
        weights = self.layer.edges(self.edges.weigh, queries, shares=self.edges.shares)
        if self.mixing.head is not None and len(weights) == 1 and self.layer.shape[0] > 1:
            raise ValueError(f"head={self.mixing.head} cannot be chosen: {self.edges.formula} has no heads of its own")
        head, fusion = self.mixing.head, HEAD_FUSIONS[self.mixing.head_fusion]
        fused = fusion(weights) if head is None else weights[head].clone()
        # Negative attention can only be in arrays that were given; what is not finite shows in the fusion of any.
        given = isinstance(self.layer, AttentionWeights) and not self.layer.captured and self.edges.shares
        if given or not bool(fused.isfinite().all()):
            self._check(weights, queries)
        return fused.to(_double(fused))

    @cached_property
    def _column_mean(self) -> torch.Tensor:
        """(key,): the mean over the queries that the layer concerns of their edges to each key."""
        import torch

        left_out = set(self.layer.left_out)
        wanted = [query for query in range(self.layer.shape[1]) if query not in left_out]
        step = max(1, TILE // (self.layer.shape[0] * self.layer.shape[2]))
        tiles = (self._fused(wanted[start : start + step]).sum(0) for start in range(0, len(wanted), step))
        return torch.stack(list(tiles)).sum(0) / len(wanted)

    @cached_property
    def _weakest(self) -> float:
        """The least edge that is not discarded, of those that may be; what a mask hides is no edge."""
        import torch

        plain = Transition(self.layer, self.number, self.edges, Mixing(
            0.0, self.mixing.head_fusion, self.mixing.head, remove_column_mean=self.mixing.remove_column_mean
        ))  # fmt: skip
        edges = plain.matrix()
        dropped = int(self.mixing.discard_ratio * int((edges > 0).sum()))
        edges[edges <= 0] = math.inf
        edges[:, list(self.mixing.undiscarded)] = math.inf
        return float(torch.kthvalue(edges.flatten(), min(dropped + 1, edges.numel())).values)

    def _without_weakest(self, rows: torch.Tensor) -> torch.Tensor:
        weak = rows < self._weakest
        weak[:, list(self.mixing.undiscarded)] = False
        return rows.masked_fill(weak, 0)

    def _check(self, weights: torch.Tensor, queries: list[int]) -> None:
        """Refuse weights that are not finite; of attention, also negative ones, and rows that do not sum to 1 beside a
        residual.
        """
        wrong = ~weights.isfinite() | ((weights < 0) if self.edges.shares else False)
        if wrong.any():
            head, query, key = wrong.nonzero()[0].tolist()
            what = "attention must be finite and not negative" if self.edges.shares else "edges must be finite"
            raise ValueError(
                f"{what}; layer {self.number}, head {head}, query {queries[query]}, key {key} is "
                f"{weights[head, query, key].item()}"
            )
        sums = weights.sum(-1)
        wrong = (sums - 1).abs() > ROW_SUM_TOLERANCE
        if self.mixing.residual and self.edges.shares and wrong.any():
            head, query = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"with a residual the rows of attention must sum to 1; layer {self.number}, head {head}, query "
                f"{queries[query]} sums to {sums[head, query].item():.6g}; pass residual=0 to take the matrices as "
                "they are"
            )


def _row_normalised(rows: torch.Tensor) -> torch.Tensor:
    """Each row divided by its sum; rows of zeros stay zeros."""
    return rows / rows.sum(-1, keepdim=True).clamp_min(1e-300)


def _mean(weights: torch.Tensor) -> torch.Tensor:
    """The mean over heads in float64, head by head, which is faster than a reduction that converts as it goes."""
    first, *others = weights.unbind()
    total = first.to(_double(first), copy=True)
    for head in others:
        total += head
    return total.div_(len(weights))


def _double(x: torch.Tensor) -> torch.dtype:
    """float64, but on MPS, which has none."""
    import torch

    return torch.float32 if x.device.type == "mps" else torch.float64
