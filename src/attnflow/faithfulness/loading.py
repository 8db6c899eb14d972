"""What `attnflow evaluate` reads: labelled texts, and classifiers of Hugging Face with their head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from attnflow.capturing.huggingface import first_line


def texts(path: Path) -> list[tuple[str, int | None]]:
    """The examples of a file: one text on each line, with its label (the index of a class) behind a tab if it has one.

    Raises FileNotFoundError if there is no such file, ValueError for a label that is no index, or no texts at all.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}; give one with a text on each line")
    examples: list[tuple[str, int | None]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        text, tab, label = line.rpartition("\t")
        if tab and not label.strip().isdecimal():
            raise ValueError(f"{path}, line {number}: the label must be the index of a class; it is {label!r}")
        if line.strip():
            examples.append((text, int(label)) if tab else (line, None))
    if not examples:
        raise ValueError(f"{path} holds no texts; it should have one on each line, with a tab and a label behind it")
    return examples


def text_classifier(name: str, device: str = "cpu") -> tuple[torch.nn.Module, Any]:
    """A text classifier in evaluation mode and its tokenizer, from a local folder or a name on the hub.

    Raises ModuleNotFoundError without transformers, ValueError if there is no such model, or if it has no trained head.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("text models need transformers: pip install 'attnflow[hf]'") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(name, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"cannot load a text classifier from {name!r}: {first_line(error)}; give a folder that save_pretrained "
            "wrote, or a name on the Hugging Face hub (which needs a connection)"
        ) from error
    model, facts = loaded
    if facts["missing_keys"]:
        raise ValueError(
            f"{name!r} is no trained classifier: it has no weights for {sorted(facts['missing_keys'])[0]}; "
            "give one that was fine-tuned to classify"
        )
    return model.eval().to(device), tokenizer
