"""What an evaluation found: one row per example, method, layer and metric; its summary; its Parquet file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from attnflow.answer import PAGES
from attnflow.faithfulness.metrics import METRICS
from attnflow.files import named, plain, to_json, write_whole
from attnflow.memory import check_memory

_FORMAT = "attnflow-evaluation-1"
_COLUMNS = {
    "example": "int64",
    "method": "string",
    "layer": "int32",
    "metric": "string",
    "value": "double",
    "error": "string",
}
# What a row takes in memory as Python has it, however well it is packed in a file.
_BYTES_OF_A_ROW = 400
# Examples below which an interval is Student's.
FEW = 30


class Row(NamedTuple):
    """One measurement. layer: None for baselines, which have none. value: NaN where the metric is undefined."""

    example: int
    method: str
    layer: int | None
    metric: str
    value: float


class Failure(NamedTuple):
    """An example that could not be measured, or (with a method) one method on it; error: one line."""

    example: int
    method: str | None
    error: str


class Summary(NamedTuple):
    """One method's values of one metric: mean, deviation (n - 1), and the interval of the mean (`interval`).

    direction: whether more ("up") or less ("down") is better. n: the examples counted. undefined: those left out
    because the metric is undefined on them.
    """

    method: str
    layer: int | None
    metric: str
    direction: str
    mean: float
    deviation: float
    low: float
    high: float
    n: int
    undefined: int


class Difference(NamedTuple):
    """How far one method is from another on one metric: the mean over the examples that both have, and its interval.

    An interval that holds 0 does not tell the two apart. n: the examples counted.
    """

    method: str
    layer: int | None
    than: str
    metric: str
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The rows of an evaluation, what failed, and the recipe: settings, seed, model, data and versions."""

    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]
    recipe: Mapping[str, Any]

    def __repr__(self) -> str:
        examples = len({row.example for row in self.rows})
        return f"<Evaluation: {examples} examples, {len(self.rows)} values, {len(self.failures)} failures>"

    def summary(self, *, resamples: int = 1000, level: float = 0.95) -> list[Summary]:
        """One entry per method, layer and metric, in the order of the rows.

        The interval is that of `interval`, drawn from the recipe's seed. Numbers that too few examples define are NaN.
        """
        rng = np.random.default_rng(self.recipe["seed"])
        entries: list[Summary] = []
        for (method, layer, metric), by_example in self._values().items():
            values = np.array([value for value in by_example.values() if not math.isnan(value)])
            mean = float(values.mean()) if values.size else math.nan
            deviation = float(values.std(ddof=1)) if values.size > 1 else math.nan
            low, high = interval(values, resamples, level, rng)
            counts = len(values), len(by_example) - len(values)
            direction = METRICS[metric].direction
            entries.append(Summary(method, layer, metric, direction, mean, deviation, low, high, *counts))
        return entries

    def differences(self, than: str | None = None, *, resamples: int = 1000, level: float = 0.95) -> list[Difference]:
        """How far each method is from the method `than`, or from the best of each metric, example by example.

        Of several layers of `than`, the best counts. The examples are resampled, not the methods, so that what is hard
        for all does not widen the interval (a paired bootstrap). Where many methods are compared, one in twenty is told
        apart by chance.

        Raises ValueError for a method that was not measured.
        """
        groups = self._values()
        known = {key: [value for value in found.values() if not math.isnan(value)] for key, found in groups.items()}
        means = {key: float(np.mean(values)) for key, values in known.items() if values}
        if than is not None and than not in {method for method, _, _ in groups}:
            raise ValueError(
                f"{than!r} was not measured; choose one of {', '.join(dict.fromkeys(k[0] for k in groups))}"
            )
        rng = np.random.default_rng(self.recipe["seed"])
        entries: list[Difference] = []
        for metric in dict.fromkeys(key[2] for key in means):
            sign = 1 if METRICS[metric].direction == "up" else -1
            others = [key for key in means if key[2] == metric and than in (None, key[0])]
            if not others:
                continue
            best = max(others, key=lambda key: sign * means[key])
            for key in (key for key in means if key[2] == metric and key != best):
                pairs = [(value, groups[best].get(example, math.nan)) for example, value in groups[key].items()]
                apart = np.array([one - other for one, other in pairs if not math.isnan(one - other)])
                mean = float(apart.mean()) if apart.size else math.nan
                ends = interval(apart, resamples, level, rng)
                entries.append(Difference(key[0], key[1], best[0], metric, mean, *ends, len(apart)))
        return entries

    def _values(self) -> dict[tuple[str, int | None, str], dict[int, float]]:
        """The values of each method, layer and metric, by example."""
        groups: dict[tuple[str, int | None, str], dict[int, float]] = {}
        for row in self.rows:
            groups.setdefault(row[1:4], {})[row.example] = row.value
        return groups

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write every value to a Parquet file, or by the suffix .html a page of the summary; whole or not at all.

        Failures are rows of the file with an error and no metric; the page counts them.
        """
        if Path(path).suffix.lower() in PAGES:
            from attnflow.reporting import report_evaluation

            return report_evaluation(self, Path(path))
        if Path(path).suffix.lower() != ".parquet":
            raise ValueError(f"cannot write {named(path)}: the suffix must be .parquet, or .html for a page")
        import pyarrow as pa
        from pyarrow import parquet

        records: list[tuple[Any, ...]] = [(*row, None) for row in self.rows]
        records += [(failure.example, failure.method, None, None, None, failure.error) for failure in self.failures]
        columns = list(zip(*records, strict=True)) or [()] * len(_COLUMNS)
        header = to_json({"format": _FORMAT, "recipe": plain(self.recipe)})
        fields = [(name, pa.type_for_alias(kind)) for name, kind in _COLUMNS.items()]
        schema = pa.schema(fields, metadata={"attnflow": header})
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        table = pa.Table.from_arrays(arrays, schema=schema)
        return write_whole(Path(path), lambda file: parquet.write_table(table, file))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evaluation:
        """Read what `save` wrote.

        Raises ValueError if the file is not such a file, FileNotFoundError if there is none.
        """
        import pyarrow as pa
        from pyarrow import parquet

        with open(path, "rb") as source:
            try:
                file = parquet.ParquetFile(source)
                count = file.metadata.num_rows
                check_memory(
                    count * _BYTES_OF_A_ROW, f"an evaluation of {count:,} rows", "measure fewer examples a file"
                )
                header = json.loads((file.schema_arrow.metadata or {})[b"attnflow"])
                _check(header, {field.name: str(field.type) for field in file.schema_arrow})
                records = list(zip(*(column.to_pylist() for column in file.read().columns), strict=True))
                rows = tuple(Row(*record[:5]) for record in records if record[5] is None)
                failures = tuple(
                    Failure(record[0], record[1], record[5]) for record in records if record[5] is not None
                )
                check_rows(rows, failures)
            except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{named(path)} does not hold an evaluation that attnflow saved ({error})") from error
        return cls(rows, failures, header["recipe"])


def check_rows(rows: Iterable[Row], failures: Iterable[Failure]) -> None:
    """Raise ValueError for anything among rows and failures, as a file has them, that is no measurement or failure."""
    for row in rows:
        example, method, layer, metric, value = cast("tuple[Any, ...]", row)
        known = isinstance(method, str) and isinstance(metric, str) and metric in METRICS
        if not (known and _counts(example) and _counts(layer or 0) and isinstance(value, float)):
            raise ValueError(f"{row} is no measurement of a metric that is known here")
    for failure in failures:
        example, method, error = cast("tuple[Any, ...]", failure)
        if not (_counts(example) and isinstance(method or "", str) and isinstance(error, str)):
            raise ValueError(f"{failure} is no failure")


def _counts(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check(header: Any, columns: Mapping[str, str]) -> None:
    """Refuse a file whose header or columns are not those that `save` writes."""
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    if columns != _COLUMNS:
        raise ValueError(f"its columns are {columns}")
    recipe = header.get("recipe")
    if not isinstance(recipe, dict) or not _counts(recipe.get("seed")):
        raise ValueError("its recipe has no seed")


def interval(
    values: NDArray[np.float64], resamples: int, level: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Where the mean of values (example,) lies: the middle `level` of the means of bootstrap samples of the examples.

    Of fewer than 30 examples, whose bootstrap is too narrow, Student's t says it. NaN of fewer than two.

    Raises ValueError for a level that is no share, and for fewer than one sample.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is the share of an interval, between 0 and 1, such as 0.95; it is {level}")
    if resamples < 1:
        raise ValueError(f"resamples must be 1 or more; it is {resamples}")
    if values.size < 2:
        return math.nan, math.nan
    if values.size < FEW:
        half = float(stats.t.ppf((1 + level) / 2, values.size - 1) * values.std(ddof=1) / math.sqrt(values.size))
        return float(values.mean()) - half, float(values.mean()) + half
    means = [values[rng.integers(0, values.size, values.size)].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
