"""What a ViT looks at in photographs of the retina: a probe for disease on DINOv2-small, and maps of what it used.

The probe is a logistic regression over the frozen model's last [CLS] and mean patch embeddings, cross-validated: every
photograph is predicted and explained by the probe of the four folds that it is not in.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from attnflow.capturing import demo, vision
from attnflow.faithfulness.metrics import METRICS, deletion, deletion_gap, insertion
from attnflow.faithfulness.results import Row
from attnflow.faithfulness.score import image_score, remembered
from attnflow.studies import PhotographOptions, Progress
from attnflow.studies.comparison import (
    STUDIED,
    Failures,
    Floats,
    baselines,
    best,
    means,
    methods,
    number,
    patches,
    ranked,
    summaries,
    table,
    topmost,
    traced,
)
from attnflow.studies.page import Explained, write_page
from attnflow.studies.probe import FOLDS, PENALTY, Probe, Validated, cross_validated, features
from attnflow.studies.record import Record, checksums, scored

PUBLISHED = (
    "https://www.kaggle.com/competitions/aptos2019-blindness-detection (train.csv and train_images), or any folder of "
    "GRADE_NUMBER.jpg, such as https://github.com/SRahimDR/DR-image-dataset"
)
STEPS = 5  # of 20 % of the patches each
MEASURES = {"deletion-gap": deletion_gap, "deletion": deletion, "insertion": insertion}
SMALL = 60  # photographs in the probe
DRAWN = ("gradient-norm",)  # beside the methods, on the page
_GRADED = re.compile(r"(\d+)_[^.]*\.(jpe?g|png)", re.IGNORECASE)


class Photograph(NamedTuple):
    """A photograph of a retina and the grade of its disease; the lowest grade of a folder is none."""

    path: Path
    grade: int


def photographs(folder: Path) -> list[Photograph]:
    """The graded photographs of a folder: of APTOS 2019 as it is published, or named GRADE_NUMBER.jpg.

    Raises FileNotFoundError if there are none, or one that train.csv names is absent, with where they are published.
    """
    listed = folder / "train.csv"
    if listed.is_file():
        with listed.open(newline="", encoding="utf-8") as file:
            rows = [(row["id_code"], int(row["diagnosis"])) for row in csv.DictReader(file)]
        found = [Photograph(folder / "train_images" / f"{name}.png", grade) for name, grade in rows]
        absent = [one.path for one in found if not one.path.is_file()]
        if absent:
            raise FileNotFoundError(
                f"{listed} names {absent[0]}, which is not there; data are published at {PUBLISHED}"
            )
    else:
        matches = ((path, _GRADED.fullmatch(path.name)) for path in sorted(folder.glob("*")))
        found = [Photograph(path, int(match[1])) for path, match in matches if match]
    if not found:
        raise FileNotFoundError(f"no graded photographs are in {folder}; such data are published at {PUBLISHED}")
    return found


class Loaded(NamedTuple):
    """The photographs in the order in which they are measured and shown, their model, and its probes."""

    options: PhotographOptions
    folder: Path
    vision: vision.VisionModel
    photographs: list[Photograph]
    probes: Validated

    @property
    def grades(self) -> NDArray[np.int64]:
        """The grade of each photograph."""
        return np.array([one.grade for one in self.photographs])

    def pixels(self, place: int) -> torch.Tensor:
        """A photograph as the model takes it."""
        return _pixels(self.vision, self.photographs[place], small=self.options.small)

    def probe(self, place: int) -> Probe:
        """The probe of the folds that a photograph is not in."""
        return Probe(self.vision.model, self.probes.heads[self.probes.fold[place]]).eval()

    def count(self, wanted: int) -> int:
        """How many photographs are taken where so many are wanted."""
        return min(wanted, len(self.photographs), 2 if self.options.small else wanted)


def load(data: Path, options: PhotographOptions, progress: Progress) -> Loaded:
    """The photographs of a folder, or of fundus_dr in it, the grades in turn, and the probes, trained and validated.

    Raises FileNotFoundError without photographs, ValueError for too few of them, with disease or without.
    """
    folder = data / "fundus_dr" if (data / "fundus_dr").is_dir() else data
    chosen = _in_turn(photographs(folder), options.seed)[: SMALL if options.small else None]
    grades = np.array([one.grade for one in chosen])
    healthy = int(grades.min())
    if min(np.sum(grades == healthy), np.sum(grades > healthy)) < FOLDS:
        raise ValueError(f"{folder} needs at least {FOLDS} photographs without disease (grade {healthy}) and with")
    loaded = vision.load()
    prepared: list[torch.Tensor] = []
    for place, one in enumerate(chosen):
        with torch.no_grad():
            prepared.append(features(loaded.model, _pixels(loaded, one, small=options.small))[0].double())
        progress("photographs", place + 1, len(chosen))
    probes = cross_validated(torch.stack(prepared), grades, options.seed)
    return Loaded(options, folder, loaded, chosen, probes)


def measure(loaded: Loaded, progress: Progress) -> Record:
    """Measure the probe, and every method on it."""
    options, count = loaded.options, loaded.count(loaded.options.measured)
    rows: list[Row] = []
    failures = Failures()
    for place in range(count):
        probe, pixels = loaded.probe(place), loaded.pixels(place)
        rows += _rows(place, probe, pixels, _maps(probe, pixels, options.seed, failures))
        progress("measuring", place + 1, count)
    entries = summaries(rows, options.seed)
    return Record(
        study="retinopathy",
        settings={
            "model": demo.IMAGE,
            "photographs": len(loaded.photographs),
            "measured": count,
            "probe": f"logistic regression on [CLS] and mean patch, penalty {PENALTY}, {FOLDS} folds",
            "disease": f"any grade above {loaded.grades.min()}",
            "target": "the probe's predicted class (disease or none): its logit for gradients, its probability else",
            "steps": f"{STEPS} of {100 // STEPS} % of the patches",
            "query": "[CLS], top layer",
            "seed": options.seed,
        },
        data=checksums([*loaded.folder.glob("train.csv"), *(one.path for one in loaded.photographs)]),
        tables={
            "probe": _quality(loaded.probes, loaded.grades, options.seed),
            "faithfulness": table(entries),
            **failures.table,
        },
        scores=[one for name in MEASURES for one in scored(f"{name}, from [CLS]", topmost(entries, name))],
    )


def sentences(record: Record) -> list[str]:
    """What the numbers say, one sentence each."""
    quality = record.tables["probe"]
    low, high = quality["disease AUC, 95 % interval"]
    words = [
        f"The probe tells disease from none with AUC {quality['disease AUC']:.2f} ({low:.2f} to {high:.2f}), each of "
        f"{quality['photographs']} photographs predicted by a probe that was not trained on it.",
        f"Its grades are right on {quality['grade accuracy']:.0%}, where always naming the commonest is on "
        f"{quality['accuracy of the commonest grade']:.0%}; quadratic kappa {quality['grade quadratic kappa']:.2f}.",
        "The maps show what this model attended to, or what its prediction is sensitive to: they are no diagnosis and "
        "do not mark lesions.",
    ]
    measured = {name: record.of(f"{name}, from [CLS]") for name in MEASURES}
    if not measured["deletion-gap"]:
        return words
    gaps = means(measured["deletion-gap"])
    clear = [one.method for one in measured["deletion-gap"] if one.low > 0]
    return [
        *words,
        *(
            f"{name.capitalize()} on {record.settings['measured']} photographs: {ranked(found)}."
            for name, found in measured.items()
        ),
        f"Deletion gaps whose interval lies above 0, what a random order has: {', '.join(clear) or 'none'}.",
        f"Of the methods {best(gaps)} has the largest gap ({number(gaps[best(gaps)])}), nearness to the centre has "
        f"{number(gaps['centre'])} and the norm of the gradient {number(gaps['gradient-norm'])}.",
    ]


def page(loaded: Loaded, record: Record, path: Path, progress: Progress) -> None:
    """Write the page of photographs with their maps."""
    shown: list[Explained] = []
    for place in range(count := loaded.count(loaded.options.limit)):
        maps = _maps(loaded.probe(place), loaded.pixels(place), loaded.options.seed, Failures())
        drawn = {name: grid for name, grid in maps.items() if name in STUDIED or name in DRAWN}
        one, found = loaded.photographs[place], loaded.probes
        shown.append(Explained(one.path, one.grade, int(found.grade[place]), float(found.disease[place]), drawn))
        progress("drawing", place + 1, count)
    write_page(path, shown, record.words)


def _in_turn(everything: Sequence[Photograph], seed: int) -> list[Photograph]:
    """The photographs in a random order in which the grades take turns."""
    order = np.random.default_rng(seed).permutation(len(everything))
    turn: dict[int, int] = {}
    ranks: list[tuple[int, int, int]] = []
    for place in order.tolist():
        grade = everything[place].grade
        turn[grade] = turn.get(grade, -1) + 1
        ranks.append((turn[grade], grade, place))
    return [everything[place] for _, _, place in sorted(ranks)]


def _pixels(loaded: vision.VisionModel, one: Photograph, *, small: bool) -> torch.Tensor:
    return loaded.prepare(vision.open_image(one.path), (112, 112) if small else None)


def _maps(probe: Probe, pixels: torch.Tensor, seed: int, failures: Failures) -> dict[str, Floats]:
    """The relevance of the patches (row, column) by every method from [CLS] at the top layer, and by the baselines."""
    trace = traced(probe, pixels, "predicted")
    scores = {name: one.row for name, one in methods(trace, query=0, layer=-1, failures=failures)}
    scores |= baselines(trace, probe, pixels, target="predicted", seed=seed)
    grid: Any = trace.grid
    return {name: one[patches(trace)].reshape(grid) for name, one in scores.items()}


def _rows(example: int, probe: Probe, pixels: torch.Tensor, maps: dict[str, Floats]) -> list[Row]:
    with torch.no_grad():
        target = int(probe(pixels).argmax())
    grid: Any = next(iter(maps.values())).shape
    roles = ["prefix", *["patch"] * (grid[0] * grid[1])]
    score = {
        METRICS[name].image_blank: remembered(
            image_score(probe, pixels, roles, grid, target, blank=METRICS[name].image_blank, batch_size=16)
        )
        for name in MEASURES
    }
    return [
        Row(example, name, None, measure, function(grid.ravel(), score[METRICS[measure].image_blank], STEPS))
        for name, grid in maps.items()
        for measure, function in MEASURES.items()
    ]


def _quality(validated: Validated, grades: NDArray[np.int64], seed: int) -> dict[str, Any]:
    """How good the probe is on photographs that it did not see; intervals by 1000 bootstrap samples."""
    ill = grades > grades.min()
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, len(grades), len(grades)) for _ in range(1000)]
    areas = [roc_auc_score(ill[one], validated.disease[one]) for one in samples if 0 < ill[one].sum() < len(one)]
    return {
        "disease AUC": round(float(roc_auc_score(ill, validated.disease)), 4),
        "disease AUC, 95 % interval": np.quantile(areas, (0.025, 0.975)).round(4).tolist(),
        "grade accuracy": round(float(np.mean(validated.grade == grades)), 4),
        "accuracy of the commonest grade": round(
            float(np.unique(grades, return_counts=True)[1].max() / len(grades)), 4
        ),
        "grade quadratic kappa": round(float(cohen_kappa_score(validated.grade, grades, weights="quadratic")), 4),
        "photographs": len(grades),
        "with disease": int(ill.sum()),
    }
