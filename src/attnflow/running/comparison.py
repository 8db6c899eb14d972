"""Two runs on the same data, such as two checkpoints of a model: where relevance moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from attnflow.faithfulness.run import whole_number
from attnflow.files import named
from attnflow.running.overview import Mean, content, mean_of, rank_correlation, row_scores
from attnflow.running.results import Run
from attnflow.running.shards import read_shard

# Tokens of an example that are told, those that moved most.
_TOLD = 3
_COLUMNS = ["example", "name", "identity", "method", "tokens", "roles", "scores", "positions", "error"]
_ROWS_AT_HAND = 8  # shards of the second run, of which each is asked for again and again


class MovedToken(NamedTuple):
    """A token with its shares of the relevance of its example: its score by the sum of all sizes, with its sign."""

    position: int
    token: str
    before: float
    after: float


class Moved(NamedTuple):
    """One example by one method in both runs.

    correlation: of the scores of the tokens that are neither special nor prefix (Spearman), overlap: the share of the k
    largest of them, by size, that both have. moved: the share of the relevance that stands at other tokens: half the
    sum over all tokens of how far their shares differ, 0 to 1. NaN where undefined: fewer than five tokens or scores
    all alike; no more tokens than k; nothing but 0. tokens: the three that moved most, of all.
    """

    example: int
    name: str
    method: str
    correlation: float
    overlap: float
    moved: float
    tokens: tuple[MovedToken, ...]


class Change(NamedTuple):
    """The means of a method over all examples that both runs explain; see `Moved`."""

    method: str
    correlation: Mean
    overlap: Mean
    moved: Mean


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs, example by example.

    rows: one for each example and method that both explain, with the tokens that both saw. matched: examples that are
    in both. only_first, only_second: those in one alone. failed: answers that one of the two lacks. other_tokens:
    answers that are of other tokens, and are not compared. differs: what the recipes of the two have otherwise, such as
    "model.sha256", each with both values. top: k of the overlap.
    """

    rows: tuple[Moved, ...]
    matched: int
    only_first: int
    only_second: int
    failed: int
    other_tokens: int
    differs: Mapping[str, tuple[Any, Any]]
    top: int

    def summary(self) -> list[Change]:
        """The means of each method over the examples, with 95 % intervals over examples."""
        found = list[Change]()
        for method in dict.fromkeys(row.method for row in self.rows):
            own = [row for row in self.rows if row.method == method]
            means = (mean_of([getattr(row, name) for row in own]) for name in ("correlation", "overlap", "moved"))
            found.append(Change(method, *means))
        return found

    def most_moved(self, count: int = 10) -> list[Moved]:
        """The examples of which the largest share of the relevance moved, the first by far; none where it did not."""
        return sorted((row for row in self.rows if row.moved > 0), key=lambda row: -row.moved)[:count]


