"""The experiments, the paper's own and ours. `STUDIES` is their table, and `run` the one way to run any of them.

A study is a row here and a module of the steps that `Steps` names. Importing the table loads none of these modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from attnflow.studies.record import Record

# Called with what is done, the steps done, and all steps.
Progress: TypeAlias = Callable[[str, int, int], object]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a study takes. Options that only some studies take are fields of a class of their own."""

    small: bool = False
    """Few examples and little training: minutes instead of an hour, to see that it works."""
    seed: int = 0
    """Of the sample, the random scores, the training and the intervals."""

    def __post_init__(self) -> None:
        """Refuse numbers that count nothing: ValueError."""
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{name} takes a whole number from 0 on; it is {value}")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Of a study that takes another model."""

    model: str | None = None
    """Another model for the study, in a local folder or on the Hugging Face hub."""


@dataclass(frozen=True, kw_only=True)
class PhotographOptions(Options):
    """Of a study that shows photographs."""

    limit: int = 16
    """How many photographs the page shows, the grades in turn."""
    measured: int = 16
    """How many photographs deletion and insertion are measured on; each takes a hundred forward passes."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """Of a study that trains models."""

    checkpoints: Path | None = None
    """A folder for the trained models. Those that it holds are not trained again, so a run that was killed goes on."""


class Steps(Protocol):
    """The functions that the module of a study holds."""

    def load(self, data: Path, options: Any, progress: Progress) -> Any:
        """Read the data and load, or train, the models.

        Raises FileNotFoundError where data are absent, with where they are published.
        """
        ...

    def measure(self, loaded: Any, progress: Progress) -> Record:
        """Measure every method. The record holds the numbers, and no sentence yet."""
        ...

    def sentences(self, record: Record) -> list[str]:
        """What the numbers of the record say, one sentence each."""
        ...

    def page(self, loaded: Any, record: Record, path: Path, progress: Progress) -> None:
        """Write the study's page, or its picture. A study whose row names no page has no such function."""
        ...


@dataclass(frozen=True)
class Study:
    """An experiment.

    question: one sentence. data: which data it needs and where they are published, and what else a reader must know.
    module: the module of `attnflow.studies` with its steps. options: what it takes. page: the file that it writes
    beside its record, under the folder of the studies.
    """

    name: str
    question: str
    data: str
    module: str
    options: type[Options] = Options
    page: str | None = None

    @property
    def steps(self) -> Steps:
        """The functions of its module, which is loaded now.

        Raises ModuleNotFoundError where the module needs the extra "studies".
        """
        try:
            return cast("Steps", import_module(f"attnflow.studies.{self.module}"))
        except ModuleNotFoundError as error:
            needed = str(error.name).partition(".")[0]
            raise ModuleNotFoundError(
                f"the study {self.name} needs {needed}: pip install 'attnflow[studies]'"
            ) from error


STUDIES: dict[str, Study] = {
    row.name: row
    for row in (
        Study(
            "segmentation",
            "Does relevance lie on the object? 30 photographs of horses with masks, seen by the packaged DINOv2-small.",
            "The data, weizmann_horses, are published at https://github.com/shenshutao/image_segmentation.",
            "segmentation",
        ),
        Study(
            "sst2",
            "Table 3 of Abnar & Zuidema 2020: correlation with gradients and blank-out on the test set of SST-2.",
            "The data, sst2, are published at https://github.com/clairett/pytorch-sentiment-classification. The model "
            "is a text classifier (0 negative, 1 positive): by default the packaged MiniLM with the adapter in the "
            "data, adapters/sst2_minilm_lora.safetensors.",
            "sst2",
            ModelOptions,
        ),
        Study(
            "retinopathy",
            "What a ViT looks at in photographs of the retina: a probe on DINOv2-small, overlays, and a page of them.",
            "The data are APTOS 2019 as it is published (train.csv, train_images), at "
            "https://www.kaggle.com/competitions/aptos2019-blindness-detection, or a folder of GRADE_NUMBER.jpg whose "
            "lowest grade is no disease, such as https://github.com/SRahimDR/DR-image-dataset. The maps are no "
            "diagnosis.",
            "retinopathy",
            PhotographOptions,
            page="retinopathy/index.html",
        ),
        Study(
            "pronouns",
            "Figure 4 of Abnar & Zuidema 2020: does relevance point to the referent that a language model prefers?",
            "A masked model is asked for the pronoun at its mask, a causal one for the next word. The data, "
            "pronoun/winogender_templates.tsv, are published at https://github.com/rudinger/winogender-schemas. The "
            "model is a masked or causal language model: by default stories260K (causal, "
            "https://huggingface.co/karpathy/tinyllamas) from the data.",
            "pronouns",
            ModelOptions,
            page="pronouns.png",
        ),
        Study(
            "verb-number",
            "Tables 1 and 2 and figures 1 to 3 of Abnar & Zuidema 2020: is a verb singular or plural?",
            "Trains the paper's model (6 layers, 8 heads, width 128) without a mask from three seeds, with a causal "
            "mask, and a tenth as long; then correlates every method at every layer with blank-out and with input "
            "gradients. The data are those of Linzen et al. 2016, published at "
            "https://github.com/TalLinzen/rnn_agreement: numpred.val and numpred.test.1 to .5; with numpred.train in "
            "the same folder, it is trained on as well.",
            "verb_number",
            TrainingOptions,
            page="verb-number.md",
        ),
    )
}


def run(
    study: Study,
    data: Path,
    folder: Path,
    options: Options | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Record:
    """Run a study and write its record, its page and the leaderboard of all studies into a folder; returns the record.

    The numbers are on disk before sentences are made of them and the page is drawn, so that a fault there loses none.

    Raises FileNotFoundError where data are absent, ValueError for options or data that cannot be used.
    """
    steps = study.steps
    loaded = steps.load(data, options or study.options(), progress)
    record = steps.measure(loaded, progress)
    record.save(folder)
    record = replace(record, words=steps.sentences(record))
    record.save(folder)
    if study.page:
        path = folder / study.page
        path.parent.mkdir(parents=True, exist_ok=True)
        steps.page(loaded, record, path, progress)
    return record
