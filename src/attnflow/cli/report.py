"""The command that makes one page of saved answers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
    """Make one page of HTML of saved answers, of an evaluation, or of a run, to explore offline.

    Parameters
    ----------
    files
        Answers that attnflow saved as .json or .npz, of one input or of several, or folders of them; or one evaluation
        (.parquet); or the folder of one run.
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
    from attnflow.answer import DATA, PAGES, Relevance
    from attnflow.running.shards import MANIFEST
    from attnflow.show.report import command_of, save_page

    if not files:
        raise ValueError("no file was given; name at least one that attnflow saved as .json or .npz")
    if runs := [path for path in files if (path / MANIFEST).is_file()]:
        if len(files) > 1 or image is not None:
            raise ValueError(f"{named(runs[0])} is a run, which has a page of its own; give it alone")
        check_outputs([output], PAGES, *runs)
        from attnflow import reporting
        from attnflow.running.results import read

        with working("reading", quiet=quiet):
            reporting.report(read(runs[0]), output)
        note(f"wrote {named(output)}", quiet=quiet)
        return
    found = [path for given in files for path in _within(given, DATA)]
    check_outputs([output], PAGES, *found, image)
    if evaluations := [path for path in found if path.suffix.lower() == ".parquet"]:
        if len(found) > 1 or image is not None:
            raise ValueError(f"{named(evaluations[0])} is an evaluation, which has a page of its own; give it alone")
        from attnflow.faithfulness.results import Evaluation

        Evaluation.load(evaluations[0]).save(output)
        note(f"wrote {named(output)}", quiet=quiet)
        return
    with working("reading", quiet=quiet):
        relevances = [Relevance.load(path) for path in found]
        photograph = None
        if image is not None:
            from attnflow.capturing.vision import open_image

            photograph = open_image(image)
    save_page(
        relevances, output, names=[path.stem for path in found], image=photograph, command=command_of(sys.argv[1:])
    )
    note(f"wrote {named(output)}", quiet=quiet)


def _within(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """The answers in a folder, by name; a file is itself."""
    if not path.is_dir():
        return [path]
    found = sorted(one for one in path.iterdir() if one.suffix.lower() in suffixes)
    if not found:
        raise ValueError(
            f"the folder {named(path)} holds no answer; it takes files that end in {' or '.join(suffixes)}"
        )
    return found
