"""What `attnflow evaluate` reads: labelled texts and photographs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.capturing.vision import VisionModel, open_image

# (pixels, label), with a mask behind them where there are masks.
Photograph: TypeAlias = tuple[torch.Tensor, int | None] | tuple[torch.Tensor, int | None, NDArray[np.bool_]]

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def texts(path: Path) -> list[tuple[str, int | None]]:
    """The examples of a file: one text on each line, with its label (the index of a class) behind a tab if it has one.

    Raises FileNotFoundError if there is no such file, ValueError for a label that is no index, or no texts at all.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; give one with a text on each line")
    examples: list[tuple[str, int | None]] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        text, tab, label = line.rpartition("\t")
        if tab and not label.strip().isdecimal():
            raise ValueError(f"{path}, line {number}: the label must be the index of a class; it is {label!r}")
        if line.strip():
            examples.append((text, int(label)) if tab else (line, None))
    if not examples:
        raise ValueError(f"{path} holds no texts; it should have one on each line, with a tab and a label behind it")
    return examples


def photographs(folder: Path, loaded: VisionModel, masks: Path | None = None) -> list[Callable[[], Photograph]]:
    """The examples of a folder, each a function that opens it, so that no more than one is in memory.

    Photographs in folder/LABEL are of that class: its index, or its name in the model's `id2label`; those in the folder
    itself have no label. The labels come in turn, so that the first examples are of all classes.
    masks: a folder with a mask for each photograph, of the same name with any suffix; what is not black is inside.

    Raises FileNotFoundError if there is no such folder, ValueError for a label that is no class, for no photographs, or
    for not a single mask of them. What cannot be opened is an error of its function: FileNotFoundError, ValueError.
    """
    for wanted in (folder, *([masks] if masks else [])):
        if not wanted.is_dir():
            raise FileNotFoundError(f"there is no folder {str(wanted)!r}")
    names: Mapping[int, str] = getattr(getattr(loaded.model, "config", None), "id2label", {})
    labelled: list[list[tuple[Path, int | None]]] = [[(path, None) for path in images_in(folder)]]
    for inside in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        images = images_in(inside)
        label = class_index(inside.name, names) if images else None
        labelled.append([(path, label) for path in images])
    examples = [one for turn in zip_longest(*labelled) for one in turn if one]
    if not examples:
        raise ValueError(f"{folder} holds no photographs; it should hold them itself, or in a folder for each label")
    if masks is None:
        return [partial(_photograph, loaded, path, label) for path, label in examples]
    stems = [path.relative_to(folder).with_suffix("") for path, _ in examples]
    found = {path.relative_to(masks).with_suffix(""): path for path in images_in(masks, "**/*")}
    if not found.keys() & set(stems):
        raise ValueError(f"{masks} holds no mask of a photograph, such as {stems[0]}.png")
    return [
        partial(_photograph, loaded, path, label, found.get(stem, masks / stem))
        for (path, label), stem in zip(examples, stems, strict=True)
    ]


def _photograph(loaded: VisionModel, path: Path, label: int | None, mask: Path | None = None) -> Photograph:
    """The whole photograph as the model takes it (1, 3, height, width), and its mask at that size."""
    from PIL import Image

    pixels = loaded.prepare(open_image(path))
    if mask is None:
        return pixels, label
    height, width = pixels.shape[2:]
    inside = open_image(mask).resize((width, height), Image.Resampling.NEAREST)
    return pixels, label, np.asarray(inside).max(axis=-1) > 0


def images_in(folder: Path, pattern: str = "*") -> list[Path]:
    """The photographs of a folder, by their suffix, in the order of their names; hidden files are none."""
    found = (path for path in folder.glob(pattern) if path.suffix.lower() in _IMAGES)
    return sorted(path for path in found if not path.name.startswith("."))


def class_index(name: str, names: Mapping[int, str]) -> int:
    """The class that a folder is called by; of "tench, Tinca tinca" both are names."""
    if name.isdecimal():
        return int(name)
    wanted = name.casefold()
    classes = [index for index, known in names.items() if wanted in (known.casefold(), *known.casefold().split(", "))]
    if len(classes) != 1:
        such = f" or its name, such as {next(iter(names.values()))!r}" if names else ""
        raise ValueError(
            f"the folder {name!r} names {'several classes' if classes else 'no class'} of the model; call it by the "
            f"index of a class{such}, or put photographs without a label into the folder above"
        )
    return classes[0]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8; for photographs give the folder that holds them") from error
