"""Attention that somebody else computed, from .npz, .npy and .safetensors files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from attnflow.memory import check_arrays
from attnflow.trace import Trace

# Names that say that an array is attention, or a layer of it.
_ATTENTION = re.compile(r"attentions?[\W_]*\d*", re.IGNORECASE)

SUFFIXES = (".npz", ".npy", ".safetensors")


def load(path: str | Path, *, example: int | None = None) -> Trace:
    """A trace from a file that holds attention; never unpickles.

    One array of shape (layer, head, query, key) or (layer, query, key), or one array per layer, each (head, query, key)
    or (query, key), whose names differ in a number alone and are taken in its order ("layer_2" before "layer_10"). A
    file with arrays named attention (attentions, attention_0, ...) may hold others beside them; in any other file all
    arrays must be attention, but for one named "tokens", whose strings or numbers label the input.

    A batch axis, before the heads or of size 1 before the layers, is dropped if its size is 1; otherwise `example`
    chooses from it, and from tokens (example, token).

    Raises FileNotFoundError if there is no such file, ValueError if it cannot be read or holds something else.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"cannot read attention from {path.name!r}: the suffix must be one of {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    check_arrays(path)
    try:
        arrays = _read(path)
    except Exception as error:
        reason = str(error)
        if "allow_pickle" in reason:
            reason = "it is another kind of file, or holds Python objects, which are never loaded"
        raise ValueError(f"{str(path)!r} cannot be read as attention arrays: {reason}") from error
    held = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
    tokens = arrays.pop("tokens", None)
    names = _layers_of(path, arrays, held)
    stacked = len(names) == 1 and arrays[names[0]].ndim > 2
    stack = arrays[names[0]]
    if stacked and stack.ndim == 5 and stack.shape[0] == 1:  # (example, layer, head, query, key)
        layers = [layer[None] for layer in stack[0]]
    else:
        layers = list(stack) if stacked else [arrays[name] for name in names]
    batch = next((layer.shape[0] for layer in layers if layer.ndim == 4 and layer.shape[0] != 1), None)
    if example is None and batch is not None:
        raise ValueError(
            f"{str(path)!r} holds a batch of {batch} examples ({held}); choose one with example (--example 0)"
        )
    if example is not None:
        layers = [_example(layer, example, number) for number, layer in enumerate(layers)]
    if tokens is not None and tokens.ndim == 2:
        tokens = tokens[0 if example is None else example]
    try:
        return Trace.from_arrays(layers, tokens=tokens, names=None if stacked else names)
    except ValueError as error:
        raise ValueError(f"{error}; {str(path)!r} holds {held}") from error


def _layers_of(path: Path, arrays: dict[str, Any], held: str) -> list[str]:
    """The names of the arrays that are attention, the layer nearest the input first; ValueError if that is not clear.

    arrays: without the tokens. held: the names and shapes of all, for the message.
    """
    if not arrays:
        raise ValueError(
            f"{str(path)!r} holds no arrays of attention ({held or 'it is empty'}); expected (layer, head, query, key)"
        )
    named = [name for name in arrays if _ATTENTION.fullmatch(name)]
    names = sorted(named or arrays, key=_natural)
    series = {re.sub(r"\d+", "#", name) for name in names}
    if len(names) > 1 and len(series) > 1:
        raise ValueError(
            f"{str(path)!r} holds several arrays, and which of them are attention is not clear: {held}; name it "
            "'attention', or its layers 'attention_0', 'attention_1', ..."
        )
    ranks = (2, 3, 4, 5) if len(names) == 1 else (2, 3, 4)
    wrong = [name for name in names if arrays[name].ndim not in ranks]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} in {str(path)!r} is no attention: expected (layer, head, query, key), or an array (head, "
            f"query, key) for each layer; the file holds {held}"
        )
    return names


def _read(path: Path) -> dict[str, Any]:
    """The arrays of a file by their names; of one that names its attention, that and the tokens alone."""
    match path.suffix.lower():
        case ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in _wanted(file.files)}
        case ".npy":
            return {"attention": np.load(path, allow_pickle=False)}
        case _:
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in _wanted(list(file.keys()))}


def _wanted(names: list[str]) -> list[str]:
    named = [name for name in names if _ATTENTION.fullmatch(name)]
    return [name for name in names if name in named or name == "tokens"] if named else names


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _example(layer: Any, example: int, number: int) -> Any:
    if not isinstance(example, SupportsIndex):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"example is a number, counted from 0; {example!r} was given")
    if layer.ndim != 4:
        shape = tuple(layer.shape)
        raise ValueError(f"layer {number} of shape {shape} has no batch axis to choose example {example} from")
    if not -layer.shape[0] <= example < layer.shape[0]:
        raise ValueError(f"example {example} is out of range: the batch holds {layer.shape[0]}")
    return layer[example]
