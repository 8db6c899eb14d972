"""A probe: a linear classifier on a frozen vision model, cross-validated, that methods explain like any other model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

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


def logistic(inputs: torch.Tensor, labels: NDArray[np.int64]) -> Head:
    """scikit-learn's logistic regression of features (case, feature) on labels (case,).

    The features are standardised for the penalty, and the head takes them as they are.
    """
    mean, deviation = inputs.mean(0), inputs.std(0).clamp_min(1e-6)
    classes = len(np.unique(labels))
    # Of two classes scikit-learn has one row of weights, the difference of the two that a softmax would have, whose
    # squares are half as much together.
    penalty = PENALTY / 2 if classes == 2 else PENALTY
    found = LogisticRegression(C=1 / penalty, tol=1e-8, max_iter=3000).fit((inputs - mean) / deviation, labels)
    weight, bias = torch.from_numpy(found.coef_), torch.from_numpy(found.intercept_)
    if classes == 2:
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    scaled = weight / deviation
    return Head(scaled, bias - scaled @ mean)


def cross_validated(inputs: torch.Tensor, grades: NDArray[np.int64], seed: int) -> Validated:
    """Probes for disease and for the grade, each photograph predicted by those of the folds that it is not in."""
    levels, level = np.unique(grades, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(grades))
    order = order[np.argsort(level[order], kind="stable")]  # each grade in turn over the folds
    fold = np.empty(len(grades), np.int64)
    fold[order] = np.arange(len(grades)) % FOLDS
    disease, predicted = np.empty(len(grades)), np.empty(len(grades), np.int64)
    heads: list[Head] = []
    for number in range(FOLDS):
        train, test = fold != number, fold == number
        heads.append(logistic(inputs[train], (level > 0).astype(np.int64)[train]))
        disease[test] = heads[-1](inputs[test]).softmax(-1)[:, 1].numpy()
        predicted[test] = levels[logistic(inputs[train], level[train])(inputs[test]).argmax(-1).numpy()]
    return Validated(fold, disease, predicted, heads)
