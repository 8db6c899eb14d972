"""What a worker does: some examples in, their rows out, by as few passes of the model as memory allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnflow.answer import Relevance
from attnflow.capturing import capture_batch, huggingface
from attnflow.capturing.target import Classes, as_target, has_logits, norm_at
from attnflow.capturing.vision import open_image
from attnflow.explaining import answer, entered_for, is_targeted
from attnflow.faithfulness.example import line
from attnflow.files import plain, to_json
from attnflow.methods import kept_for
from attnflow.running.plan import Plan, Subject
from attnflow.running.proofs import FirstProof, first_proof, tensors_of
from attnflow.running.shards import BESIDE, Table, table_of
from attnflow.running.sources import Example, class_of
from attnflow.trace import Trace

# Texts are padded to a multiple of this, so that batches have few shapes: the model is asked about each shape once.
_MULTIPLE = 8
# Examples in the first batch: as few as tell which axis of the model's tensors is the batch.
_FIRST = 2
# What a pass takes at its peak, in units of what it keeps of the attention.
_PEAK = 4


@dataclass(frozen=True, eq=False)
class _Ready:
    """One example as the model takes it. tokens: of a text, else 0. alike: what its batch must have in common."""

    example: Example
    inputs: Any
    target: int | None
    tokens: int
    alike: Any


class Worker:
    """A model, and what is remembered of it from batch to batch.

    Within a chunk of examples those of about the same length are explained in one pass. What cannot be explained
    together is explained alone, and what cannot be explained alone is a row with its error.
    """

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self._model, self._tokenizer, self._prepare = subject.model, subject.tokenizer, subject.prepare
        self._plan = plan
        self._targeted = any(map(is_targeted, plan.methods))
        self._kept_for = kept_for(plan.methods, plan.settings.get("residual")) | entered_for(plan.methods, {})
        self._has_logits: bool | None = None
        self._first: FirstProof | None = None
        self._kept: tuple[float, float] | None = None  # bytes for each token, and for each pair of them

    def table(self, examples: Sequence[Example], progress: Callable[[int], object] | None = None) -> Table:
        """The rows of some examples, in their order, then in that of the methods.

        progress: called with the number of examples that are done, of each batch.

        Raises ImportError for a missing package; with fail_fast ValueError for the first example that fails.
        """
        start, processor = time.perf_counter(), time.process_time()
        rows: dict[int, list[dict[str, Any]]] = {}
        alone = dict[int, str]()
        ready: list[_Ready] = []
        for example in examples:
            try:
                ready.append(self._ready(example))
            except ImportError:
                raise
            except Exception as error:
                rows[example.number] = [self._failure(example, error)]
        if progress and rows:
            progress(len(rows))
        for batch in self._batches(ready):
            rows |= self._rows(batch, alone)
            if progress:
                progress(len(batch))
        facts = {
            "seconds": time.perf_counter() - start,
            "processor_seconds": time.process_time() - processor,
            "alone": len(alone),
            "why": next(iter(alone.values()), None),
        }
        return table_of([row for example in examples for row in rows[example.number]], facts)

    def _ready(self, example: Example) -> _Ready:
        content = example.content
        if isinstance(content, Exception):
            raise content
        target = self._label(example) if self._plan.target == "label" and self._targeted else None
        if isinstance(content, str):
            inputs = huggingface.tokenize(content, self._model, self._tokenizer)
            return _Ready(example, inputs, target, inputs["input_ids"].shape[1], tuple(sorted(inputs)))
        if isinstance(content, Path):
            if self._prepare is None:
                raise ValueError(
                    "a photograph needs a model that says how it wants its pixels: load_model(task='image')"
                )
            content = self._prepare(open_image(content))
        if not isinstance(content, torch.Tensor):
            return _Ready(example, content, target, 0, example.number)
        pixels = content[None] if content.ndim == 3 and content.is_floating_point() else content
        parameter = next(self._model.parameters(), None)
        pixels = pixels if parameter is None else pixels.to(parameter.device)
        together = pixels.ndim == 4 and len(pixels) == 1
        return _Ready(example, pixels, target, 0, (pixels.shape, pixels.dtype) if together else example.number)

    def _label(self, example: Example) -> int:
        label = example.label
        if label is None:
            raise ValueError("the example has no label; give one, or target='predicted'")
        return class_of(label, self._model)

    def _batches(self, ready: Sequence[_Ready]) -> Iterator[list[_Ready]]:
        """The examples in batches of about the same length that memory holds, the short ones first."""
        pads = getattr(self._tokenizer, "pad_token", None) is not None
        groups: dict[Any, list[_Ready]] = {}
        for one in ready:
            groups.setdefault((one.alike, None if pads else one.tokens), []).append(one)
        for group in groups.values():
            batch: list[_Ready] = []
            for one in sorted(group, key=lambda one: one.tokens):
                if batch and not self._holds(len(batch) + 1, one.tokens):
                    yield batch
                    batch = []
                batch.append(one)
            yield batch

    def _holds(self, count: int, tokens: int) -> bool:
        """Whether so many examples of so many tokens may share a pass."""
        # What a function of the output does with other examples, or with padding, is not known.
        if count > (1 if callable(self._plan.target) else self._plan.batch_size):
            return False
        if self._kept is None:  # the first batch tells
            return count <= _FIRST
        by_token, by_pair = self._kept
        tokens = max(tokens, 1)
        needed = _PEAK * count * (by_token * tokens + by_pair * tokens**2)
        return self._plan.memory is None or needed <= self._plan.memory

    def _rows(self, batch: Sequence[_Ready], alone: dict[int, str]) -> dict[int, list[dict[str, Any]]]:
        """The rows of each example of a batch, by its number. alone: takes those that no pass held together."""
        try:
            traces, targets, predictions = self._traces(batch)
        except ImportError:
            raise
        except Exception as error:
            if len(batch) == 1:
                return {batch[0].example.number: [self._failure(batch[0].example, error)]}
            alone |= {one.example.number: line(error) for one in batch}
            return {number: own for one in batch for number, own in self._rows([one], alone).items()}
        if self._kept is None:
            self._kept = _kept_bytes(traces[0], batch[0].tokens or 1)
        every = zip(batch, traces, targets, predictions, strict=True)
        return {
            one.example.number: self._explained(one, trace, target, prediction)
            for one, trace, target, prediction in every
        }

    def _traces(self, batch: Sequence[_Ready]) -> tuple[list[Trace], list[Any], list[dict[str, Any]]]:
        """The traces of a batch; of each example the target as it has it alone, and what was predicted."""
        inputs = self._together(batch)
        settings: Any = {"tokenizer": self._tokenizer, **self._kept_for}
        target: Any = None
        alone: list[Any] = []
        if self._targeted:
            target = [one.target for one in batch] if self._plan.target == "label" else self._plan.target
        if self._targeted and target is None:
            if not self._has_logits:
                seen = self._captured(inputs, {**settings, "at_each_layer": False, "entered": False})
                self._has_logits = has_logits(seen[0].output)
                alone = [norm_at(trace.readout, trace.decoder_start or 0) for trace in seen]
            target = "predicted" if self._has_logits else _each(alone, inputs)
        traces = self._captured(inputs, {**settings, "target": target})
        if len(traces) != len(batch):
            raise ValueError(f"the model was given {len(batch)} examples and attended over {len(traces)}")
        targets: list[Any] = [None] * len(batch)
        if alone and not self._has_logits:
            targets = alone
            traces = [_of_target(trace, own) for trace, own in zip(traces, alone, strict=True)]
        elif self._targeted:
            named = isinstance(as_target(target), Classes)
            targets = [trace.target and trace.target["target"] if named else target for trace in traces]
        logits = getattr(traces[0].output, "logits", traces[0].output)
        return traces, targets, _predicted(logits) or [{} for _ in batch]

    def _captured(self, inputs: Any, settings: Mapping[str, Any]) -> list[Trace]:
        """The traces of a batch, of which the model is asked about the first, and about others where it must be."""
        if self._first is None or not self._first.plain:
            traces = capture_batch(self._model, inputs, **settings)
            if self._first is not None or len(traces) == 1:
                return traces
            self._first = first_proof(self._model, inputs, traces, settings)
            return [self._first.applied(trace) for trace in traces] if self._first.plain else traces
        return [self._first.applied(trace) for trace in capture_batch(self._model, inputs, **settings, prove=False)]

    def _together(self, batch: Sequence[_Ready]) -> Any:
        """The inputs of a batch as one, texts padded on the right."""
        inputs = [one.inputs for one in batch]
        if len(batch) == 1:
            return inputs[0]
        if isinstance(inputs[0], torch.Tensor):
            return torch.cat(inputs)
        if len({one.tokens for one in batch}) == 1:
            return {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}
        lists = [{name: value[0].tolist() for name, value in one.items()} for one in inputs]
        device = inputs[0]["input_ids"].device

        def padded(multiple: int | None) -> dict[str, Any]:
            found = self._tokenizer.pad(lists, padding_side="right", pad_to_multiple_of=multiple, return_tensors="pt")
            return dict(found.to(device))

        if self._first is not None and self._first.plain:  # no shape is asked about any more
            return padded(None)
        wide = padded(_MULTIPLE)
        try:
            huggingface.check_ids(wide["input_ids"], self._model, self._tokenizer)
        except ValueError:  # the multiple is more than the model takes
            return padded(None)
        return wide

    def _explained(self, one: _Ready, trace: Trace, target: Any, prediction: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A row for each method on one example."""
        found: list[dict[str, Any]] = []
        for method in self._plan.methods:
            try:
                relevance = answer(
                    method, trace, self._model, one.inputs, target, self._tokenizer, {**self._plan.settings}
                )
                row = row_of(relevance, top=self._plan.top, full=self._plan.full)
                found.append({**_facts(one.example), **prediction, "method": method, **row})
            except ImportError:
                raise
            except Exception as error:
                found.append(self._failure(one.example, error, method))
        return found

    def _failure(self, example: Example, error: Exception, method: str | None = None) -> dict[str, Any]:
        if self._plan.fail_fast:
            raise ValueError(f"example {example.number} ({example.name}): {line(error)}") from error
        return _facts(example) | {"method": method, "error": _utf8(line(error))}


