"""Model and input in, relevance out: `explain` captures what methods need and no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

import torch

from attnflow.baselines import BASELINES
from attnflow.capturing import CaptureSettings, capture
from attnflow.capturing.inputs import arguments, module_of
from attnflow.capturing.target import Target
from attnflow.graph import Settings
from attnflow.methods import METHODS, relevance
from attnflow.relevance import Relevance
from attnflow.trace import Trace

Progress = Callable[[int, int], object]


class ExplainSettings(Settings, CaptureSettings, total=False):
    """The settings of `capture` and those of the attention graph."""


@overload
def explain(
    model: torch.nn.Module,
    inputs: Any,
    method: str = ...,
    *,
    receptive_field: bool = ...,
    progress: Progress | None = ...,
    **settings: Unpack[ExplainSettings],
) -> Relevance: ...


@overload
def explain(
    model: torch.nn.Module,
    inputs: Any,
    method: Sequence[str],
    *,
    receptive_field: bool = ...,
    progress: Progress | None = ...,
    **settings: Unpack[ExplainSettings],
) -> dict[str, Relevance]: ...


def explain(
    model: torch.nn.Module,
    inputs: Any,
    method: str | Sequence[str] = "rollout",
    *,
    receptive_field: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[ExplainSettings],
) -> Relevance | dict[str, Relevance]:
    """Which inputs an output drew on, in one call: run the model on one example, and carry what it attended to.

    model, inputs: as `attnflow.capture` takes them, with its settings, such as tokenizer and target.
    method: a name in `METHODS`, or in `BASELINES` of those that need the inputs alone; of several the answer is a
    dictionary. The model runs once for all methods, and once more for each baseline.
    target: of methods that need gradients; "predicted" unless told otherwise.
    query: unless told otherwise the position that the output is read from, or all where it is read from several.
    The other settings are those of `attnflow.relevance`, and go to every method.

    Raises ValueError, before the model runs, for unknown methods, and for a target that no method makes use of; else as
    `attnflow.capture` and `attnflow.relevance` do.
    """
    names = [method] if isinstance(method, str) else list(method)
    known = [*METHODS, *(name for name, row in BASELINES.items() if row.needs == "inputs")]
    for name in names:
        if name not in known:
            raise ValueError(f"method {name!r} is unknown; choose one of {', '.join(known)}")
    if not names:
        raise ValueError("no method was given; choose at least one of " + ", ".join(known))
    targeted = [name for name in names if name not in METHODS or "gradient" in METHODS[name].needs]
    target: Target | None = settings.pop("target", None)
    if target is not None and not targeted:
        raise ValueError(f"target has no part in {', '.join(names)}: they explain a position, whatever is made of it")
    target = "predicted" if target is None and targeted else target
    capturing = {name: value for name, value in settings.items() if name in CaptureSettings.__annotations__}
    carrying: dict[str, Any] = {name: value for name, value in settings.items() if name not in capturing}
    measured = settings.get("residual") == "measured"
    if measured or any("block" in METHODS[name].needs for name in names if name in METHODS):
        capturing["keep"] = "block"
    trace = capture(model, inputs, target=target, **capturing)  # pyright: ignore[reportArgumentType]
    carrying.setdefault("query", trace.readout if trace.readout is not None else trace.reads)
    carrying |= {"receptive_field": receptive_field, "progress": progress}

    def answer(name: str) -> Relevance:
        if name in METHODS:
            return relevance(trace, name, **carrying)
        return _baseline(name, trace, model, inputs, target, settings.get("tokenizer"))

    answers = {name: answer(name) for name in names}
    return answers[method] if isinstance(method, str) else answers


def _baseline(name: str, trace: Trace, model: Any, inputs: Any, target: Any, tokenizer: Any) -> Relevance:
    module, bound = module_of(model)
    args, named = arguments(module, inputs, tokenizer)
    given: torch.Tensor | Mapping[str, Any] = args[0] if args else {**bound, **named}
    return BASELINES[name].function(trace, module, given, target=target)
