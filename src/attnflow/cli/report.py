"""The command that makes one page of saved answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from attnflow.cli.arguments import check_outputs
from attnflow.cli.printing import note, take_messages, working
from attnflow.files import named


def report(
    *files: Path,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    image: Path | None = None,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
    debug: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Make one page of HTML of saved answers, to explore offline.

    Parameters
    ----------
    files
        Answers that attnflow saved as .json or .npz, of one input or of several.
    output
        The page to write (.html).
    image
        The photograph that the patches of these answers tile.
    quiet
        No notes.
    debug
        Show the traceback of an error.
    """
    take_messages(quiet=quiet)
    from attnflow.answer import PAGES, Relevance
    from attnflow.show.report import command_of, save_page

    if not files:
        raise ValueError("no file was given; name at least one that attnflow saved as .json or .npz")
    check_outputs([output], PAGES, *files, image)
    with working("reading", quiet=quiet):
        relevances = [Relevance.load(path) for path in files]
        photograph = None
        if image is not None:
            from attnflow.capturing.vision import open_image

            photograph = open_image(image)
    save_page(relevances, output, image=photograph, command=command_of(sys.argv[1:]))
    note(f"wrote {named(output)}", quiet=quiet)
