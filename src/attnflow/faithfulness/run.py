"""Evaluation over a data set: every method and baseline against every metric, example by example."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from importlib.metadata import version
from inspect import signature
from operator import index
from pathlib import Path
from typing import Any, Literal

import torch

from attnflow.baselines import BASELINES
from attnflow.capturing.target import TargetValue, as_target, resolved
from attnflow.faithfulness import journal
from attnflow.faithfulness.example import (
    EvaluationTarget,
    Given,
    Opened,
    Plan,
    digest,
    line,
    measure,
    opened,
    randomised,
)
from attnflow.faithfulness.journal import Entry
from attnflow.faithfulness.metrics import METRICS
from attnflow.faithfulness.results import Evaluation
from attnflow.faithfulness.score import IMAGE_BLANKS, TEXT_BLANKS
from attnflow.files import destination, named, plain
from attnflow.graph import Settings
from attnflow.methods import METHODS

# What stands beside the methods in every evaluation.
ALWAYS = ("random", "gradient-norm")


def evaluate(
    model: torch.nn.Module,
    data: Iterable[Given],
    *,
    methods: Sequence[str] = ("raw", "rollout", "flow"),
    metrics: Sequence[str] | None = None,
    tokenizer: Any = None,
    target: EvaluationTarget = "predicted",
    query: int | str | None = "readout",
    layer: int | Literal["all"] = -1,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    gradient: str = "gradient-norm",
    blank: str | None = None,
    special: bool = False,
    output: str | Path | None = None,
    batch_size: int = 64,
    seed: int = 0,
    shuffled: torch.nn.Module | None = None,
    progress: Callable[[int, int | None], object] | None = None,
) -> Evaluation:
    """Measure how faithful methods are to a model on a data set, always beside random scores and the gradient.

    data: (text, label) with a tokenizer, or (text, label, marks) with marks (token,), nonzero on the tokens where the
    answer is known to lie, special tokens counted; (pixels, label) or (pixels, label, mask), with pixels (channel,
    height, width) as the model takes them and a mask (height, width), nonzero inside. An example may also be a function
    without arguments that returns it, called in its turn, so that a data set need not fit in memory.
    methods: names in METHODS or BASELINES. metrics: names in METRICS; None for all that fit the first example.
    target: the class explained: "predicted" by the model, the example's "label", an index, or a name. Or a pair (a, b)
    for a rather than b, another value of `capturing.target`, or a function of the model's output that returns one score
    per case. Tests that remove tokens watch a class's probability, and the value of any other target.
    query: the output position explained, as the methods take it; "readout" is the trace's own, or the mean over all.
    layer: the layer explained, or "all". settings: further settings of a method, by its name. gradient: the baseline
    that gradient correlations are with; it has none itself. special: whether special tokens may be removed and take
    part in correlations.
    blank: what removed text becomes ("unk" unless told), or removed patches (unless told "zero", and "blur" for
    insertion); `faithfulness.score` lists them. batch_size: cases in one forward pass.
    shuffled: the model that "randomised-weights" compares with; None for one that forgot all that it learnt.
    output: a new .parquet file. Until it is whole, finished examples stand in a file of that name and ".partial", and
    the same call after a kill goes on behind them. progress: called with the examples done, and in all if known.

    An example that fails, or one method on it, is recorded with its error and does not end the run.

    Raises ValueError for a setting that is unknown, for settings or data other than those of the run that is resumed
    (also for fewer data), while another run writes the same output, and if no example could be measured (the file is
    written all the same); FileExistsError, before any work, for an output that is there already; OSError for one that
    cannot be written; ModuleNotFoundError for a missing package.
    """
    methods, metrics = check_names(methods, metrics)
    _check_settings((*methods, *ALWAYS, *_known("gradient baseline", gradient, BASELINES)), settings or {})
    seed, batch_size = whole_number("seed", seed, 0), whole_number("batch_size", batch_size, 1)
    layer = layer if isinstance(layer, str) and layer == "all" else whole_number('layer, where it is not "all",', layer)
    if not callable(target) and not isinstance(target, str | tuple | TargetValue):
        target = whole_number("target, where it is no name, pair, value or function,", target, 0)
    if not callable(target) and target != "label":
        target = resolved(target, model)  # pyright: ignore[reportAssignmentType]
    partial = None if output is None else check_output(Path(output))
    examples = map(opened, data)
    beginning, first = until_first(examples)
    plan = Plan(
        methods=tuple(dict.fromkeys((*methods, *ALWAYS, gradient))),
        metrics=_fitting(first) if metrics is None else metrics,
        target=target,
        query=query,
        layer=layer,
        settings=settings or {},
        gradient=gradient,
        blank=blank,
        special=special,
        seed=seed,
        batch_size=batch_size,
        tokenizer=tokenizer,
    )
    _check(model, first, plan)
    recipe = _recipe(model, plan) | {"shuffled": None if shuffled is None else weights_digest(shuffled)}
    if all(METRICS[name].needs != "randomised" for name in plan.metrics):
        shuffled = None
    elif shuffled is None:
        shuffled = randomised(model, seed)
    total = len(data) if isinstance(data, Sized) else None
    entries: list[Entry] = []
    with nullcontext() if partial is None else journal.opened(partial) as kept:
        done = kept.resume(recipe) if kept else {}
        for number, example in enumerate(itertools.chain(beginning, examples)):
            if number in done:
                entry = _same(done[number], example, partial)
            else:
                entry = measure(model, shuffled, number, example, plan)
                if kept:
                    kept.append(entry)
            entries.append(entry)
            if progress:
                progress(number + 1, total)
        if len(done) > len(entries):
            raise ValueError(
                f"{partial} holds {len(done)} finished examples and the data are only {len(entries)}: give all of them "
                "to go on with it, write to another file, or delete it to begin again"
            )
        evaluation = _whole(entries, recipe)
        if output is not None:
            evaluation.save(output)
        if kept:
            kept.delete()
    if not evaluation.rows:
        raise ValueError(f"none of the {len(entries)} examples could be measured: {evaluation.failures[0].error}")
    return evaluation


def check_names(
    methods: Sequence[str] | str, metrics: Sequence[str] | str | None
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The names of methods and metrics, of one or of several.

    Raises ValueError for the first that there is not.
    """
    known = _known("method", methods, METHODS | BASELINES)
    if metrics is None:
        return known, None
    if not metrics:
        raise ValueError("there are no metrics; give at least one, or None for all that fit the data")
    return known, _known("metric", metrics, METRICS)


