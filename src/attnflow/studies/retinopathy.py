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

from attnflow.capturing import demo, vision
from attnflow.faithfulness.metrics import METRICS, deletion, deletion_gap, insertion
from attnflow.faithfulness.results import Row, Summary
from attnflow.faithfulness.score import image_score, remembered
from attnflow.studies.contest import (
    STUDIED,
    Floats,
    Progress,
    baselines,
    means,
    methods,
    patches,
    ranked,
    summaries,
    table,
    topmost,
    traced,
)
from attnflow.studies.page import Explained, write_page
from attnflow.studies.probe import FOLDS, PENALTY, Probe, Validated, auc, cross_validated, features, quadratic_kappa
from attnflow.studies.record import Record, checksums, standings

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


def study(
    folder: Path,
    *,
    page: Path,
    limit: int = 16,
    measured: int = 16,
    small: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Record:
    """Train and validate the probe on a folder's photographs, measure every method on it, and write overlays.

    page: the folder for index.html and its pictures. limit: the photographs that it shows; measured: those that
    deletion and insertion are measured on. Both take the grades in turn.

    Raises FileNotFoundError without photographs, ValueError for too few of them, with disease or without.
    """
    if min(limit, measured) < 0:
        raise ValueError(f"limit and measured are numbers of photographs; they are {limit} and {measured}")
    everything = photographs(folder)
    chosen = _in_turn(everything, seed)[: SMALL if small else None]
    grades = np.array([one.grade for one in chosen])
    healthy = int(grades.min())
    if min(np.sum(grades == healthy), np.sum(grades > healthy)) < FOLDS:
        raise ValueError(f"{folder} needs at least {FOLDS} photographs without disease (grade {healthy}) and with")
    if small:
        limit, measured = min(limit, 2), min(measured, 2)
    loaded = vision.load()
    total = len(chosen) + min(max(limit, measured), len(chosen))
    prepared: list[torch.Tensor] = []
    for number, one in enumerate(chosen):
        with torch.no_grad():
            prepared.append(features(loaded.model, _pixels(loaded, one, small=small))[0].double())
        if progress:
            progress(number + 1, total)
    validated = cross_validated(torch.stack(prepared), grades, seed)
    rows: list[Row] = []
    shown: list[Explained] = []
    failed: dict[str, str] = {}
    for number, one in enumerate(chosen[: max(limit, measured)]):
        probe = Probe(loaded.model, validated.heads[validated.fold[number]]).eval()
        pixels = _pixels(loaded, one, small=small)
        maps = _maps(probe, pixels, seed, failed)
        if number < measured:
            rows += _rows(number, probe, pixels, maps)
        if number < limit:
            drawn = {name: grid for name, grid in maps.items() if name in STUDIED or name in DRAWN}
            shown.append(
                Explained(one.path, one.grade, int(validated.grade[number]), float(validated.disease[number]), drawn)
            )
        if progress:
            progress(len(chosen) + number + 1, total)
    entries = summaries(rows, seed)
    quality = _quality(validated, grades, seed)
    words = _words(quality, entries, len(chosen))
    write_page(page, shown, words)
    return Record(
        study="retinopathy",
        settings={
            "model": demo.IMAGE,
            "photographs": len(chosen),
            "measured": min(measured, len(chosen)),
            "probe": f"logistic regression on [CLS] and mean patch, penalty {PENALTY}, {FOLDS} folds",
            "disease": f"any grade above {healthy}",
            "target": "the probe's predicted class (disease or none): its logit for gradients, its probability else",
            "steps": f"{STEPS} of {100 // STEPS} % of the patches",
            "query": "[CLS], top layer",
            "seed": seed,
        },
        data=checksums([*folder.glob("train.csv"), *(one.path for one in chosen)]),
        tables={"probe": quality, "faithfulness": table(entries)} | ({"failed": failed} if failed else {}),
        standings=[one for name in MEASURES for one in standings(f"{name}, from [CLS]", topmost(entries, name))],
        words=words,
    )


def _in_turn(everything: Sequence[Photograph], seed: int) -> list[Photograph]:
    """The photographs in a random order in which the grades take turns."""
    order = np.random.default_rng(seed).permutation(len(everything))
    turn: dict[int, int] = {}
    ranks: list[tuple[int, int, int]] = []
    for number in order.tolist():
        grade = everything[number].grade
        turn[grade] = turn.get(grade, -1) + 1
        ranks.append((turn[grade], grade, number))
    return [everything[number] for _, _, number in sorted(ranks)]


def _pixels(loaded: vision.VisionModel, one: Photograph, *, small: bool) -> torch.Tensor:
    return loaded.prepare(vision.open_image(one.path), (112, 112) if small else None)


def _maps(probe: Probe, pixels: torch.Tensor, seed: int, failed: dict[str, str]) -> dict[str, Floats]:
    """The relevance of the patches (row, column) by every method from [CLS] at the top layer, and by the baselines."""
    trace = traced(probe, pixels, "predicted")
    scores = {name: one.row for name, one in methods(trace, query=0, layer=-1, failed=failed)}
    scores |= baselines(trace, probe, pixels, target="predicted", seed=seed)
    grid: Any = trace.grid
    return {name: one[patches(trace)].reshape(grid) for name, one in scores.items()}


def _rows(number: int, probe: Probe, pixels: torch.Tensor, maps: dict[str, Floats]) -> list[Row]:
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
        Row(number, name, None, measure, function(grid.ravel(), score[METRICS[measure].image_blank], STEPS))
        for name, grid in maps.items()
        for measure, function in MEASURES.items()
    ]


