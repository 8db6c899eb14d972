"""The tests of faithfulness: one number for how well a relevance agrees with what the model does, or with a mask.

Each is a function of the relevance of the tokens that may be removed, and of the model as a score function over the
same tokens (`faithfulness.score`). So special tokens are in or out for all alike, by how the score was made.
Tokens of equal relevance keep the order of the input. NaN means that the test is undefined: a correlation with
something constant, an order of tokens that are all alike, a mask that is empty or covers all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.integrate import trapezoid

from attnflow.faithfulness import segmentation
from attnflow.faithfulness.segmentation import alike

Floats: TypeAlias = NDArray[np.float64]
ScoreFunction: TypeAlias = Callable[[NDArray[np.bool_]], Floats]
Rank: TypeAlias = Literal["spearman", "kendall"]

ERASER_SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)
TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


class Curve(NamedTuple):
    """The score as tokens are removed or shown, in even steps.

    tokens: how many there are. scores (step,): with none of them removed or shown, ..., with all of them.
    """

    tokens: int
    scores: tuple[float, ...]

    @property
    def shares(self) -> Floats:
        """The share of the tokens that is removed or shown at each step, from 0 to 1."""
        return _steps(self.tokens, len(self.scores) - 1) / self.tokens

    @property
    def area(self) -> float:
        """The area under the curve, by the trapezoidal rule."""
        return float(trapezoid(self.scores, self.shares))


def correlation(relevance: Floats, other: Floats, rank: Rank = "spearman") -> float:
    """The rank correlation of two scores of the same tokens, in [-1, 1]; ties have their average rank.

    rank: "spearman", or "kendall" (tau-b).
    """
    _check(other)
    _check(relevance, len(other))
    if alike(relevance) or alike(other):
        return math.nan
    result: Any = (stats.spearmanr if rank == "spearman" else stats.kendalltau)(relevance, other)
    return float(result.statistic)


def blank_out(score: ScoreFunction, count: int) -> Floats:
    """The change of the score when each token alone is removed (token,): score(x) - score(x without it)."""
    keep = np.concatenate([np.ones((1, count), np.bool_), ~np.eye(count, dtype=np.bool_)])
    scores = score(keep)
    return scores[0] - scores[1:]


def blank_out_correlation(relevance: Floats, score: ScoreFunction, rank: Rank = "spearman") -> float:
    """The rank correlation of the size of relevance with that of the change when a token is blanked out, in [-1, 1].

    Abnar & Zuidema 2020, whose code ranks ties densely; here they have their average rank. Sizes are compared with
    sizes, so that a score against the target counts as much as one for it.
    """
    _check(relevance)
    return correlation(np.abs(relevance), np.abs(blank_out(score, len(relevance))), rank)


def signed_blank_out_correlation(relevance: Floats, score: ScoreFunction) -> float:
    """The rank correlation of relevance with the change when a token is blanked out, signs and all, in [-1, 1].

    A token speaks for the target where the score falls without it. Relevance that has no sign can rank such tokens
    first, but not those that speak against the target last.
    """
    _check(relevance)
    return correlation(relevance, blank_out(score, len(relevance)))


def gradient_correlation(relevance: Floats, gradient: Floats, rank: Rank = "spearman") -> float:
    """The rank correlation of the size of relevance with that of a gradient, in [-1, 1] (Abnar & Zuidema 2020)."""
    return correlation(np.abs(relevance), np.abs(gradient), rank)


def randomised_correlation(relevance: Floats, randomised: Floats) -> float:
    """The size of the rank correlation with the relevance for a model whose weights were shuffled, in [0, 1].

    Adebayo et al. 2018, with all weights at once; `randomisation.cascade` goes layer after layer. What stays the same
    when the model forgets all that it learnt says nothing of what it learnt.
    """
    return abs(correlation(relevance, randomised))


def comprehensiveness(relevance: Floats, score: ScoreFunction, shares: Sequence[float] = ERASER_SHARES) -> float:
    """The fall of the score when the most relevant tokens are removed, the mean over shares of the tokens.

    DeYoung et al. 2020 (ERASER). A share is rounded up, so that at least one token is removed. Also the
    area over the perturbation curve (AOPC), with other shares.
    """
    scores = _curve(relevance, score, shares)
    return float(np.mean(scores[0] - scores[1:]))


def sufficiency(relevance: Floats, score: ScoreFunction, shares: Sequence[float] = ERASER_SHARES) -> float:
    """The fall of the score when only the most relevant tokens are kept, the mean over shares of the tokens.

    DeYoung et al. 2020 (ERASER). A share is rounded up.
    """
    _check(relevance)
    if alike(relevance):
        return math.nan
    kept = ~first_removed(relevance, [len(relevance), *_counts(shares, len(relevance))])
    scores = score(kept)
    return float(np.mean(scores[0] - scores[1:]))


def log_odds(relevance: Floats, score: ScoreFunction, shares: Sequence[float] = TENTHS) -> float:
    """The logarithm of the score with the most relevant tokens removed over that without, the mean over shares.

    Shrikumar et al. 2017, as Chen, Zheng & Ji 2020 use it, who remove 20 %. The score is a probability; one of 0 counts
    as the smallest normal number of single precision.
    """
    scores = np.log(np.maximum(_curve(relevance, score, shares), np.finfo(np.float32).tiny))
    return float(np.mean(scores[1:] - scores[0]))


def deletion(relevance: Floats, score: ScoreFunction, steps: int = 32) -> float:
    """The area under the score as tokens are removed, the most relevant first; the share removed runs from 0 to 1.

    Petsiuk et al. 2018 (RISE), by tokens instead of pixels, at most `steps` of them even steps.
    """
    return _area(deletion_curve(relevance, score, steps))


def deletion_curve(relevance: Floats, score: ScoreFunction, steps: int = 32) -> Curve | None:
    """The curve whose area `deletion` is; None where all tokens are alike."""
    return _by_steps(lambda counts: first_removed(relevance, counts), relevance, score, steps)


def least_first_deletion(relevance: Floats, score: ScoreFunction, steps: int = 32) -> float:
    """`deletion` with the least relevant tokens first."""
    return _area(least_first_deletion_curve(relevance, score, steps))


def least_first_deletion_curve(relevance: Floats, score: ScoreFunction, steps: int = 32) -> Curve | None:
    """The curve whose area `least_first_deletion` is; None where all tokens are alike."""
    return deletion_curve(-relevance, score, steps)


def deletion_gap(relevance: Floats, score: ScoreFunction, steps: int = 32) -> float:
    """`least_first_deletion` less `deletion`: how far the order matters; 0 is expected of a random one."""
    return least_first_deletion(relevance, score, steps) - deletion(relevance, score, steps)


def insertion(relevance: Floats, score: ScoreFunction, steps: int = 32) -> float:
    """The area under the score as tokens are put on a blank, the most relevant first (Petsiuk et al. 2018, RISE).

    The area runs over the share that is shown. But for ties it is `least_first_deletion` with another blank: images are
    shown on a blur.
    """
    return _area(insertion_curve(relevance, score, steps))


def insertion_curve(relevance: Floats, score: ScoreFunction, steps: int = 32) -> Curve | None:
    """The curve whose area `insertion` is; None where all tokens are alike."""
    return _by_steps(lambda counts: ~first_removed(relevance, counts), relevance, score, steps)


def positive_perturbation(relevance: Floats, correct: ScoreFunction) -> float:
    """The area under accuracy as the most relevant 10 to 90 % of the tokens are removed, divided by its width.

    Chefer et al. 2021, who leave it undivided (at most 0.8). correct: a score that is 1 where the model still predicts
    the target, and 0 elsewhere.
    """
    scores = _curve(relevance, correct, TENTHS)[1:]
    return float(trapezoid(scores, TENTHS)) / (TENTHS[-1] - TENTHS[0])


def negative_perturbation(relevance: Floats, correct: ScoreFunction) -> float:
    """`positive_perturbation` with the least relevant tokens first."""
    return positive_perturbation(-relevance, correct)


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    direction: whether more ("up") or less ("down") is better. needs: what the function takes beside the relevance: a
    "score", a score that is 1 where the prediction is "correct", a "gradient" to correlate with, the relevance for a
    "randomised" model, a "mask" of pixels, "marks" on tokens. kinds: the data that it is measured on when no metrics
    are named. image_blank: what removed patches become. curve: what the function is the area of, if it is one.
    """

    function: Callable[..., float]
    direction: Literal["up", "down"]
    needs: Literal["score", "correct", "gradient", "randomised", "mask", "marks"]
    kinds: tuple[Literal["text", "image", "mask", "marks"], ...]
    source: str
    image_blank: Literal["zero", "blur"] = "zero"
    curve: Callable[[Floats, ScoreFunction], Curve | None] | None = None