def _known(kind: str, names: Sequence[Any] | str, table: Mapping[str, Any]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not isinstance(name, str) or name not in table:
            raise ValueError(f"{kind} {name!r} is unknown; choose from {', '.join(table)}")
    return names


def _check_settings(methods: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> None:
    for name, given in settings.items():
        if name not in methods:
            raise ValueError(f"settings are given for {name!r}, which is not among the methods")
        if name in METHODS:
            own = [*Settings.__annotations__, "receptive_field"]
        else:
            parameters = signature(BASELINES[name].function).parameters.values()
            own = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
        taken = [one for one in own if one not in ("query", "layer", "target", "progress")]  # which are evaluate's
        for setting in given:
            if setting not in taken:
                raise ValueError(f"{name} takes no {setting!r}; its settings here are {', '.join(taken)}")


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """The value of a setting as Python's own number, whatever library it comes from."""
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        start = "" if least is None else f" from {least} on"
        raise ValueError(f"{name} must be a whole number{start}; it is {value!r}")
    return number


def until_first(examples: Iterator[Any]) -> tuple[list[Opened], tuple[Any, ...]]:
    """The examples up to the first that could be opened, and that one; ValueError if there is none, or no tuple."""
    beginning: list[Opened] = []
    for example in examples:
        beginning.append(example)
        if isinstance(example, Exception):
            continue
        if not isinstance(example, tuple | list) or len(example) < 2:
            raise ValueError(f"an example is (text, label) or (pixels, label); the first is a {type(example).__name__}")
        return beginning, tuple(example)
    if beginning and isinstance(beginning[0], Exception):
        raise ValueError(f"none of the {len(beginning)} examples could be opened: {line(beginning[0])}")
    raise ValueError("there are no data; give at least one example, such as (text, label)")


def _fitting(example: tuple[Any, ...]) -> tuple[str, ...]:
    """The metrics for data of the kind of one example."""
    text = isinstance(example[0], str)
    kinds = {"text" if text else "image", *(["marks" if text else "mask"] if len(example) > 2 else [])}
    return tuple(name for name, row in METRICS.items() if kinds & set(row.kinds))


def _check(model: torch.nn.Module, first: tuple[Any, ...], plan: Plan) -> None:
    """Refuse, before any work, what would fail on every example."""
    text = isinstance(first[0], str)
    blanks = TEXT_BLANKS if text else IMAGE_BLANKS
    if plan.blank is not None and plan.blank not in blanks:
        raise ValueError(f"blank {plan.blank!r} is unknown for these data; choose one of {', '.join(blanks)}")
    if not text and not isinstance(first[0], torch.Tensor):
        raise ValueError(
            f"an example is (text, label), or (pixels, label) with a tensor; it begins with a {type(first[0]).__name__}"
        )
    if text and plan.tokenizer is None:
        raise ValueError("text needs a tokenizer: evaluate(model, data, tokenizer=tokenizer)")
    if model.training:
        raise ValueError("the model is in training mode, where its output is random: call model.eval() first")
    correct = [name for name in plan.metrics if METRICS[name].needs == "correct"]
    for name in plan.metrics:
        wants_text = METRICS[name].needs == "marks"
        if METRICS[name].needs in ("mask", "marks") and (len(first) < 3 or text != wants_text):
            kind = (
                "texts with marks: give data as (text, label, marks)"
                if wants_text
                else ("images with masks: give data as (pixels, label, mask)")
            )
            raise ValueError(f"{name} needs {kind}")
    if correct and not isinstance(plan.target, int | str):
        raise ValueError(f"{correct[0]} asks whether the predicted class changes: the target must be a class")


def _recipe(model: torch.nn.Module, plan: Plan) -> dict[str, Any]:
    """What decides the values: for the file, and to tell whether a run that is resumed is the same."""
    names = ("methods", "metrics", "query", "layer", "settings", "gradient", "blank", "special", "seed")
    target = as_target(plan.target).words
    tokens = "special tokens are " + ("removed like others" if plan.special else "never removed and not correlated")
    recipe = {
        **{name: getattr(plan, name) for name in names},
        "target": target,
        "tokens": tokens,
        "tokenizer": None if plan.tokenizer is None else type(plan.tokenizer).__name__,
        "model": {"class": type(model).__name__, "sha256": weights_digest(model)},
        "versions": versions_of(model, plan.tokenizer),
    }
    return plain(recipe)


def weights_digest(model: torch.nn.Module) -> str:
    """The SHA-256 of all weights of a model, in hexadecimal."""
    result = hashlib.sha256()
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        result.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def versions_of(*used: object) -> dict[str, str]:
    """Of what computes the values: Python, our package, numbers, and where the model and the tokenizer come from."""
    origins = {type(one).__module__.partition(".")[0] for one in used}
    names = ["attnflow", "numpy", "scipy", "torch", *sorted(origins & {"transformers", "timm", "torchvision"})]
    return {"python": platform.python_version()} | {name: version(name) for name in names}


def check_output(output: Path) -> Path:
    """The journal of an output, `output`.partial, after a check, before any work, that both can be written.

    Raises FileExistsError for an output that is there already, since it may have taken hours to measure.
    """
    if output.suffix.lower() != ".parquet":
        raise ValueError(f"cannot write {output.name!r}: the suffix must be .parquet")
    partial = output.with_name(output.name + ".partial")
    if destination(output).exists():
        raise FileExistsError(
            f"{named(output)} is there already, and nothing that was measured is replaced; attnflow.Evaluation.load "
            "reads it: delete it to measure anew, or write to another file"
        )
    destination(partial)
    return partial


def _same(entry: Entry, example: Opened, partial: object) -> Entry:
    if entry.digest != digest(example):
        raise ValueError(
            f"example {entry.example} is not the one that the unfinished run in {partial} measured; give the "
            "same data to go on with it, or delete that file to begin again"
        )
    return entry


def _whole(entries: Sequence[Entry], recipe: Mapping[str, Any]) -> Evaluation:
    """All entries as one evaluation."""
    digests = hashlib.sha256("".join(entry.digest for entry in entries).encode()).hexdigest()
    return Evaluation(
        rows=tuple(row for entry in entries for row in entry.rows),
        failures=tuple(failure for entry in entries for failure in entry.failures),
        recipe={**recipe, "data": {"examples": len(entries), "sha256": digests}},
    )
