"""The command line: a thin shell over the library. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from attnflow.cli.evaluate import evaluate
from attnflow.cli.explain import array, image, text
from attnflow.cli.printing import print_json
from attnflow.cli.study import study

app = App(
    name="attnflow",
    help="Which inputs did a Transformer's output draw on? Attention rollout, attention flow and raw attention.",
    version=lambda: f"attnflow {_version()}",
    help_epilogue="Layers, heads and positions count from 0; layer 0 is nearest the input, negative numbers count from "
    "the end.",
)


for command in (text, image, array, evaluate, study):
    app.command(command)


@app.command
def methods(*, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List the methods: what an edge weighs, how edges are carried to the input, and where each was published.

    Parameters
    ----------
    json
        Print JSON instead of a table.
    """
    from attnflow.methods import METHODS

    columns = ("formula", "carried", "source")
    rows = [{"name": name} | {column: getattr(row, column) for column in columns} for name, row in METHODS.items()]
    if json:
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "edges", "carried by", "source", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def _version() -> str:
    from importlib.metadata import version

    return version("attnflow")


def main() -> None:
    """Run the command line: exit 0, 2 for input that cannot be used (one line on standard error), 130 for Ctrl-C."""
    arguments = sys.argv[1:]
    if arguments[:2] == ["text", "-"]:  # standard input, as if the text were absent
        del arguments[1]
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (CycloptsError, ValueError, OSError, ImportError, MemoryError) as error:
        if "--debug" in arguments:
            raise
        message = " ".join(str(error).split())
        if sys.stderr:
            print(f"attnflow: error: {message}", file=sys.stderr)
        sys.exit(2)
