"""The model as a test of faithfulness sees it: a function from which tokens are kept to the target's score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.baselines import blurred
from attnflow.capturing.target import TargetValue

Keep: TypeAlias = NDArray[np.bool_]
Reading: TypeAlias = Literal["probability", "logit", "correct"]
TextBlank: TypeAlias = Literal["unk", "mask", "pad", "delete"]
ImageBlank: TypeAlias = Literal["zero", "mean", "blur"]
ScoreTarget: TypeAlias = int | TargetValue | Callable[[Any], Any]

READINGS: tuple[Reading, ...] = get_args(Reading)
TEXT_BLANKS: tuple[TextBlank, ...] = get_args(TextBlank)
IMAGE_BLANKS: tuple[ImageBlank, ...] = get_args(ImageBlank)


@dataclass(frozen=True, eq=False)
class Score:
    """The target's score of one example of which only some tokens are kept.

    Called with a keep-mask (case, token), True where a token stays, it returns (case,) float64. Its tokens are those
    that may be removed; `positions` says where each stands in the input. All other positions, which are the special and
    prefix tokens unless they were asked for, always stay.

    forward: the scores (case,) of one batch of keep-masks; called without gradients, `batch_size` cases at a time,
    cases of like size together. device: where its keep-masks are wanted.
    """

    positions: tuple[int, ...]
    forward: Callable[[torch.Tensor], torch.Tensor]
    batch_size: int
    device: torch.device | str = "cpu"

    def __call__(self, keep: Keep) -> NDArray[np.float64]:
        """The scores (case,) of keep-masks (case, token).

        Raises ValueError for masks that do not fit the tokens, and for scores that are not finite.
        """
        if keep.ndim != 2 or keep.shape[1] != len(self.positions) or keep.dtype != np.bool_:
            raise ValueError(
                f"a keep-mask must be booleans (case, {len(self.positions)}), one for each token that may be removed; "
                f"{keep.dtype} of shape {keep.shape} was given"
            )
        scores = np.empty(len(keep))
        order = np.argsort(keep.sum(1), kind="stable")
        with torch.no_grad():
            for start in range(0, len(keep), self.batch_size):
                cases = order[start : start + self.batch_size]
                batch = self.forward(torch.from_numpy(keep[cases]).to(self.device)).cpu().numpy()
                if batch.shape != (len(cases),):
                    raise ValueError(f"a target must give one score per case: {len(cases)}; it gave {batch.shape}")
                scores[cases] = batch
        if not np.isfinite(scores).all():
            raise ValueError(f"the score is not finite in {np.sum(~np.isfinite(scores))} of {len(scores)} cases")
        return scores


def remembered(score: Callable[[Keep], NDArray[np.float64]]) -> Callable[[Keep], NDArray[np.float64]]:
    """The same score function, which asks the model about each keep-mask once.

    Methods and metrics share many cases: the whole input, every single token blanked out, the same token first.
    """
    known: dict[bytes, float] = {}

    def recall(keep: Keep) -> NDArray[np.float64]:
        names = [row.tobytes() for row in np.packbits(keep, axis=1)]
        new = {name: case for case, name in enumerate(names) if name not in known}
        if new:
            known.update(zip(new, score(keep[list(new.values())]).tolist(), strict=True))
        return np.array([known[name] for name in names])

    return recall


def text_score(
    model: torch.nn.Module,
    inputs: Mapping[str, Any],
    roles: Sequence[str],
    target: ScoreTarget,
    *,
    tokenizer: Any,
    blank: TextBlank = "unk",
    reading: Reading = "probability",
    special: bool = False,
    batch_size: int = 64,
) -> Score:
    """The score function of one text: tokens that are not kept become a blank token, or are deleted.

    inputs: what the tokenizer made of it, a batch of one without padding, on the model's device. roles: one per token.
    target: the index of a class, a settled value of `capturing.target`, or a function of the model's output that
    returns one score per case.
    blank: the tokenizer's "unk" (the paper's), "mask" or "pad" token, which is attended to like any other; or "delete":
    the tokens behind it move up, and shorter cases are padded and masked.
    reading: the target's "probability" (softmax of the logits), its "logit", or "correct": 1 where it has the highest
    logit and 0 elsewhere. Any other target is read as it is. special: whether special tokens may be removed.

    Raises ValueError for inputs that do not fit, and for a blank that the tokenizer does not have.
    """
    ids = inputs["input_ids"]
    if tuple(ids.shape) != (1, len(roles)):
        raise ValueError(f"expected the ids of one text with {len(roles)} tokens; they have shape {tuple(ids.shape)}")
    positions = tuple(place for place, role in enumerate(roles) if special or role == "text")
    blank_id = _blank_id(blank, tokenizer)
    _check_reading(reading)

    def forward(keep: torch.Tensor) -> torch.Tensor:
        whole = torch.ones(len(keep), len(roles), dtype=torch.bool, device=keep.device)
        whole[:, list(positions)] = keep
        batch = {name: value.expand(len(keep), *value.shape[1:]) for name, value in inputs.items()}
        if blank == "delete":
            batch = _deleted(batch, whole, blank_id)
        else:
            batch["input_ids"] = torch.where(whole, batch["input_ids"], blank_id)
        return read(model(**batch), target, reading, batch.get("attention_mask"))

    return Score(positions, forward, batch_size, ids.device)


def image_score(
    model: torch.nn.Module,
    pixels: torch.Tensor,
    roles: Sequence[str],
    grid: tuple[int, int],
    target: ScoreTarget,
    *,
    blank: ImageBlank = "zero",
    reading: Reading = "probability",
    batch_size: int = 64,
) -> Score:
    """The score function of one image: patches that are not kept are painted over.

    pixels (1, channel, height, width), as the model takes them, on its device. grid: (rows, columns) of the patches.
    blank: "zero" in the model's own scale (the mean colour of the training data, if it was subtracted), the "mean"
    colour of this image, or a "blur" of it, by a Gaussian as wide (one deviation) as a patch is high.
    target and reading are those of `text_score`. Prefix tokens have no pixels and always stay.

    Raises ValueError for pixels that do not divide into the grid.
    """
    height, width = pixels.shape[-2:]
    if pixels.ndim != 4 or len(pixels) != 1 or height % grid[0] or width % grid[1]:
        raise ValueError(
            f"expected the pixels of one image that divides into {grid[0]} x {grid[1]} patches; they have shape "
            f"{tuple(pixels.shape)}"
        )
    patch = height // grid[0], width // grid[1]
    canvas = _canvas(blank, pixels, patch[0])
    _check_reading(reading)

    def forward(keep: torch.Tensor) -> torch.Tensor:
        shown = keep.view(-1, 1, *grid).repeat_interleave(patch[0], 2).repeat_interleave(patch[1], 3)
        return read(model(torch.where(shown, pixels, canvas)), target, reading)

    positions = tuple(place for place, role in enumerate(roles) if role == "patch")
    return Score(positions, forward, batch_size, pixels.device)


def read(output: Any, target: ScoreTarget, reading: Reading, attention_mask: Any = None) -> torch.Tensor:
    """The target's scores (case,) in a model's output, in double precision on the CPU.

    Logits are (case, class), or (case, token, vocabulary), of which the last token that is no padding is taken.

    Raises ValueError for an output without logits, or without this class among them.
    """
    if isinstance(target, TargetValue):
        return target.scores(output, attention_mask).reshape(-1).cpu().double()
    if callable(target):
        return target(output).reshape(-1).cpu().double()
    logits: Any = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.ndim not in (2, 3):
        raise ValueError(
            f"the model returns no logits but {type(output).__name__}; use a model with a head (such as "
            "AutoModelForSequenceClassification), or give a function of its output as the target"
        )
    if logits.ndim == 3:
        logits = logits[torch.arange(len(logits)), _last(logits, attention_mask)]
    classes = logits.shape[1]
    if not 0 <= target < classes:
        raise ValueError(f"target {target} is out of range: the model has {classes} classes, 0 to {classes - 1}")
    if reading != "logit" and classes == 1:
        raise ValueError(f"the model has a single logit, so its {reading} is always 1: use reading='logit'")
    logits = logits.cpu().double()
    if reading == "correct":
        return (logits.argmax(-1) == target).double()
    return (logits if reading == "logit" else logits.softmax(-1))[:, target]


def _last(logits: torch.Tensor, attention_mask: Any) -> torch.Tensor:
    """The last token of each case that attention_mask does not hide, wherever the padding stands."""
    count = logits.shape[1]
    if attention_mask is None:
        return torch.full((len(logits),), count - 1, device=logits.device)
    return (attention_mask * torch.arange(1, count + 1, device=logits.device)).argmax(1)


def _check_reading(reading: str) -> None:
    if reading not in READINGS:
        raise ValueError(f"reading {reading!r} is unknown; choose one of {', '.join(READINGS)}")


def _blank_id(blank: str, tokenizer: Any) -> int:
    """The id of a blank; for deletion, of what fills the cases up behind their ends, which is never attended to."""
    if blank not in TEXT_BLANKS:
        raise ValueError(f"blank {blank!r} is unknown for text; choose one of {', '.join(TEXT_BLANKS)}")
    if blank == "delete":
        return tokenizer.pad_token_id or 0
    found = getattr(tokenizer, f"{blank}_token_id")
    if found is None:
        having = [name for name in TEXT_BLANKS[:-1] if getattr(tokenizer, f"{name}_token_id") is not None]
        raise ValueError(f"the tokenizer has no {blank} token: choose blank from {', '.join([*having, 'delete'])}")
    return found


def _deleted(batch: dict[str, Any], keep: torch.Tensor, filler: int) -> dict[str, Any]:
    """The batch with the tokens that are not kept taken out, and its rows filled up behind and masked."""
    counts = keep.sum(1)
    if not counts.all():
        raise ValueError("a case deletes every token of the text; use a blank token, or let special tokens stay")
    order = keep.byte().argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
    inside = torch.arange(order.shape[1], device=keep.device) < counts[:, None]
    kept = {
        name: value.gather(1, order) if value.shape == keep.shape else value
        for name, value in batch.items()
        if name != "attention_mask"
    }
    kept["input_ids"] = kept["input_ids"].where(inside, filler)
    return kept | {"attention_mask": inside.long()}


def _canvas(blank: str, pixels: torch.Tensor, sigma: int) -> torch.Tensor:
    """What removed patches are painted with, broadcastable to pixels (1, channel, height, width)."""
    if blank not in IMAGE_BLANKS:
        raise ValueError(f"blank {blank!r} is unknown for images; choose one of {', '.join(IMAGE_BLANKS)}")
    if blank == "zero":
        return torch.zeros_like(pixels)
    return pixels.mean((2, 3), keepdim=True) if blank == "mean" else blurred(pixels, sigma)
