"""Labels: what each tensor of a forward pass was made of, as far as the last attention call on the way.

A label is a whole number whose bits stand for the marks of a pass: its input tensors, the places where tokens begin
(embeddings, convolutions), and its attention calls. The output of a call carries the bit of that call alone, so that
the label of a tensor names its direct parents, and the parents of these are found at the calls. A tensor that was made
of parameters and constants alone has the label 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

# Functions that take a tensor for its shape, type or device, and nothing of its numbers.
_SHAPE_ONLY = frozenset(
    {
        torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like,
        torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.new_empty,
        torch.Tensor.new_tensor, torch.Tensor.size, torch.Tensor.dim,
    }
)  # fmt: skip


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor among arguments or outputs: in tuples, lists, mappings and dataclass-like outputs, at any depth."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)


class Labels:
    """The labels of the tensors of one forward pass, kept while the tensors live.

    What goes into a function comes out of it, in place too. Where a tensor is a view of another, both share what is
    written into either.
    """

    def __init__(self) -> None:
        self._inputs: Any = WeakTensorKeyDictionary()
        self._labels: Any = WeakTensorKeyDictionary()

    def of(self, x: torch.Tensor) -> int:
        """The label of one tensor."""
        given = self._inputs.get(x)
        if given is not None:
            return given | self._labels.get(x, 0)
        base = x._base  # pyright: ignore[reportPrivateUsage]
        label = self._labels.get(x, 0)
        return label if base is None else label | self._labels.get(base, 0)

    def of_all(self, values: Any) -> int:
        """The union of the labels of all tensors among some values."""
        label = 0
        for x in tensors_in(values):
            label |= self.of(x)
        return label

    def mark_input(self, x: torch.Tensor, bit: int) -> None:
        """Give an input its own label, whatever it is a view of."""
        self._inputs[x] = bit

    def set(self, outputs: Any, label: int) -> None:
        """Give outputs a label of their own, which replaces what they had."""
        for x in tensors_in(outputs):
            self._labels[x] = label

    def pass_on(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
        """Give what a function returned, or wrote into, the label of what it took; that label."""
        if output is None:  # it can only have written into its first argument (`x[i] = y`)
            if func is not torch.Tensor.__setitem__:
                return 0
            output = args[0]
        elif not isinstance(output, torch.Tensor | tuple | list):
            return 0
        if func in _SHAPE_ONLY:
            return 0
        label = self.of_all(args) | (self.of_all(kwargs) if kwargs else 0)
        if label:
            for x in tensors_in(output):
                self._labels[x] = self._labels.get(x, 0) | label
                base = x._base  # pyright: ignore[reportPrivateUsage]
                if base is not None and args and x is args[0]:  # written in place
                    self._labels[base] = self._labels.get(base, 0) | label
        return label
