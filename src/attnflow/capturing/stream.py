"""What enters every block: the tensors through which all relevance passes between two calls of attention.

Gradients under rules run through a graph from the score down to where tokens begin. A tensor without which no route is
left from the one to the other holds all relevance of that place, token by token: it is the stream, whatever a model
calls it and wherever its norms stand.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from attnflow.capturing.rules import Rules
from attnflow.layers import Carried


@dataclass(frozen=True, eq=False)
class _Seen:
    """A tensor on the way. version: of its numbers. constants: how many were added to the stream below it."""

    x: torch.Tensor
    version: int
    constants: int


class Stream(Rules):
    """Rules, under which it is also seen what enters every block and what biases take at every token."""

    def __init__(self, name: str) -> None:
        super().__init__(name, by_token=True)
        self._leaves: list[torch.Tensor] = []
        self._recent: list[_Seen] = []
        self._alive: list[list[_Seen]] = []  # before each call of attention, of what was seen since the one before
        self._constants_below: list[int] = []  # how many constants were added before each call of attention

    def given(self, values: Any) -> Any:
        """Inputs of which gradients can be asked without a trace on the caller's own."""
        if type(values) is dict:
            return {name: self.given(value) for name, value in values.items()}
        if type(values) in (tuple, list):
            return type(values)(self.given(value) for value in values)
        return values.detach() if isinstance(values, torch.Tensor) else values

    def begin(self, output: torch.Tensor) -> torch.Tensor:
        """What the model gets where tokens begin: the same numbers, to which gradients are taken."""
        if output.requires_grad and not output.is_leaf:  # made of what began before
            return output
        leaf = output if output.requires_grad else output.detach().requires_grad_()
        self._leaves.append(leaf)
        return self._note(leaf)

    def call(self) -> None:
        """Say that attention is about to be called: of what was seen, the model holds the stream still."""
        seen = [(weakref.ref(one.x), one.version, one.constants) for one in self._recent]
        self._recent.clear()
        self._constants_below.append(len(self.constants))
        alive = [(x, version, constants) for ref, version, constants in seen if (x := ref()) is not None]
        self._alive.append([_Seen(*one) for one in alive])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._note(super().__torch_function__(func, types, args, kwargs))

    def _leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._note(super()._leave(module, args, output))

    def _note(self, output: Any) -> Any:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            self._recent.append(_Seen(output, output._version, len(self.constants)))  # pyright: ignore[reportPrivateUsage]
        return output

    def passages(self, score: torch.Tensor, calls: Sequence[int], modules: Sequence[str]) -> Passages:
        """Where all relevance of a score passes, before each of some calls of attention and behind the last.

        Raises ValueError where no single tensor holds it: the model has several streams.
        """
        place = _passed_by_all(score, self._leaves)
        found: list[_Seen] = []
        for number, module in zip(calls, modules, strict=True):
            own = self._among(self._alive[number], place)
            if own is None:
                raise ValueError(
                    f"keep='relevance' needs one stream that everything passes through; none was found below the "
                    f"attention of {module or 'the model'} (an encoder beside a decoder, two towers, connections that "
                    "skip blocks, a stream that is written over)"
                )
            found.append(own)
        rows = found[-1].x.shape[:-1].numel()
        above = [one for one in self._recent if one.x.ndim > 1 and one.x.shape[:-1].numel() == rows]
        top = self._among(above, place)
        if top is None:
            raise ValueError(
                "keep='relevance' found no tensor above the last attention that holds every token: pool the tokens "
                "after the last block, not within it"
            )
        return Passages((*found, top), [self._constants_below[number] for number in calls], list(self.constants))

    def _among(self, seen: Sequence[_Seen], place: dict[Any, tuple[int, int]]) -> _Seen | None:
        """The one nearest the score of those that everything passes through."""
        nearest: tuple[int, _Seen] | None = None
        for one in (one for one in seen if one.x.requires_grad):
            edge = get_gradient_edge(one.x)
            at, output = place.get(edge.node, (-1, -1))
            written = one.x._version != one.version  # pyright: ignore[reportPrivateUsage]
            if at >= 0 and output == edge.output_nr and not written and (nearest is None or at < nearest[0]):
                nearest = at, one
        return None if nearest is None else nearest[1]


@dataclass(frozen=True, eq=False)
class Passages:
    """What enters each block and, last, what leaves the topmost; with the constants that were added on the way.

    at_calls: how many constants were added before the attention of each block was called.
    """

    seen: tuple[_Seen, ...]
    at_calls: list[int]
    constants: list[torch.Tensor]

    @property
    def wanted(self) -> list[torch.Tensor]:
        """What gradients are needed of."""
        return [*(one.x for one in self.seen), *self.constants]

    def carried(self, gradients: Sequence[torch.Tensor | None]) -> list[Carried]:
        """The relevance of every block, from the gradients of `wanted`."""
        relevance = [
            torch.zeros(x.shape[:-1].numel()) if gradient is None else _relevance(x, gradient)
            for x, gradient in zip(self.wanted, gradients, strict=True)
        ]
        streams, constants = relevance[: len(self.seen)], relevance[len(self.seen) :]
        result: list[Carried] = []
        for number, (below, above) in enumerate(zip(self.seen, self.seen[1:], strict=False)):
            entering, leaving, called = streams[number], streams[number + 1], self.at_calls[number]
            at_keys, at_queries = constants[below.constants : called], constants[called : above.constants]
            result.append(Carried(entering, leaving, _together(at_queries, entering), _together(at_keys, entering)))
        return result


def _together(constants: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """What constants took at each token, those that belong to one."""
    return torch.stack([torch.zeros_like(like), *(one for one in constants if one.shape == like.shape)]).sum(0)


def _relevance(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Values times their gradient, (row,), summed in single precision or better."""
    precision = torch.promote_types(x.dtype, torch.float32)
    return (x.detach().to(precision) * gradient.to(precision)).sum(-1).flatten()


def _passed_by_all(score: torch.Tensor, leaves: Sequence[torch.Tensor]) -> dict[Any, tuple[int, int]]:
    """The nodes of autograd's graph that lie on all routes from a score to where tokens begin.

    Of each, its place in an order in which all routes run, and the number of the one output that is made use of. In
    such an order a node lies on all routes if and only if no edge reaches from before it to behind it.
    """
    root, ends = get_gradient_edge(score).node, {get_gradient_edge(leaf).node for leaf in leaves}
    leads: dict[Any, bool] = {}
    order: list[Any] = []
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, finished = stack.pop()
        if finished:
            leads[node] = node in ends or any(leads.get(below, False) for below, _ in node.next_functions)
            if leads[node]:
                order.append(node)
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions if below is not None and below not in leads]
    order.reverse()
    place = {node: number for number, node in enumerate(order)}
    outputs: dict[Any, set[int]] = {root: {get_gradient_edge(score).output_nr}}
    result: dict[Any, tuple[int, int]] = {}
    furthest = 0
    for number, node in enumerate(order):
        if furthest <= number and len(outputs[node]) == 1:
            result[node] = number, next(iter(outputs[node]))
        for below, output in node.next_functions:
            if below in place:
                outputs.setdefault(below, set()).add(output)
                furthest = max(furthest, place[below])
        if node in ends:
            furthest = max(furthest, len(order) - 1 if len(ends) == 1 else len(order))
    return result
