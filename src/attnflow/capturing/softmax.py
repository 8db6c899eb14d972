"""Attention that a model computes itself: a softmax whose result is multiplied with values."""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from attnflow.capturing.calls import WeightedSum, refuse_dropout
from attnflow.capturing.labels import Labels, tensors_in

_T = torch.Tensor
_SOFTMAX = frozenset({F.softmax, torch.softmax, _T.softmax})
_MULTIPLY = frozenset({torch.matmul, _T.matmul, _T.__matmul__, torch.bmm, _T.bmm})
DIFFERENCE = frozenset({torch.sub, _T.sub, _T.__sub__, _T.__rsub__, _T.sub_, _T.__isub__})
# What models do to scores and weights between their product and the values, that leaves queries and keys in place.
_FOLLOWED = DIFFERENCE | frozenset(
    {
        F.dropout, F.pad, torch.cat, torch.where, torch.clone, torch.nan_to_num, torch.clamp, torch.masked_fill,
        torch.add, torch.mul, torch.div, torch.tanh, torch.unsqueeze, torch.squeeze, torch.chunk, torch.split,
        torch.reshape, torch.flatten, torch.unflatten, torch.concat,
        _T.add, _T.add_, _T.__add__, _T.__radd__, _T.__iadd__, _T.mul, _T.mul_, _T.__mul__, _T.__rmul__, _T.__imul__,
        _T.div, _T.div_, _T.__truediv__, _T.__itruediv__, _T.tanh, _T.clamp, _T.masked_fill, _T.masked_fill_,
        _T.nan_to_num, _T.where, _T.to, _T.type, _T.type_as, _T.float, _T.double, _T.half, _T.bfloat16, _T.contiguous,
        _T.clone, _T.__getitem__, _T.view, _T.reshape, _T.flatten, _T.unflatten, _T.unsqueeze, _T.squeeze, _T.expand,
        _T.chunk, _T.split, _T.unbind, _T.detach, _T.expand_as, _T.view_as,
    }
)  # fmt: skip
# Of these, the ones that may change how many queries or keys there are: a sink's column is added and cut off again.
_RESIZED = frozenset({F.pad, torch.cat, torch.concat, _T.__getitem__})
_SWAPPED = frozenset({torch.transpose, _T.transpose, _T.swapaxes, torch.swapaxes})
_PERMUTED = frozenset({torch.permute, _T.permute})


@dataclass(frozen=True)
class _Scores:
    """Scores of queries against keys: whose they are (labels), and where queries and keys stand, from the last axis.

    module: where a softmax over the keys made them weights, or None before it did.
    """

    queries: int
    keys: int
    axes: tuple[int, int] = (-2, -1)
    module: str | None = None


@dataclass(frozen=True, eq=False)
class Weighing:
    """A multiplication of weights with values: labels of queries, keys and values, and the call it makes."""

    queries: int
    keys: int
    values: int
    make: Callable[[], WeightedSum]


