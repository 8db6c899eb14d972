"""What a run reads: photographs in a folder, rows of a file, or any sequence of examples.

A source yields small examples, each with a number and an identity that is cheap to have. Nothing is opened or made
ready for a model here: that is the worker's part.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from attnflow.baselines import digest
from attnflow.faithfulness.loading import class_index, images_in
from attnflow.files import named, to_json

Kind: TypeAlias = Literal["text", "image", "inputs"]

# One row of a file: its number of line or row, from 1, and its text and label, or why it cannot be read.
_Row: TypeAlias = tuple[int, Any, Any]

_TABLES = (".tsv", ".csv", ".jsonl", ".ndjson", ".parquet")
_TEXT, _LABEL = "text", "label"
_SAVED, _SPLITS = "state.json", "dataset_dict.json"  # of a data set that Hugging Face's datasets saved


@dataclass(frozen=True, eq=False)
class Example:
    """One example of a source, as small as it can be handed to another process.

    number: its place in the source, from 0. name: what people find it by (a file, a row). identity: what changes when
    it does: a hash of a row or of numbers, the size and time of a file. content: a text, the path of a photograph,
    what a model takes; or the ValueError that tells why there is none. label: as the source has it, or None.
    """

    number: int
    name: str
    identity: str
    content: Any
    label: int | str | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """Examples in turn. count: how many, where that is known. facts: what a manifest says of the data.

    kind: what its examples are to a model; None where only they tell.
    """

    read: Callable[[], Iterator[Example]]
    count: int | None
    facts: Mapping[str, Any]
    kind: Kind | None = None


def opened(data: Any, *, text: str | None = None, label: str | None = None) -> Source:
    """The source of some data: the path of a folder or a file, or examples in memory.

    A folder holds photographs, those with a label in a folder named after it; or texts, as `save_to_disk` of Hugging
    Face's datasets writes it. A file holds texts: .tsv, .csv, .jsonl
    and .parquet in columns, and any other one text on each line. text, label: names of the columns; unless told
    otherwise "text", and "label" where there is one. A .tsv or .csv file whose first row does not name the column of
    texts has no header, and its columns are the text and, if there is a second, the label.
    Examples in memory are texts, paths of photographs, tensors or mappings as a model takes them, each alone or with
    its label as (content, label); or mappings with the column of texts.

    Raises FileNotFoundError where there is no such path, ValueError for no examples at all, and for a column that the
    file does not have. A row or file that cannot be read is an example with that error.
    """
    if not isinstance(data, str | Path):
        return _in_memory(data, text or _TEXT, label or _LABEL)
    path = Path(data)
    if (path / _SPLITS).is_file():
        raise ValueError(f"{named(path)} holds several splits; give the folder of one of them")
    if (path / _SAVED).is_file():
        return _saved(path, text or _TEXT, label)
    if path.is_dir():
        if text is not None or label is not None:
            raise ValueError(
                f"{named(path)} is a folder of photographs, which has no columns: leave text and label out"
            )
        return _photographs(path)
    if not path.exists():
        raise FileNotFoundError(
            f"there is no {named(path)}; give a folder of photographs, or a file of texts (one on each line, "
            f"{', '.join(_TABLES)})"
        )
    if path.suffix.lower() not in _TABLES and (text is not None or label is not None):
        raise ValueError(f"{named(path)} has a text on each line and no columns; columns are in {', '.join(_TABLES)}")
    return _file(path, text, label)


def kind_of(content: Any) -> Kind:
    """What an example is to a model."""
    if isinstance(content, str):
        return "text"
    return "image" if isinstance(content, Path) else "inputs"


def has_columns(path: Path) -> bool:
    """Whether a path is a table whose columns have names: every one but .tsv, which need not name them."""
    return path.suffix.lower() in set(_TABLES) - {".tsv"} or (path / _SAVED).is_file() or (path / _SPLITS).is_file()


def labelled(example: Example, model: Any) -> tuple[Any, int | None]:
    """The content of an example with the class that its label names; raises the error of one that cannot be read."""
    if isinstance(example.content, Exception):
        raise example.content
    return example.content, None if example.label is None else class_of(example.label, model)


def class_of(label: int | str, model: Any) -> int:
    """The class of a model that a label names, by its index or its name.

    Raises ValueError for a name that is none.
    """
    if isinstance(label, int):
        return label
    try:
        return class_index(label, getattr(getattr(model, "config", None), "id2label", {}))
    except ValueError as error:
        raise ValueError(f"the label {label!r} is no class of the model: give the index or the name of one") from error


def _photographs(folder: Path) -> Source:
    """The photographs of a folder and of the folders in it, which are their labels, by name."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [(path, None) for path in images_in(folder)]
    found += [(path, label.name) for label in inside for path in images_in(label)]
    if not found:
        raise ValueError(
            f"{named(folder)} holds no photographs; it should hold them itself, or in a folder for each label"
        )

    def read() -> Iterator[Example]:
        for number, (path, label) in enumerate(found):
            yield _photograph(number, path, label, path.relative_to(folder).as_posix())

    return Source(read, len(found), {"kind": "photographs", "source": str(folder), "examples": len(found)}, "image")


