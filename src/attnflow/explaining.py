"""Model and input in, relevance out: `explain` captures what methods need and no more."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, overload

import torch

from attnflow.answer import Relevance
from attnflow.baselines import BASELINES, PathFrom
from attnflow.capturing import CaptureSettings, capture
from attnflow.capturing.inputs import arguments, module_of
from attnflow.capturing.rules import LRP, RULES
from attnflow.capturing.target import Target, has_logits, norm_at
from attnflow.graph import Settings
from attnflow.layers import calls_of
from attnflow.methods import DEFAULTS, METHODS, kept_for, read_out, relevance
from attnflow.trace import Trace

# The share of a target that attention moves, to first order, up to which a warning says so: rounding in single
# precision, as where an untrained LayerNorm keeps the norm of the output the same.
UNMOVED = 1e-5

Progress = Callable[[int, int], object]


class BaselineSettings(TypedDict, total=False):
    """The settings of baselines, as their own functions say what they mean."""

    path_from: PathFrom
    steps: int
    seed: int


class ExplainSettings(Settings, CaptureSettings, BaselineSettings, total=False):
    """The settings of `capture`, those of the attention graph, and those of baselines."""


@overload
def explain(
    model: torch.nn.Module,
    inputs: Any,
    method: str | None = ...,
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
    method: str | Sequence[str] | None = None,
    *,
    receptive_field: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[ExplainSettings],
) -> Relevance | dict[str, Relevance]:
    """Which inputs an output drew on, in one call: run the model on one example, and carry what it attended to.

    model, inputs: as `attnflow.capture` takes them, with its settings, such as tokenizer and target.
    method: a name in `METHODS`, or in `BASELINES` of those that need the inputs alone; of several the answer is a
    dictionary. Unless told otherwise it is "lrp" of a target, and "rollout" without one. The model runs once for all
    methods and plain gradients, and more for every other baseline; once more where no target is given to methods that
    need one.
    target: of methods that need gradients. Unless told otherwise it is "predicted" of a model that returns logits, and
    of others the Euclidean norm of what they return at the read-out.
    query: unless told otherwise the position that the output is read from, or all where it is read from several; all
    for methods that explain the target as a whole.
    layer: with a set of rules ("cp-lrp", "attnlrp", "libra") as the method, the relevance of what enters that block,
    or of all with "all"; without it, of the input itself.
    The other settings are those of `attnflow.relevance`, which go to every method, and those of baselines (path_from,
    steps, seed; the layer of grad-cam and the query of hidden-token-attribution), which go to those that take them.

    Raises ValueError, before the model runs, for unknown methods, and for a target or setting that none of them makes
    use of; else as `attnflow.capture` and `attnflow.relevance` do.
    """
    target: Target | None = settings.pop("target", None)
    method = usual_method(target) if method is None else method
    names = [method] if isinstance(method, str) else list(method)
    check_methods(names, target)
    capturing: Any = {name: value for name, value in settings.items() if name in CaptureSettings.__annotations__}
    carrying: Any = {name: value for name, value in settings.items() if name not in capturing}
    capturing |= kept_for(names, carrying.get("residual")) | entered_for(names, capturing)
    carrying |= {"receptive_field": receptive_field, "progress": progress}
    if settings.get("rules") is not None and not any(name in METHODS and is_targeted(name) for name in names):
        raise ValueError(f"rules have no part in {', '.join(names)}: they say how gradients of attention are taken")
    if of_layers := kept_of_layers(names, carrying.get("layer")):
        trace, _ = captured(model, inputs, names, target, capturing | of_layers)
        found = entering(names[0], trace, carrying)
        return found if isinstance(method, str) else {names[0]: found}
    check_settings(names, carrying)
    trace, target = captured(model, inputs, names, target, capturing)
    answers = {name: answer(name, trace, model, inputs, target, settings.get("tokenizer"), carrying) for name in names}
    return answers[method] if isinstance(method, str) else answers


def check_settings(names: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Refuse settings that none of some methods and baselines takes."""
    taken = frozenset[str]().union(*(BASELINES[name].takes for name in names if name in BASELINES))
    if any(name in METHODS for name in names):
        taken |= settings.keys() - BaselineSettings.__annotations__
    if given := [
        name for name, value in settings.items() if value is not None and value is not False and name not in taken
    ]:
        raise ValueError(f"{given[0]} has no part in {', '.join(names)}")


def check_methods(names: Sequence[str], target: Target | None) -> None:
    """Refuse names that are no methods, none at all, and a target that none of them makes use of."""
    known = [*METHODS, *(name for name, row in BASELINES.items() if row.needs == "inputs")]
    if not names:
        raise ValueError("no method was given; choose at least one of " + ", ".join(known))
    for name in names:
        if name not in known:
            raise ValueError(f"method {name!r} is unknown; choose one of {', '.join(known)}")
    if target is not None and not any(map(is_targeted, names)):
        raise ValueError(f"target has no part in {', '.join(names)}: they explain a position, whatever is made of it")