class WeightsByHand:
    """Follows products of queries and keys through a softmax over the keys until they are multiplied with values.

    Tensors are followed while they live, and not longer.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self.constant: list[str] = []  # modules that multiplied values by weights, both of parameters alone
        self._followed: Any = WeakTensorKeyDictionary()

    def weighing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Weighing | None:
        """The weights and values that a call is about to multiply, if it does.

        The axis that the multiplication sums over must be the one that the softmax ran over. Values of parameters alone
        (memory slots, codes) are no values of positions.
        """
        if func is torch.einsum:
            return self._einsum(_operands(args))
        if func not in _MULTIPLY:
            return None
        args = (*args, *kwargs.values())
        for weights, values, transposed in ((args[0], args[1], False), (args[1], args[0], True)):
            scores = self._followed.get(weights)
            if scores is None or scores.module is None or scores.axes != ((-1, -2) if transposed else (-2, -1)):
                continue
            if transposed:
                weights, values = weights.mT, values.mT
            label = self._labels.of(args[0 if transposed else 1])
            if values.ndim < 2 or not label:
                if not scores.queries | scores.keys:
                    self.constant.append(scores.module)
                return None
            return _made(scores, weights, values, label, _transposed if transposed else _as_it_is)
        return None

    def follow(self, module: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Take note of what a call did to scores or weights."""
        if func in _SOFTMAX:
            self._softmax(module, args, kwargs, output)
        elif func in _MULTIPLY:
            rows, columns = (self._labels.of(x) for x in (*args, *kwargs.values())[:2])
            if (rows or columns) and output.ndim > 1:
                self._followed[output] = _Scores(rows, columns)
        elif func is torch.einsum:
            self._scores_of_einsum(_operands(args), output)
        elif func in _FOLLOWED and self._followed:
            self._followed_on(func, args, kwargs, output)
        elif func in _SWAPPED or func in _PERMUTED:
            self._moved(func, args, kwargs, output)

    def _softmax(self, module: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        x = args[0] if args else kwargs.get("input")
        if not isinstance(dim, int) or not isinstance(x, torch.Tensor) or output.ndim < 2:
            return
        axis = dim - output.ndim if dim >= 0 else dim
        scores = self._followed.get(x)
        if scores is None:
            label = self._labels.of(x)
            scores = _Scores(label, label, (-2, -1) if axis == -1 else (-1, axis))
        elif axis == scores.axes[0]:  # computed as keys times queries
            scores = _Scores(scores.keys, scores.queries, scores.axes[::-1])
        elif axis != scores.axes[1]:
            return
        self._followed[output] = replace(scores, module=module)

    def _followed_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found = [(x, self._followed.get(x)) for x in tensors_in((args, kwargs))]
        found = [(x, scores) for x, scores in found if scores is not None]
        if not found:
            return
        first, scores = found[0]
        for _, other in found[1:]:
            if func in DIFFERENCE and scores.module is not None and other.module is not None:
                raise ValueError(
                    f"{other.module} subtracts attention weights from others (differential attention): what is left "
                    "may be negative, for which the attention graph has no edges"
                )
            module = scores.module if scores.module is not None else other.module
            scores = replace(
                scores, queries=scores.queries | other.queries, keys=scores.keys | other.keys, module=module
            )
        if func is F.dropout:
            refuse_dropout(scores.module or "", *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        for x in tensors_in(output):
            same = x.ndim >= -min(scores.axes) and all(x.shape[axis] == first.shape[axis] for axis in scores.axes)
            if same or func in _RESIZED:
                self._followed[x] = scores

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        args = (*args, *kwargs.values())
        scores = self._followed.get(args[0])
        if scores is None:
            return
        order = list(range(output.ndim))
        if func in _SWAPPED:
            one, other = args[1:3]
            order[one], order[other] = order[other], order[one]
        else:
            dims = args[1:]
            order = [dim % output.ndim for dim in (dims[0] if isinstance(dims[0], tuple | list) else dims)]
        axes = tuple(order.index(axis % output.ndim) - output.ndim for axis in scores.axes)
        self._followed[output] = replace(scores, axes=axes)

    def _einsum(self, args: tuple[Any, ...]) -> Weighing | None:
        parsed = _equation(args)
        if parsed is None:
            return None
        (one, other), result = parsed
        for weights, letters, values, others in ((args[1], one, args[2], other), (args[2], other, args[1], one)):
            scores = self._followed.get(weights)
            if scores is None or scores.module is None or not (label := self._labels.of(values)):
                continue
            query, key = (letters[axis] for axis in scores.axes)
            outer = [letter for letter in letters if letter not in (query, key)]
            inner = [letter for letter in others if letter not in outer and letter != key]
            if key in result or key not in others or query not in result or set(result) != {*outer, query, *inner}:
                continue
            ordered = values.permute([others.index(x) for x in [*(x for x in outer if x in others), key, *inner]])
            for axis, letter in enumerate(outer):
                ordered = ordered if letter in others else ordered.unsqueeze(axis)

            order = [letters.index(letter) for letter in (*outer, query, key)]
            values = ordered.flatten(-len(inner)) if len(inner) > 1 else ordered if inner else ordered[..., None]
            arranged = partial(_arranged, order=[result.index(x) for x in (*outer, query, *inner)], inner=len(inner))
            return _made(scores, weights.permute(order), values, label, arranged)
        return None

    def _scores_of_einsum(self, args: tuple[Any, ...], output: torch.Tensor) -> None:
        parsed = _equation(args)
        if parsed is None:
            return
        (one, other), result = parsed
        rows, columns = ([x for x in result if x in own and x not in others] for own, others in
                         ((one, other), (other, one)))  # fmt: skip
        if len(rows) == len(columns) == 1:
            axes = (result.index(rows[0]) - len(result), result.index(columns[0]) - len(result))
            self._followed[output] = _Scores(self._labels.of(args[1]), self._labels.of(args[2]), axes)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _arranged(x: torch.Tensor, order: list[int], inner: int) -> torch.Tensor:
    """What an einsum returned with its axes in an order, of which the last few make up one."""
    x = x.permute(order)
    return x.flatten(-inner) if inner > 1 else x if inner else x[..., None]


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT


def _made(
    scores: _Scores,
    weights: torch.Tensor,
    values: torch.Tensor,
    label: int,
    arrange: Callable[[torch.Tensor], torch.Tensor],
) -> Weighing:
    """The call of weights (..., query, key) and values (..., key, dim) of a label."""
    outer = torch.broadcast_shapes(weights.shape[:-2], values.shape[:-2])
    two = (math.prod(outer[:-1]), outer[-1] if outer else 1)
    module = scores.module or ""

    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.expand(*outer, *x.shape[-2:]).reshape(*two, *x.shape[-2:])

    def make() -> WeightedSum:
        if weights.numel() and bool(weights.detach().amin() < 0):
            raise ValueError(
                f"{module or 'the model'} multiplies values by weights of which some are negative (differential "
                "attention, or something added to a softmax): the attention graph has no edges for these"
            )
        return WeightedSum(module, flat(weights.detach()), flat(values.detach()), lambda x: flat(arrange(x)))

    return Weighing(scores.queries, scores.keys, label, make)


def _operands(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an einsum of two tensors, which may come as a list; nothing for any other call of it."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = operands[0]
    return (equation, *operands) if isinstance(equation, str) and len(operands) == 2 else ()


def _equation(args: tuple[Any, ...]) -> tuple[tuple[str, str], str] | None:
    """The letters of the two operands of an einsum and of its result; None for any other call of it."""
    if len(args) != 3:
        return None
    equation = args[0].replace(" ", "")
    if "..." in equation:
        most = max(x.ndim - len(part) + 3 for x, part in zip(args[1:], equation.split("->")[0].split(","), strict=True))
        free = [letter for letter in string.ascii_uppercase if letter not in equation]
        equation = equation.replace("...", "".join(free[:most]))
    operands, arrow, result = equation.partition("->")
    one, comma, other = operands.partition(",")
    if not arrow or not comma or any(len(set(letters)) < len(letters) for letters in (one, other)):
        return None
    return (one, other), result
