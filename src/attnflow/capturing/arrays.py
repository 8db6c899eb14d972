"""Attention that somebody else computed, from .npz, .npy and .safetensors files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from attnflow.memory import check_arrays
from attnflow.trace import Trace

SUFFIXES = (".npz", ".npy", ".safetensors")


def load(path: str | Path, *, example: int | None = None) -> Trace:
    """A trace from a file that holds attention; never unpickles.

    One array of shape (layer, head, query, key) or (layer, query, key), or one array per layer in the natural order of
    their names ("layer_2" before "layer_10"), each (head, query, key) or (query, key). A batch axis, before the heads,
    is dropped if its size is 1; otherwise `example` chooses from it. In .npz files an array of strings named "tokens"
    labels the input.

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
    tokens = arrays.pop("tokens", None)
    names = sorted(arrays, key=_natural)
    if not names:
        raise ValueError(f"{str(path)!r} holds no arrays; expected attention (layer, head, query, key)")
    stacked = len(names) == 1 and arrays[names[0]].ndim > 2
    layers = list(arrays[names[0]]) if stacked else [arrays[name] for name in names]
    batch = next((layer.shape[0] for layer in layers if layer.ndim == 4 and layer.shape[0] != 1), None)
    if example is None and batch is not None:
        raise ValueError(f"{str(path)!r} holds a batch of {batch} examples; choose one with example (--example 0)")
    if example is not None:
        layers = [_example(layer, example, number) for number, layer in enumerate(layers)]
    return Trace.from_arrays(
        layers,
        tokens=None if tokens is None else [str(token) for token in tokens.tolist()],
        names=None if stacked else names,
    )


def _read(path: Path) -> dict[str, Any]:
    match path.suffix.lower():
        case ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        case ".npy":
            return {"attention": np.load(path, allow_pickle=False)}
        case _:
            from safetensors.torch import load_file

            return dict(load_file(path))


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _example(layer: Any, example: int, number: int) -> Any:
    if layer.ndim != 4:
        shape = tuple(layer.shape)
        raise ValueError(f"layer {number} of shape {shape} has no batch axis to choose example {example} from")
    if not -layer.shape[0] <= example < layer.shape[0]:
        raise ValueError(f"example {example} is out of range: the batch holds {layer.shape[0]}")
    return layer[example]
