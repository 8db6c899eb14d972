"""The folder of a run: a manifest, and shards of rows, each a Parquet file that is written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import parquet

from attnflow.files import locked, named, plain, to_json, write_whole

Table: TypeAlias = Any  # of pyarrow, which has no types

MANIFEST = "manifest.json"
_FORMAT = "attnflow-run-1"
_SHARD, _UNFINISHED = "shard-*.parquet", ".attnflow-*"
# Tokens that are no content of an example, by their role.
BESIDE = ("special", "prefix")

# One row is an example as one method explains it, or why there is no such row.
COLUMNS: dict[str, Any] = {
    "example": pa.int64(),  # its number in the source, from 0
    "name": pa.string(),
    "identity": pa.string(),
    "label": pa.string(),
    "prediction": pa.int64(),  # the class with the highest logit
    "probability": pa.float64(),  # that the model gives it
    "method": pa.string(),
    "target": pa.string(),  # of methods that explain one, with its score
    "score": pa.float64(),
    "tokens": pa.list_(pa.string()),
    "roles": pa.list_(pa.string()),
    "words": pa.list_(pa.int32()),
    "grid": pa.list_(pa.int32()),
    "scores": pa.list_(pa.float32()),  # one a token; of several rows one row behind the other
    "positions": pa.list_(pa.int32()),  # of the tokens, where only some are kept
    "count": pa.int32(),  # tokens in all
    "sum": pa.float64(),  # of all scores
    "queries": pa.list_(pa.int32()),
    "query_tokens": pa.list_(pa.string()),
    "rows": pa.string(),
    "layer": pa.int32(),
    "special": pa.float64(),  # the share of the scores, by their size, that special and prefix tokens have
    "saturated": pa.float64(),  # the share of the flows that their two ends alone decide
    "fixed": pa.float64(),  # and of those that layer 0 and the query's own residual fix
    "checks": pa.string(),  # JSON
    "recipe": pa.string(),  # JSON, but for checks and target
    "error": pa.string(),
}
_SCHEMA = pa.schema(list(COLUMNS.items()))


def table_of(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> Table:
    """The rows as a table, columns that a row lacks as null. facts: of the whole, such as the seconds it took."""
    arrays = [pa.array([row.get(name) for row in rows], kind) for name, kind in COLUMNS.items()]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA.with_metadata({"attnflow": to_json(facts)}))


def stored_size(table: Table) -> int:
    """Bytes that a shard of these rows takes."""
    content = BytesIO()
    _write(table, content)
    return content.tell()


def _write(table: Table, file: Any) -> None:
    parquet.write_table(table, file, compression="zstd")


@dataclass(frozen=True, eq=False)
class Folder:
    """The folder of a run, which is this run's alone."""

    path: Path

    def write(self, table: Table) -> None:
        """Keep the rows of some finished examples; the name is that of the first, so that no two shards share one."""
        path = self.path / f"shard-{table['example'][0].as_py():09d}.parquet"
        try:
            write_whole(path, lambda file: _write(table, file))
        except OSError as error:
            raise OSError(
                f"{error}; the shards written so far are whole, and the same run goes on behind them"
            ) from error

    def finished(self) -> tuple[dict[int, str], set[str]]:
        """The identity of each example in a shard, by its number, and the methods that explained any.

        Raises ValueError for a shard that cannot be read.
        """
        found, explained = dict[int, str](), set[str]()
        for path in shards(self.path):
            table = read_shard(path, ["example", "identity", "method", "error"])
            found.update(zip(table["example"].to_pylist(), table["identity"].to_pylist(), strict=True))
            explained |= explained_by(table)
        return found, explained


