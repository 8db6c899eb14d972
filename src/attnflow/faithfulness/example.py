"""One example of an evaluation: its trace, its score functions, and every method and metric on it."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow import baselines
from attnflow.answer import Relevance
from attnflow.baselines import BASELINES
from attnflow.capturing import capture, huggingface
from attnflow.capturing.target import Classes, TargetValue, as_target, resolved
from attnflow.faithfulness.journal import Entry
from attnflow.faithfulness.metrics import METRICS, ScoreFunction, blank_out
from attnflow.faithfulness.results import Failure, Row
from attnflow.faithfulness.score import Score, image_score, remembered, text_score
from attnflow.methods import METHODS, kept_for, read_out
from attnflow.methods import relevance as explained
from attnflow.trace import Trace

Given: TypeAlias = tuple[Any, ...] | Callable[[], tuple[Any, ...]]
Opened: TypeAlias = tuple[Any, ...] | Exception
EvaluationTarget: TypeAlias = int | str | tuple[int | str, int | str] | TargetValue | Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and how; `run.evaluate` says what each setting means."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    target: EvaluationTarget
    query: int | str | None
    layer: int | Literal["all"]
    settings: Mapping[str, Mapping[str, Any]]
    gradient: str
    blank: str | None
    special: bool
    seed: int
    batch_size: int
    tokenizer: Any

    def asked_of(self, method: str) -> list[str]:
        """The metrics of a method: all, but that the gradient baseline is not correlated with itself."""
        return [name for name in self.metrics if method != self.gradient or METRICS[name].needs != "gradient"]


@dataclass(frozen=True, eq=False)
class Example:
    """One example as methods and metrics see it.

    inputs: what the model takes. target: a class, or a function of the output. positions: the tokens that may be
    removed. scores: for every metric that needs one, a score function that asks the model about each case once; and
    under None the one that occlusion uses. mask (height, width), or marks (token,), where the example has any.
    """

    plan: Plan
    model: torch.nn.Module
    inputs: baselines.Inputs
    trace: Trace
    target: Any
    positions: tuple[int, ...]
    scores: Mapping[str | None, ScoreFunction]
    mask: NDArray[np.bool_] | None
    randomised: bool = False

    def relevance(self, method: str) -> Relevance:
        """The scores of a method or a baseline, of the plan's query and layers."""
        settings = self.plan.settings.get(method, {})
        if method in METHODS:
            query = read_out(method, self.trace) if self.plan.query == "readout" else self.plan.query
            return explained(self.trace, method, query=query, layer=self.plan.layer, **settings)
        function = BASELINES[method].function
        if BASELINES[method].needs == "changes":
            return function(self.trace, blank_out(self.scores[None], len(self.positions)), self.positions)
        if method == "random":
            settings = {"seed": self.plan.seed + (1 if self.randomised else 0), **settings}  # drawn anew
        return function(self.trace, self.model, self.inputs, target=self.target, **settings)

    def value(self, metric: str, scores: NDArray[np.float64], others: Mapping[str, NDArray[np.float64]]) -> float:
        """A metric of scores (token,) over the whole input. others (token,): the scores that some correlate with."""
        row = METRICS[metric]
        removable = scores[list(self.positions)]
        if row.needs in ("gradient", "randomised"):
            return row.function(removable, others[row.needs][list(self.positions)])
        if row.needs not in ("mask", "marks"):
            return row.function(removable, self.scores[metric])
        # A mask says where something is, not for what it speaks: of signed relevance the size is compared with it.
        if row.needs == "marks":
            return row.function(np.abs(removable)[None], self._marks(metric)[None])
        if self.mask is None or self.trace.grid is None:
            raise ValueError(f"{metric} needs images with masks: give data as (pixels, label, mask)")
        return row.function(np.abs(removable).reshape(self.trace.grid), self.mask)

    def _marks(self, metric: str) -> NDArray[np.bool_]:
        """Which of the tokens that may be removed are marked."""
        tokens = len(self.trace.tokens)
        if self.mask is None or self.mask.shape != (tokens,):
            found = "no marks" if self.mask is None else f"marks of shape {self.mask.shape}"
            raise ValueError(f"{metric} needs a text with marks ({tokens},), one for each token; there are {found}")
        return self.mask[list(self.positions)]


def opened(given: Given) -> Opened:
    """The example, or why it cannot be opened, where it is a function that opens it."""
    if not callable(given):
        return given
    try:
        return given()
    except ImportError:
        raise
    except Exception as error:
        return error