METRICS: dict[str, Metric] = {
    "blank-out": Metric(blank_out_correlation, "up", "score", ("text", "image"), "Abnar & Zuidema 2020"),
    "blank-out-kendall": Metric(
        partial(blank_out_correlation, rank="kendall"),
        "up",
        "score",
        ("text",),
        "Abnar & Zuidema 2020, Kendall's tau-b",
    ),
    "signed-blank-out": Metric(
        signed_blank_out_correlation, "up", "score", ("text", "image"), "blank-out, signs and all"
    ),
    "gradient": Metric(gradient_correlation, "up", "gradient", ("text", "image"), "Abnar & Zuidema 2020"),
    "gradient-kendall": Metric(
        partial(gradient_correlation, rank="kendall"),
        "up",
        "gradient",
        ("text",),
        "Abnar & Zuidema 2020, Kendall's tau-b",
    ),
    "comprehensiveness": Metric(comprehensiveness, "up", "score", ("text",), "DeYoung et al. 2020"),
    "sufficiency": Metric(sufficiency, "down", "score", ("text",), "DeYoung et al. 2020"),
    "aopc": Metric(
        partial(comprehensiveness, shares=TENTHS),
        "up",
        "score",
        ("text",),
        "Samek et al. 2017; 10 to 90 % of the tokens",
    ),
    "log-odds": Metric(log_odds, "down", "score", ("text",), "Shrikumar et al. 2017"),
    "insertion": Metric(insertion, "up", "score", ("image",), "Petsiuk et al. 2018", "blur", curve=insertion_curve),
    "deletion": Metric(
        deletion,
        "down",
        "score",
        ("text", "image"),
        "Petsiuk et al. 2018: most influential first",
        curve=deletion_curve,
    ),
    "least-first-deletion": Metric(
        least_first_deletion,
        "up",
        "score",
        ("text", "image"),
        "Mehri et al. 2025: least influential first",
        curve=least_first_deletion_curve,
    ),
    "deletion-gap": Metric(deletion_gap, "up", "score", ("text", "image"), "Mehri et al. 2025"),
    "positive-perturbation": Metric(positive_perturbation, "down", "correct", ("image",), "Chefer et al. 2021"),
    "negative-perturbation": Metric(negative_perturbation, "up", "correct", ("image",), "Chefer et al. 2021"),
    "randomised-weights": Metric(randomised_correlation, "down", "randomised", (), "Adebayo et al. 2018"),
    "pixel-accuracy": Metric(segmentation.pixel_accuracy, "up", "mask", ("mask",), "Chefer et al. 2021"),
    "mean-iou": Metric(segmentation.mean_iou, "up", "mask", ("mask",), "Chefer et al. 2021"),
    "average-precision": Metric(
        segmentation.average_precision, "up", "mask", ("mask",), "Chefer et al. 2021; foreground only"
    ),
    "pixel-auc": Metric(segmentation.pixel_auc, "up", "mask", ("mask",), "area under the ROC curve"),
    "pointing-game": Metric(segmentation.pointing_game, "up", "mask", ("mask",), "Zhang et al. 2016"),
    "token-auc": Metric(segmentation.pixel_auc, "up", "marks", ("marks",), "area under the ROC curve, by tokens"),
    "token-average-precision": Metric(
        segmentation.average_precision, "up", "marks", ("marks",), "DeYoung et al. 2020: agreement with rationales"
    ),
    "token-pointing": Metric(
        segmentation.pointing_game, "up", "marks", ("marks",), "Zhang et al. 2016, by tokens instead of pixels"
    ),
}


