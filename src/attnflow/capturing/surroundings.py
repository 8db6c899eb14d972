"""What surrounds each attention call: found by following its output, function by function, with no names.

From the output through reshapes to the linear layer that joins the heads, through casts, dropout that does nothing and
constant factors (LayerScale, a gate) to the addition whose other operand is the stream, and to a norm of the sum. Each
tensor on the way carries the numbers of its elements, which are moved as it is moved, so that batches, windows and any
order of heads need no rules of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from attnflow.block import Block, Norm
from attnflow.capturing.calls import FusedCall, Kept, Rows, tolerance
from attnflow.capturing.labels import Labels, tensors_in

if TYPE_CHECKING:
    from attnflow.capturing.recorder import Fed, Recording

_T = torch.Tensor
_SAME = frozenset(
    {
        F.dropout, _T.to, _T.type, _T.type_as, _T.float, _T.double, _T.half, _T.bfloat16, _T.contiguous, _T.clone,
        _T.detach, _T.requires_grad_, torch.clone, torch.detach,
    }
)  # fmt: skip
_MOVED = frozenset(
    {
        _T.view, _T.view_as, _T.reshape, _T.reshape_as, _T.flatten, _T.unflatten, _T.transpose, _T.permute, _T.squeeze,
        _T.unsqueeze, _T.swapaxes, _T.swapdims, _T.movedim, _T.__getitem__, _T.roll, _T.t,
        torch.reshape, torch.flatten, torch.unflatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
        torch.swapaxes, torch.swapdims, torch.movedim, torch.roll, torch.t,
    }
)  # fmt: skip
# Numbers of elements may lie otherwise in memory than the elements do.
_RESHAPED = {_T.view: _T.reshape, _T.view_as: _T.reshape_as}
_ADD = frozenset({torch.add, _T.add, _T.add_, _T.__add__, _T.__radd__, _T.__iadd__})
_MULTIPLY = frozenset({torch.mul, _T.mul, _T.mul_, _T.__mul__, _T.__rmul__, _T.__imul__})
_MATMUL = frozenset({torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm})
_LINEAR = frozenset({F.linear, torch.addmm, *_MATMUL})
_SQUARE = frozenset({torch.square, _T.square})
_POWER = frozenset({torch.pow, _T.pow, _T.__pow__})
_MEAN = frozenset({torch.mean, _T.mean})
_ROOT = frozenset({torch.rsqrt, _T.rsqrt})
_NORMS = frozenset({F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm})

# How a norm by hand has come along: squares of a sum, their mean (with eps), its inverse root.
_Root: TypeAlias = Literal["squares", "mean", "root"]


@dataclass(frozen=True, eq=False)
class Surroundings:
    """The block around a call of a batch.

    rows (outer, outer, query): the row of every query in what follows. columns (outer, outer, dim): which inputs of the
    projection a head fills. weight (width, inputs), bias (width); added, stream (row, width); norm, second,
    second_scale (row, 1), as in `Block`.
    """

    module: str
    rows: torch.Tensor
    columns: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    added: torch.Tensor
    stream: torch.Tensor
    norm: Norm | None
    second: Norm | None
    second_scale: torch.Tensor | None

    def take(self, rows: Rows) -> Block:
        """The block of some rows of a call's outer axes, which are the heads of one layer; own is not known here."""
        first, second = zip(*rows, strict=True)
        own = self.rows[list(first), list(second)]
        columns = self.columns[list(first), list(second)]
        if bool((own != own[0]).any()) or columns.unique().numel() != self.weight.shape[1]:
            raise _lost(self.module, "the output projection", "it joins what are not the heads of one layer")
        at, inputs = own[0], columns.flatten()
        straight = bool((inputs == torch.arange(len(inputs), device=inputs.device)).all())
        weight = (self.weight if straight else self.weight[:, inputs]).unflatten(1, columns.shape)
        scale = None if self.second_scale is None else self.second_scale[at]
        return Block(weight, self.bias, self.added[at], self.stream[at], None, self.norm, self.second, scale)


@dataclass(eq=False)
class _Sum:
    """A sum that the attention went into: (row, width) with everything else in it, and what became of it."""

    total: torch.Tensor
    added: torch.Tensor
    stream: torch.Tensor
    goes_on: bool = False
    normed: _Normed | None = None
    uses: set[Any] = field(default_factory=set[Any])


