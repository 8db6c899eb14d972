"""The target: which number of a model's output is explained, and differentiated.

A class or token id is the plainest; the values below ask for more: one class rather than another, a token at a
position, an answer, how an embedding lies to another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch

from attnflow.trace import is_index

# How an embedding is made of what a model returns: a vector that it returns itself, or of the vectors of its tokens.
Pooling: TypeAlias = Literal["output", "mean", "first", "last"]

# The fields in which models return an embedding (batch, width).
_EMBEDDINGS = ("sentence_embedding", "text_embeds", "image_embeds", "embeddings")


class TargetValue:
    """What a target asks of a model's output. mask: the input's `attention_mask`, if it has one."""

    @property
    def words(self) -> int | str:
        """The target for the recipe: an index, or words."""
        raise NotImplementedError

    def settled(self, output: Any, mask: Any) -> TargetValue:
        """The same with "predicted" fixed to what this output predicts, example by example."""
        return self

    def scores(self, output: Any, mask: Any) -> Any:
        """The scores (example,)."""
        raise NotImplementedError

    def of(self, index: int) -> TargetValue:
        """The settled target of one example."""
        return self


@dataclass(frozen=True)
class Classes(TargetValue):
    """The logit of a class or token id, one for each example, or "predicted": what a number or a list means."""

    target: int | str | tuple[int, ...]

    @property
    def words(self) -> int | str:
        """The index, or all."""
        return self.target if isinstance(self.target, int | str) else ", ".join(map(str, self.target))

    def settled(self, output: Any, mask: Any) -> Classes:
        """See `TargetValue`."""
        return Classes(tuple(_indices(self.target, _last(output, mask))))

    def scores(self, output: Any, mask: Any) -> torch.Tensor:
        """See `TargetValue`."""
        logits = _last(output, mask)
        return logits[torch.arange(len(logits)), _indices(self.target, logits)]

    def of(self, index: int) -> Classes:
        """See `TargetValue`."""
        return Classes(_one(self.target, index))


@dataclass(frozen=True)
class Contrast(TargetValue):
    """The difference of two logits: why `target` rather than `against`.

    target, against: a class or token id, the name of a class, one for each example, or "predicted". Logits are read as
    those of a single class are.
    """

    target: int | str | tuple[int, ...]
    against: int | str | tuple[int, ...]

    @property
    def words(self) -> str:
        """Which rather than which."""
        return f"{Classes(self.target).words} rather than {Classes(self.against).words}"

    def settled(self, output: Any, mask: Any) -> Contrast:
        """See `TargetValue`."""
        logits = _last(output, mask)
        pair = Contrast(tuple(_indices(self.target, logits)), tuple(_indices(self.against, logits)))
        if any(one == other for one, other in zip(pair.target, pair.against, strict=True)):  # pyright: ignore
            raise ValueError(f"{pair.words} is no contrast: give two different classes")
        return pair

    def scores(self, output: Any, mask: Any) -> torch.Tensor:
        """See `TargetValue`."""
        return Classes(self.target).scores(output, mask) - Classes(self.against).scores(output, mask)

    def of(self, index: int) -> Contrast:
        """See `TargetValue`."""
        return Contrast(_one(self.target, index), _one(self.against, index))


@dataclass(frozen=True)
class Token(TargetValue):
    """The logit of a token at a position: what a model says there.

    position: among those that the model returns logits (batch, token, vocabulary) for, its padding left out; negative
    from the end. id: of the token, one for each example, or "predicted".
    """

    position: int
    id: int | str | tuple[int, ...] = "predicted"

    def __post_init__(self) -> None:
        if not is_index(self.position):
            raise ValueError(f"a token stands at a position, a number; {self.position!r} was given")

    @property
    def words(self) -> str:
        """Which token, and where."""
        return f"token {Classes(self.id).words} at position {self.position}"

    def settled(self, output: Any, mask: Any) -> Token:
        """See `TargetValue`."""
        return replace(self, id=tuple(_indices(self.id, self._logits(output, mask))))

    def scores(self, output: Any, mask: Any) -> torch.Tensor:
        """See `TargetValue`."""
        logits = self._logits(output, mask)
        return logits[torch.arange(len(logits)), _indices(self.id, logits)]

    def of(self, index: int) -> Token:
        """See `TargetValue`."""
        return replace(self, id=_one(self.id, index))

    def _logits(self, output: Any, mask: Any) -> torch.Tensor:
        logits = _logits(output)
        if logits.ndim != 3:
            raise ValueError(f"{self.words} needs logits (batch, token, vocabulary); they are {tuple(logits.shape)}")
        places = _places(logits, mask)
        fewest = min(map(len, places))
        if not -fewest <= self.position < fewest:
            raise ValueError(f"{self.words} is out of range: the model returns logits of {fewest} positions")
        return logits[torch.arange(len(logits)), [own[self.position] for own in places]]


@dataclass(frozen=True)
class Answer(TargetValue):
    """The log-probability of an answer: the sum over its tokens, each given all before it.

    ids: of the answer's tokens, with which the text that the model is given must end.
    """

    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(int(one) for one in self.ids))
        if not self.ids:
            raise ValueError("an answer needs the ids of at least one token")

    @property
    def words(self) -> str:
        """How long it is."""
        return f"log-probability of the last {len(self.ids)} tokens"

    def scores(self, output: Any, mask: Any) -> torch.Tensor:
        """See `TargetValue`."""
        logits, count = _logits(output), len(self.ids)
        places = _places(logits, mask) if logits.ndim == 3 else [[]]
        if min(map(len, places)) <= count:
            raise ValueError(
                f"an answer of {count} tokens needs logits (batch, token, vocabulary) of all of them and of the token "
                f"before; they are {tuple(logits.shape)}"
            )
        if wrong := [one for one in self.ids if not 0 <= one < logits.shape[-1]]:
            raise ValueError(
                f"an answer holds token {wrong[0]}; the model knows those from 0 to {logits.shape[-1] - 1}"
            )
        rows = torch.stack([one[own[-count - 1 : -1]] for one, own in zip(logits, places, strict=True)])
        return rows.log_softmax(-1)[:, range(count), self.ids].sum(1)

    def check(self, ids: torch.Tensor) -> None:
        """Raise ValueError where the ids (example, token) of a text do not end with the answer."""
        for row in ids[:, -len(self.ids) :].tolist():
            if tuple(row) != self.ids:
                raise ValueError(
                    f"the text ends with the tokens {row}, and the answer is {list(self.ids)}: give the model prompt "
                    "and answer together, without padding behind"
                )


@dataclass(frozen=True, eq=False)
class Similarity(TargetValue):
    """The cosine of the angle between the embedding of the input and a given one (width,): see `similarity_to`."""

    embedding: torch.Tensor
    pooling: Pooling = "output"
    other: str = "a given one"

    @property
    def words(self) -> str:
        """Of what, and how it is pooled."""
        return f"cosine similarity of the embedding ({_said(self.pooling)}) to {self.other}"

    def scores(self, output: Any, mask: Any) -> torch.Tensor:
        """See `TargetValue`."""
        own = pooled(output, self.pooling, mask)
        return torch.nn.functional.cosine_similarity(own, _fitting(self.embedding, own), dim=-1)


@dataclass(frozen=True, eq=False)
class Direction(TargetValue):
    """How far the embedding of the input reaches along a given vector (width,): the dot product with it."""

    vector: torch.Tensor
    pooling: Pooling = "output"

    @property
    def words(self) -> str:
        """Of what, and how it is pooled."""
        return f"embedding ({_said(self.pooling)}) along a given direction"

    def scores(self, output: Any, mask: Any) -> torch.Tensor:
        """See `TargetValue`."""
        own = pooled(output, self.pooling, mask)
        return (own * _fitting(self.vector, own)).sum(-1)


@dataclass(frozen=True)
class Function(TargetValue):
    """A target that is a function of the model's output."""

    function: Callable[[Any], Any]

    @property
    def words(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", "function")

    def scores(self, output: Any, mask: Any) -> Any:
        """See `TargetValue`."""
        return self.function(output)


Target: TypeAlias = int | str | Sequence[int | str] | Callable[[Any], Any] | TargetValue


def similarity_to(embedding: Any, pooling: Pooling = "output") -> Similarity:
    """The target of a bi-encoder: how similar the input is to another whose embedding (width,) is given.

    `pooled` makes an embedding of what a model returns; pooling says how, and must be that of the other one.
    """
    return Similarity(torch.as_tensor(embedding).detach().reshape(-1), pooling)


def as_target(target: Target) -> TargetValue:
    """The target as a value: of a pair (a, b) their contrast, of a list one class per example.

    Raises ValueError for what is none.
    """
    if isinstance(target, TargetValue):
        return target
    if callable(target):
        return Function(target)
    if isinstance(target, str):
        return Classes(target)
    if isinstance(target, tuple) and len(target) == 2:
        return Contrast(*target)
    try:
        return Classes(operator.index(target) if is_index(target) else tuple(target))  # pyright: ignore
    except TypeError:
        raise ValueError(
            f"a target is an index, a name, a pair (a, b), a list, a value such as Contrast or a function; {target!r} "
            "was given"
        ) from None


def resolved(target: Target, model: Any, ids: torch.Tensor | None = None) -> Target:
    """The target with names of classes as their indices, as the model's configuration names them.

    ids (example, token): of the text that the model is given, which an answer must end.

    Raises ValueError for a name that no class has, and for an answer with which the text does not end.
    """
    value = as_target(target)
    if isinstance(value, Answer) and ids is not None:
        value.check(ids)
    if isinstance(value, Classes) and isinstance(value.target, str):
        return _class(value.target, model)  # pyright: ignore[reportReturnType]
    if isinstance(value, Contrast):
        return Contrast(_class(value.target, model), _class(value.against, model))
    return target


def _class(name: int | str | tuple[int, ...], model: Any) -> int | str | tuple[int, ...]:
    """The index of a class that may be given by name; "predicted" and numbers as they are."""
    if not isinstance(name, str) or name == "predicted":
        return name
    if name == "answer":
        raise ValueError('the target "answer" is what a model writes: let it write with generate=, or give Answer(ids)')
    names: Mapping[int, str] = getattr(getattr(model, "config", None), "id2label", None) or {}
    for same in (str, str.casefold):
        found = [index for index, own in names.items() if same(str(own)) == same(name)]
        if len(found) == 1:
            return found[0]
    shown = [str(own) for own in names.values()]
    known = f"it has {', '.join(shown[:8])}{' and more' if len(shown) > 8 else ''}" if shown else "it names none"
    raise ValueError(
        f'target {name!r} is no class of {type(model).__name__}: {known}; or give an index, or "predicted"'
    )


class TargetScores:
    """A target's scores (example,), as `record` wants them: of the model's output, and remembered.

    target: a class or token id, one per example, "predicted" for each example's own highest logit, a value of this
    module, or a function of the model's output that returns one score per example. Logits are (batch, class), or
    (batch, token, vocabulary), of which the last token that attention_mask does not hide is taken.
    """

    def __init__(self, target: Target, attention_mask: Any = None) -> None:
        self.settled = as_target(target)
        self._mask = attention_mask
        self.scores = torch.zeros(0)

    def __call__(self, output: Any) -> torch.Tensor:
        """The scores, with their graph; ValueError for a target that the output does not have.

        After the first call `settled` is the target of that output, which stays what it is for others.
        """
        self.settled = self.settled.settled(output, self._mask)
        scores = self.settled.scores(output, self._mask)
        if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or scores.ndim > 1:
            shown = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise ValueError(f"a target must give one score per example, a tensor (example,); it gave {shown}")
        self.scores = scores.detach().reshape(-1)
        return scores

    def of_another(self, output: Any) -> torch.Tensor:
        """The scores (example,) of another output, for what the target settled as; they are not remembered."""
        return self.settled.scores(output, self._mask)

    def facts(self, index: int) -> dict[str, Any]:
        """The target of one example: its index among the logits, or words, and its score."""
        return {
            "target": self.settled.of(index).words,
            "score": float(self.scores[index if len(self.scores) > 1 else 0]),
        }


def pooled(output: Any, pooling: Pooling = "output", attention_mask: Any = None) -> torch.Tensor:
    """The embeddings (example, width) of what a model returned.

    pooling: "output" for the embedding that the model returns itself, as a tensor (batch, width), or in a field such as
    sentence_embedding or text_embeds; else of the vectors of its tokens, padding left out, the "mean", "first" or
    "last".

    Raises ValueError for what the model does not return.
    """
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling {pooling!r} is unknown; choose one of {', '.join(get_args(Pooling))}")
    found: Mapping[str, Any] = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    if pooling == "output":
        vectors = [found[name] for name in _EMBEDDINGS if isinstance(found.get(name), torch.Tensor)]
        vectors = [output] if isinstance(output, torch.Tensor) else vectors
        if len(vectors) != 1 or vectors[0].ndim != 2:
            raise ValueError(
                f"{type(output).__name__} holds no embedding (batch, width) of its own, or several; say how it is made "
                "of the tokens: pooling='mean', 'first' or 'last'"
            )
        return vectors[0]
    hidden: Any = output if isinstance(output, torch.Tensor) else found.get("last_hidden_state")
    if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
        raise ValueError(
            f"{type(output).__name__} holds no vectors of tokens (batch, token, width) to take the {pooling} of"
        )
    places = _places(hidden, attention_mask)
    if pooling == "mean":
        return torch.stack([one[own].mean(0) for one, own in zip(hidden, places, strict=True)])
    return hidden[torch.arange(len(hidden)), [own[0 if pooling == "first" else -1] for own in places]]


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


def _indices(target: int | str | Sequence[int], logits: torch.Tensor) -> list[int]:
    """The index of each example among logits (example, class), of one alone for any number of examples.

    Raises ValueError for one that they do not have.
    """
    if target == "predicted":
        return logits.argmax(-1).tolist()
    indices: list[Any] = [target] * len(logits) if isinstance(target, int | str) else list(target)
    wrong = [i for i in indices if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < logits.shape[1]]
    if wrong or len(indices) != len(logits):
        raise ValueError(
            f"target {target!r} does not fit logits of shape {tuple(logits.shape)}: give an index from 0 to "
            f'{logits.shape[1] - 1}, a list of one per example, a pair (a, b) for a rather than b, "predicted", or a '
            "function of the output"
        )
    return indices


def _one(target: int | str | tuple[int, ...], index: int) -> int | str | tuple[int, ...]:
    """Of indices for each example that of one."""
    return target[index if len(target) > 1 else 0] if isinstance(target, tuple) else target


def _last(output: Any, mask: Any) -> torch.Tensor:
    """Logits (example, class): of (batch, token, vocabulary) those of the last token that is no padding."""
    logits = _logits(output)
    if logits.ndim == 2:
        return logits
    count = logits.shape[1]
    if not isinstance(mask, torch.Tensor):
        return logits[:, -1]
    cut = mask.shape[1] - count  # a model may be asked for the last few logits only
    places = [int(row.nonzero().max()) - cut for row in mask]
    if min(places) < 0 or max(places) >= count:
        raise ValueError(
            f"the model returns logits of {count} tokens, and the last token of an example is not among them: ask "
            "it for those of all tokens (logits_to_keep=0), or pad on the left"
        )
    return logits[torch.arange(len(logits)), places]


def _places(x: torch.Tensor, mask: Any) -> list[list[int]]:
    """For each example of (batch, token, ...) the positions that a mask over as many does not hide."""
    if isinstance(mask, torch.Tensor) and mask.shape == x.shape[:2]:
        return [row.nonzero().flatten().tolist() for row in mask]
    return [list(range(x.shape[1]))] * len(x)


def _said(pooling: Pooling) -> str:
    return "as returned" if pooling == "output" else f"{pooling} of the tokens"


def _fitting(vector: Any, own: torch.Tensor) -> torch.Tensor:
    """A given vector on the device and in the precision of the model's; ValueError for another width."""
    given = torch.as_tensor(vector).detach().reshape(-1).to(own)
    if given.shape != own.shape[1:]:
        raise ValueError(f"the vector given has {len(given)} numbers, and the model's embedding {own.shape[1]}")
    return given


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if has_logits(output):
        return logits
    raise ValueError(
        f"the model returns no logits but {type(output).__name__}; use a model with a head (such as "
        "AutoModelForSequenceClassification), or give a function of its output as the target"
    )
