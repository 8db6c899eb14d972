"""What an edge weighs: head fusion and the residual turn a layer of a trace into transitions of the attention graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, SupportsIndex, TypeAlias

from attnflow.layers import AttentionWeights, Layer

if TYPE_CHECKING:
    import torch

HeadFusion: TypeAlias = Literal["mean", "max", "min"]

HEAD_FUSIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda attention: _mean(attention),
    "max": lambda attention: attention.amax(0),
    "min": lambda attention: attention.amin(0),
}

# How far a row of attention may be from 1 before a residual beside it loses its meaning: half precision strays by 1e-3.
ROW_SUM_TOLERANCE = 5e-3

# Attention weights (head, query, key) in one tile: 16 MB in single precision; twice or half of it is no faster.
TILE = 2**22


@dataclass(frozen=True, eq=False)
class Transition:
    """The edges (query, key) of one layer, float64, made tile by tile when they are asked for.

    (1 - residual) * W + residual * I, where W is the fusion over heads, or one head alone. With residual 0.5 and the
    mean this is A = 0.5 W_att + 0.5 I (Abnar & Zuidema 2020, section 3). The maximum or minimum over heads does not
    sum to 1, so before a residual is added its rows are divided by their sum; without one it stays as it is.

    layer: from a trace; number: its number, for messages. Where a layer pools, no residual joins its queries to keys.

    Raises ValueError for an unknown fusion, head or residual, for a residual on a layer that is not square; and when
    the edges are made, for attention that is negative, not finite, or (with a residual, in
    arrays that were given) has rows that do not sum to 1.
    """

    layer: Layer
    number: int
    head_fusion: HeadFusion = "mean"
    residual: float = 0.5
    head: int | None = None

    def __post_init__(self) -> None:
        heads, queries, keys = self.layer.shape
        if self.head_fusion not in HEAD_FUSIONS:
            raise ValueError(f"head_fusion {self.head_fusion!r} is unknown; choose one of {', '.join(HEAD_FUSIONS)}")
        if not isinstance(self.residual, int | float) or not 0 <= self.residual <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"residual must lie between 0 and 1; it is {self.residual}")
        if self.head is not None and not (isinstance(self.head, SupportsIndex) and -heads <= self.head < heads):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"head {self.head} is out of range: layer {self.number} has {heads} heads, 0 to {heads - 1}"
            )
        if self.residual and queries != keys and not self.layer.pools:
            raise ValueError(
                f"layer {self.number} has {queries} queries and {keys} keys: a residual joins each query to the key at "
                "its own place, so it needs as many of both; pass residual=0"
            )

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
        attention = self.layer.attention(queries)
        fused = attention[self.head] if self.head is not None else HEAD_FUSIONS[self.head_fusion](attention)
        # Negative weights can only be in arrays that were given; what is not finite shows in the fusion of any.
        given = isinstance(self.layer, AttentionWeights) and not self.layer.captured
        if given or not bool(fused.isfinite().all()):
            self._check(attention, queries)
        fused = fused.to(_double(fused))
        if not self.residual or self.layer.pools:
            return fused
        if self.head is None and self.head_fusion != "mean":
            fused = fused / fused.sum(-1, keepdim=True).clamp_min(1e-300)
        mixed = (1 - self.residual) * fused
        mixed[range(len(queries)), queries] += self.residual
        return mixed

    def _check(self, attention: torch.Tensor, queries: list[int]) -> None:
        """Refuse weights that are not finite or negative and, with a residual, rows that do not sum to 1."""
        wrong = ~attention.isfinite() | (attention < 0)
        if wrong.any():
            head, query, key = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"attention must be finite and not negative; layer {self.number}, head {head}, query {queries[query]}, "
                f"key {key} is {attention[head, query, key].item()}"
            )
        sums = attention.sum(-1)
        wrong = (sums - 1).abs() > ROW_SUM_TOLERANCE
        if self.residual and wrong.any():
            head, query = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"with a residual the rows of attention must sum to 1; layer {self.number}, head {head}, query "
                f"{queries[query]} sums to {sums[head, query].item():.6g}; pass residual=0 to take the matrices as "
                "they are"
            )


def _mean(attention: torch.Tensor) -> torch.Tensor:
    """The mean over heads in float64, head by head, which is faster than a reduction that converts as it goes."""
    first, *others = attention.unbind()
    total = first.to(_double(first), copy=True)
    for head in others:
        total += head
    return total.div_(len(attention))


def _double(x: torch.Tensor) -> torch.dtype:
    """float64, but on MPS, which has none."""
    import torch

    return torch.float32 if x.device.type == "mps" else torch.float64
