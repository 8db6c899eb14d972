"""What a model is asked once: later batches, of any shape, are taken to be as the first one was proved to be.

`capture` proves every new shape of inputs, and texts in batches have many. Which axis holds the examples is the one
thing that could change with a shape, and it cannot where the proof found what `capture` takes for the likeliest anyway:
the first axis, of the tokens and of every call. Where it found anything else the model is asked about every shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from attnflow.capturing import capture_batch, structure
from attnflow.capturing.inputs import arguments, module_of
from attnflow.capturing.proof import ORDERS
from attnflow.trace import Trace


@dataclass(frozen=True)
class FirstProof:
    """What was found out about the first batch.

    plain: whether it holds for every shape. facts: for the recipe. reads: the positions that a pooled output is read
    from, "all", or None where that is not known.
    """

    plain: bool
    facts: Mapping[str, str]
    reads: tuple[int, ...] | Literal["all"] | None = None

    def applied(self, trace: Trace) -> Trace:
        """A trace that was not proved, with what the first batch says of it."""
        reads = trace.reads  # which a target's gradient tells by itself
        if reads is None:
            reads = tuple(range(len(trace.tokens))) if self.reads == "all" else self.reads
        return replace(trace, reads=reads, model={**trace.model, "proofs": self.facts})


def first_proof(model: Any, inputs: Any, traces: Sequence[Trace], settings: Mapping[str, Any]) -> FirstProof:
    """What the proof of a batch of several examples says of others.

    traces: of the batch, proved. settings: of the capture that made them.
    """
    facts: Mapping[str, str] = traces[0].model["proofs"]
    found = {"all" if _reads_all(trace) else trace.reads for trace in traces}
    known: list[tuple[int, ...] | Literal["all"] | None] = [one for one in (None, "all", (0,)) if found == {one}]
    if not known or not _lies_plainly(model, inputs, settings.get("tokenizer"), len(traces)):
        return FirstProof(False, facts)
    again = capture_batch(model, inputs, **settings, prove=False)
    same = all(_same(first, second) for first, second in zip(traces, again, strict=True))
    return FirstProof(same, {**facts, "asked": "of the first batch"}, known[0])


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that layers hold, with the name of its field."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_of(name, one)
    elif dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from tensors_of(one.name, getattr(value, one.name))


def _reads_all(trace: Trace) -> bool:
    return trace.reads == tuple(range(len(trace.tokens)))


def _lies_plainly(model: Any, inputs: Any, tokenizer: Any, count: int) -> bool:
    """Whether the examples of a batch were proved to lie along the first axis of the tokens and of every call."""
    module, bound = module_of(model)
    args, named = arguments(module, inputs, tokenizer)
    found = structure.known(module, args, {**bound, **named}, None)
    proof = None if found is None else found.structure.proof
    if proof is None or proof.mixers is not None:
        return False
    axes = {(layout.batch, layout.batch_axis) for layout in proof.layouts.values()}
    return axes == {(count, 0)} and set(proof.orders.values()) == {ORDERS[0]}


def _same(first: Trace, second: Trace) -> bool:
    """Whether two captures of the same input kept the same."""
    pairs = list(zip(tensors_of("", first.layers), tensors_of("", second.layers), strict=False))
    named = (first.tokens, first.roles, first.grid) == (second.tokens, second.roles, second.grid)
    return named and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-6) for (_, one), (_, other) in pairs
    )