def _photograph(number: int, path: Path, label: int | str | None, name: str) -> Example:
    try:
        facts = path.stat()
        identity = _hash(name, label, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        return Example(number, name, _hash(name, label), ValueError(f"{named(path)}: {error.strerror}"), label)
    return Example(number, name, identity, path, label)


def _file(path: Path, text: str | None, label: str | None) -> Source:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        rows, facts = _parquet(path, text, label)
    elif suffix in (".jsonl", ".ndjson"):
        rows, facts = (lambda: _json_lines(path, text or _TEXT, label)), {"text": text or _TEXT, "label": label}
    elif suffix in _TABLES:
        rows, facts = _separated(path, "\t" if suffix == ".tsv" else ",", text, label)
    else:
        rows, facts = (lambda: _lines(path)), {}

    def read() -> Iterator[Example]:
        for number, (row, content, own) in enumerate(rows()):
            yield _of_row(number, f"row {row}", content, own)

    count = sum(1 for _ in rows())
    if not count:
        raise ValueError(f"{named(path)} holds no texts")
    if (suffix in (".jsonl", ".ndjson")) and all(isinstance(content, ValueError) for _, content, _ in rows()):
        raise ValueError(f"{named(path)}: {next(rows())[1]}")
    found = path.stat()
    said = {"kind": suffix.removeprefix(".") or "text", "source": str(path), "examples": count, **facts}
    return Source(read, count, said | {"size": found.st_size, "modified": found.st_mtime_ns}, "text")


def _of_row(number: int, name: str, content: Any, label: Any) -> Example:
    """The example of a row, whatever stands in it."""
    own = label if label is None or isinstance(label, int | str) else str(label)
    if isinstance(content, ValueError):
        return Example(number, name, _hash(str(content), own), content, own)
    if not isinstance(content, str):
        error = ValueError(f"the text is {'missing' if content is None else f'a {type(content).__name__}'}")
        return Example(number, name, _hash(content, own), error, own)
    return Example(number, name, _hash(content, own), content, own)


def _lines(path: Path) -> Iterator[_Row]:
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:  # what is no UTF-8 fails by itself
        for row, line in enumerate(file, start=1):
            if line.strip():
                yield row, line.removesuffix("\n"), None


def _json_lines(path: Path, text: str, label: str | None) -> Iterator[_Row]:
    for row, line, _ in _lines(path):
        try:
            found: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield row, ValueError(f"it is no JSON ({error})"), None
            continue
        lacking = [name for name in (text, *([label] if label else [])) if name not in found] if _is(found) else [text]
        if lacking:
            has = f"its fields are {', '.join(map(str, found))}" if _is(found) else "it is no object"
            yield row, ValueError(f"there is no field {lacking[0]!r}: {has}; name them with --text and --label"), None
        else:
            yield row, found[text], found.get(label or _LABEL)


def _is(value: Any) -> bool:
    return isinstance(value, dict)


def _separated(
    path: Path, separator: str, text: str | None, label: str | None
) -> tuple[Callable[[], Iterator[_Row]], dict[str, Any]]:
    """The rows of a table of texts, and which of its columns are read."""
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL

    def records() -> Generator[tuple[int, Any]]:
        csv.field_size_limit(2**31 - 1)  # a text may be longer than the 131,072 characters that csv allows
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=True)
            while True:
                try:
                    record: Any = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    record = ValueError(f"it cannot be read ({error})")
                if record:
                    yield reader.line_num, record

    with closing(records()) as beginning:
        first: Any = next(beginning, (0, []))[1]
    first = [] if isinstance(first, ValueError) else first
    header = text is not None or label is not None or _TEXT in first
    if header:
        names = {"text": text or _TEXT, "label": label or _LABEL}
        lacking = [name for name in names.values() if name not in first and (name != _LABEL or label is not None)]
        if lacking:
            raise ValueError(f"{named(path)} has no column {lacking[0]!r}; its columns are {', '.join(first)}")
        of_text = first.index(names["text"])
        of_label = first.index(names["label"]) if names["label"] in first else None
    elif len(first) > 2:
        raise ValueError(
            f"{named(path)} has {len(first)} columns, and none of them is called {_TEXT!r}: name the one of the texts "
            f"with --text, such as {first[0]!r}"
        )
    else:
        of_text, of_label = 0, 1 if len(first) == 2 else None

    def rows() -> Iterator[_Row]:
        for row, record in islice(records(), int(header), None):
            if isinstance(record, ValueError):
                yield row, record, None
            elif len(record) != len(first):
                yield row, ValueError(f"the row has {len(record)} columns, and the first has {len(first)}"), None
            else:
                yield row, record[of_text], None if of_label is None else record[of_label]

    return rows, {"text": first[of_text] if header else 1, "label": first[of_label] if header and of_label else None}