@dataclass(eq=False)
class _Normed:
    """What a norm returned (row, width), whether that is added to anything, and the sum if an MLP's output is."""

    norm: Norm
    output: torch.Tensor
    by_hand: bool = False
    goes_on: bool = False
    sum: _Sum | None = None


@dataclass(eq=False)
class _Chain:
    """What was found so far behind one call. bit: its label. known: the label of all that it was made of."""

    call: Kept
    bit: int
    known: int
    shape: torch.Size
    rows: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    sums: list[_Sum] = field(default_factory=list[_Sum])
    last: str = "nothing that is seen"
    fault: tuple[str, str] | None = None
    size: int = 0  # numbers in what the projection returned

    def found(self, *, pre_norm: bool) -> Surroundings:
        """The block; ValueError says which step was not found. pre_norm: whether sums of other calls go on."""
        module = self.call.module
        if self.fault is not None:
            raise _lost(module, *self.fault)
        if self.weight is None or self.rows is None or self.columns is None:
            raise _lost(module, "the output projection", f"what attention returned went into {self.last}")
        if not self.sums:
            raise _lost(module, "the addition to the stream", f"what its projection returned went into {self.last}")
        settled = [one for one in self.sums if one.goes_on or one.normed is not None]
        one = (settled or self.sums[-1:])[0]
        _compare(module, "the addition to the stream", one.added + one.stream, one.total)
        known = one.normed is not None and not one.uses  # all of the sum goes through the norm
        read = one.normed is None and one.uses and one.uses <= _LINEAR  # the last sum, read by a linear layer
        if not (one.goes_on or known or read):
            names = ", ".join(sorted(map(_name, one.uses))) or "nothing that is seen"
            also = "" if one.normed is None else " as well as into a norm"
            raise _lost(module, "the norm behind the addition", f"the sum went into {names}{also}")
        normed, second, scale = _behind(module, one), None, None
        if normed is not None and pre_norm and not normed.goes_on:
            normed = None  # the last norm of a pre-norm model
        if normed is not None and normed.sum is not None and (after := _behind(module, normed.sum)) is not None:
            second = after.norm
            scale = second.scale(normed.sum.total.to(_better(normed.sum.total)))
        weight, bias = self.weight, self.bias
        if self.factor is not None:
            weight = weight * self.factor[:, None]
        return Surroundings(
            module, self.rows, self.columns, weight, bias, one.added, one.stream,
            None if normed is None else normed.norm, second, scale,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _At:
    """A tensor on the way. ids: the number of each of its elements. at: where it stands: behind attention, behind the
    projection, or as a sum, a norm's output, or a step of a norm by hand.
    """

    chain: _Chain
    ids: torch.Tensor
    at: Literal["heads", "projected"] | _Sum | _Normed | tuple[_Root, _Sum, float]


class Follower:
    """Follows what every call of a recording returned. Tensors are followed while they live, and not longer."""

    def __init__(self, labels: Labels, recording: Recording) -> None:
        self._labels, self._recording = labels, recording
        self._followed: Any = WeakTensorKeyDictionary()
        self._chains: dict[int, _Chain] = {}
        self._pre_norm = False

    def start(self, number: int, call: Kept, output: torch.Tensor, fed: Fed) -> None:
        """Follow what a call returned, which was fed by some labels."""
        chain = _Chain(call, fed.bit, self._recording.reached(fed.queries | fed.keys | fed.values), output.shape)
        self._chains[number] = chain
        ids = torch.arange(output.numel(), device=output.device).view(output.shape)
        joined = call.out_projection if isinstance(call, FusedCall) else None
        if joined is None or not isinstance(call, FusedCall):
            self._followed[output] = (_At(chain, ids, "heads"),)
            return
        heads, dim = call.q.shape[1], joined.weight.shape[1] // call.q.shape[1]
        rows = call.rows_of(ids)[..., 0] // output.shape[-1]  # (batch, 1, query)
        columns = torch.arange(heads * dim, device=output.device).view(1, heads, dim)
        chain.rows = rows.expand(-1, heads, -1)
        chain.columns = columns.expand(len(rows), -1, -1)
        chain.weight = joined.weight.clone()
        chain.bias = None if joined.bias is None else joined.bias.clone()
        chain.size = output.numel()
        self._followed[output] = (_At(chain, ids, "projected"),)

    def forget(self, numbers: set[int]) -> None:
        """Let go of calls that are not kept."""
        for number in numbers & self._chains.keys():
            del self._chains[number]

    def returned(self, output: Any) -> None:
        """Say what the model returned: a sum among it goes on as it is."""
        for x in tensors_in(output):
            for state in self._followed.get(x, ()):
                if isinstance(state.at, _Sum):
                    state.at.goes_on = True

    def found(self, number: int) -> Surroundings:
        """The block around a call; ValueError says which step was not found, and in which module."""
        return self._chains[number].found(pre_norm=self._pre_norm)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that does not attend, and follow what goes through it."""
        given = (*args, *kwargs.values())
        if not any(x in self._followed for x in tensors_in(given)):
            return func(*args, **kwargs)
        if _in_place(func):  # what it writes into is another tensor afterwards
            before = args[0].detach().clone()
            self._followed[before] = self._followed.pop(args[0], ())
            self._labels.set(before, self._labels.of(args[0]))
            given = (before, *given[1:])
        output = func(*args, **kwargs)
        states = [
            (place if isinstance(x, _T) else -1, state)
            for place, x in enumerate(given) for y in tensors_in(x) for state in self._followed.get(y, ())
        ]  # fmt: skip
        if isinstance(output, _T):
            following = [self._next(state, place, func, given, kwargs, output) for place, state in states]
            if any(following):
                self._followed[output] = tuple({id(one): one for one in following if one is not None}.values())
        elif tensors_in(output) or output is None:
            for _, state in states:
                self._lose(state, func)
        return output

    def _lose(self, state: _At, func: Any) -> None:
        """Take note of a function behind which a tensor is not followed."""
        if isinstance(state.at, str):
            state.chain.last = _name(func)
        elif isinstance(state.at, _Sum) and func not in _NORMS:
            state.at.uses.add(func)

    def _next(
        self, state: _At, place: int, func: Any, given: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> _At | None:
        """Where the output of a function stands; None where it is not followed."""
        positional = given[: len(given) - len(kwargs)]
        if func in _SAME and place == 0 and output.shape == state.ids.shape:
            return state
        if func in _MOVED and place == 0 and positional:
            move: Any = _RESHAPED.get(func, func)
            return replace(state, ids=move(state.ids, *positional[1:], **kwargs))
        found = None
        if place < 0 or (state.at != "heads" and state.ids.numel() != state.chain.size):
            pass  # inside a list; or a part of the positions alone
        elif state.at == "heads":
            found = self._project(state, place, func, given, output)
        elif isinstance(state.at, tuple):
            found = self._by_hand(state, state.at, func, given, kwargs, output)
        elif func in _ADD and output.shape == state.ids.shape and kwargs.get("alpha", 1) == 1:
            return self._add(state, given[place], given[1 - place], output)
        elif func in _MULTIPLY and output.shape == state.ids.shape:
            found = self._scale(state, given[1 - place], func, output)
        elif not isinstance(state.at, str):
            found = self._norm(state, func, given, kwargs, output)
        if found is None:
            self._lose(state, func)
        return found

    def _project(self, state: _At, place: int, func: Any, given: tuple[Any, ...], output: torch.Tensor) -> _At | None:
        """The linear layer that joins the heads."""
        chain, bias = state.chain, None
        if func is F.linear and place == 0:
            weight, bias = given[1], given[2] if len(given) > 2 else None
        elif func is torch.addmm and place == 1 and len(given) == 3:
            weight, bias = given[2].mT, given[0]
        elif func in _MATMUL and place == 0 and given[1].ndim == 2:
            weight = given[1].mT
        else:
            return None
        if self._labels.of_all([weight, bias]):
            return None
        if chain.weight is not None:
            chain.fault = ("the output projection", "what attention returned goes into two linear layers, as with LoRA")
            return None
        heads = chain.call.rows_of(torch.arange(chain.shape.numel(), device=output.device).view(chain.shape))
        if state.ids.numel() != heads.numel():
            chain.fault = ("the output projection", "some of what attention returned is cut off before it")
            return None
        at = torch.full_like(heads.flatten(), -1).scatter_(0, state.ids.flatten(), torch.arange(
            heads.numel(), device=output.device
        ))[heads]  # fmt: skip
        rows, columns = at // weight.shape[1], at % weight.shape[1]
        if bool((at < 0).any() | (rows != rows[..., :1]).any() | (columns != columns[:, :, :1]).any()):
            chain.fault = ("the output projection", "the linear layer behind it joins no heads of one position")
            return None
        chain.rows, chain.columns, chain.size = rows[..., 0], columns[:, :, 0], output.numel()
        chain.weight = weight.detach().clone()
        chain.bias = None if bias is None else bias.detach().expand(len(weight)).clone()
        return _At(chain, torch.arange(output.numel(), device=output.device).view(output.shape), "projected")

    def _add(self, state: _At, own: torch.Tensor, other: Any, output: torch.Tensor) -> _At | None:
        """An addition: of a bias, of the stream, or of what the MLP made of the sum."""
        chain, label = state.chain, self._labels.of_all([other])
        width = self._width(state)
        if state.at == "projected":
            constant = None if label else _row(other, state.ids, width)
            if constant is not None:
                chain.bias = constant if chain.bias is None else chain.bias + constant
                return state
        depends = bool(self._recording.reached(label) & chain.bit)
        if isinstance(state.at, _Normed):
            state.at.goes_on = state.at.goes_on or bool(label)
            if label & chain.bit and state.at.sum is None:
                total = _aligned(output, state.ids, width)
                state.at.sum = _Sum(total, total, total)
                return replace(state, at=state.at.sum)
            if not label:
                chain.fault = ("the norm behind the addition", "a bias is added to what it gives by hand")
            return None
        if depends and isinstance(state.at, _Sum):
            state.at.goes_on = self._pre_norm = True
            return None
        if depends or any(label & fed.bit & ~chain.known for fed in self._recording.fed):
            what = "something that is made of it, as LoRA does" if depends else "what other attention returned"
            chain.fault = ("the addition to the stream", f"what its projection returned is added to {what}")
            return None
        more = _aligned(_like(other, output).expand(output.shape), state.ids, width)
        total = _aligned(output, state.ids, width)
        if isinstance(state.at, _Sum):
            one = _Sum(total, state.at.added, state.at.stream + more)
        else:
            one = _Sum(total, _aligned(own, state.ids, width), more)
        chain.sums.append(one)
        return replace(state, at=one)

    def _scale(self, state: _At, other: Any, func: Any, output: torch.Tensor) -> _At | None:
        """A constant factor: LayerScale, a gate, or the weight of a norm that is written by hand."""
        chain, width = state.chain, self._width(state)
        if isinstance(state.at, _Sum):
            roots = self._followed.get(other, ()) if isinstance(other, _T) else ()
            eps = [one.at[2] for one in roots if isinstance(one.at, tuple) and one.at[:2] == ("root", state.at)]
            if eps:
                norm = Norm(None, None, eps[0], centred=False)
                return self._normed(state, state.at, norm, output, by_hand=True)
            squares = isinstance(other, _T) and any(one.at is state.at for one in roots)
            return replace(state, at=("squares", state.at, 0.0)) if squares else None
        factor = None if self._labels.of_all([other]) else _row(other, state.ids, width)
        if factor is None:
            return None
        if isinstance(state.at, _Normed):
            if not state.at.by_hand or state.at.norm.weight is not None:
                return None
            state.at.norm = replace(state.at.norm, weight=factor)
            state.at.output = _aligned(output, state.ids, width)
            return state
        chain.factor = factor if chain.factor is None else chain.factor * factor
        chain.bias = None if chain.bias is None else chain.bias * factor
        return state

    def _norm(
        self, state: _At, func: Any, given: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
    ) -> _At | None:
        """A norm of a sum: torch's own, or the first step of one that is written by hand."""
        if not isinstance(state.at, _Sum):
            return None
        if func in _NORMS:
            centred = func is F.layer_norm or func is torch.layer_norm
            names = ("input", "normalized_shape", "weight", "bias", "eps") if centred else (
                "input", "normalized_shape", "weight", "eps"
            )  # fmt: skip
            asked = dict(zip(names, given[: len(given) - len(kwargs)], strict=False)) | kwargs
            weight, bias, eps = asked.get("weight"), asked.get("bias"), asked.get("eps")
            if tuple(asked["normalized_shape"]) != (self._width(state),) or self._labels.of_all([weight, bias]):
                return None
            eps = eps if eps is not None else 1e-5 if centred else torch.finfo(output.dtype).eps
            weight, bias = (None if x is None else x.detach().clone() for x in (weight, bias))
            norm = Norm(weight, bias, eps, centred)
            return self._normed(state, state.at, norm, output)
        squared = func in _SQUARE or (func in _POWER and given[1] == 2)
        return replace(state, at=("squares", state.at, 0.0)) if squared else None

    def _normed(self, state: _At, one: _Sum, norm: Norm, output: torch.Tensor, *, by_hand: bool = False) -> _At | None:
        """A norm of a sum was found; the second one is the last that is followed."""
        if one.normed is None:
            one.normed = _Normed(norm, _aligned(output, state.ids, self._width(state)), by_hand)
        last = any(first.normed is not None and first.normed.sum is one for first in state.chain.sums)
        return None if last and not by_hand else replace(state, at=one.normed)

    def _by_hand(
        self,
        state: _At,
        at: tuple[_Root, _Sum, float],
        func: Any,
        given: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: torch.Tensor,
    ) -> _At | None:
        """The next step of 1 / sqrt(mean of squares + eps)."""
        step, one, eps = at
        if (
            step == "squares"
            and func in _MEAN
            and given[1:2] in ((-1,), ([-1],), ((-1,),))
            and output.ndim == state.ids.ndim
        ):
            return replace(state, at=("mean", one, eps))
        if step == "mean" and func in _ADD and not self._labels.of_all(given[1:]):
            constant = next(x for x in given if not (isinstance(x, _T) and x.shape == output.shape))
            return replace(state, at=("mean", one, eps + float(constant)))
        return replace(state, at=("root", one, eps)) if step == "mean" and func in _ROOT else None

    def _width(self, state: _At) -> int:
        assert state.chain.weight is not None
        return len(state.chain.weight)


def check(block: Block, queries: list[int], weighted: torch.Tensor, module: str) -> None:
    """Raise ValueError unless weighted values (head, query, dim) are, projected, what was added at some queries."""
    expected = block.projected(weighted)
    if block.bias is not None:
        expected = expected + block.bias
    _compare(module, "the output projection", expected, block.added[queries])


def _behind(module: str, one: _Sum) -> _Normed | None:
    """The norm that all of a sum goes through; None where the sum goes on itself."""
    if one.goes_on or one.normed is None:
        return None
    again = one.normed.norm(one.total.to(_better(one.total)))
    _compare(module, "the norm behind the addition", again, one.normed.output)
    return one.normed


def _compare(module: str, step: str, expected: torch.Tensor, seen: torch.Tensor) -> None:
    finite = seen.isfinite()  # padding that attends to nothing may hold anything
    difference, scale = (float(x.where(finite, 0).abs().max()) for x in (seen - expected, seen))
    if not difference <= tolerance(seen.dtype) * scale:
        raise _lost(module, step, f"computed again it is off by {difference:.2g}, where the largest is {scale:.2g}")


def _lost(module: str, step: str, why: str) -> ValueError:
    return ValueError(
        f"keep='block' did not find {step} behind the attention of {module or 'the model'}: {why}; leave "
        "that layer out (layers=), or capture without keep=, for methods that need no block"
    )


def _aligned(x: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """The elements of a tensor in the order of their numbers, (row, width): a copy."""
    flat = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
    flat[ids.flatten()] = x.detach().flatten()
    return flat.view(-1, width)


def _row(constant: Any, ids: torch.Tensor, width: int) -> torch.Tensor | None:
    """A constant that is the same in every row, (width,); None for any other."""
    if not isinstance(constant, torch.Tensor):
        return torch.full((width,), float(constant), device=ids.device)
    rows = _aligned(constant.expand(ids.shape), ids, width)
    return rows[0].clone() if bool((rows == rows[0]).all()) else None


def _name(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__name__", "a function")


def _in_place(func: Any) -> bool:
    """Whether a function writes into its first argument, as its name says."""
    name = getattr(func, "__name__", "")
    written = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__", "__imul__")
    return (written or name in ("__isub__", "__itruediv__")) and func not in _SAME


def _like(x: Any, output: torch.Tensor) -> torch.Tensor:
    return x.to(output.dtype) if isinstance(x, torch.Tensor) else output.new_tensor(x)


def _better(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
