"""The command that compares two runs on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from attnflow.cli.arguments import Integer
from attnflow.cli.printing import note, print_json, print_table, take_messages, working

if TYPE_CHECKING:
    from attnflow.running.comparison import Comparison, Mean

_SHOWN = 5


def compare(
    first: Path,
    second: Path,
    /,
    *,
    top: Integer = 5,
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
    debug: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Compare two runs on the same data, such as two checkpoints: where relevance moved.

    Examples meet by their identity, and those in one run alone are counted. Intervals are of the mean over examples.

    Parameters
    ----------
    first
        The folder of a run.
    second
        The folder of another run, by a method that the first has too.
    top
        How many of the highest tokens, by size, the overlap looks at.
    json
        Print JSON with every example instead of a table.
    quiet
        No notes.
    debug
        Show the traceback of an error.
    """
    with working("reading", quiet=quiet):
        take_messages(quiet=quiet)
        from attnflow.files import plain
        from attnflow.running.comparison import compare as compare_runs
        from attnflow.running.results import read

        found = compare_runs(read(first), read(second), top=top)
    if json:
        print_json(plain(_as_dict(found)))
    else:
        _print(found)
    for one in found.most_moved(_SHOWN):
        moved = ", ".join(f"{token.token} {token.before:.3f} to {token.after:.3f}" for token in one.tokens)
        note(f"{one.name}, {one.method}: {one.moved:.1%} moved; {moved}", quiet=quiet)
    for name, (before, after) in found.differs.items():
        note(f"the runs differ in {name}: {before!r} and {after!r}", quiet=quiet)
    if not found.differs:
        note("the runs have the same recipe: the same model with the same settings", quiet=quiet)
    counts = {
        "examples are in the first run alone": found.only_first,
        "examples are in the second run alone": found.only_second,
        "answers are missing in one of the runs": found.failed,
        "answers are of other tokens, and are not compared": found.other_tokens,
    }
    for what, count in counts.items():
        if count:
            note(f"{count:,} {what}", quiet=quiet)


def _as_dict(found: Comparison) -> dict[str, object]:
    return {
        "matched": found.matched,
        "only_first": found.only_first,
        "only_second": found.only_second,
        "failed": found.failed,
        "other_tokens": found.other_tokens,
        "top": found.top,
        "differs": found.differs,
        "summary": [
            {"method": one.method}
            | {name: getattr(one, name)._asdict() for name in ("correlation", "overlap", "moved")}
            for one in found.summary()
        ],
        "examples": [one._asdict() | {"tokens": [token._asdict() for token in one.tokens]} for one in found.rows],
    }


def _print(found: Comparison) -> None:
    from rich.table import Table

    table = Table("method", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("rank correlation", f"top {found.top} in common", "relevance that moved", "n", "undefined"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in found.summary():
        undefined = max(one.correlation.undefined, one.overlap.undefined, one.moved.undefined)
        means = _interval(one.correlation, ".3f"), _interval(one.overlap, ".1%"), _interval(one.moved, ".1%")
        count = one.moved.n + one.moved.undefined
        table.add_row(one.method, *means, f"{count:,}", f"{undefined:,}" if undefined else "")
    print_table(table)


def _interval(mean: Mean, form: str) -> str:
    if not mean.n:
        return "undefined"
    return f"{mean.mean:{form}}" + (f" ({mean.low:{form}} to {mean.high:{form}})" if mean.n > 1 else "")
