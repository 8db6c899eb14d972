"""A probe: a linear classifier on a frozen vision model, cross-validated, that methods explain like any other model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from attnflow.studies.comparison import Floats

FOLDS = 5
# On the squared weights, beside a loss summed over the examples. Of 1, 10, 100 and 1000 the best AUC in this same
# cross-validation (.61, .64, .67, .67), which is then a little too good.
PENALTY = 100.0


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