def first_removed(relevance: Floats, counts: Sequence[int]) -> NDArray[np.bool_]:
    """Keep-masks (case, token) in which the `counts` most relevant tokens are removed."""
    rank = np.empty(len(relevance), np.int64)
    rank[np.argsort(-relevance, kind="stable")] = np.arange(len(relevance))
    return rank >= np.asarray(counts)[:, None]


def _curve(relevance: Floats, score: ScoreFunction, shares: Sequence[float]) -> Floats:
    """Scores (1 + share,): of the whole input, then with each share of the most relevant tokens removed."""
    _check(relevance)
    if alike(relevance):
        return np.full(1 + len(shares), math.nan)
    return score(first_removed(relevance, [0, *_counts(shares, len(relevance))]))


def _by_steps(
    masks: Callable[[Sequence[int]], NDArray[np.bool_]], relevance: Floats, score: ScoreFunction, steps: int
) -> Curve | None:
    """The score of keep-masks for rising numbers of tokens; None where there is no order of them."""
    _check(relevance)
    if alike(relevance):
        return None
    count = len(relevance)
    return Curve(count, tuple(score(masks(_steps(count, min(count, steps)).tolist())).tolist()))


def _steps(count: int, steps: int) -> NDArray[np.int64]:
    """Rising numbers of `count` tokens (1 + steps,), from none to all."""
    return np.round(np.linspace(0, count, steps + 1)).astype(np.int64)


def _area(curve: Curve | None) -> float:
    return math.nan if curve is None else curve.area


def _counts(shares: Sequence[float], count: int) -> list[int]:
    """Numbers of tokens, shares rounded up; the small step back keeps 0.1 x 30 at 3."""
    return [math.ceil(share * count - 1e-9) for share in shares]


def _check(relevance: Floats, count: int | None = None) -> None:
    if relevance.ndim != 1 or not np.isfinite(relevance).all() or len(relevance) != (count or len(relevance)):
        expected = f"({count},)" if count else "(token,)"
        raise ValueError(f"relevance must be finite scores {expected}; shape {relevance.shape} was given")
