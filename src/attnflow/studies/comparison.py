"""Who takes part in a study, and how it is counted: all methods of the table, and what they must beat."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.baselines import BASELINES, Inputs
from attnflow.capturing import capture
from attnflow.faithfulness.example import line
from attnflow.faithfulness.results import Evaluation, Row, Summary
from attnflow.graph import LayerChoice
from attnflow.methods import raw, relevance
from attnflow.studies.record import Score
from attnflow.trace import Grid, Query, Trace

Floats: TypeAlias = NDArray[np.float64]

# The methods of the paper, at every layer; the leaderboard has all methods, at the top.
STUDIED = ("raw", "rollout", "flow")
GRADIENTS = ("gradient-norm", "gradient-sum", "gradient-x-input")


def traced(model: torch.nn.Module, inputs: Inputs, target: Any, tokenizer: Any = None) -> Trace:
    """The trace of one example, with the gradients of a target."""
    return capture(model, inputs, tokenizer=tokenizer, target=target)


@dataclass
class Failures:
    """The methods that could not be had: on how many examples, and the first error of each."""

    examples: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    errors: dict[str, str] = field(default_factory=lambda: dict[str, str]())

    def add(self, method: str, error: Exception) -> None:
        """Count an example on which a method failed."""
        self.examples[method] = self.examples.get(method, 0) + 1
        self.errors.setdefault(method, line(error))

    @property
    def table(self) -> dict[str, Any]:
        """The table "failed" of a record, or no table where nothing failed."""
        found = {name: {"examples": count, "error": self.errors[name]} for name, count in self.examples.items()}
        return {"failed": found} if found else {}


def methods(trace: Trace, *, query: Query, layer: LayerChoice, failures: Failures) -> Iterator[tuple[str, Relevance]]:
    """Every method of STUDIED on a trace, by name; one that fails is left out and counted."""
    for name in STUDIED:
        try:
            found = relevance(trace, name, query=query, layer=layer)
        except ImportError:
            raise
        except Exception as error:
            failures.add(name, error)
        else:
            yield name, found


def baselines(trace: Trace, model: torch.nn.Module, inputs: Inputs, *, target: Any, seed: int) -> dict[str, Floats]:
    """What is known without the attention graph, each (token,): random scores, gradients, place, the first layer alone.

    position: a later token has more. centre: a patch nearer the middle of the image has more. first-layer: the sum of
    the token's column in layer 0 of raw attention, which orders tokens as a saturated flow does.
    """
    found = {"random": BASELINES["random"].function(trace, model, inputs, target=target, seed=seed).row}
    for name in GRADIENTS:
        found[name] = BASELINES[name].function(trace, model, inputs, target=target).row
    found["first-layer"] = raw(trace, layer=0).scores.sum(axis=0)
    if trace.grid is None:
        return found | {"position": np.arange(len(trace.tokens), dtype=np.float64)}
    return found | {"centre": _centre(trace, trace.grid)}


def patches(trace: Trace) -> list[int]:
    """The positions of the patches."""
    return [position for position, role in enumerate(trace.roles) if role == "patch"]


def summaries(rows: Iterable[Row], seed: int) -> list[Summary]:
    """Means over the examples with their intervals, one per method, layer and metric."""
    return Evaluation(tuple(rows), (), {"seed": seed}).summary()


def topmost(entries: Sequence[Summary], metric: str) -> list[Summary]:
    """Each method at its topmost layer, and the baselines, on one metric."""
    highest = max((one.layer for one in entries if one.layer is not None), default=None)
    return [one for one in entries if one.metric == metric and one.layer in (None, highest)]


def table(entries: Iterable[Summary]) -> dict[str, dict[str, dict[str, Any]]]:
    """Metric, method, then layer ("" for baselines, which have none) to the numbers, as JSON takes them."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for one in entries:
        layer = "" if one.layer is None else str(one.layer)
        numbers = {name: round(getattr(one, name), 4) for name in ("mean", "deviation", "low", "high")}
        result.setdefault(one.metric, {}).setdefault(one.method, {})[layer] = {**numbers, "n": one.n}
    return result


def ranked(scores: Iterable[Score]) -> str:
    """Methods with their means, best first, as a phrase: "raw 0.941, flow 0.702"."""
    known = sorted(scores, key=lambda one: one.mean if one.direction == "down" else -one.mean)
    return ", ".join(f"{one.method} {one.mean:.3f}" for one in known if one.n)


def means(scores: Iterable[Score]) -> Mapping[str, float]:
    """The mean of each method; NaN for a method that has none."""
    return defaultdict(lambda: math.nan, {one.method: one.mean for one in scores})


def best(known: Mapping[str, float]) -> str:
    """The method of STUDIED with the largest number; "none" where no number is known."""
    candidates = [name for name in STUDIED if not math.isnan(known[name])]
    return max(candidates, key=lambda name: known[name], default="none")


def number(value: float | None, form: str = ".3f") -> str:
    """A number in a sentence; "undefined" for NaN, which files hold as null."""
    return "undefined" if value is None or math.isnan(value) else format(value, form)


def _centre(trace: Trace, grid: Grid) -> Floats:
    """Minus the distance of each patch from the middle, in patches; prefix tokens have the least."""
    middle = (np.array(grid) - 1) / 2
    distance = np.linalg.norm(np.indices(grid).reshape(len(grid), -1).T - middle, axis=1)
    result = np.full(len(trace.tokens), -distance.max())
    result[patches(trace)] = -distance
    return result
