"""The journal of a run: every finished example is one line of a file, so that a killed run loses none of them."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from attnflow.faithfulness.metrics import Curve
from attnflow.faithfulness.results import Failure, Row, check_rows
from attnflow.files import destination, locked, named, to_json


@dataclass(frozen=True)
class Entry:
    """One finished example. digest: of the example itself, in hexadecimal."""

    example: int
    digest: str
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...]

    def line(self) -> str:
        """The entry as one line of JSON, undefined values as null."""
        rows = [[*row[1:4], None if math.isnan(row.value) else row.value, row.curve] for row in self.rows]
        failures = [failure[1:] for failure in self.failures]
        content = {"example": self.example, "digest": self.digest, "rows": rows, "failures": failures}
        return to_json(content) + "\n"

    @classmethod
    def read(cls, line: bytes) -> Entry:
        """The entry that `line` made; ValueError, KeyError or TypeError if it made none."""
        content = json.loads(line)
        number = content["example"]
        rows = (
            Row(number, method, layer, metric, math.nan if value is None else value, curve and _curve(*curve))
            for method, layer, metric, value, curve in content["rows"]
        )
        failures = (Failure(number, *failure) for failure in content["failures"])
        entry = cls(number, content["digest"], tuple(rows), tuple(failures))
        check_rows(entry.rows, entry.failures)
        return entry


@contextmanager
def opened(path: Path) -> Generator[Journal]:
    """The journal at a path, which is this run's alone until it is closed, or until its process ends in any way.

    Raises ValueError while another run has it, OSError where it cannot be written.
    """
    real = destination(path)
    if real.exists() and not real.is_file():
        raise OSError(f"cannot keep finished examples in {named(path)}: it is no file")
    while True:
        with open(real, "a+b", buffering=0) as file:
            if not locked(file):
                raise ValueError(f"another run is writing {named(path)}; wait until it ends, or write to another file")
            if _is_at(real, file):  # else a run that just ended has deleted it
                yield Journal(real, file)
                return


@dataclass(frozen=True)
class Journal:
    """A file whose first line is the recipe of a run, and whose other lines are its finished examples."""

    path: Path
    file: IO[bytes]

    def resume(self, recipe: Mapping[str, Any]) -> dict[int, Entry]:
        """The finished examples of an earlier run with the same recipe; starts the file if there is none.

        A last line that a kill cut short is dropped.

        Raises ValueError if the file is of a run with another recipe, or is no journal.
        """
        self.file.seek(0)
        whole = [line for line in io.BytesIO(self.file.read()) if line.endswith(b"\n")]
        if not whole:
            self.file.truncate(0)
            self._write(to_json(recipe) + "\n")
            return {}
        try:
            earlier = dict(json.loads(whole[0]))
            entries = [Entry.read(line) for line in whole[1:]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{named(self.path)} is not the journal of an evaluation ({error}); move it away"
            raise ValueError(reason) from error
        self._check_same(earlier, recipe)
        self.file.truncate(sum(len(line) for line in whole))
        return {entry.example: entry for entry in entries}

    def append(self, entry: Entry) -> None:
        """Add a finished example, on the disk when this returns."""
        self._write(entry.line())

    def delete(self) -> None:
        """Remove the file, once all of it stands elsewhere."""
        if sys.platform == "win32":  # which removes no open file
            self.file.close()
        self.path.unlink(missing_ok=True)

    def _write(self, text: str) -> None:
        left = memoryview(text.encode())
        try:
            while left:
                left = left[self.file.write(left) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            raise OSError(
                f"cannot write {named(self.path)}: {error.strerror}; what it holds is kept, and the same call goes on "
                "behind it"
            ) from error

    def _check_same(self, earlier: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
        differing = [name for name in recipe if earlier.get(name) != recipe[name]]
        if differing:
            name = differing[0]
            raise ValueError(
                f"{named(self.path)} is of an unfinished run with other settings: {name} was {earlier.get(name)!r} and "
                f"is now {recipe[name]!r}; give the same settings to go on with it, or delete the file to begin again"
            )


def _curve(tokens: int, scores: list[float]) -> Curve:
    return Curve(tokens, tuple(scores))


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
