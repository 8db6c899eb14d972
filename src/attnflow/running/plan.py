"""What a run explains and keeps, and the model that it asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from attnflow.capturing.inputs import module_of

RunTarget: TypeAlias = int | Literal["predicted", "label"] | Callable[[Any], Any]


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
        prepare = getattr(given, "prepare", None)
        if isinstance(given, tuple) and len(given) == 2:
            given, tokenizer = given
        elif callable(prepare) and not isinstance(given, torch.nn.Module):
            given = given.model
        else:
            prepare = None
        module_of(given)
        if given.training:
            raise ValueError("the model is in training mode, where its output is random: call model.eval() first")
        return cls(given, tokenizer, prepare)
