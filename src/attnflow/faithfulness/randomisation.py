"""Does a method see what a model has learnt? Its weights are randomised, module by module from the output down."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from attnflow.baselines import Inputs
from attnflow.capturing import capture_batch
from attnflow.faithfulness.example import Given, model_inputs, opened, randomised
from attnflow.faithfulness.results import Evaluation
from attnflow.faithfulness.run import evaluate, until_first

# An item of a list of modules: the name of the first that ends in a number.
_ITEM = re.compile(r"(.*?\.)?[^.]*\d(?=\.|$)")


def cascade(
    model: torch.nn.Module,
    data: Iterable[Given],
    *,
    methods: Sequence[str] = ("raw", "rollout", "flow"),
    tokenizer: Any = None,
    seed: int = 0,
    progress: Callable[[int, int | None], object] | None = None,
    **settings: Any,
) -> dict[str, Evaluation]:
    """The metric "randomised-weights" after each step in which one more module forgets what it learnt.

    Adebayo et al. 2018, cascading randomisation: first the head, then block by block down to the embeddings. Where they
    draw new weights, the numbers of each parameter are put in a random order, as `evaluate` does for all at once: the
    last step is its "randomised-weights". The model is left as it was.

    data, methods, tokenizer, settings: as `evaluate` takes them; the first example that opens must be one that the
    model takes. Returns for each step, by the name of the module that is randomised in it, the evaluation: of every
    example, method and layer the size of the rank correlation with the relevance for the model as it was. For a method
    that sees what was learnt it falls; raw attention of a layer stays at 1 until its own block is reached.

    Raises what `evaluate` and `attnflow.capture` raise.
    """
    model = getattr(model, "_orig_mod", model)  # as in `capture`
    data = list(data)
    _, first = until_first(map(opened, data))
    partly, whole = copy.deepcopy(model), randomised(model, seed)
    steps = modules_from_output(partly, model_inputs(first[0], partly, tokenizer))
    found: dict[str, Evaluation] = {}
    for number, (name, parameters) in enumerate(steps.items()):
        with torch.no_grad():
            for parameter in parameters:
                partly.get_parameter(parameter).copy_(whole.get_parameter(parameter))
        before = number * len(data)
        found[name] = evaluate(
            model,
            data,
            methods=methods,
            metrics=["randomised-weights"],
            tokenizer=tokenizer,
            seed=seed,
            shuffled=partly,
            progress=progress and (lambda done, _, before=before: progress(before + done, len(steps) * len(data))),
            **settings,
        )
    return found


def modules_from_output(model: torch.nn.Module, inputs: Inputs) -> dict[str, list[str]]:
    """The names of a model's parameters, by the module that they belong to, from the output down.

    A block is an item of a list of modules (encoder.layer.3) in which the model attends; what runs between two blocks
    belongs to the lower, what runs before all (or never) is called "embeddings", what runs after them "head".
    Parameters that modules share belong to the first that runs. inputs: any that the model takes.
    """
    ran: dict[str, None] = {}
    hooks = [module.register_forward_pre_hook(partial(_note, ran, name)) for name, module in model.named_modules()]
    try:
        traces = capture_batch(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    calls = [layer.name for trace in traces for layer in trace.layers]
    blocks = {match[0] if (match := _ITEM.match(name)) else name for name in calls}
    begun = list(dict.fromkeys(block for name in ran if (block := _around(name, blocks)) is not None))
    place, places = "embeddings", dict[torch.nn.Parameter, str]()
    for name in ran:
        block = _around(name, blocks)
        place = block if block is not None else "head" if place in (begun[-1], "head") else place
        for parameter in model.get_submodule(name).parameters(recurse=False):
            places.setdefault(parameter, place)
    steps: dict[str, list[str]] = {step: [] for step in ("head", *reversed(begun), "embeddings")}
    for name, parameter in model.named_parameters():
        never = _around(name, blocks)  # of a module whose forward is not called, such as a projection of a fused kernel
        steps[places.get(parameter, "embeddings" if never is None else never)].append(name)
    return {step: parameters for step, parameters in steps.items() if parameters}


def _note(ran: dict[str, None], name: str, module: torch.nn.Module, args: Any) -> None:
    ran[name] = None


def _around(name: str, blocks: Iterable[str]) -> str | None:
    """The block that a module is, or lies in; the whole model is named ""."""
    return next((block for block in blocks if not block or f"{name}.".startswith(f"{block}.")), None)