@contextmanager
def opened(path: Path, manifest: Mapping[str, Any], *, part: int | None = None) -> Generator[Folder]:
    """The folder of a run, made if it is not there; its manifest is written, or is that of the same run.

    part: the number of the part of the run that this process explains, where others may write at the same time.

    Raises ValueError for the folder of another run and while another process writes it, OSError for what cannot be
    written to.
    """
    check_folder(path)
    try:
        path.mkdir(exist_ok=True)
        handles = _handles(path, part)
    except OSError as error:
        raise OSError(f"cannot write to the folder {named(path)}: {error.strerror}") from error
    try:
        for handle, shared in handles.items():
            if not locked(handle, shared=shared):
                raise ValueError(
                    f"another run is writing to {named(path)}; wait until it ends, or write to another folder"
                )
        if part is None:
            for left in path.glob(_UNFINISHED):  # by a kill in the middle of a write
                left.unlink()
        content = plain({"format": _FORMAT, **manifest})
        if (path / MANIFEST).exists():
            _check_same(path, read_manifest(path)["recipe"], content["recipe"])
        else:
            text = json.dumps(content, indent=1) + "\n"
            write_whole(path / MANIFEST, lambda file: file.write(text.encode()))
        yield Folder(path)
    finally:
        for handle in handles:
            os.close(handle)


def _handles(path: Path, part: int | None) -> dict[int, bool]:
    """What the system locks, and whether it may be locked by several: the folder, and of a part a file of its own.

    None on Windows, which opens no folders.
    """
    if sys.platform == "win32":
        return {}
    handles = {os.open(path, os.O_RDONLY): part is not None}
    if part is not None:
        handles[os.open(path / f".attnflow-part-{part}", os.O_RDWR | os.O_CREAT)] = False
    return handles


def check_folder(path: Path) -> None:
    """Refuse what is no place for a run: a file, a folder of something else, a folder in one that is missing."""
    if path.is_dir():
        others = sorted(one.name for one in path.iterdir() if not one.match(_UNFINISHED))
        if others and MANIFEST not in others:
            raise ValueError(f"{named(path)} holds {named(others[0])} and no run; give a new folder, or an empty one")
        if others:
            read_manifest(path)
    elif os.path.lexists(path):
        raise NotADirectoryError(f"cannot write to {named(path)}: it is no folder; give the name of a new one")
    elif not path.parent.is_dir():
        raise FileNotFoundError(f"cannot make the folder {named(path)}: {named(path.parent)} does not exist")


def check_room(path: Path, needed: int) -> None:
    """Raise OSError if the disk has no room for so many bytes."""
    place = path if path.is_dir() else path.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise OSError(
            f"the rows need about {size(needed)} and the disk of {named(path)} has {size(free)}; keep fewer scores "
            "(top, --top), or write elsewhere"
        )


def size(count: int) -> str:
    """A number of bytes, for people."""
    for scale, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count} bytes"


def shards(path: Path) -> list[Path]:
    """The finished shards of a run, by the number of their first example."""
    return sorted(path.glob(_SHARD))


def read_shard(path: Path, columns: Iterable[str] | None = None) -> Table:
    """The rows of a shard, with its facts as metadata.

    Raises ValueError for what is none.
    """
    try:
        with open(path, "rb") as source:
            file = parquet.ParquetFile(source)
            if not file.schema_arrow.equals(_SCHEMA):
                raise ValueError("its columns are others")
            json.loads(file.schema_arrow.metadata[b"attnflow"])
            return file.read(columns=None if columns is None else list(columns))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{named(path)} is no shard of a run ({error}); if it is damaged, delete it: the same run makes it again"
        ) from error


def explained_by(table: Table) -> set[str]:
    """The methods that explained an example among these rows."""
    pairs = zip(table["method"].to_pylist(), table["error"].to_pylist(), strict=True)
    return {method for method, error in pairs if error is None}


def facts_of(table: Table) -> dict[str, Any]:
    """The facts of a shard: the seconds it took, and the examples that no batch could hold."""
    return json.loads((table.schema.metadata or {})[b"attnflow"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a run; ValueError for a folder that holds none."""
    try:
        content: Any = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content["recipe"], dict):
            raise ValueError(f"its format is not {_FORMAT!r}")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{named(path)} holds no run: there is no {MANIFEST} in it") from error
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"{named(path / MANIFEST)} is not the manifest of a run ({error})") from error
    return content


def _check_same(path: Path, earlier: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    for name in [*recipe, *earlier]:
        if earlier.get(name) != recipe.get(name):
            raise ValueError(
                f"{named(path)} holds a run with other settings: {name} was {earlier.get(name)!r} and is now "
                f"{recipe.get(name)!r}; give the same to go on with it, or write to another folder"
            )