def is_targeted(name: str) -> bool:
    """Whether a method explains a target."""
    return BASELINES[name].targeted if name in BASELINES else "gradient" in METHODS[name].needs


def _by_rules(name: str) -> bool:
    return name in RULES or name == "lrp"


def kept_of_layers(names: Sequence[str], layer: int | str | None) -> CaptureSettings:
    """The settings of `capture` by which a set of rules explains what enters a layer; none where it does not.

    Raises ValueError beside other methods, which need another capture.
    """
    if layer is None or not any(map(_by_rules, names)):
        return {}
    if len(names) > 1:
        raise ValueError(f"layer {layer} goes with one set of rules alone; {', '.join(names)} were given")
    return {"rules": LRP if names[0] == "lrp" else names[0], "keep": "relevance"}


def entering(name: str, trace: Trace, settings: Mapping[str, Any]) -> Relevance:
    """The relevance of what enters one layer or all, by the set of rules under which the trace was captured.

    Raises ValueError for a query, which the target takes the place of.
    """
    if settings.get("query") is not None:
        raise ValueError(
            f"query has no part in {name}: it explains the target, and every token of the layer has a score"
        )
    found = relevance(trace, edges="entering-relevance", carry="received", **settings)
    return replace(found, recipe={**found.recipe, "method": name})


def entered_for(names: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The setting of `capture` by which some baselines need no pass of their own, where it can be had."""
    plain = settings.get("rules") is None and settings.get("generate") is None
    return {"entered": True} if plain and any(name in BASELINES and BASELINES[name].entered for name in names) else {}


def captured(
    model: Any, inputs: Any, names: Sequence[str], target: Target | None, settings: CaptureSettings
) -> tuple[Trace, Target | None]:
    """The trace that some methods need, and the target that was chosen for them where none was given.

    settings: of `capture`, those of `kept_for` among them.
    """
    if not any(map(is_targeted, names)):
        return capture(model, inputs, **settings), None
    if target is None and settings.get("generate") is not None:
        raise ValueError("several tokens are written, and a target is of one: say with target= which, or a function")
    if target is None:
        plain: CaptureSettings = {**settings, "at_each_layer": False, "entered": False, "rules": None, "keep": None}
        target = usual_target(capture(model, inputs, **plain))
        trace = capture(model, inputs, **{**settings, "target": target})
        if any(is_targeted(name) and not _by_rules(name) for name in names):  # rules have gradients of their own
            _check_that_it_moves(trace)
        return trace, target
    return capture(model, inputs, **{**settings, "target": target}), target


def usual_method(target: Any) -> str:
    """The method where none is named: "lrp" of a target, and "rollout" without one."""
    return DEFAULTS["array" if target is None else "target"]


def usual_target(trace: Trace) -> Target:
    """What is explained where no target is given: the predicted class, or the norm of what the model returns."""
    return "predicted" if has_logits(trace.output) else norm_at(trace.readout, trace.decoder_start or 0)


def _check_that_it_moves(trace: Trace) -> None:
    """Warn where attention can hardly move the target, as it cannot the norm of what an untrained LayerNorm returns.

    Of each call that is |gradient at what it returned| |its values| over the target's score, |.| the Euclidean norm.
    """
    assert trace.target is not None
    known = [call.gradient for layer in trace.layers for call in calls_of(layer) if call.gradient is not None]
    most = max((float(one.output.double().norm() * one.v.double().norm()) for one in known), default=0.0)
    share = most / max(abs(trace.target["score"]), 1e-300)
    if share <= UNMOVED:
        warnings.warn(
            f"attention moves the target, {trace.target['target']}, by {share:.1g} of it at most, to first order, so "
            "that its relevance is near rounding (the norm of what an untrained LayerNorm returns is always the same): "
            "say what to explain with target=",
            stacklevel=4,
        )


def answer(
    name: str, trace: Trace, model: Any, inputs: Any, target: Any, tokenizer: Any, settings: Mapping[str, Any]
) -> Relevance:
    """The answer of a method, or of a baseline, which runs the model once more."""
    if name in METHODS:
        settings = {one: value for one, value in settings.items() if one not in BaselineSettings.__annotations__}
        given: Any = {"query": read_out(name, trace), **settings}
        return relevance(trace, name, **given)
    if trace.generated_from is not None:
        raise ValueError(
            f"{name} explains one pass over what it is given, and generate= adds what the model wrote: give prompt and "
            "answer together as the input, with target=Answer(ids) for the answer"
        )
    module, bound = module_of(model)
    args, named = arguments(module, inputs, tokenizer)
    entered: torch.Tensor | Mapping[str, Any] = args[0] if args else {**bound, **named}
    row = BASELINES[name]
    own = {one: value for one, value in settings.items() if one in row.takes and value is not None}
    return row.function(trace, module, entered, target=target, **own)
