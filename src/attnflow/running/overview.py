"""What the examples of a run say together: how methods agree, where relevance piles up, and mean maps of classes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from attnflow.faithfulness.metrics import correlation
from attnflow.faithfulness.results import interval
from attnflow.running.shards import BESIDE, Table, read_shard

if TYPE_CHECKING:
    from attnflow.running.results import Run

# Fewer tokens have ranks that are nearly all ties or opposites.
_RANKED = 5
_COLUMNS = [
    "example", "name", "label", "prediction", "probability", "method", "tokens", "roles", "grid", "scores",
    "positions", "error",
]  # fmt: skip
_SEED, _RESAMPLES, _LEVEL = 0, 1000, 0.95


class Mean(NamedTuple):
    """A mean over examples with its 95 % interval (`evaluate` says how), NaN where too few define it.

    n: the examples counted. undefined: those left out, since it is undefined on them.
    """

    mean: float
    low: float
    high: float
    n: int
    undefined: int


class Agreement(NamedTuple):
    """How alike two methods rank the tokens of an example by the size of their scores: Spearman's rank correlation.

    Special and prefix tokens are left out. Undefined for fewer than five others, and for scores that are all alike.
    """

    method: str
    other: str
    correlation: Mean


class Sink(NamedTuple):
    """A token that holds much of a method's relevance: in how many examples, and which share of the sizes on average
    of these.
    """

    method: str
    token: str
    examples: int
    share: float


class ClassMap(NamedTuple):
    """The mean map of a class, (row, column) or (frame, row, column), by one method.

    Of each image the share that each patch has of the sizes of all, so that every image counts alike. Patches meet by
    their place in the frame of the image and by nothing else. examples: how many images.
    """

    method: str
    label: str
    scores: NDArray[np.float64]
    examples: int


@dataclass(frozen=True, eq=False)
class Overview:
    """What the examples of a run say together.

    examples: pyarrow, one row for each explained example: example, name, label, prediction, probability (of the
    predicted class), and agreement, the mean over pairs of methods, null where undefined. agreement: of every two
    methods. sinks: tokens with at least 0.3 of the relevance, the most frequent first. maps: of each class by its
    label, or by what was predicted where no example has one (`classes` says which); empty for texts. left_out: images
    whose grid is another than that of their class's first. partial: examples of which only some scores were kept, so
    that nothing can be ranked.
    """

    examples: Table
    agreement: list[Agreement]
    sinks: list[Sink]
    maps: list[ClassMap]
    classes: str
    left_out: int
    partial: int


def row_scores(row: Mapping[str, Any]) -> NDArray[np.float64]:
    """One score a token (token,) of a row of a run: the mean over what rows it keeps."""
    return np.array(row["scores"], dtype=np.float64).reshape(-1, len(row["tokens"])).mean(axis=0)


def content(row: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which tokens (token,) are neither special nor prefix tokens."""
    return ~np.isin(row["roles"], BESIDE)


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Spearman's rank correlation of two scores of the same tokens; NaN for fewer than five."""
    return correlation(first, second) if len(first) >= _RANKED else math.nan


def mean_of(values: list[float]) -> Mean:
    """The mean of the values that are defined, with its interval."""
    defined = np.array([value for value in values if not math.isnan(value)])
    low, high = interval(defined, _RESAMPLES, _LEVEL, np.random.default_rng(_SEED))
    mean = float(defined.mean()) if defined.size else math.nan
    return Mean(mean, low, high, len(defined), len(values) - len(defined))


def overview(run: Run, *, sink: float = 0.3) -> Overview:
    """Read all shards of a run once.

    sink: the share of an example's relevance, by the size of its scores, from which a token counts as a sink.

    Raises ValueError for a share that is not between 0 and 1.
    """
    if not 0 < sink <= 1:
        raise ValueError(f"sink must lie between 0 and 1; it is {sink}")
    seen = _Seen(tuple(run.manifest["recipe"]["methods"]), sink)
    for path in run.shards:
        rows = defaultdict[int, list[dict[str, Any]]](list)
        for row in read_shard(path, _COLUMNS).to_pylist():
            if row["error"] is None:
                rows[row["example"]].append(row)
        for own in rows.values():
            seen.take(own)
    return seen.overview()


class _Seen:
    """What is added up on the way through the shards."""

    def __init__(self, methods: tuple[str, ...], sink: float) -> None:
        self._pairs: dict[tuple[str, str], list[float]] = {pair: [] for pair in combinations(methods, 2)}
        self._sink = sink
        self._sinks = defaultdict[tuple[str, str], list[float]](list)
        self._maps: dict[str, dict[tuple[str, str], ClassMap]] = {"label": {}, "prediction": {}}
        self._left_out = {"label": 0, "prediction": 0}
        self._examples: list[dict[str, Any]] = []
        self._partial = 0

    def take(self, rows: list[dict[str, Any]]) -> None:
        """Add one example, of which each method has a row."""
        first = rows[0]
        found = list[float]()
        whole = {row["method"]: row for row in rows if row["positions"] is None}
        self._partial += not whole
        for (one, other), values in self._pairs.items():
            if one in whole and other in whole:
                values.append(_alike(whole[one], whole[other]))
                found.append(values[-1])
        for row in whole.values():
            self._take_row(row)
        defined = [value for value in found if not math.isnan(value)]
        facts = {name: first[name] for name in ("example", "name", "label", "prediction", "probability")}
        self._examples.append(facts | {"agreement": sum(defined) / len(defined) if defined else None})

    def _take_row(self, row: Mapping[str, Any]) -> None:
        sizes = np.abs(row_scores(row))
        if not (total := sizes.sum()):
            return
        for place in np.flatnonzero(sizes >= self._sink * total):
            self._sinks[row["method"], row["tokens"][place]].append(float(sizes[place] / total))
        patches = sizes[np.array(row["roles"]) == "patch"]
        if row["grid"] is None or not patches.sum():
            return
        scores = (patches / patches.sum()).reshape(row["grid"])
        for by, maps in self._maps.items():
            if row[by] is None:
                continue
            key = row["method"], str(row[by])
            if key not in maps:
                maps[key] = ClassMap(*key, scores, 1)
            elif maps[key].scores.shape == scores.shape:
                maps[key] = ClassMap(*key, maps[key].scores + scores, maps[key].examples + 1)
            else:
                self._left_out[by] += 1

    def overview(self) -> Overview:
        classes = "label" if any(one["label"] is not None for one in self._examples) else "prediction"
        names = {"example": pa.int64(), "name": pa.string(), "label": pa.string(), "prediction": pa.int64()}
        names |= {"probability": pa.float64(), "agreement": pa.float64()}
        ordered = sorted(self._examples, key=lambda one: one["example"])
        sinks = [Sink(*key, len(shares), sum(shares) / len(shares)) for key, shares in self._sinks.items()]
        maps = self._maps[classes].values()
        return Overview(
            examples=pa.table({name: pa.array([one[name] for one in ordered], kind) for name, kind in names.items()}),
            agreement=[Agreement(*pair, mean_of(values)) for pair, values in self._pairs.items() if values],
            sinks=sorted(sinks, key=lambda one: -one.examples),
            maps=sorted((one._replace(scores=one.scores / one.examples) for one in maps), key=lambda one: one[:2]),
            classes=classes,
            left_out=self._left_out[classes],
            partial=self._partial,
        )


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    if one["tokens"] != other["tokens"]:
        return math.nan
    kept = content(one)
    return rank_correlation(np.abs(row_scores(one))[kept], np.abs(row_scores(other))[kept])
