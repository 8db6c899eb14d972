"""The command that explains every example of a data set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from attnflow.cli.arguments import Integer, check_model, integer, names
from attnflow.cli.arguments import target as wanted_target
from attnflow.cli.printing import note, print_json, print_table, stages, take_messages, working
from attnflow.files import named

if TYPE_CHECKING:
    from attnflow.running.results import Run

_SHOWN = 5


def run(
    data: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    model: str | None = None,
    method: Annotated[str | None, Parameter(name=["--method", "--methods"])] = None,
    target: str | None = None,
    against: str | None = None,
    text: str | None = None,
    label: str | None = None,
    query: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    layer: Annotated[Integer | None, Parameter(allow_leading_hyphen=True)] = None,
    start_layer: Integer | None = None,
    head: Integer | None = None,
    head_fusion: Literal["mean", "max", "min"] | None = None,
    residual: float | Literal["add", "measured"] | None = None,
    receptive_field: Annotated[bool, Parameter(negative=())] = False,
    top: Integer | None = None,
    full: Annotated[bool, Parameter(negative=())] = False,
    limit: Integer | None = None,
    shuffle: Integer | None = None,
    workers: Integer = 1,
    engine: Literal["local", "ray"] = "local",
    part: str | None = None,
    batch_size: Integer = 16,
    shard_size: Integer = 128,
    fail_fast: Annotated[bool, Parameter(negative=())] = False,
    device: str = "cpu",
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
    debug: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Explain every photograph of a folder, or every text of a file, and keep the answers in a folder.

    Whatever ends a run, the same command goes on behind what is finished. attnflow.read reads the folder.

    Parameters
    ----------
    data
        A folder of photographs, those with a label in a folder named after it; or a file of texts: .tsv, .csv, .jsonl,
        .parquet, or any other with one text on each line.
    output
        A new folder, or that of the same run.
    model
        A local folder or a Hugging Face hub name (of images also of timm). By default the packaged MiniLM for texts,
        and the packaged DINOv2-small for photographs.
    method
        Names with commas between them: `attnflow methods` lists the methods, and beside them are random, gradient-norm,
        gradient-sum, gradient-x-input, integrated-gradients, lrp, libra, attnlrp and cp-lrp. By default lrp of a
        target, and rollout without one.
    target
        What methods that need gradients explain: the index or name of a class or token, predicted, or label, the class
        that each example is labelled with. By default predicted of a model that gives logits, else the norm of its
        output.
    against
        Another class or token: explain why the target rather than this one.
    text
        The column of the texts; by default the one called text. A .tsv or .csv file without such a column in its first
        row has no header, and its columns are the text and its label.
    label
        The column of the labels; by default the one called label, if there is one.
    query
        The output position to explain: a position, a token such as [CLS], or "all" for the mean over all. By default
        the one that the output is read from.
    layer
        The layer whose output is explained; by default the top one.
    start_layer
        The lowest layer taken in.
    head
        One head of the explained layer instead of the fusion of all.
    head_fusion
        How heads become one matrix; by default their mean.
    residual
        What a position keeps of itself in each layer: a weight of the identity, "add" for the whole identity beside the
        edges, or "measured" of the model; by default what the method asks for.
    receptive_field
        Divide by what each token's place alone would explain, if attention were even; for causal models.
    top
        Keep so many tokens of each example, those with the highest scores by their size.
    full
        Keep the rows of all queries, not their mean.
    limit
        Take the first examples only.
    shuffle
        Take the examples in an order that this seed draws.
    workers
        Processes, each with its own model and its share of the cores.
    engine
        ray takes actors of a Ray cluster instead of processes: that of RAY_ADDRESS, or one started here.
    part
        Explain one part of the data into the folder that all parts share: 0/4 is the first of four. Under torchrun each
        process has its own part unless told otherwise, and cuda is the device of its local rank.
    batch_size
        Examples in one forward pass, at most.
    shard_size
        Examples in one file. A kill loses those whose file is not whole.
    fail_fast
        End at the first example that fails.
    device
        Where the model runs, as torch names it: cpu, cuda, cuda:1, mps.
    json
        Print JSON instead of a table.
    quiet
        No progress bars and no notes.
    debug
        Show the traceback of an error.
    """
    with working("loading", quiet=quiet):
        take_messages(quiet=quiet)
        from attnflow.running.engine import run as explain_all

    own = _part(part)
    given = {"layer": layer, "start_layer": start_layer, "head": head, "head_fusion": head_fusion}
    given |= {"residual": residual, "query": query and _position(query)}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with stages(quiet=quiet) as bar:
        found = explain_all(
            check_model(model),
            data,
            output,
            method=None if method is None else names(method),
            target=wanted_target(target, against),
            text=text,
            label=label,
            top=top,
            full=full,
            limit=limit,
            shuffle=shuffle,
            workers=workers,
            engine=engine,
            part=own,
            batch_size=batch_size,
            shard_size=shard_size,
            fail_fast=fail_fast,
            device=_device(device),
            receptive_field=receptive_field,
            progress=_with_rate(bar),
            note=lambda message: note(message, quiet=quiet),
            **settings,
        )
    summary = found.summary()
    if own is not None and not found.is_whole(limit):
        note(f"part {own[0]} of {own[1]} is done; other parts of {named(found.path)} are not whole yet", quiet=quiet)
        return
    if json:
        print_json({"manifest": found.manifest, "summary": summary})
    else:
        _print_summary(summary)
    for one in found.failed[:_SHOWN]:
        note(f"example {one.example} ({one.name}), {one.method or 'all methods'}: {one.error}", quiet=quiet)
    if summary["failures"] > _SHOWN:
        note(f"{summary['failures']:,} failures in all", quiet=quiet)
    if summary["alone"]:
        note(f"{summary['alone']:,} examples were explained alone, since a batch failed: {summary['why']}", quiet=quiet)
    note(f"{_counted(found, summary)}; attnflow.read({str(output)!r}) reads them", quiet=quiet)