def compare(first: Run, second: Run, *, top: int = 5) -> Comparison:
    """Where the relevance of the same examples differs between two runs.

    Examples meet by their identity: the hash of a row, or the name, size and time of a file. Methods are those that
    both runs have. top: how many tokens the overlap looks at.

    Raises ValueError for runs without a common method or without a common example, for runs that kept only the highest
    scores, and if no example has the same tokens in both.
    """
    top = whole_number("top", top, 1)
    recipes = [dict(run.manifest["recipe"]) for run in (first, second)]
    for run, recipe in zip((first, second), recipes, strict=True):
        if recipe["top"] is not None:
            raise ValueError(
                f"{named(run.path)} kept the {recipe['top']} highest scores of each example, so that nothing can be "
                "ranked; run it without top (--top)"
            )
    methods = [name for name in recipes[0]["methods"] if name in recipes[1]["methods"]]
    if not methods:
        raise ValueError(
            f"the runs have no method in common: one has {', '.join(recipes[0]['methods'])}, the other "
            f"{', '.join(recipes[1]['methods'])}"
        )
    places, others = _places(first), _places(second)
    shared = places.keys() & others.keys()
    if not shared:
        raise ValueError(
            f"{named(first.path)} and {named(second.path)} have no example in common, of {len(places):,} and "
            f"{len(others):,}: they are compared on the same data; a photograph that was copied counts as another"
        )
    rows, lacking, other_tokens = list[Moved](), 0, 0
    for mine, theirs in _pairs(first, second, places, others):
        for method in methods:
            if method not in mine or method not in theirs:
                lacking += 1
            elif mine[method]["tokens"] != theirs[method]["tokens"]:
                other_tokens += 1
            else:
                rows.append(_moved(mine[method], theirs[method], top))
    if not rows:
        raise ValueError(
            f"of {len(shared):,} common examples none can be compared: {other_tokens:,} answers are of other tokens "
            f"(as another tokenizer or size of patches makes them), {lacking:,} are missing in one of the runs"
        )
    facts = [dict(_leaves(recipe)) for recipe in recipes]
    return Comparison(
        rows=tuple(rows),
        matched=len(shared),
        only_first=len(places) - len(shared),
        only_second=len(others) - len(shared),
        failed=lacking,
        other_tokens=other_tokens,
        differs={
            name: (before, after)
            for name in dict.fromkeys([*facts[0], *facts[1]])
            if (before := facts[0].get(name)) != (after := facts[1].get(name))
        },
        top=top,
    )


def _leaves(part: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings under the names that lead to it, with dots between them."""
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _leaves(cast("Mapping[str, Any]", value), f"{inside}{name}.")
        else:
            yield f"{inside}{name}", value


# What an example is known by: its identity, and how many with the same came before it in the data.
_Key = tuple[str, int]


class _Place(NamedTuple):
    """The shard of an example, and its number."""

    shard: Path
    example: int


def _places(run: Run) -> dict[_Key, _Place]:
    """Where each example stands, in the order of the data."""
    found = dict[int, tuple[str, Path]]()
    for path in run.shards:
        table = read_shard(path, ["example", "identity"])
        for example, identity in zip(table["example"].to_pylist(), table["identity"].to_pylist(), strict=True):
            found[example] = identity, path
    places, before = dict[_Key, _Place](), dict[str, int]()
    for example in sorted(found):
        identity, path = found[example]
        before[identity] = before.get(identity, -1) + 1
        places[identity, before[identity]] = _Place(path, example)
    return places


def _pairs(
    first: Run, second: Run, places: Mapping[_Key, _Place], others: Mapping[_Key, _Place]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The rows by method of each common example in both runs, in the order of the first's data."""
    cached = lru_cache(maxsize=_ROWS_AT_HAND)(_rows)
    for key, (shard, example) in places.items():
        if key in others:
            there = others[key]
            yield cached(shard).get(example, {}), cached(there.shard).get(there.example, {})


def _rows(path: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """The answers in a shard by their example and method."""
    found = dict[int, dict[str, dict[str, Any]]]()
    for row in read_shard(path, _COLUMNS).to_pylist():
        if row["error"] is None:
            found.setdefault(row["example"], {})[row["method"]] = row
    return found


def _moved(mine: Mapping[str, Any], theirs: Mapping[str, Any], top: int) -> Moved:
    scores = [row_scores(row) for row in (mine, theirs)]
    kept = content(mine)
    before, after = (one / (np.abs(one).sum() or 1) for one in scores)
    overlap = math.nan
    if kept.sum() > top:
        best = [set(np.argsort(-np.abs(one[kept]), kind="stable")[:top].tolist()) for one in scores]
        overlap = len(best[0] & best[1]) / top
    empty = not all(one.any() for one in scores)
    distance = np.abs(after - before)
    return Moved(
        example=mine["example"],
        name=mine["name"],
        method=mine["method"],
        correlation=rank_correlation(scores[0][kept], scores[1][kept]),
        overlap=overlap,
        moved=math.nan if empty else float(distance.sum() / 2),
        tokens=tuple(
            MovedToken(int(place), mine["tokens"][place], float(before[place]), float(after[place]))
            for place in np.argsort(-distance, kind="stable")[:_TOLD]
        ),
    )
