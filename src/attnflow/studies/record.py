"""What a study found, as JSON that says how it was made; and the leaderboard of the studies in a folder."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from attnflow.faithfulness.results import Summary
from attnflow.files import destination, write_whole

LEADERBOARD = "leaderboard.md"
_FORMAT = "attnflow-study-2"
_PACKAGES = ("attnflow", "numpy", "scipy", "numba", "torch", "transformers", "scikit-learn")


class Score(NamedTuple):
    """How a method or a baseline did on one task of a study: one cell of the leaderboard.

    task: what was asked, in a few words, the same for all methods compared. direction: whether more ("up") or less
    ("down") is better. low, high: the 95 % bootstrap interval of the mean over n examples.
    """

    task: str
    direction: str
    method: str
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a study found, and what is needed to find it again.

    settings: every choice that was made, the seed among them. data: file name to SHA-256. tables: the numbers, as JSON
    takes them, under the names that the docs use. scores: for the leaderboard. words: what the numbers say, a sentence
    each, made of the numbers once these are saved.
    """

    study: str
    settings: Mapping[str, Any]
    data: Mapping[str, str]
    tables: Mapping[str, Any]
    scores: Sequence[Score]
    words: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    def of(self, task: str) -> list[Score]:
        """The scores of one task."""
        return [one for one in self.scores if one.task == task]

    def save(self, folder: Path) -> Path:
        """Write `folder`/STUDY.json, whole or not at all, and the leaderboard of all studies there anew."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, **_finite(asdict(self))}, ensure_ascii=False, indent=1) + "\n"
        path = write_whole(folder / f"{self.study}.json", lambda file: file.write(text.encode()))
        table = leaderboard(load(one) for one in sorted(folder.glob("*.json")))
        write_whole(folder / LEADERBOARD, lambda file: file.write(table.encode()))
        return path


def load(path: Path) -> Record:
    """Read what `Record.save` wrote.

    Raises ValueError if the file is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (own := content.pop("format")) != _FORMAT:
            raise ValueError(f"its format is {own!r}, and {_FORMAT!r} is read: run the study again, or move it away")
        rows: list[list[Any]] = [
            [math.nan if value is None else value for value in row] for row in content.pop("scores")
        ]
        return Record(**content, scores=[Score(*row) for row in rows])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold a study that attnflow saved ({error})") from error


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute the numbers, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def checksums(paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file, under its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def required(folder: Path, *names: str, published: str) -> list[Path]:
    """The files of these names in the folder.

    Raises FileNotFoundError for the first that is absent, with where the data are published.
    """
    paths = [folder / name for name in names]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(
                f"the study needs {path}, which is not there; the data are published at {published}"
            )
    return paths


def check_folder(folder: Path) -> None:
    """Refuse, before any work, a folder that could not be made or written: OSError."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    destination(there / LEADERBOARD)  # or a folder that is made in it


def scored(task: str, summaries: Iterable[Summary]) -> list[Score]:
    """One score for each summary: one metric, one layer per method."""
    return [Score(task, one.direction, one.method, one.mean, one.low, one.high, one.n) for one in summaries]


def leaderboard(records: Iterable[Record]) -> str:
    """The leaderboard in Markdown: methods by tasks, the best of each task in bold, then what each study says."""
    everything = list(records)
    columns = [(record.study, task) for record in everything for task in dict.fromkeys(s.task for s in record.scores)]
    cells = {(record.study, one.task, one.method): one for record in everything for one in record.scores}
    methods = list(dict.fromkeys(one.method for record in everything for one in record.scores))
    lines = [
        "# Leaderboard of the studies",
        "",
        "Written by `attnflow study`: means with their 95 % bootstrap intervals.",
        "",
    ]
    lines += ["| study and task | " + " | ".join(methods) + " |", "| --- |" + " --- |" * len(methods)]
    for study, task in columns:
        row = [cells.get((study, task, method)) for method in methods]
        best = _best([one for one in row if one is not None])
        arrow = next("↑" if one.direction == "up" else "↓" for one in row if one is not None)
        shown = ["" if one is None else _cell(one, best=one.method == best) for one in row]
        lines.append(f"| {study}: {task} {arrow} | " + " | ".join(shown) + " |")
    for record in everything:
        lines += ["", f"## {record.study}", "", *(f"- {sentence}" for sentence in record.words)]
    return "\n".join(lines) + "\n"


def _best(row: Sequence[Score]) -> str | None:
    known = [one for one in row if not math.isnan(one.mean)]
    if not known:
        return None
    return (max if known[0].direction == "up" else min)(known, key=lambda one: one.mean).method


def _cell(one: Score, *, best: bool) -> str:
    if math.isnan(one.mean):
        return "undefined"
    mean = f"**{one.mean:.3f}**" if best else f"{one.mean:.3f}"
    return f"{mean} ({one.low:.3f} to {one.high:.3f})"


def _finite(value: Any) -> Any:
    """The value with null for what is undefined, as JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
