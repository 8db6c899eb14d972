"""The command line: a thin shell over the library. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError

from attnflow.cli.compare import compare
from attnflow.cli.evaluate import evaluate
from attnflow.cli.explain import array, image, text
from attnflow.cli.printing import console, escape_what_cannot_be_encoded, note, print_json, print_table
from attnflow.cli.report import report
from attnflow.cli.run import run
from attnflow.cli.study import study
from attnflow.files import named

# Which extra of ours installs a package that not everything needs.
_EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "timm": "timm",
    "captum": "captum",
    "ray": "ray",
    "datasets": "datasets",
}

app = App(
    name="attnflow",
    help="Which inputs did a Transformer's output draw on? Attention rollout, attention flow and raw attention.",
    version=lambda: f"attnflow {_version()}",
    help_epilogue="Layers, heads and positions count from 0; layer 0 is nearest the input, negative numbers count from "
    "the end.",
)


for command in (text, image, array, run, report, compare, evaluate, study):
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
    from rich.table import Table

    table = Table("method", "edges", "carried by", "source", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row.values())
    print_table(table)


def _version() -> str:
    from importlib.metadata import version

    return version("attnflow")


def main() -> None:
    """Run the command line.

    Exit 0; 2 for input that cannot be used or output that cannot be written, a line each on standard error; 1 for what
    nobody foresaw; 130 for Ctrl-C, 141 for a pipe that nobody reads.
    """
    arguments = sys.argv[1:]
    _keep_closed_streams_closed()
    escape_what_cannot_be_encoded()
    try:
        _run(arguments)
        if sys.stdout:
            sys.stdout.flush()  # the help, which is printed for us
        return
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 141
    except Exception as error:
        if "--debug" in arguments:
            raise
        code = 0
        for one in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
            foreseen = isinstance(one, CycloptsError | ValueError | OSError | ImportError | MemoryError)
            unforeseen = f"this should not happen ({type(one).__name__}); --debug shows where: "
            note(f"error: {'' if foreseen else unforeseen}{_message(one)}")
            code = max(code, 2 if foreseen else 1)
    _drop_output()
    sys.exit(code)


def _run(arguments: list[str]) -> None:
    settings: dict[str, Any] = {"exit_on_error": False, "print_error": False, "result_action": "return_value"}
    settings["console"] = console()
    try:
        app(arguments, **settings)
    except UnknownOptionError as error:
        text = error.token.keyword or error.token.value
        if arguments[0] != "text" or "--" in arguments:
            raise
        if text != "-" and not any(one.isspace() for one in text):
            raise ValueError(f"{_message(error)} A text that begins with - goes behind --") from error
        others = list(arguments)
        others.remove(text)  # no option has a space in it, and "-" is standard input
        app([*others, "--", text], **settings)


def _message(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = "" if error.filename is None else f"{named(str(error.filename))}: "
        return f"{where}{error.strerror}"
    if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
        return f"this needs {error.name}: pip install 'attnflow[{_EXTRAS[error.name]}]'"
    return str(error) or type(error).__name__


def _keep_closed_streams_closed() -> None:
    """Fill the places of standard streams that are closed, lest a file that is opened takes them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _drop_output() -> None:
    """Let go of what standard output could not take, which would fail once more at the end of the process."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