def row_of(relevance: Relevance, *, top: int | None, full: bool) -> dict[str, Any]:
    """What is kept of an answer; `relevance_of` makes it one again.

    top: keep the tokens with so many of the highest scores, by their size. full: keep every row, not their mean.

    Raises ValueError for scores that are not finite.
    """
    if not np.isfinite(relevance.scores).all():
        raise ValueError("some of the scores are not finite")
    scores = relevance.every_layer[-1]
    queries, query_tokens, rows = relevance.queries, relevance.query_tokens, relevance.rows
    if not full and len(queries) > 1:
        scores, queries = relevance.row[None], queries[:1]
        query_tokens, rows = (f"mean of {len(relevance.queries)} queries",), "group"
    sizes = np.abs(scores).sum(0)
    beside = np.isin(relevance.roles, BESIDE)
    kept = np.arange(len(relevance.tokens))
    if top is not None and top < len(kept):
        kept = np.sort(np.argsort(-sizes, kind="stable")[:top])
    whole = len(kept) == len(relevance.tokens)
    recipe = {name: value for name, value in relevance.recipe.items() if name not in ("checks", "target")}
    checks = plain(relevance.recipe.get("checks", {}))
    target = relevance.recipe.get("target") or {}
    return {
        "target": None if not target else str(target["target"]),
        "score": target.get("score"),
        "tokens": [_utf8(relevance.tokens[place]) for place in kept],
        "roles": [relevance.roles[place] for place in kept],
        "words": relevance.words if whole else None,
        "grid": relevance.grid if whole else None,
        "scores": scores[:, kept].ravel(),
        "positions": None if whole else kept,
        "count": len(relevance.tokens),
        "sum": float(scores.sum()),
        "queries": queries,
        "query_tokens": [_utf8(token) for token in query_tokens],
        "rows": rows,
        "layer": relevance.layers[-1],
        "special": float(sizes[beside].sum() / sizes.sum()) if sizes.sum() else None,
        "saturated": checks.get("saturated"),
        "fixed": checks.get("fixed_by_layer_0"),
        "checks": to_json(checks),
        "recipe": to_json(plain(recipe)),
    }


