"""The block around an attention call: what it does to a residual stream, as numbers that were seen at one input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over vectors: (x - mean) * scale(x) * weight + bias, where an RMS norm leaves the mean alone.

    weight, bias (width), if it has them. eps: as in scale(x) = 1 / sqrt(mean square + eps). centred: whether it takes
    the mean off first.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    centred: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """What the norm makes of vectors (..., width)."""
        normed = self.linear(x) * self.scale(x)
        return normed if self.bias is None else normed + self.bias.to(x)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 1): what the norm multiplies each vector (..., width) with."""
        x = self.centre(x)
        return (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """The norm without its scale and bias: a linear map of vectors (..., width).

        Where the scale of a sum is taken as given, the norm of the sum is the sum of these, times that scale, and the
        bias (Kobayashi et al. 2021, section 3).
        """
        return self.weighted(self.centre(x))

    def centre(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors (..., width) without their means, if the norm takes them off."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def weighted(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors (..., width) times the norm's weight."""
        return x if self.weight is None else x * self.weight.to(x)


@dataclass(frozen=True, eq=False)
class Block:
    """The output projection behind a call, the stream that it is added to, and the norms behind the addition.

    weight (width, head, dim), bias (width): of the projection, LayerScale or a constant gate multiplied in. added
    (query, width): what is added to the stream, the sum over heads and keys of weight times values, and the bias.
    stream (query, width): everything else in the addition: what a position had, and in a parallel block also what the
    MLP makes of it. own (query): the key at which each query stands; None where queries are no keys
    (cross-attention, probes). norm: what all of the sum goes through; None where the sum itself goes on
    (a pre-norm model). second: the norm behind the next addition, that of the MLP, if there is such a one, and
    second_scale (query, 1): what it multiplied each vector with.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    added: torch.Tensor
    stream: torch.Tensor
    own: torch.Tensor | None
    norm: Norm | None
    second: Norm | None
    second_scale: torch.Tensor | None

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The norms behind the additions, in their order."""
        return tuple(norm for norm in (self.norm, self.second) if norm is not None)

    def total(self, queries: list[int]) -> torch.Tensor:
        """(query, width): the sum of the addition at some queries, in single precision or better."""
        import torch

        total = self.stream[queries] + self.added[queries]
        return total.to(torch.promote_types(total.dtype, torch.float32))

    def projected(self, heads: torch.Tensor) -> torch.Tensor:
        """(head, ..., dim) weighted values as what they add to the stream, (..., width), without the bias."""
        import torch

        return torch.einsum("h...d,whd->...w", heads, self.weight.to(heads))

    def of_each_head(self, values: torch.Tensor) -> torch.Tensor:
        """Values (head, key, dim) as what each head adds to the stream at weight 1: f_h(x_j), (key, head, width)."""
        import torch

        return torch.einsum("hkd,whd->khw", values, self.weight.to(values))

    def through(self, x: torch.Tensor, norms: int) -> torch.Tensor:
        """Vectors (..., width) through the linear part of the first so many norms."""
        for norm in self.norms[:norms]:
            x = norm.linear(x)
        return x

    def scales(self, queries: list[int], norms: int) -> torch.Tensor:
        """(query, 1): what the first so many norms multiplied the sums at some queries with, float64."""
        total = self.total(queries).double()
        scale = total.new_ones(len(queries), 1)
        if norms > 0 and self.norm is not None:
            scale = scale * self.norm.scale(total)
        if norms > 1 and self.second_scale is not None:
            scale = scale * self.second_scale[queries]
        return scale
