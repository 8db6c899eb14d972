"""The one loader of models: by name and task, for Python and every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, overload

import torch

from attnflow.capturing import demo, huggingface, image_text, vision
from attnflow.capturing.huggingface import TextModel, TextTask
from attnflow.capturing.image_text import ImageTextModel
from attnflow.capturing.vision import ImageTask, VisionModel

_TASKS = (*get_args(TextTask), *get_args(ImageTask), "image-text")


@overload
def load_model(name: str | Path | None = None, *, task: TextTask = "text", device: str = "cpu") -> TextModel: ...
@overload
def load_model(name: str | Path | None = None, *, task: ImageTask, device: str = "cpu") -> VisionModel: ...
@overload
def load_model(
    name: str | Path | None = None, *, task: Literal["image-text"], device: str = "cpu"
) -> ImageTextModel: ...


def load_model(name: str | Path | None = None, *, task: str = "text", device: Any = "cpu") -> Any:
    """A model in evaluation mode with what makes its inputs, its weights as they were stored.

    name: a local folder or a name on the Hugging Face hub; images also take folders of timm and hub names that start
    with "timm/". None is the packaged demo, for the tasks "text" and "image". Weights are read from safetensors or .bin
    files, whole or in shards, in the precision that they were stored in; Python objects and code are never loaded.
    task: "text", "text-generation", "text-classification" or "fill-mask" give (model, tokenizer); "image" or
    "image-classification" a `VisionModel` (model, prepare); "image-text" an `ImageTextModel` (model, processor). "text"
    and "image" are models without a head, to be explained; the others have the head that they were trained with.
    device: where it runs, as torch names it.

    Raises ValueError if there is no such model, if some of its weights are missing, of another size, or stored for
    layers that it does not have, if it has no trained head for its task, or for an unknown device; ModuleNotFoundError
    for a missing package. A pooler that was not stored is left out of a model without a head, and the recipe says so.

    >>> model, tokenizer = load_model()
    >>> type(model).__name__
    'BertModel'
    """
    if task not in _TASKS:
        raise ValueError(f"task {task!r} is unknown; choose one of {', '.join(_TASKS)}")
    place = _device(device)
    if task == "image-text":
        if name is None:
            raise ValueError("there is no packaged model of image and text: give the name of one")
        return image_text.load(str(name), place)
    if task in get_args(ImageTask):
        return vision.load(demo.IMAGE if name is None else str(name), place, classifies=task == "image-classification")
    return huggingface.load(demo.TEXT if name is None else str(name), place, task=task)  # pyright: ignore[reportArgumentType]


def _device(name: Any) -> str:
    """The device, if torch has it here."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return str(name)