def _quality(validated: Validated, grades: NDArray[np.int64], seed: int) -> dict[str, Any]:
    """How good the probe is on photographs that it did not see; intervals by 1000 bootstrap samples."""
    ill = grades > grades.min()
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, len(grades), len(grades)) for _ in range(1000)]
    areas = [auc(validated.disease[one], ill[one]) for one in samples if 0 < ill[one].sum() < len(one)]
    return {
        "disease AUC": round(auc(validated.disease, ill), 4),
        "disease AUC, 95 % interval": np.quantile(areas, (0.025, 0.975)).round(4).tolist(),
        "grade accuracy": round(float(np.mean(validated.grade == grades)), 4),
        "accuracy of the commonest grade": round(
            float(np.unique(grades, return_counts=True)[1].max() / len(grades)), 4
        ),
        "grade quadratic kappa": round(quadratic_kappa(validated.grade, grades), 4),
        "photographs": len(grades),
        "with disease": int(ill.sum()),
    }


def _words(quality: dict[str, Any], entries: list[Summary], count: int) -> list[str]:
    """The findings, each from the numbers."""
    low, high = quality["disease AUC, 95 % interval"]
    words = [
        f"The probe tells disease from none with AUC {quality['disease AUC']:.2f} ({low:.2f} to {high:.2f}), each of "
        f"{count} photographs predicted by a probe that was not trained on it.",
        f"Its grades are right on {quality['grade accuracy']:.0%}, where always naming the commonest is on "
        f"{quality['accuracy of the commonest grade']:.0%}; quadratic kappa {quality['grade quadratic kappa']:.2f}.",
        "The maps show what this model attended to, or what its prediction is sensitive to: they are no diagnosis and "
        "do not mark lesions.",
    ]
    if not entries:
        return words
    gaps = {one.method: one for one in entries if one.metric == "deletion-gap"}
    known = {name: one for name, one in gaps.items() if name in STUDIED}
    best = max(known, key=lambda name: known[name].mean)
    clear = [name for name, one in gaps.items() if one.low > 0]
    return [
        *words,
        *(
            f"{name.capitalize()} on {gaps['random'].n} photographs: {ranked(topmost(entries, name))}."
            for name in MEASURES
        ),
        f"Deletion gaps whose interval lies above 0, what a random order has: {', '.join(clear) or 'none'}.",
        f"Of the methods {best} has the largest gap ({means(known.values())[best]:.3f}), nearness to the centre has "
        f"{gaps['centre'].mean:.3f} and the norm of the gradient {gaps['gradient-norm'].mean:.3f}.",
    ]
