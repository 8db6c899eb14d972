"""`attnflow study`: run an experiment, print its tables, and write its JSON and the leaderboard."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter, Token, convert

from attnflow.cli.arguments import integer
from attnflow.cli.printing import (
    console,
    note,
    print_json,
    print_table,
    stages,
    standard_output,
    take_messages,
    working,
)
from attnflow.files import destination, named
from attnflow.studies import STUDIES, Options, Study, run

if TYPE_CHECKING:
    from attnflow.studies.record import Record


def _strict(kind: Any, tokens: Sequence[Token]) -> Any:
    """An option of a study, where nothing is no name, and 1.5 no whole number."""
    value = tokens[0].value
    if not value.strip():
        raise ValueError("it is empty; give a value, or leave the option out")
    return integer("it", value, "a whole number") if kind is int else convert(kind, tokens)


study = App(
    name="study",
    help="Run an experiment of the paper, or one of ours, and write down what it found.",
    default_parameter=Parameter(converter=_strict, negative=()),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a study writes, and what it prints."""

    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("studies")
    """The folder for the study's JSON, its pictures and the leaderboard; with --small the folder small in it."""
    json: bool = False
    """Print the record as JSON instead of tables."""
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False
    """No progress bars and no notes."""
    debug: bool = False
    """Show the traceback of an error."""


def _command(row: Study) -> Callable[..., None]:
    """The command of a study, with its options."""

    def command(data: Path, *, options: Options, output: Output) -> None:
        take_messages(quiet=output.quiet)
        # A small study never takes the place of a full one.
        folder = output.output / "small" if options.small else output.output
        with working("loading", quiet=output.quiet):
            _check(folder)
        with stages(quiet=output.quiet) as progress:
            record = run(row, data, folder, options, progress)
        _print(record, folder / f"{row.name}.json", output)
        if row.page:
            note(f"wrote {named(folder / row.page)}", quiet=output.quiet)

    command.__doc__ = f"{row.question}\n\n{row.data}"
    command.__defaults__ = (Path(os.environ.get("ATTNFLOW_DATA", "data")),)
    command.__kwdefaults__ = {"options": row.options(), "output": Output()}
    folder = "The folder with the data; by default what ATTNFLOW_DATA names, else data."
    command.__annotations__ = {
        "data": Annotated[Path, Parameter(help=folder, show_default=False)],
        "options": Annotated[row.options, Parameter(name="*")],
        "output": Output,
    }
    return command


for row in STUDIES.values():
    study.command(_command(row), name=row.name)


def _check(folder: Path) -> None:
    """Refuse, before any work, a folder that the study could not write, or whose records could not be read."""
    from attnflow.studies import record

    record.check_folder(folder)
    for path in folder.glob("*.json"):
        destination(path)
        record.load(path)


def _print(record: Record, path: Path, output: Output) -> None:
    """Print what was found; say what was written and which methods failed."""
    note(f"wrote {named(path)} and the leaderboard beside it", quiet=output.quiet)
    if output.json:
        print_json(_json(path))
    else:
        _print_tables(record)
    for method, failure in record.tables.get("failed", {}).items():
        note(f"{method} failed on {failure['examples']} examples: {failure['error']}", quiet=output.quiet)


def _json(path: Path) -> Any:
    import json

    return json.loads(path.read_text(encoding="utf-8"))


def _print_tables(record: Record) -> None:
    """The scores of each task, best first, then the findings in words."""
    from rich.table import Table

    table = Table("", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("mean", "95 % interval", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    for task in dict.fromkeys(one.task for one in record.scores):
        block = [one for one in record.scores if one.task == task]
        sign, arrow = (-1, "↑") if block[0].direction == "up" else (1, "↓")
        table.add_row(f"{task} {arrow}", style="bold")
        for one in sorted(block, key=lambda one: (one.mean != one.mean, sign * one.mean)):
            table.add_row(f"  {one.method}", f"{one.mean:.3f}", f"{one.low:.3f} to {one.high:.3f}", str(one.n))
    print_table(table)
    with standard_output():
        for sentence in record.words:
            console().print(f"- {sentence}", markup=False, highlight=False)
