"""What the commands print besides their result: JSON, notes, a spinner, a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


def print_json(value: Any) -> None:
    """One line of JSON on standard output."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def note(message: str, *, quiet: bool) -> None:
    """A line on standard error."""
    if not quiet and sys.stderr:
        print(f"attnflow: {message}", file=sys.stderr)


@contextmanager
def working(what: str, *, quiet: bool) -> Generator[None]:
    """A spinner on standard error, if that is a terminal."""
    if quiet or not (sys.stderr and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress(what: str, *, quiet: bool) -> Generator[Callable[[int, int | None], object] | None]:
    """A progress bar on standard error, if that is a terminal; it shows itself at the first call."""
    if quiet or not (sys.stderr and sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def stages(*, quiet: bool) -> Generator[Callable[[str, int, int], object]]:
    """`progress` for work in several stages: called with the stage, the steps done, and in all."""
    if quiet or not (sys.stderr and sys.stderr.isatty()):
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
