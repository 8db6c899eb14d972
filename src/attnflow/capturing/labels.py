"""Labels: what each tensor of a forward pass was made of, as far as the last attention call on the way.

A label is a whole number whose bits stand for the marks of a pass: its input tensors, the places where tokens begin
(embeddings, convolutions), and its attention calls. The output of a call carries the bit of that call alone, so that
the label of a tensor names its direct parents, and the parents of these are found at the calls. A tensor that was made
of parameters and constants alone has the label 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

# Functions that take a tensor for its shape, type or device, and nothing of its numbers.
_SHAPE_ONLY = frozenset(
    {
        torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like,
        torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full, torch.Tensor.new_empty,
        torch.Tensor.new_tensor, torch.Tensor.size, torch.Tensor.dim,
    }
)  # fmt: skip


_NESTED = (tuple, list, Mapping)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Every tensor among arguments or outputs: in tuples, lists, mappings and dataclass-like outputs, at any depth."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, _NESTED):
            found += tensors_in(value)
    return found


def replaced(values: Any, others: Mapping[torch.Tensor, torch.Tensor]) -> Any:
    """Values with others in the place of some tensors, in tuples, lists and dictionaries."""
    if isinstance(values, torch.Tensor):
        return others.get(values, values)
    if isinstance(values, dict):
        return {name: replaced(value, others) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(replaced(value, others) for value in values)
    return values


class Labels:
    """The labels of the tensors of one forward pass, kept while the tensors live.

    What goes into a function comes out of it, in place too. Where a tensor is a view of another, both share what is
    written into either.
    """

    def __init__(self) -> None:
        self._inputs: dict[torch.Tensor, int] = {}
        # By id, which is the tensor's own as long as it lives. (Looking up a WeakTensorKeyDictionary takes far longer.)
        self._labels: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def _own(self, x: torch.Tensor) -> int:
        found = self._labels.get(id(x))
        return 0 if found is None or found[0]() is not x else found[1]

    def _give(self, x: torch.Tensor, label: int) -> None:
        self._labels[id(x)] = weakref.ref(x), label

    def of(self, x: torch.Tensor) -> int:
        """The label of one tensor."""
        given = self._inputs.get(x)
        if given is not None:
            return given | self._own(x)
        base = x._base  # pyright: ignore[reportPrivateUsage]
        return self._own(x) if base is None else self._own(x) | self._own(base)

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
            self._give(x, label)

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
                self._give(x, self._own(x) | label)
                base = x._base  # pyright: ignore[reportPrivateUsage]
                if base is not None and args and x is args[0]:  # written in place
                    self._give(base, self._own(base) | label)
        return label
