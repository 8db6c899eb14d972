"""The answer: `Relevance`, scores of the input tokens with the recipe that made them; and how files are written."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

PICTURES = (".png", ".svg", ".pdf")
DATA = (".npz", ".json")
_FORMAT = "attnflow-relevance-1"
_CONTINUES = re.compile(r"^##(?!#|$)")  # WordPiece's mark of a piece that continues a word
_BYTES = re.compile(r"(?:\\x[89a-f][0-9a-f])+")  # bytes of characters that were split among tokens


# What a row of scores is of: a query, a token that the model wrote, a group of tokens, or the target as a whole.
Rows: TypeAlias = Literal["query", "generated", "group", "target"]


class Scored(NamedTuple):
    """One input token with its score."""

    position: int
    token: str
    score: float


@dataclass(frozen=True, eq=False)
class Relevance:
    """How much each input token mattered to each query, as one method sees it.

    scores: float64 (query, token), or (layer, query, token) where every layer was asked for. Values are the
    method's own, unnormalised: a rollout row sums to 1, a flow is the value of a maximum flow in units of capacity.
    tokens, roles: the input positions (columns). queries, query_tokens: positions and labels of the rows.
    layers: which layers' queries the scores explain, counted from 0 at the input; one for (query, token) scores.
    grid: (rows, columns), or (frames, rows, columns), of the patches among the tokens, or None.
    words: the word that each token belongs to, or None.
    recipe: method, settings, model, versions and checks: what is needed to make the scores again.
    rows: what a row is of: a "query", a token that was "generated", a "group", or the "target" as a whole, which
    stands at no position.
    """

    scores: NDArray[np.float64]
    tokens: tuple[str, ...]
    roles: tuple[str, ...]
    queries: tuple[int, ...]
    query_tokens: tuple[str, ...]
    layers: tuple[int, ...]
    grid: tuple[int, int] | tuple[int, int, int] | None = None
    words: tuple[int, ...] | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: Rows = "query"

    def __post_init__(self) -> None:
        expected = (len(self.queries), len(self.tokens))
        if self.scores.ndim == 3:
            expected = (len(self.layers), *expected)
        if self.scores.shape != expected or len(self.roles) != len(self.tokens):
            raise ValueError(
                f"scores of shape {self.scores.shape} do not fit {len(self.layers)} layers, {len(self.queries)} "
                f"queries, {len(self.tokens)} tokens and {len(self.roles)} roles"
            )

    def __repr__(self) -> str:
        axes = "layer, query, token" if self.scores.ndim == 3 else "query, token"
        return f"<Relevance by {self.recipe.get('method', 'unknown')}: scores ({axes}) {self.scores.shape}>"

    @property
    def every_layer(self) -> NDArray[np.float64]:
        """The scores as (layer, query, token), also where one layer was asked for."""
        return self.scores if self.scores.ndim == 3 else self.scores[None]

    @property
    def row(self) -> NDArray[np.float64]:
        """One score per token (token,): of the topmost layer, the mean over queries where there are several."""
        return self.every_layer[-1].mean(axis=0)

    def top(self, k: int = 5) -> list[Scored]:
        """The `k` input tokens with the highest scores in `row`, best first; ties keep the order of the input."""
        order = np.argsort(-self.row, kind="stable")[: max(k, 0)]
        return [Scored(int(i), self.tokens[i], float(self.row[i])) for i in order]

    def normalized(self) -> Relevance:
        """The same with every row divided by its sum; rows of zeros stay zeros. For display, not for comparison."""
        total = self.scores.sum(axis=-1, keepdims=True)
        scores = np.divide(self.scores, total, out=np.zeros_like(self.scores), where=total != 0)
        return replace(self, scores=scores, recipe={**self.recipe, "scaling": "each row divided by its sum"})

    def by_receptive_field(self, field: Relevance) -> Relevance:
        """The same divided by the relevance that places alone would have, `field`: 1 is as much as its place explains.

        Where a place has none, the result is 0.
        """
        scores = np.divide(self.scores, field.scores, out=np.zeros_like(self.scores), where=field.scores > 0)
        settings = {**self.recipe.get("settings", {}), "receptive_field": True}
        recipe = {**self.recipe, "settings": settings, "scaling": "divided by the receptive field"}
        return replace(self, scores=scores, recipe=recipe)

    def by_word(self) -> Relevance:
        r"""The same with the pieces of each word merged: scores are summed over them as tokens, averaged as queries.

        Labels are joined without the mark of WordPiece ("##"), and their bytes (\xd0) read as characters. Raises
        ValueError where the words are not known: merge them before leaving roles out.
        """
        if self.words is None:
            raise ValueError("these scores do not know which tokens are pieces of a word: capture with a tokenizer")
        starts = [i for i, word in enumerate(self.words) if i == 0 or word != self.words[i - 1]]
        scores = np.add.reduceat(self.scores, starts, axis=-1)
        of_query = [self.words[position] for position in self.queries]
        words = list(dict.fromkeys(of_query))
        rows = [scores[..., [i for i, word in enumerate(of_query) if word == one], :].mean(-2) for one in words]
        place = {self.words[start]: number for number, start in enumerate(starts)}
        pieces = np.split(np.array(self.tokens, dtype=object), starts[1:])
        labels = [_joined(list(group)) for group in pieces]
        return replace(
            self,
            scores=np.stack(rows, axis=-2),
            tokens=tuple(labels),
            roles=tuple(self.roles[start] for start in starts),
            queries=tuple(place[word] for word in words),
            query_tokens=tuple(labels[place[word]] for word in words),
            words=None,
            recipe={**self.recipe, "pieces": "summed over the tokens of a word, averaged over its queries"},
        )

    def without(self, *roles: str) -> Relevance:
        """The same without the tokens of some roles ("special", "prefix"), which often take most of the relevance.

        The share of the scores that is left out stands in the recipe. Raises ValueError if nothing would be left.
        """
        keep = [i for i, role in enumerate(self.roles) if role not in roles]
        if not keep:
            raise ValueError(
                f"nothing is left without {', '.join(roles)}: all {len(self.tokens)} tokens are of these roles"
            )
        total = float(self.scores.sum())
        share = 1 - float(self.scores[..., keep].sum()) / total if total else 0.0
        return replace(
            self,
            scores=self.scores[..., keep],
            tokens=tuple(self.tokens[i] for i in keep),
            roles=tuple(self.roles[i] for i in keep),
            words=None,
            recipe={**self.recipe, "left_out": {"roles": list(roles), "share": share}},
        )

    def with_checks(self, checks: Mapping[str, Any]) -> Relevance:
        """The same with facts about how far the scores can be trusted in the recipe."""
        return replace(self, recipe={**self.recipe, "checks": {**self.recipe.get("checks", {}), **checks}})

    def show(self) -> None:
        """Print the tokens coloured by `row`, and the layer x token table."""
        from attnflow.show.terminal import show

        show(self)

    def _repr_html_(self) -> str:
        from attnflow.show.notebook import html

        return html(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path`, whole or not at all: data (.npz, .json) or a picture (.png, .svg, .pdf) by its suffix.

        Raises ValueError for any other suffix.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix in PICTURES:
            from attnflow.show.plots import picture, save_figure

            return save_figure(picture(self), path)
        if suffix not in DATA:
            raise ValueError(f"cannot write {path.name!r}: the suffix must be one of {', '.join(DATA + PICTURES)}")
        header = json.dumps(self.as_dict(with_scores=suffix == ".json"), ensure_ascii=False, allow_nan=False)
        if suffix == ".json":
            return write_whole(path, lambda file: file.write(header.encode()))
        return write_whole(path, lambda file: np.savez_compressed(file, scores=self.scores, header=np.array(header)))

    def as_dict(self, *, with_scores: bool = True) -> dict[str, Any]:
        """Everything as plain lists, numbers and strings, ready for JSON."""
        result: dict[str, Any] = {"format": _FORMAT, "recipe": dict(self.recipe)}
        for name in ("tokens", "roles", "queries", "query_tokens", "layers"):
            result[name] = list(getattr(self, name))
        result["grid"] = list(self.grid) if self.grid else None
        result["words"] = list(self.words) if self.words else None
        if with_scores:
            result["scores"] = self.scores.tolist()
        return result

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Relevance:
        """Read what `save` wrote to .npz or .json; never unpickles.

        Raises ValueError if the file is not such a file, FileNotFoundError if there is none.
        """
        path = Path(path)
        try:
            if path.suffix.lower() == ".npz":
                with np.load(path, allow_pickle=False) as file:
                    content = json.loads(str(file["header"])) | {"scores": file["scores"]}
            else:
                content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or not isinstance(content["recipe"], dict):
                raise ValueError(f"format {content['format']!r}")
            if not np.isfinite(np.asarray(content["scores"], dtype=np.float64)).all():
                raise ValueError("scores that are not finite")
            return cls(
                scores=np.asarray(content["scores"], dtype=np.float64),
                tokens=tuple(content["tokens"]),
                roles=tuple(content["roles"]),
                queries=tuple(content["queries"]),
                query_tokens=tuple(content["query_tokens"]),
                layers=tuple(content["layers"]),
                grid=tuple(content["grid"]) if content["grid"] else None,
                words=tuple(content["words"]) if content["words"] else None,
                recipe=content["recipe"],
            )
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{path} does not hold a relevance that attnflow saved ({error})") from error


def _joined(pieces: list[str]) -> str:
    """The label of a word made of the labels of its pieces."""
    label = pieces[0] + "".join(_CONTINUES.sub("", piece) for piece in pieces[1:])
    text = _BYTES.sub(_read, label)
    return text.lstrip("␣").strip() or text


def _read(run: re.Match[str]) -> str:
    return bytes.fromhex(run[0].replace("\\x", "")).decode("utf-8", "backslashreplace")


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> Path:
    """Write a file whole or not at all: into a temporary file beside it, then renamed over it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: the folder {path.parent} does not exist")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