def _predicted(logits: Any) -> list[dict[str, Any]]:
    """The class that each example of a batch is given, with its probability; nothing for what is no (batch, class)."""
    if not isinstance(logits, torch.Tensor) or logits.ndim != 2:
        return []
    highest = logits.detach().double().softmax(-1).max(-1)
    pairs = zip(highest.indices.tolist(), highest.values.tolist(), strict=True)
    return [{"prediction": index, "probability": probability} for index, probability in pairs]


def _facts(example: Example) -> dict[str, Any]:
    label = None if example.label is None else _utf8(str(example.label))
    return {
        "example": example.number,
        "name": _utf8(example.name),
        "identity": example.identity,
        "label": label,
    }


def _utf8(text: str) -> str:
    r"""The text with escapes (\udcff) for what is no UTF-8, which no Parquet file takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _of_target(trace: Trace, target: Callable[[Any], torch.Tensor]) -> Trace:
    """A trace of a batch, whose gradients are those of a target of its own example."""
    entered = trace.entered
    return replace(
        trace,
        target={**(trace.target or {}), "target": target.__name__},
        entered=None if entered is None else entered._replace(targets=(as_target(target),)),
    )


def _each(targets: Sequence[Callable[[Any], torch.Tensor]], inputs: Any) -> Callable[[Any], torch.Tensor]:
    """The target of a batch of which each example has its own, over its own positions without padding."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None

    def scores(output: Any) -> torch.Tensor:
        found: Any = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
        hidden = {name: x for name, x in found.items() if isinstance(x, torch.Tensor) and x.ndim == 3}
        own: list[torch.Tensor] = []
        for number, target in enumerate(targets):
            alone = {name: x[number : number + 1] for name, x in hidden.items()}
            if isinstance(mask, torch.Tensor):
                kept = mask[number].bool()
                alone = {name: x[:, kept] if x.shape[1] == len(kept) else x for name, x in alone.items()}
            own.append(target(alone))
        return torch.cat(own)

    return scores


def _kept_bytes(trace: Trace, tokens: int) -> tuple[float, float]:
    """The bytes that a trace keeps for each token of its example, and for each pair of them."""
    linear = pairs = 0
    seen = set[int]()
    for name, tensor in tensors_of("layers", trace.layers):
        if tensor.data_ptr() in seen:  # layers that share a mask
            continue
        seen.add(tensor.data_ptr())
        if name in ("weights", "mask"):
            pairs += tensor.nbytes
        else:
            linear += tensor.nbytes
    return linear / tokens, pairs / tokens**2
