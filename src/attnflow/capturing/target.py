"""The target: which number of a model's output is explained, and differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

Target: TypeAlias = int | Literal["predicted"] | Sequence[int] | Callable[[Any], Any]


class Chosen:
    """A target's scores (example,), as `record` wants them: of the model's output, and remembered.

    target: a class or token id, one per example, "predicted" for each example's own highest logit, or a function of
    the model's output that returns one score per example. Logits are (batch, class), or (batch, token, vocabulary),
    of which the last token that attention_mask does not hide is taken.
    """

    def __init__(self, target: Target, attention_mask: Any = None) -> None:
        self._target = target
        self._mask = attention_mask
        self.indices: list[int] | None = None
        self.scores = torch.zeros(0)

    def __call__(self, output: Any) -> torch.Tensor:
        """The scores, with their graph; ValueError for a target that the output does not have."""
        scores: Any = self._target(output) if callable(self._target) else self._logits_at(output, self._target)
        if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or scores.ndim > 1:
            shown = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise ValueError(f"a target must give one score per example, a tensor (example,); it gave {shown}")
        self.scores = scores.detach().reshape(-1)
        return scores

    def facts(self, index: int) -> dict[str, Any]:
        """The target of one example: its index among the logits, or the function's name, and its score."""
        name = getattr(self._target, "__name__", "function") if self.indices is None else self.indices[index]
        return {"target": name, "score": float(self.scores[index if len(self.scores) > 1 else 0])}

    def _logits_at(self, output: Any, target: int | str | Sequence[int]) -> torch.Tensor:
        logits = _logits(output)
        if logits.ndim == 3:
            logits = logits[torch.arange(len(logits)), self._last(logits)]
        indices: list[Any]
        if target == "predicted":
            indices = logits.argmax(-1).tolist()
        else:
            indices = [target] * len(logits) if isinstance(target, int) else list(target)
        wrong = [i for i in indices if not isinstance(i, int) or not 0 <= i < logits.shape[1]]
        if wrong or len(indices) != len(logits):
            raise ValueError(
                f"target {target!r} does not fit logits of shape {tuple(logits.shape)}: give an index from 0 to "
                f'{logits.shape[1] - 1}, one per example, "predicted", or a function of the output'
            )
        self.indices = indices
        return logits[torch.arange(len(logits)), indices]

    def _last(self, logits: torch.Tensor) -> list[int]:
        count = logits.shape[1]
        if not isinstance(self._mask, torch.Tensor):
            return [count - 1] * len(logits)
        cut = self._mask.shape[1] - count  # a model may be asked for the last few logits only
        places = [int(row.nonzero().max()) - cut for row in self._mask]
        if min(places) < 0 or max(places) >= count:
            raise ValueError(
                f"the model returns logits of {count} tokens, and the last token of an example is not among them: ask "
                "it for those of all tokens (logits_to_keep=0), or pad on the left"
            )
        return places


def has_logits(output: Any) -> bool:
    """Whether a model's output is or holds logits (batch, class) or (batch, token, vocabulary)."""
    logits = getattr(output, "logits", output)
    return isinstance(logits, torch.Tensor) and logits.ndim in (2, 3)


def norm_at(query: int | str | Sequence[int] | None, start: int = 0) -> Callable[[Any], torch.Tensor]:
    """The target of a model that returns no logits: the Euclidean norm of what it returns at the read-out.

    query: of the trace; of several positions, or all, the norm of their mean. start: where the stream that is returned
    begins among the positions of the trace.
    """

    def norm(output: Any) -> torch.Tensor:
        found = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
        hidden = next((x for x in found.values() if isinstance(x, torch.Tensor) and x.ndim == 3), None)
        if hidden is None:
            raise ValueError(
                f"the model returns neither logits nor hidden states (batch, token, width), but "
                f"{type(output).__name__}; give a function of its output as the target"
            )
        places = [query] if isinstance(query, int) else query
        if places is not None and not isinstance(places, str):
            hidden = hidden[:, [place - start for place in places]]
        return hidden.mean(1).norm(dim=-1)

    norm.__name__ = f"norm of the output at {query}" if isinstance(query, int) else "norm of the mean output"
    return norm


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if has_logits(output):
        return logits
    raise ValueError(
        f"the model returns no logits but {type(output).__name__}; use a model with a head (such as "
        "AutoModelForSequenceClassification), or give a function of its output as the target"
    )