def _position(query: str) -> Any:
    return int(query) if query.removeprefix("-").isdecimal() else query


def _part(given: str | None) -> tuple[int, int] | None:
    """The part of the data that --part names, or that torchrun gives this process."""
    if given is not None:
        number, _, count = given.partition("/")
        expected = "a part and how many there are, such as 0/4"
        return integer("--part", number, expected), integer("--part", count, expected)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def _device(name: str) -> str:
    """The device named; under torchrun each process of a machine has the GPU of its own number."""
    local = os.environ.get("LOCAL_RANK")
    return f"cuda:{local}" if name == "cuda" and local is not None and "TORCHELASTIC_RUN_ID" in os.environ else name


def _with_rate(bar: Callable[[str, int, int], object]) -> Callable[[int, int | None], object]:
    """A progress bar that says how many examples are explained in a second."""
    beginning: list[tuple[float, int]] = []

    def called(done: int, total: int | None) -> None:
        beginning.append((time.monotonic(), done)) if not beginning else None
        start, before = beginning[0]
        seconds = time.monotonic() - start
        rate = f", {(done - before) / seconds:.1f} examples a second" if seconds else ""
        bar(f"explaining{rate}", done, total or 0)

    return called


def _counted(found: Run, summary: dict[str, Any]) -> str:
    failed = f", {summary['failed']:,} failed" if summary["failed"] else ""
    rate = summary["examples_per_second"]
    speed = f" at {rate:.1f} a second and worker" if rate else ""
    return f"{summary['examples']:,} examples are in {named(found.path)}{failed}{speed}"


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("method", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("examples", "on special tokens", "saturated flows"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in summary["methods"].items():
        shares = ["" if one[share] is None else f"{one[share]:.1%}" for share in ("special", "saturated")]
        table.add_row(name, f"{one['rows']:,}", *shares)
    print_table(table)
