"""The answer: `Relevance`, scores of the input tokens with the recipe that made them."""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

from attnflow.files import named, plain, to_json, write_whole
from attnflow.memory import check_arrays

PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", ".htm")
DATA = (".npz", ".json")
SUFFIXES = DATA + PAGES + PICTURES
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
    layers: which layers' queries the scores explain, counted from 0 at the input; one for (query, token) scores. Of a
    target that no layer explains (baselines) the last, which no view names.
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
        """Take numbers of numpy and torch, and labels of any kind, and refuse what does not fit together."""
        for name, kind in _SEQUENCES.items():
            object.__setattr__(self, name, tuple(map(kind, getattr(self, name))))
        each_layer = (len(self.layers),) if self.scores.ndim == 3 or len(self.layers) != 1 else ()
        expected = (*each_layer, len(self.queries), len(self.tokens))
        labels = len(self.query_tokens), len(self.roles)
        if self.scores.shape != expected or expected[-2:] != labels or 0 in expected:
            raise ValueError(
                f"scores of shape {self.scores.shape} do not fit {len(self.layers)} layers, {len(self.queries)} "
                f"queries with {len(self.query_tokens)} labels, {len(self.tokens)} tokens and {len(self.roles)} roles"
            )
        if self.words is not None and not max(self.queries) < len(self.words) == len(self.tokens):
            raise ValueError(
                f"{len(self.words)} words do not fit {len(self.tokens)} tokens and a query at {max(self.queries)}"
            )
        patches = self.roles.count("patch")
        if self.grid is not None and (len(self.grid) not in (2, 3) or math.prod(self.grid) != patches):
            raise ValueError(f"a grid of {self.grid} does not hold {patches} patches")

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
        place = {self.words[start]: number for number, start in enumerate(starts)}
        pieces = np.split(np.array(self.tokens, dtype=object), starts[1:])
        labels = [_joined(list(group)) for group in pieces]
        merged = replace(
            self,
            scores=scores,
            tokens=tuple(labels),
            roles=tuple(self.roles[start] for start in starts),
            words=None,
            recipe={**self._recipe_of(starts), "pieces": "summed over the tokens of a word, averaged over its queries"},
        )
        if self.rows in ("target", "group"):  # which stand at no position
            return merged
        of_query = [self.words[position] for position in self.queries]
        words = list(dict.fromkeys(of_query))
        rows = [scores[..., [i for i, word in enumerate(of_query) if word == one], :].mean(-2) for one in words]
        return replace(
            merged,
            scores=np.stack(rows, axis=-2),
            queries=tuple(place[word] for word in words),
            query_tokens=tuple(labels[place[word]] for word in words),
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
            grid=None if "patch" in roles else self.grid,
            words=None,
            recipe={**self._recipe_of(keep), "left_out": {"roles": list(roles), "share": share}},
        )

    def _recipe_of(self, positions: Sequence[int]) -> dict[str, Any]:
        """The recipe where just the tokens at these positions, in order, are left: parts begin elsewhere."""
        parts = self.recipe.get("parts")
        moved = {name: bisect_left(positions, start) for name, start in (parts or {}).items()}
        return {**self.recipe, **({"parts": moved} if parts else {})}

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
        """Write to `path`, whole or not at all, by its suffix.

        Data (.npz, .json), a picture (.png, .svg, .pdf), or a page to explore (.html; `attnflow.report` adds an image,
        other methods and the graph).

        Raises ValueError for any other suffix.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix in PICTURES:
            from attnflow.show.plots import picture, save_figure

            return save_figure(picture(self), path)
        if suffix in PAGES:
            from attnflow.show.report import save_page

            return save_page([self], path)
        if suffix not in DATA:
            raise ValueError(f"cannot write {path.name!r}: the suffix must be one of {', '.join(SUFFIXES)}")
        if not np.isfinite(self.scores).all():
            raise ValueError(f"cannot write {named(path)}: some of the scores are not finite, which no file can hold")
        header = to_json(self.as_dict(with_scores=suffix == ".json"))
        if suffix == ".json":
            return write_whole(path, lambda file: file.write(header.encode()))
        return write_whole(path, lambda file: np.savez_compressed(file, scores=self.scores, header=np.array(header)))

    def as_dict(self, *, with_scores: bool = True) -> dict[str, Any]:
        """Everything as plain lists, numbers and strings, ready for JSON."""
        result: dict[str, Any] = {"format": _FORMAT, "recipe": plain(self.recipe)}
        for name in _SEQUENCES:
            result[name] = list(getattr(self, name))
        result["grid"] = list(self.grid) if self.grid else None
        result["words"] = list(self.words) if self.words else None
        result["rows"] = self.rows
        if with_scores:
            result["scores"] = self.scores.tolist()
        return result

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Relevance:
        """Read what `save` wrote to .npz or .json; never unpickles.

        Raises ValueError if the file is not such a file, FileNotFoundError if there is none.
        """
        path = Path(path)
        zipped = path.suffix.lower() == ".npz"
        if zipped:
            check_arrays(path)
        try:
            if zipped:
                with np.load(path, allow_pickle=False) as file:
                    content = json.loads(str(file["header"])) | {"scores": file["scores"]}
            else:
                content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**_fields(content))
        except MemoryError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.filename is not None:
                raise
            raise ValueError(f"{named(path)} does not hold a relevance that attnflow saved ({error})") from error


# What a file holds as lists, and of what; a relevance takes whatever can be read as such.
_SEQUENCES: dict[str, type[int] | type[str]] = {
    "tokens": str, "roles": str, "queries": int, "query_tokens": str, "layers": int,
}  # fmt: skip


def _string(value: Any) -> bool:
    return isinstance(value, str)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_string, cast(list[Any], value)))


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in cast(list[Any], value))


def _left_out(value: Any) -> bool:
    return isinstance(value, dict) and _strings(value.get("roles")) and _number(value.get("share"))


def _parts(value: Any) -> bool:
    return isinstance(value, dict) and _counts(list(cast(dict[Any, Any], value).values()))


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


# What a file must hold beside its scores, and what must hold of all that is read of a recipe when scores are shown.
_SCHEMA: dict[str, Any] = {
    **{name: _strings if kind is str else _counts for name, kind in _SEQUENCES.items()},
    "grid": _or_none(_counts),
    "words": _or_none(_counts),
    "rows": _or_none(lambda value: value in get_args(Rows)),
    "recipe": {
        "method": _or_none(_string),
        "scaling": _or_none(_string),
        "settings": {"residual": _or_none(lambda value: _number(value) or value in ("add", "measured"))},
        "model": {"proofs": {"mixers": _or_none(_string)}},
        "left_out": _or_none(_left_out),
        "parts": _or_none(_parts),
        "zeros": _or_none(_string),
    },
}


def _check(part: Any, schema: Mapping[str, Any], name: str) -> None:
    if not isinstance(part, dict):
        raise ValueError(f"{name} must be a mapping")
    for key, holds in schema.items():
        if isinstance(holds, dict):
            _check(part.get(key, {}), cast(Any, holds), key)
        elif not holds(part.get(key)):
            raise ValueError(f"{key} cannot be {part.get(key)!r:.60}")


def _fields(content: Any) -> dict[str, Any]:
    """The fields of a relevance, of what a file holds; ValueError for what `as_dict` would not have written."""
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    _check(content, _SCHEMA, "the file")
    scores = np.asarray(content.get("scores"))
    if scores.dtype.kind not in "fiu" or scores.ndim not in (2, 3) or not np.isfinite(scores).all():
        raise ValueError("scores must be finite numbers, for each query and token, or each layer, query and token")
    lists = {name: tuple(content[name]) for name in _SEQUENCES}
    optional = {name: tuple(content[name]) if content.get(name) else None for name in ("grid", "words")}
    rows = content.get("rows", "query")
    return {"scores": scores.astype(np.float64), "recipe": content["recipe"], "rows": rows, **lists, **optional}


def _joined(pieces: list[str]) -> str:
    """The label of a word made of the labels of its pieces."""
    label = pieces[0] + "".join(_CONTINUES.sub("", piece) for piece in pieces[1:])
    text = _BYTES.sub(_read, label)
    return text.lstrip("␣").strip() or text


def _read(run: re.Match[str]) -> str:
    return bytes.fromhex(run[0].replace("\\x", "")).decode("utf-8", "backslashreplace")