def measure(model: torch.nn.Module, shuffled: torch.nn.Module | None, number: int, data: Opened, plan: Plan) -> Entry:
    """All methods and metrics on one example; whatever fails is part of the entry, but for a missing package.

    shuffled: the model with its weights randomised, where a metric needs it. data: what `opened` returns.
    """
    name = digest(data)
    if isinstance(data, Exception):
        return Entry(number, name, (), (Failure(number, None, line(data)),))
    try:
        example = prepare(model, data, plan)
        forgetful = prepare(shuffled, data, replace(plan, target=example.target)) if shuffled else None
        forgetful = forgetful and replace(forgetful, randomised=True)
        reference = example.relevance(plan.gradient).row
    except ImportError:
        raise
    except Exception as error:
        return Entry(number, name, (), (Failure(number, None, line(error)),))
    rows: list[Row] = []
    failures: list[Failure] = []
    for method in plan.methods:
        try:
            relevance = example.relevance(method)
            by_layer = relevance.every_layer.mean(axis=1)
            randomised = forgetful.relevance(method).every_layer.mean(axis=1) if forgetful else by_layer
            for layer, scores, other in zip(relevance.layers, by_layer, randomised, strict=True):
                others = {"gradient": reference, "randomised": other}
                values = [(metric, example.value(metric, scores, others)) for metric in plan.asked_of(method)]
                rows += [Row(number, method, None if method in BASELINES else layer, *value) for value in values]
        except ImportError:
            raise
        except Exception as error:
            failures.append(Failure(number, method, line(error)))
    return Entry(number, name, tuple(rows), tuple(failures))


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy of the model that forgot what it learnt: the numbers of each parameter in a random order."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return model


def prepare(model: torch.nn.Module, data: tuple[Any, ...], plan: Plan) -> Example:
    """The trace and the score functions of (text, label) or (pixels, label), with marks or a mask behind them."""
    content, label = data[:2]
    target: Any = plan.target
    if target == "label":
        if label is None:
            raise ValueError("the example has no label; give one, or target='predicted'")
        target = int(label)
    inputs = model_inputs(content, model, plan.tokenizer)
    kept: dict[str, Any] = {}
    for name in plan.methods:
        kept |= kept_for([name], plan.settings.get(name, {}).get("residual"))
    trace = capture(model, inputs, tokenizer=plan.tokenizer, target=target, entered=True, **kept)
    if not callable(target):
        named = {} if isinstance(inputs, torch.Tensor) else inputs
        settled = as_target(resolved(target, model)).settled(trace.output, named.get("attention_mask")).of(0)
        target = trace.target["target"] if isinstance(settled, Classes) and trace.target else settled
    positions, scores = _scores(model, inputs, trace, target, plan)
    inside = np.asarray(data[2]) != 0 if len(data) > 2 else None
    return Example(plan, model, inputs, trace, target, positions, scores, inside)


def model_inputs(content: Any, model: torch.nn.Module, tokenizer: Any) -> baselines.Inputs:
    """What the model takes for a text, or for pixels with or without a batch axis, on its device."""
    if isinstance(content, str):
        return huggingface.tokenize(content, model, tokenizer)
    return (content if content.ndim == 4 else content[None]).to(next(model.parameters()).device)


def digest(data: Opened) -> str:
    """The SHA-256 of an example in hexadecimal: its text or pixels, its label and its mask; or why there are none."""
    result = hashlib.sha256()
    for part in (line(data),) if isinstance(data, Exception) else data:
        if part is None or isinstance(part, str | int):
            result.update(f"{type(part).__name__} {part} ".encode())
        else:
            result.update(baselines.digest(part if isinstance(part, torch.Tensor) else torch.tensor(np.asarray(part))))
    return result.hexdigest()


def _scores(
    model: torch.nn.Module, inputs: baselines.Inputs, trace: Trace, target: Any, plan: Plan
) -> tuple[tuple[int, ...], dict[str | None, ScoreFunction]]:
    """The positions that may be removed, and a score function per metric; metrics that ask alike share theirs."""
    made: dict[tuple[str, str], ScoreFunction] = {}

    def make(reading: Any, blank: Any) -> Score:
        common: dict[str, Any] = {"blank": blank, "reading": reading, "batch_size": plan.batch_size}
        if isinstance(inputs, torch.Tensor):
            if trace.grid is None or len(trace.grid) != 2:
                raise ValueError(
                    "the trace has no patches of an image: pixels must go through the model's own patch embedding"
                )
            return image_score(model, inputs, trace.roles, trace.grid, target, **common)
        common |= {"tokenizer": plan.tokenizer, "special": plan.special}
        return text_score(model, inputs, trace.roles, target, **common)

    usual = "zero" if isinstance(inputs, torch.Tensor) else "unk"
    positions = make("probability", plan.blank or usual).positions
    wanted: dict[str | None, tuple[str, str]] = {None: ("probability", plan.blank or usual)}
    for name in plan.metrics:
        row = METRICS[name]
        if row.needs in ("score", "correct"):
            blank = plan.blank or (row.image_blank if isinstance(inputs, torch.Tensor) else usual)
            wanted[name] = ("correct" if row.needs == "correct" else "probability", blank)
    made = {key: remembered(make(*key)) for key in set(wanted.values())}
    return positions, {name: made[key] for name, key in wanted.items()}


def line(error: Exception) -> str:
    """The error on one line, with its kind where that is not plain bad input."""
    message = " ".join(str(error).split())
    return message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"
