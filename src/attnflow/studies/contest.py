"""Who takes part in a study, and how it is counted: all methods of the table, and what they must beat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.baselines import BASELINES, Inputs
from attnflow.capturing import capture
from attnflow.faithfulness.results import Evaluation, Row, Summary
from attnflow.graph import LayerChoice
from attnflow.methods import raw, relevance
from attnflow.trace import Grid, Query, Trace

Floats: TypeAlias = NDArray[np.float64]
Progress: TypeAlias = Callable[[int, int | None], object]

# The methods of the paper, at every layer; the leaderboard has all methods, at the top.
STUDIED = ("raw", "rollout", "flow")
GRADIENTS = ("gradient-norm", "gradient-sum", "gradient-x-input")


def traced(model: torch.nn.Module, inputs: Inputs, target: Any, tokenizer: Any = None) -> Trace:
    """The trace of one example, with the gradients of a target."""
    return capture(model, inputs, tokenizer=tokenizer, target=target)


def methods(
    trace: Trace, *, query: Query, layer: LayerChoice, failed: dict[str, str]
) -> Iterator[tuple[str, Relevance]]:
    """Every method of STUDIED on a trace, by name; one that cannot be had is left out and its error noted."""
    for name in STUDIED:
        try:
            yield name, relevance(trace, name, query=query, layer=layer)
        except ValueError as error:
            failed.setdefault(name, " ".join(str(error).split()))


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


def ranked(entries: Iterable[Summary]) -> str:
    """Methods with their means, best first, as a phrase: "raw .941, flow .702"."""
    known = sorted(entries, key=lambda one: one.mean if one.direction == "down" else -one.mean)
    return ", ".join(f"{one.method} {one.mean:.3f}" for one in known if one.n)


def means(entries: Iterable[Summary]) -> Mapping[str, float]:
    """The mean of each method; of several layers, the last given."""
    return {one.method: one.mean for one in entries}


def _centre(trace: Trace, grid: Grid) -> Floats:
    """Minus the distance of each patch from the middle, in patches; prefix tokens have the least."""
    middle = (np.array(grid) - 1) / 2
    distance = np.linalg.norm(np.indices(grid).reshape(len(grid), -1).T - middle, axis=1)
    result = np.full(len(trace.tokens), -distance.max())
    result[patches(trace)] = -distance
    return result
