"""What a run has found so far: `Run`, read from its folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from attnflow.answer import Relevance
from attnflow.files import named
from attnflow.memory import check_memory
from attnflow.running.overview import Overview, overview
from attnflow.running.shards import COLUMNS, Table, facts_of, read_manifest, read_shard, shards

_pc: Any = pyarrow.compute  # which makes its functions as it is loaded

_SUMMED = ["example", "method", "special", "saturated", "fixed", "error"]


class Failed(NamedTuple):
    """An example that could not be explained, or (with a method) not by one; error: one line."""

    example: int
    name: str
    method: str | None
    error: str


@dataclass(frozen=True, eq=False)
class Run:
    """The folder of a run, whole or unfinished, as it was when it was read.

    manifest: the recipe (methods, settings, model, versions), and what the data were.
    """

    path: Path
    manifest: Mapping[str, Any]
    shards: tuple[Path, ...]

    def __repr__(self) -> str:
        return f"<Run: {named(self.path)}, {len(self.shards)} shards>"

    @cached_property
    def table(self) -> Table:
        """One row for each example and method, by example and then in the order of the methods; see `COLUMNS`.

        Raises MemoryError for more than memory holds: the shards are Parquet files, to be read one by one.
        """
        needed = 4 * sum(path.stat().st_size for path in self.shards)
        check_memory(needed, f"the table of {len(self.shards):,} shards", "read them one by one (Run.shards)")
        found = self._read(None)
        return found.filter(_pc.is_null(found["error"]))

    @cached_property
    def failed(self) -> list[Failed]:
        """Every example that could not be explained, and every method on one, with its error."""
        found = self._read(["example", "name", "method", "error"])
        found = found.filter(_pc.is_valid(found["error"]))
        return [Failed(**row) for row in found.to_pylist()]

    def relevance(self, example: int, method: str | None = None) -> Relevance:
        """The answer of one method on one example, by its number in the data.

        method: needed where the run has several. Of an answer whose highest scores alone were kept, these tokens, and
        the recipe says which share of the scores they have. Scores have single precision.

        Raises ValueError for an example or a method that is not there, with the error of one that failed.
        """
        methods = self.manifest["recipe"]["methods"]
        if method is None and len(methods) > 1:
            raise ValueError(f"this run has several methods; say which: {', '.join(methods)}")
        method = methods[0] if method is None else method
        if method not in methods:
            raise ValueError(f"this run has no method {method!r}; its methods are {', '.join(methods)}")
        for path in self._likely(example):
            found = read_shard(path)
            found = found.filter(_pc.equal(found["example"], example))
            for row in found.to_pylist():
                if row["error"] is not None and row["method"] in (None, method):
                    raise ValueError(f"example {example} ({row['name']}) failed: {row['error']}")
                if row["method"] == method:
                    return relevance_of(row)
        raise ValueError(f"example {example} is not in {named(self.path)}")

    def answers(self, examples: Sequence[int]) -> dict[int, dict[str, Relevance]]:
        """The answers on some examples by their number and method, of those that there are; reads every shard once."""
        found = dict[int, dict[str, Relevance]]()
        for path in self.shards:
            table = read_shard(path)
            table = table.filter(_pc.is_in(table["example"], pa.array(examples, pa.int64())))
            for row in table.filter(_pc.is_null(table["error"])).to_pylist():
                found.setdefault(row["example"], {})[row["method"]] = relevance_of(row)
        return found

    def summary(self) -> dict[str, Any]:
        """Counts and means over all that is there.

        examples: with an answer of at least one method. failed: examples without any, failures: errors in all. rows:
        answers. methods: for each its rows, the mean share of the scores, by their size, that special and prefix tokens
        have ("special"), and of flows the mean share that their two ends alone decide ("saturated") and that layer 0
        and the query's own residual fix ("fixed"). seconds: that
        workers spent on examples, together; processor_seconds: of their cores, which other work on the machine does not
        lengthen. examples_per_second: of one worker, by the clock. alone: examples that no batch could
        hold, with the first reason ("why").
        """
        found = self._read(_SUMMED)
        ok = found.filter(_pc.is_null(found["error"]))
        of_method = {name: ok.filter(_pc.equal(ok["method"], name)) for name in self.manifest["recipe"]["methods"]}
        explained = len(ok["example"].unique())
        every = len(found["example"].unique())
        facts = [facts_of(read_shard(path, [])) for path in self.shards]
        seconds = sum(one["seconds"] for one in facts)
        return {
            "examples": explained,
            "failed": every - explained,
            "failures": found.num_rows - ok.num_rows,
            "rows": ok.num_rows,
            "methods": {
                name: {
                    "rows": rows.num_rows,
                    "special": _pc.mean(rows["special"]).as_py(),
                    "saturated": _pc.mean(rows["saturated"]).as_py(),
                    "fixed": _pc.mean(rows["fixed"]).as_py(),
                }
                for name, rows in of_method.items()
            },
            "seconds": seconds,
            "processor_seconds": sum(one["processor_seconds"] for one in facts),
            "examples_per_second": every / seconds if seconds else None,
            "alone": sum(one["alone"] for one in facts),
            "why": next((one["why"] for one in facts if one["why"]), None),
        }

    def is_whole(self, limit: int | None = None) -> bool:
        """Whether each example of the data, or of its first `limit`, has rows; also where no one knows how many."""
        count = self.manifest["data"]["examples"]
        if count is None:
            return True
        return len(self._read(["example"])["example"].unique()) >= min(count, limit or count)

    def overview(self, *, sink: float = 0.3) -> Overview:
        """What the examples say together: how methods agree, where relevance piles up, mean maps of classes.

        sink: the share of an example's relevance, by size, from which a token counts as a sink. Reads every shard once.
        """
        return overview(self, sink=sink)

    def _read(self, columns: list[str] | None) -> Table:
        names = list(COLUMNS) if columns is None else columns
        empty = pa.table({name: pa.array([], COLUMNS[name]) for name in names})
        parts = [read_shard(path, columns).replace_schema_metadata(None) for path in self.shards]
        found = pa.concat_tables([empty, *parts])
        numbers = found["example"].to_numpy()
        if (np.diff(numbers) < 0).any():  # in the order in which a shuffled run explained them
            found = found.take(np.argsort(numbers, kind="stable"))
        return found

    def _likely(self, example: int) -> list[Path]:
        """The shards, first the one in which an example is unless the run was shuffled."""
        before = [path for path in self.shards if int(path.stem.rpartition("-")[2]) <= example]
        return [*reversed(before), *(path for path in self.shards if path not in before)]


def read(path: str | os.PathLike[str]) -> Run:
    """What a run has written to its folder so far, whether it is whole or not.

    Raises FileNotFoundError where there is no run, ValueError for what is none.
    """
    folder = Path(path)
    return Run(folder, read_manifest(folder), tuple(shards(folder)))


def relevance_of(row: Mapping[str, Any]) -> Relevance:
    """The answer that `row_of` kept."""
    count = len(row["tokens"])
    scores = np.array(row["scores"], dtype=np.float64).reshape(-1, count)
    recipe = {**json.loads(row["recipe"]), "checks": json.loads(row["checks"])}
    if row["target"] is not None:
        target = int(row["target"]) if row["target"].isdecimal() else row["target"]
        recipe["target"] = {"target": target, "score": row["score"]}
    if row["positions"] is not None:
        share = float(scores.sum()) / row["sum"] if row["sum"] else 0.0
        recipe["kept"] = {"tokens": row["positions"], "of": row["count"], "share": share}
    return Relevance(
        scores=scores,
        tokens=tuple(row["tokens"]),
        roles=tuple(row["roles"]),
        queries=tuple(row["queries"]),
        query_tokens=tuple(row["query_tokens"]),
        layers=(row["layer"],),
        grid=None if row["grid"] is None else tuple(row["grid"]),
        words=None if row["words"] is None else tuple(row["words"]),
        recipe=recipe,
        rows=row["rows"],
    )