def _parquet(path: Path, text: str | None, label: str | None) -> tuple[Callable[[], Iterator[_Row]], dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        columns: list[str] = parquet.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{named(path)} cannot be read as Parquet: {error}") from error
    wanted = [text or _TEXT, *([label or _LABEL] if label or _LABEL in columns else [])]
    for name in wanted:
        if name not in columns:
            raise ValueError(f"{named(path)} has no column {name!r}; its columns are {', '.join(columns)}")

    def rows() -> Iterator[_Row]:
        row = 0
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=wanted):
                texts = batch.column(wanted[0]).to_pylist()
                labels = batch.column(wanted[1]).to_pylist() if len(wanted) > 1 else [None] * len(texts)
                for content, own in zip(texts, labels, strict=True):
                    row += 1
                    yield row, content, own

    return rows, {"text": wanted[0], "label": wanted[1] if len(wanted) > 1 else None}


def _saved(folder: Path, text: str, label: str | None) -> Source:
    """The rows of a data set that Hugging Face's datasets saved, which stays on the disk."""
    from datasets import load_from_disk  # pyright: ignore[reportMissingImports]

    rows: Any = load_from_disk(str(folder))
    columns: list[str] = rows.column_names
    wanted = [text, *([label or _LABEL] if label or _LABEL in columns else [])]
    for name in wanted:
        if name not in columns:
            raise ValueError(f"{named(folder)} has no column {name!r}; its columns are {', '.join(columns)}")
    if not len(rows):
        raise ValueError(f"{named(folder)} holds no texts")

    def read() -> Iterator[Example]:
        for number, row in enumerate(rows.select_columns(wanted)):
            yield _of_row(number, f"row {number + 1}", row[text], row[wanted[1]] if len(wanted) > 1 else None)

    facts = {"kind": "datasets", "source": str(folder), "examples": len(rows), "text": text}
    return Source(read, len(rows), facts | {"label": wanted[1] if len(wanted) > 1 else None}, "text")


def _in_memory(data: Any, text: str, label: str) -> Source:
    """The source of a sequence, which may be read again, or of an iterator, which is read once."""
    if isinstance(data, Mapping | torch.Tensor | np.ndarray) or not isinstance(data, Iterable):
        raise ValueError(
            f"data must be a path, or a sequence or iterator of examples, such as a list of texts; a "
            f"{type(data).__name__} was given"
        )
    count = len(data) if isinstance(data, Sized) else None
    if count == 0:
        raise ValueError("there are no data; give at least one example, such as a text")

    def read() -> Iterator[Example]:
        for number, given in enumerate(data):
            yield _given(number, given, text, label)

    return Source(read, count, {"kind": "in memory", "source": type(data).__name__, "examples": count})


def _given(number: int, given: Any, text: str, label: str) -> Example:
    name, own = f"example {number}", None
    if isinstance(given, tuple | list):
        pair: Sequence[Any] = given
        if len(pair) != 2 or not (pair[1] is None or isinstance(pair[1], int | str | np.integer)):
            error = ValueError("an example is a content, or (content, label) with a number or a string as its label")
            return Example(number, name, _hash(repr(given)[:1000]), error)
        given, own = pair
        own = int(own) if isinstance(own, np.integer) else own
    if isinstance(given, Mapping) and text in given:
        given, own = given[text], given.get(label, own)
        return _of_row(number, name, given, own)
    if isinstance(given, str):
        return _of_row(number, name, given, own)
    if isinstance(given, Path):
        return _photograph(number, given, own, given.as_posix())
    if isinstance(given, np.ndarray):
        given = torch.from_numpy(given)
    if isinstance(given, torch.Tensor | Mapping):
        try:
            return Example(number, name, _hash(digest(given).hex(), own), given, own)
        except (AttributeError, TypeError):
            pass
    error = ValueError(
        f"an example is a text, the path of a photograph, or what the model takes; it is a {type(given).__name__}"
    )
    return Example(number, name, _hash(type(given).__name__, own), error, own)


def _hash(*parts: Any) -> str:
    """32 hexadecimal digits that change when a part does."""
    text = to_json([part if part is None or isinstance(part, int | str) else repr(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def in_order(examples: Iterator[Example], shuffle: int | None, limit: int | None) -> Iterator[Example]:
    """The first examples in the order of the source, or in one that a seed draws, which holds all of them."""
    if shuffle is not None:
        every = list(examples)
        order = np.random.default_rng(shuffle).permutation(len(every))
        examples = (every[place] for place in order)
    return islice(examples, limit)


def until_readable(examples: Iterator[Example]) -> tuple[list[Example], Iterator[Example]]:
    """The examples up to the first that can be read, and all of them; no more are asked for, since they may be slow."""
    first: list[Example] = []
    for example in examples:
        first.append(example)
        if not isinstance(example.content, Exception):
            break
    return first, chain(first, examples)


def peeked(examples: Iterator[Example], count: int) -> tuple[list[Example], Iterator[Example]]:
    """The first examples, and all of them."""
    first = list(islice(examples, min(count, sys.maxsize)))
    return first, chain(first, examples)
