"""Write the reference pages that come from the code: docs/commands.md and docs/tables.md.

python tools/reference.py [--check]

--check writes nothing, and exits with 1 and the names of the pages that are not current.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import attnflow
from attnflow.cli import app

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Written by tools/reference.py: change the code, then run `make reference`. -->\n\n"


def commands() -> str:
    """The help of every command."""
    _, text = app.generate_docs().split("## attnflow text", 1)  # behind the lists of contents
    text = re.sub(r"\n {4,}", " ", f"# Command line\n\n## attnflow text{text}")  # the lines of a description
    return text.replace("[CLS]", "`[CLS]`")  # no link


def tables() -> str:
    """The tables that methods, baselines and tests of faithfulness are rows of."""
    parts = (
        (
            "Methods",
            ("name", "edges", "carried by", "source"),
            ((name, f"{row.edges}: {row.formula}", row.carried, row.source) for name, row in attnflow.METHODS.items()),
        ),
        (
            "Edges",
            ("name", "formula", "source", "residual", "needs"),
            (
                (name, row.formula, row.source, row.residual, ", ".join(sorted(row.needs)))
                for name, row in attnflow.EDGES.items()
            ),
        ),
        (
            "Carriers",
            ("name", "what", "source"),
            ((name, row.what, row.source) for name, row in attnflow.CARRIERS.items()),
        ),
        ("Rules", ("name", "source"), ((name, row.source) for name, row in attnflow.RULES.items())),
        ("Baselines", ("name", "source"), ((name, row.source) for name, row in attnflow.BASELINES.items())),
        (
            "Tests of faithfulness",
            ("name", "better", "of", "source"),
            ((name, row.direction, ", ".join(row.kinds), row.source) for name, row in attnflow.METRICS.items()),
        ),
    )
    return "# Tables\n\n" + "\n".join(f"## {title}\n\n{table(head, rows)}" for title, head, rows in parts)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of Markdown."""
    head = list(head)
    cells = (head, ["---"] * len(head), *rows)
    return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, write in (("commands.md", commands), ("tables.md", tables)):
        text, path = NOTE + write(), DOCS / name
        if not path.is_file() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.write_text(text)
    if check and stale:
        sys.exit(f"not current: {', '.join(stale)}; run `make reference`")


if __name__ == "__main__":
    main()
