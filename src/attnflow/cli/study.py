"""`attnflow study`: run an experiment, print its tables, and write its JSON and the league table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from attnflow.cli.arguments import Integer, check_model
from attnflow.cli.printing import (
    console,
    note,
    print_json,
    print_table,
    progress,
    stages,
    standard_output,
    take_messages,
    working,
)
from attnflow.files import destination, named, write_whole

if TYPE_CHECKING:
    from attnflow.studies.record import Record

study = App(name="study", help="Run an experiment of the paper, or one of ours, and write down what it found.")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Common:
    """The options that all studies share."""

    data: Annotated[Path, Parameter(show_default=False)] = Path(os.environ.get("ATTNFLOW_DATA", "data"))
    """The folder with the data; by default what ATTNFLOW_DATA names, else data."""
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("studies")
    """The folder for the study's JSON, its pictures and the league table."""
    small: Annotated[bool, Parameter(negative=())] = False
    """Few examples and little training: minutes instead of an hour, to see that it works; into the folder small of
    --output."""
    seed: Integer = 0
    """Of the sample, the random scores, the training and the intervals."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print the record as JSON instead of tables."""
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=())] = False
    """No progress bars and no notes."""
    debug: Annotated[bool, Parameter(negative=())] = False
    """Show the traceback of an error."""

    @property
    def folder(self) -> Path:
        """Where all is written: a small study never takes the place of a full one."""
        return self.output / "small" if self.small else self.output


def begin(common: Common, *folders: Path, model: str | None = None) -> None:
    """Refuse, before any work, what the study could not write."""
    take_messages(quiet=common.quiet)
    check_model(model)
    if common.seed < 0:
        raise ValueError(f"--seed takes a whole number from 0 on; it is {common.seed}")
    from attnflow.studies import record

    for folder in (common.folder, *folders):
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        destination(there / record.LEAGUE)  # or a folder that is made in it
    for path in common.folder.glob("*.json"):
        destination(path)
        record.load(path)


def deliver(record: Record, common: Common) -> None:
    """Write the record and the league table, and print what was found; say which methods could not be had."""
    path = record.save(common.folder)
    note(f"wrote {named(path)} and the league table beside it", quiet=common.quiet)
    if common.json:
        print_json(_json(path))
    else:
        _print(record)
    for method, error in record.tables.get("failed", {}).items():
        note(f"left out {method}: {error}", quiet=common.quiet)


@study.command
def segmentation(*, common: Common = Common()) -> None:
    """Does relevance lie on the object? 30 photographs of horses with masks, seen by the packaged DINOv2-small.

    The data, weizmann_horses, are published at https://github.com/shenshutao/image_segmentation.
    """
    with working("loading", quiet=common.quiet):
        begin(common)
        from attnflow.studies import segmentation

    with progress("horses", quiet=common.quiet) as called:
        record = segmentation.study(common.data, small=common.small, seed=common.seed, progress=called)
    deliver(record, common)


@study.command
def sst2(*, model: str | None = None, common: Common = Common()) -> None:
    """Table 3 of Abnar & Zuidema 2020: correlation with gradients and blank-out on the test set of SST-2.

    The data, sst2, are published at https://github.com/clairett/pytorch-sentiment-classification.

    Parameters
    ----------
    model
        A text classifier (0 negative, 1 positive), in a local folder or on the Hugging Face hub. By default the
        packaged MiniLM with the adapter in the data, adapters/sst2_minilm_lora.safetensors.
    """
    with working("loading", quiet=common.quiet):
        begin(common, model=model)
        from attnflow.studies import sst2

    with progress("sentences", quiet=common.quiet) as called:
        record = sst2.study(common.data, model=model, small=common.small, seed=common.seed, progress=called)
    deliver(record, common)


