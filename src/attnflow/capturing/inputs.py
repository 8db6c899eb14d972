"""What people hand over as a model and its inputs, as a module with positional and keyword arguments."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch

from attnflow.capturing import huggingface
from attnflow.capturing.labels import tensors_in

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def module_of(model: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The module behind what was given as a model, and arguments that were bound to it.

    Compiled and parallel models are seen as the module that they run; functools.partial as its module. ValueError for
    anything that is no module.
    """
    bound: dict[str, Any] = {}
    while isinstance(model, functools.partial):
        bound = {**model.keywords, **bound}
        model = model.func
    model = getattr(model, "_orig_mod", model)  # torch.compile keeps the model that it was given
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        model = model.module
    if not isinstance(model, torch.nn.Module):
        inner = getattr(model, "model", None)
        hint = "; give its .model" if isinstance(inner, torch.nn.Module) else ""
        raise ValueError(f"capture needs a torch.nn.Module; a {type(model).__name__} was given{hint}")
    return model, bound


def arguments(model: torch.nn.Module, inputs: Any, tokenizer: Any) -> Arguments:
    """The arguments of a model's forward pass: of a mapping, a tensor, a tuple, or with a tokenizer of texts.

    A pair of texts is one input of two parts. Arrays and lists of numbers become tensors on the model's device, with a
    batch axis where token ids have none. A mapping that the model wants as one argument stays one.

    Raises ValueError for anything else.
    """
    several = isinstance(inputs, list | tuple) and all(isinstance(text, str) for text in inputs)
    if isinstance(inputs, str) or several:
        texts: Any = inputs
        inputs = huggingface.tokenize(texts, model, tokenizer)
    if isinstance(inputs, np.ndarray):
        inputs = _tensor("inputs", inputs, model)
    empty = [tuple(x.shape) for x in tensors_in(inputs) if 0 in x.shape]
    if empty:
        raise ValueError(f"an input is empty: its shape is {empty[0]}; give at least one example of one token")
    if isinstance(inputs, Mapping):
        named = {name: _tensor(name, value, model) for name, value in inputs.items()}
        return ((named,), {}) if _wants_one_mapping(model, named) else ((), named)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        return tuple(_tensor(str(number), value, model) for number, value in enumerate(inputs)), {}
    raise ValueError(
        f"inputs must be a mapping, a tensor or a tuple of arguments (or text, with a tokenizer); a "
        f"{type(inputs).__name__} was given"
    )


def _tensor(name: str, value: Any, model: torch.nn.Module) -> Any:
    """An array, or a list of whole numbers, as a tensor on the model's device; anything else as it is."""
    numbers = isinstance(value, list) and bool(value) and _depth(value) is not None
    if not isinstance(value, np.ndarray) and not numbers:
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} holds {array.dtype}; expected numbers: give the model's tensors")
    parameter = next(model.parameters(), None)
    found = torch.from_numpy(np.ascontiguousarray(array)).to(parameter.device if parameter is not None else "cpu")
    return found[None] if numbers and _depth(value) == 1 else found


def _depth(values: Any) -> int | None:
    """1 for a list of whole numbers, 2 for a list of such lists of one length; None for anything else."""
    if all(_is_whole(value) for value in values):
        return 1
    rows = all(isinstance(row, list) and row and _depth(row) == 1 for row in values)
    return 2 if rows and len({len(row) for row in values}) == 1 else None


def _is_whole(value: Any) -> bool:
    """Whether it is a whole number, of Python, numpy or torch."""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_floating_point() and not value.is_complex()
    return isinstance(value, Integral)


def _wants_one_mapping(model: torch.nn.Module, named: Mapping[str, Any]) -> bool:
    """Whether a model's forward takes the mapping itself (SentenceTransformer), and not its entries by name."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return False
    needed = [one for one in parameters if one.default is inspect.Parameter.empty]
    return len(needed) == 1 and not any(one.name in named for one in parameters)


def fresh(values: Any) -> Any:
    """Inputs for one pass of several.

    Tensors are as they are, but for those made in inference mode, which no gradient can pass. Objects that a pass would
    change (a cache of keys) are copied, with the tensors that they hold.
    """
    if isinstance(values, torch.Tensor):
        return values.clone() if values.is_inference() else values
    if type(values) is dict:
        return {name: fresh(value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(fresh(value) for value in values)
    return values if isinstance(values, Mapping | torch.nn.Module) else _copied(values)


def _copied(value: Any) -> Any:
    """An object of a class of its own with copies of all that it holds; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((name, _copied(one)) for name, one in value.items())
    if type(value) in (tuple, list):
        return type(value)(_copied(one) for one in value)
    held = getattr(value, "__dict__", None)
    if not held or isinstance(value, type | torch.nn.Module) or callable(value):
        return value
    twin = copy.copy(value)
    twin.__dict__.update({name: _copied(one) for name, one in held.items()})
    return twin
