"""What the commands print: results on standard output, and on standard error notes, a spinner, a progress bar."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from attnflow.answer import Relevance
    from attnflow.faithfulness.routes import RouteTest


# Wider than any table.
_WIDEST = 10_000


def printable(text: str) -> str:
    r"""The text on one line, with escapes (\x1b) for what a terminal would obey instead of showing."""
    line = " ".join(text.split())
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)


def note(message: str, *, quiet: bool = False) -> None:
    """A line on standard error; where that is full or closed there is nobody to tell."""
    if not quiet and sys.stderr:
        with suppress(OSError):
            print(f"attnflow: {printable(message)}", file=sys.stderr)


def take_messages(*, quiet: bool) -> None:
    """Show what libraries warn of or log as notes, each once, and keep the bars of transformers off standard error."""
    said = set[str]()

    def say(message: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            note(str(message), quiet=quiet)

    class Notes(logging.Handler):
        """Shows records from warnings on as notes."""

        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    def show_warning(message: object, *_where: object, **_what: object) -> None:
        say(message)

    warnings.showwarning = show_warning
    logging.lastResort = Notes(logging.WARNING)  # for all that nobody else handles
    with suppress(ModuleNotFoundError):  # the loader says what is missing, and for what
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


@contextmanager
def standard_output() -> Generator[None]:
    """For printing a result, all of which is out behind it.

    Raises BrokenPipeError where nobody reads any more, OSError where it cannot be written.
    """
    if sys.stdout is None:
        raise OSError("cannot write to standard output: it is closed")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(f"cannot write to standard output: {error.strerror}") from error


def escape_what_cannot_be_encoded() -> None:
    """Let standard output write escapes for the characters that its encoding lacks, instead of losing all."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def console() -> Console:
    """Standard output as rich sees it, where a closed pipe is a BrokenPipeError as everywhere else."""
    from rich.console import Console

    class Pipe(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Pipe()


def print_json(value: Any) -> None:
    """One line of JSON on standard output, with escapes where its encoding lacks a character."""
    from attnflow.files import to_json

    text = to_json(value)
    with standard_output():
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = json.dumps(value, allow_nan=False)
        print(text)


def print_table(table: Table) -> None:
    """A table on standard output, wider than the terminal where it must be: no name is cut."""
    output = console()
    needed = output.measure(table, options=output.options.update(max_width=_WIDEST)).maximum
    output.width = max(output.width, needed)
    with standard_output():
        output.print(table)


def print_knockout(tested: RouteTest) -> None:
    """What the target loses without the edges of each method, beside random edges."""
    from rich.table import Table

    table = Table("edges taken out of", "edges", "the target falls by", "random edges", "random, same queries")
    for name, taken in tested.taken.items():
        changes = (f"{value:+.4f}" for value in (taken.change, taken.random, taken.same_queries))
        table.add_row(name, str(taken.edges), *changes)
    table.caption = f"the target is {tested.base:.4f} of the whole model"
    print_table(table)


def print_relevance(relevance: Relevance) -> None:
    """What `relevance.show` prints."""
    from attnflow.show.terminal import show

    with standard_output():
        show(relevance, console=console())


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