@study.command
def retinopathy(
    folder: Path,
    /,
    *,
    page: Path | None = None,
    limit: Integer = 16,
    measured: Integer = 16,
    common: Common = Common(),
) -> None:
    """What a ViT looks at in photographs of the retina: a probe on DINOv2-small, overlays, and a page of them.

    For APTOS 2019 as it is published (train.csv, train_images), at
    https://www.kaggle.com/competitions/aptos2019-blindness-detection, or a folder of GRADE_NUMBER.jpg whose lowest
    grade is no disease, such as https://github.com/SRahimDR/DR-image-dataset. The maps are no diagnosis.

    Parameters
    ----------
    folder
        The folder with the photographs and their grades.
    page
        The folder for index.html and its overlays. By default the folder retinopathy in --output.
    limit
        How many photographs the page shows, the grades in turn.
    measured
        How many photographs deletion and insertion are measured on; each takes a hundred forward passes.
    """
    place = page or common.folder / "retinopathy"
    with working("loading", quiet=common.quiet):
        begin(common, place)
        from attnflow.studies import retinopathy

    with progress("photographs", quiet=common.quiet) as called:
        record = retinopathy.study(
            folder,
            page=place,
            limit=limit,
            measured=measured,
            small=common.small,
            seed=common.seed,
            progress=called,
        )
    deliver(record, common)
    note(f"wrote {named(place / 'index.html')}", quiet=common.quiet)


@study.command
def pronouns(*, model: str | None = None, common: Common = Common()) -> None:
    """Figure 4 of Abnar & Zuidema 2020: does relevance point to the referent that a language model prefers?

    A masked model is asked for the pronoun at its mask, a causal one for the next word. The data,
    pronoun/winogender_templates.tsv, are published at https://github.com/rudinger/winogender-schemas.

    Parameters
    ----------
    model
        A masked or causal language model, in a local folder or on the Hugging Face hub. By default stories260K
        (causal, https://huggingface.co/karpathy/tinyllamas) from the data.
    """
    with working("loading", quiet=common.quiet):
        begin(common, model=model)
        from attnflow.studies import pronouns

        common.folder.mkdir(parents=True, exist_ok=True)
    picture = common.folder / "pronouns.png"
    with progress("sentences", quiet=common.quiet) as called:
        record = pronouns.study(
            common.data, picture=picture, model=model, small=common.small, seed=common.seed, progress=called
        )
    deliver(record, common)


def _json(path: Path) -> Any:
    import json

    return json.loads(path.read_text(encoding="utf-8"))


def _print(record: Record) -> None:
    """The standings of each task, best first, then the findings in words."""
    from rich.table import Table

    table = Table("", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("mean", "95 % interval", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    for task in dict.fromkeys(one.task for one in record.standings):
        block = [one for one in record.standings if one.task == task]
        sign, arrow = (-1, "↑") if block[0].direction == "up" else (1, "↓")
        table.add_row(f"{task} {arrow}", style="bold")
        for one in sorted(block, key=lambda one: (one.mean != one.mean, sign * one.mean)):
            table.add_row(f"  {one.method}", f"{one.mean:.3f}", f"{one.low:.3f} to {one.high:.3f}", str(one.n))
    print_table(table)
    with standard_output():
        for sentence in record.words:
            console().print(f"- {sentence}", markup=False, highlight=False)


@study.command(name="verb-number")
def verb_number(*, checkpoints: Path | None = None, common: Common = Common()) -> None:
    """Tables 1 and 2 and figures 1 to 3 of the paper: is a verb singular or plural?

    Trains the paper's model (6 layers, 8 heads, width 128) without a mask from three seeds, with a causal mask, and a
    tenth as long; then correlates every method at every layer with blank-out and with input gradients. The data are
    those of Linzen et al. 2016, published at https://github.com/TalLinzen/rnn_agreement: numpred.val and numpred.test.1
    to .5; with numpred.train in the same folder, it is trained on as well.

    Parameters
    ----------
    checkpoints
        A folder for the trained models. Those that it holds are not trained again, so a run that was killed goes on.
    """
    begin(common, *([checkpoints] if checkpoints else []))
    with stages(quiet=common.quiet) as progress:
        from attnflow.studies import verb_number, verb_report

        record = verb_number.run(
            common.data,
            small=common.small,
            seed=common.seed,
            checkpoints=checkpoints,
            pictures=common.folder,
            progress=progress,
        )
    report = verb_report.markdown(record)
    write_whole(common.folder / f"{record.study}.md", lambda file: file.write(report.encode()))
    deliver(record, common)
