"""What a ViT looks at in photographs of the retina: a probe for disease on DINOv2-small, and maps of what it used.

The probe is a logistic regression over the frozen model's last [CLS] and mean patch embeddings, cross-validated: every
photograph is predicted and explained by the probe of the four folds that it is not in.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from attnflow.capturing import demo, vision
from attnflow.faithfulness.metrics import METRICS, deletion, deletion_gap, insertion
from attnflow.faithfulness.results import Row, Summary
from attnflow.faithfulness.score import image_score, remembered
from attnflow.methods import METHODS
from attnflow.studies.contest import (
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
from attnflow.studies.record import Record, checksums, standings

PUBLISHED = (
    "https://www.kaggle.com/competitions/aptos2019-blindness-detection (train.csv and train_images), or any folder of "
    "GRADE_NUMBER.jpg, such as https://github.com/SRahimDR/DR-image-dataset"
)
FOLDS = 5
# On the squared weights, beside a loss summed over the examples. Of 1, 10, 100 and 1000 the best AUC in this same
# cross-validation (.61, .64, .67, .67), which is then a little too good.
PENALTY = 100.0
STEPS = 5  # of 20 % of the patches each
MEASURES = {"deletion-gap": deletion_gap, "deletion": deletion, "insertion": insertion}
SMALL = 60  # photographs in the probe
DRAWN = ("gradient-norm",)  # beside the methods, on the page
_GRADED = re.compile(r"(\d+)_[^.]*\.(jpe?g|png)", re.IGNORECASE)


class Photograph(NamedTuple):
    """A photograph of a retina and the grade of its disease; the lowest grade of a folder is none."""

    path: Path
    grade: int


class Head(NamedTuple):
    """A linear classifier: weight (class, feature), bias (class,)."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Logits (case, class) of features (case, feature)."""
        return features @ self.weight.T + self.bias


class Probe(torch.nn.Module):
    """A vision model with a linear head on its features: logits (case, class) from pixels."""

    def __init__(self, backbone: torch.nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = Head(head.weight.float(), head.bias.float())

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits (case, class) of pixels (case, channel, height, width)."""
        return self.head(features(self.backbone, pixels))


class Validated(NamedTuple):
    """A cross-validation: the fold of each photograph, its probability of disease and grade by the probe without it.

    heads: the disease head of each fold, trained without it.
    """

    fold: NDArray[np.int64]
    disease: Floats
    grade: NDArray[np.int64]
    heads: Sequence[Head]


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


def features(backbone: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """The last [CLS] embedding and the mean over the patches' (case, 2 x width)."""
    hidden = backbone(pixels).last_hidden_state
    return torch.cat([hidden[:, 0], hidden[:, 1:].mean(1)], dim=-1)


def logistic(inputs: torch.Tensor, labels: torch.Tensor, classes: int) -> Head:
    """A logistic regression of features (case, feature) on labels (case,), by L-BFGS; convex, so that no seed matters.

    The features are standardised for the penalty, and the head takes them as they are.
    """
    mean, deviation = inputs.mean(0), inputs.std(0).clamp_min(1e-6)
    standard = (inputs - mean) / deviation
    weight = torch.zeros(classes, inputs.shape[1], dtype=inputs.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=inputs.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(Head(weight, bias)(standard), labels, reduction="sum")
        value = value + 0.5 * PENALTY * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    scaled = weight.detach() / deviation
    return Head(scaled, bias.detach() - scaled @ mean)


def cross_validated(inputs: torch.Tensor, grades: NDArray[np.int64], seed: int) -> Validated:
    """Probes for disease and for the grade, each photograph predicted by those of the folds that it is not in."""
    levels, level = np.unique(grades, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(grades))
    order = order[np.argsort(level[order], kind="stable")]  # each grade is spread evenly over the folds
    fold = np.empty(len(grades), np.int64)
    fold[order] = np.arange(len(grades)) % FOLDS
    disease, predicted = np.empty(len(grades)), np.empty(len(grades), np.int64)
    heads: list[Head] = []
    for number in range(FOLDS):
        train, test = torch.from_numpy(fold != number), torch.from_numpy(fold == number)
        heads.append(logistic(inputs[train], torch.from_numpy(level > 0).long()[train], 2))
        disease[fold == number] = heads[-1](inputs[test]).softmax(-1)[:, 1].numpy()
        of_grade = logistic(inputs[train], torch.from_numpy(level)[train], len(levels))
        predicted[fold == number] = levels[of_grade(inputs[test]).argmax(-1).numpy()]
    return Validated(fold, disease, predicted, heads)


def auc(scores: Floats, positive: NDArray[np.bool_]) -> float:
    """The area under the ROC curve: how often a positive has more than a negative; a tie counts half."""
    statistic = stats.mannwhitneyu(scores[positive], scores[~positive]).statistic
    return float(statistic / (positive.sum() * (~positive).sum()))


def quadratic_kappa(predicted: NDArray[np.int64], true: NDArray[np.int64]) -> float:
    """Cohen's kappa with squared distances of grades (the score of APTOS 2019): 1 for agreement, 0 for chance."""
    by_chance = np.mean((predicted[:, None] - true[None, :]) ** 2)
    return float(1 - np.mean((predicted - true) ** 2) / by_chance) if by_chance else math.nan


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
            drawn = {name: grid for name, grid in maps.items() if name in METHODS or name in DRAWN}
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
    known = {name: one for name, one in gaps.items() if name in METHODS}
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
