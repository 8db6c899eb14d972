"""What a run explains and keeps, and the model that it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from attnflow.capturing.inputs import module_of
from attnflow.capturing.target import Contrast
from attnflow.capturing.vision import VisionModel

# A class by its index or name, "predicted", "label", a class rather than another, or a function of the output.
RunTarget: TypeAlias = int | str | tuple[int | str, int | str] | Contrast | Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every worker is told; `run` says what each setting means.

    settings: of the attention graph, the same for every method. memory: bytes that one batch may take, or None.
    """

    methods: tuple[str, ...]
    target: RunTarget | None
    settings: Mapping[str, Any]
    top: int | None
    full: bool
    batch_size: int
    memory: int | None
    fail_fast: bool


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with what makes its inputs: a tokenizer, or a function from a photograph to pixels."""

    model: torch.nn.Module
    tokenizer: Any = None
    prepare: Callable[[Any], torch.Tensor] | None = None

    @classmethod
    def of(cls, given: Any, tokenizer: Any = None) -> Subject:
        """What `load_model` returns, a pair (model, tokenizer), or a model.

        Raises ValueError for anything else, and for a model in training mode.
        """
        prepare = None
        if isinstance(given, VisionModel):
            given, prepare = given.model, given.prepare
        elif isinstance(given, tuple):
            given, tokenizer = _pair(given)
        model, _ = module_of(given)
        if model.training:
            raise ValueError("the model is in training mode, where its output is random: call model.eval() first")
        return cls(model, tokenizer, prepare)


def _pair(given: tuple[Any, ...]) -> tuple[Any, Any]:
    if len(given) != 2:
        raise ValueError(f"a model is given alone or as (model, tokenizer); a tuple of {len(given)} was given")
    return given
