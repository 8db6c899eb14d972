"""The command that measures how faithful methods are."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from attnflow.cli.arguments import Integer, check_model, check_outputs, names
from attnflow.cli.arguments import layer as layer_number
from attnflow.cli.arguments import target as wanted_target
from attnflow.cli.printing import note, print_json, print_table, progress, take_messages, working
from attnflow.files import named

if TYPE_CHECKING:
    from attnflow.faithfulness.results import Summary


def evaluate(
    data: Path,
    /,
    *,
    model: str,
    text: str | None = None,
    label: str | None = None,
    masks: Path | None = None,
    methods: str = "raw,rollout,flow",
    metrics: str | None = None,
    target: str = "predicted",
    against: str | None = None,
    layer: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-1",
    blank: Literal["unk", "mask", "pad", "delete", "zero", "mean", "blur"] | None = None,
    special: Annotated[bool, Parameter(negative=())] = False,
    limit: Integer | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    page: Path | None = None,
    batch_size: Integer = 64,
    seed: Integer = 0,
    device: str = "cpu",
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False,
    debug: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Measure how faithful methods are to a text or image classifier, beside random scores and the gradient.

    Parameters
    ----------
    data
        A file with one text on each line, and its label behind a tab if it has one; a table (.csv, .jsonl, .parquet, or
        what Hugging Face's datasets saved); or a folder of photographs, those with a label in a folder named after it:
        the index or the name of a class.
    model
        A local folder or a Hugging Face hub name of a text classifier, or of an image classifier (also of timm).
    text
        The column of the texts of a table; by default the one called text.
    label
        The column of the labels of a table; by default the one called label, if there is one.
    masks
        A folder with a mask of the same name for each photograph, black outside: adds the tests of segmentation.
    methods
        Names with commas between them: methods (`attnflow methods` lists them), or baselines (gradient-sum,
        gradient-x-input, lrp, libra, attnlrp, cp-lrp, occlusion, integrated-gradients, grad-cam (photographs),
        hidden-token-attribution). random and gradient-norm are always there.
    metrics
        Names with commas between them; by default all that are for such data. For both: blank-out, signed-blank-out,
        gradient, deletion, least-first-deletion, deletion-gap. For texts: blank-out-kendall, gradient-kendall,
        comprehensiveness, sufficiency, aopc, log-odds. For photographs: insertion, positive-perturbation,
        negative-perturbation; with masks pixel-accuracy, mean-iou, average-precision, pixel-auc, pointing-game. On
        request only: randomised-weights. In Python alone, of texts with marks: token-auc, token-average-precision,
        token-pointing.
    target
        The class explained: predicted, label, its index, or its name.
    against
        Another class, by index or name: explain why the target rather than this one.
    layer
        The layer explained, or "all".
    blank
        What removed tokens become: unk, mask or pad, and delete takes them out; by default unk. Or what removed patches
        are painted with: zero, mean, blur; by default zero, and blur for insertion.
    special
        Let special tokens be removed and take part in correlations.
    limit
        Take the first examples only.
    output
        Write every value to a new .parquet file. A run that was killed goes on where it stopped if it is called again.
        Or write a page (.html), as --page does.
    page
        Write a page of the summary (.html): a chart of the methods for each metric, with deletion and insertion curves.
    batch_size
        Cases in one forward pass.
    seed
        Of the random scores and the intervals.
    device
        Where the model runs, as torch names it: cpu, cuda, cuda:1, mps.
    json
        Print JSON instead of a table.
    quiet
        No progress bars and no notes.
    debug
        Show the traceback of an error.
    """
    with working("loading the model", quiet=quiet):
        take_messages(quiet=quiet)
        from attnflow.answer import PAGES
        from attnflow.capturing import checkpoints
        from attnflow.capturing.models import load_model
        from attnflow.faithfulness import loading
        from attnflow.faithfulness.run import check_names, check_output, evaluate
        from attnflow.running import sources

        if output is not None and output.suffix.lower() in PAGES:
            if page is not None:
                raise ValueError("-o and --page both name a page; give -o a .parquet file, or leave one of them out")
            output, page = None, output
        chosen, measured = check_names(names(methods), None if metrics is None else names(metrics))
        what = wanted_target(target, against)
        check_model(model)
        if output is not None:
            check_output(output)
        if page is not None:
            check_outputs([page], PAGES, data, masks)
        if limit is not None and limit < 1:
            raise ValueError(f"--limit takes a number of examples from 1 on; it is {limit}")
        if not data.exists():
            raise FileNotFoundError(f"there is no {str(data)!r}; give a file of texts, or a folder of photographs")
        table = text is not None or label is not None or sources.has_columns(data)
        if table and masks:
            raise ValueError(f"--masks goes with a folder of photographs; {str(data)!r} is a table of texts")
        if table:
            source = sources.opened(data, text=text, label=label)
            classifier, tokenizer = load_model(model, task="text-classification", device=device)
            examples = [partial(sources.labelled, example, classifier) for example in source.read()]
        elif data.is_dir():
            loaded = load_model(model, task="image-classification", device=device)
            examples, classifier, tokenizer = loading.photographs(data, loaded, masks), loaded.model, None
        elif masks:
            raise ValueError(f"--masks goes with a folder of photographs; {str(data)!r} is a file")
        else:
            examples = loading.texts(data)
            classifier, tokenizer = load_model(model, task="text-classification", device=device)
    for line in checkpoints.notes(classifier):
        note(line, quiet=quiet)
    with progress("evaluating", quiet=quiet) as called:
        evaluation = evaluate(
            classifier,
            examples[:limit],
            methods=chosen,
            metrics=measured,
            tokenizer=tokenizer,
            target=what,
            layer=layer_number(layer),
            blank=blank,
            special=special,
            output=output,
            batch_size=batch_size,
            seed=seed,
            progress=called,
        )
    if page is not None:
        evaluation.save(page)
    for path in filter(None, (output, page)):
        note(f"wrote {named(path)}", quiet=quiet)
    summary = evaluation.summary()
    if json:
        print_json({"recipe": evaluation.recipe, "summary": [_finite(one._asdict()) for one in summary]})
    else:
        _print_summary(summary)
    for failure in evaluation.failures[:5]:
        note(f"example {failure.example}, {failure.method or 'all methods'}: {failure.error}", quiet=quiet)
    if len(evaluation.failures) > 5:
        note(f"{len(evaluation.failures)} failures in all", quiet=quiet)


def _print_summary(summary: list[Summary]) -> None:
    """One block per metric, its methods in the order of their means, best first."""
    from rich.table import Table

    table = Table("", "layer", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("mean", "95 % interval", "deviation", "n", "undefined"):
        table.add_column(column, justify="right", no_wrap=True)
    for metric in dict.fromkeys(one.metric for one in summary):
        block = [one for one in summary if one.metric == metric]
        sign, arrow = (-1, "↑") if block[0].direction == "up" else (1, "↓")
        table.add_row(f"{metric} {arrow}", style="bold")
        for one in sorted(block, key=lambda one: (math.isnan(one.mean), sign * one.mean)):
            layer = "" if one.layer is None else str(one.layer)
            numbers = f"{one.mean:.3f}", f"{one.low:.3f} to {one.high:.3f}", f"{one.deviation:.3f}", str(one.n)
            table.add_row(f"  {one.method}", layer, *numbers, str(one.undefined or ""))
    print_table(table)


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """The record with null for what is undefined, as JSON has no NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in record.items()}
