"""Every metric on score functions whose answer is known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnflow.faithfulness import metrics, segmentation
from attnflow.faithfulness.metrics import METRICS

CONTRIBUTIONS = np.array([0.05, 0.3, 0.01, 0.12, 0.2, 0.02, 0.08, 0.1, 0.04, 0.03])
BY_SIZE = np.sort(CONTRIBUTIONS)[::-1]
TOKENS = len(CONTRIBUTIONS)


def additive(keep):
    """Each kept token adds its contribution."""
    return 0.05 + keep @ CONTRIBUTIONS


def multiplicative(keep):
    """Each removed token divides by the exponential of ten times its contribution."""
    return np.exp(-10 * (~keep @ CONTRIBUTIONS))


def only(token):
    """1 while one token is kept, else 0."""
    return lambda keep: keep[:, token].astype(float)


@pytest.mark.parametrize("rank", ["spearman", "kendall"])
def test_blank_out_correlation_of_true_contributions_is_one(rank):
    assert metrics.blank_out_correlation(CONTRIBUTIONS, additive, rank) == pytest.approx(1)
    assert metrics.blank_out_correlation(1 - CONTRIBUTIONS, additive, rank) == pytest.approx(-1)


def test_sizes_are_compared_with_sizes_and_signs_with_signs():
    signed = np.array([0.3, -0.2, 0.1])
    assert metrics.blank_out_correlation(np.abs(signed), lambda keep: keep @ signed) == pytest.approx(1)
    assert metrics.blank_out_correlation(signed, lambda keep: keep @ signed) == pytest.approx(1)
    assert metrics.signed_blank_out_correlation(signed, lambda keep: keep @ signed) == pytest.approx(1)
    assert metrics.signed_blank_out_correlation(-signed, lambda keep: keep @ signed) == pytest.approx(-1)
    assert metrics.gradient_correlation(signed, -signed) == pytest.approx(1)
    np.testing.assert_allclose(metrics.blank_out(lambda keep: keep @ signed, 3), signed)


def test_ties_have_their_average_rank():
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 * 5). Dense ranks 1, 2, 2, 3 would give 3 / sqrt(2 * 5).
    relevance, other = np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4])
    assert metrics.correlation(relevance, other) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert metrics.correlation(relevance, other, "kendall") == pytest.approx(5 / math.sqrt(5 * 6))


def test_comprehensiveness_is_the_sum_of_the_removed_contributions():
    counts = [1, 1, 1, 2, 5]  # 1, 5, 10, 20 and 50 % of ten tokens, rounded up
    expected = np.mean([BY_SIZE[:count].sum() for count in counts])
    assert metrics.comprehensiveness(CONTRIBUTIONS, additive) == pytest.approx(expected)


def test_sufficiency_is_the_sum_of_the_contributions_that_were_not_kept():
    expected = np.mean([BY_SIZE[count:].sum() for count in [1, 1, 1, 2, 5]])
    assert metrics.sufficiency(CONTRIBUTIONS, additive) == pytest.approx(expected)


def test_aopc_is_the_mean_fall_over_tenths():
    expected = np.mean([BY_SIZE[:count].sum() for count in range(1, 10)])
    assert METRICS["aopc"].function(CONTRIBUTIONS, additive) == pytest.approx(expected)


def test_log_odds_of_a_product_is_a_sum():
    expected = -10 * np.mean([BY_SIZE[:count].sum() for count in range(1, 10)])
    assert metrics.log_odds(CONTRIBUTIONS, multiplicative) == pytest.approx(expected)
    assert math.isfinite(metrics.log_odds(CONTRIBUTIONS, only(1)))


@pytest.mark.parametrize("order", [np.arange(TOKENS), -np.arange(TOKENS)])
def test_area_of_equal_contributions_is_a_half_in_any_order(order):
    def even(keep):
        return keep.mean(1)

    assert metrics.deletion(order * 1.0, even) == pytest.approx(0.5)
    assert metrics.insertion(order * 1.0, even) == pytest.approx(0.5)
    assert metrics.deletion_gap(order * 1.0, even) == pytest.approx(0)


def test_area_of_one_decisive_token():
    relevance, half_step = CONTRIBUTIONS, 0.5 / TOKENS
    assert metrics.deletion(relevance, only(1)) == pytest.approx(half_step)
    assert metrics.least_first_deletion(relevance, only(1)) == pytest.approx(1 - half_step)
    assert metrics.deletion_gap(relevance, only(1)) == pytest.approx(1 - 2 * half_step)
    assert metrics.insertion(relevance, only(1)) == pytest.approx(1 - half_step)


def test_many_tokens_are_removed_in_few_steps():
    asked = []

    def score(keep):
        asked.append(keep)
        return keep.mean(1)

    assert metrics.deletion(np.arange(257.0), score) == pytest.approx(0.5)
    assert len(asked[0]) == 33
    assert asked[0][0].all()
    assert not asked[0][-1].any()


def test_perturbation_is_the_area_under_accuracy():
    assert metrics.positive_perturbation(CONTRIBUTIONS, only(1)) == pytest.approx(0)
    assert metrics.negative_perturbation(CONTRIBUTIONS, only(1)) == pytest.approx(1)
    # The token of rank 5 of ten falls at 50 %: right at .1 to .4, wrong from .5 on.
    middle = int(np.argsort(-CONTRIBUTIONS)[4])
    assert metrics.positive_perturbation(CONTRIBUTIONS, only(middle)) == pytest.approx(0.35 / 0.8)


MASK = np.zeros((8, 8), dtype=bool)
MASK[:4, :4] = True
QUARTER = np.array([[1.0, 0.0], [0.0, 0.0]])


def test_maps_are_resized_as_torch_does():
    patches = np.random.default_rng(0).random((5, 7))
    expected = torch.nn.functional.interpolate(torch.from_numpy(patches)[None, None], (35, 63), mode="bilinear")
    np.testing.assert_allclose(segmentation.resized(patches, (35, 63)), expected[0, 0], atol=1e-12)


def test_a_map_that_is_the_mask_is_perfect():
    mask = MASK.repeat(2, 0).repeat(2, 1)
    for name in ("pixel-accuracy", "mean-iou", "average-precision", "pixel-auc", "pointing-game"):
        assert METRICS[name].function(mask.astype(float), mask) == pytest.approx(1), name


def test_thresholded_segmentation_by_hand():
    # Upper half called foreground, its left half is: 16 hits, 16 false alarms, 32 right rejections.
    relevance = np.zeros((8, 8))
    relevance[:4] = 1
    assert segmentation.pixel_accuracy(relevance, MASK) == pytest.approx(48 / 64)
    assert segmentation.mean_iou(relevance, MASK) == pytest.approx((16 / 32 + 32 / 48) / 2)


def test_soft_segmentation_by_hand():
    relevance, mask = np.array([[0.9, 0.8, 0.8, 0.1]]), np.array([[True, True, False, True]])
    # Thresholds .9, .8, .1: precision 1, 2/3, 3/4 and recall 1/3 more each.
    assert segmentation.average_precision(relevance, mask) == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert segmentation.pixel_auc(relevance, mask) == pytest.approx((1 + 0.5 + 0) / 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=20))
def test_pixel_auc_and_average_precision_slowly(pixels):
    relevance = np.array([[float(value) for value, _ in pixels]])
    mask = np.array([[inside for _, inside in pixels]])
    if mask.all() or not mask.any():
        assert math.isnan(segmentation.pixel_auc(relevance, mask))
        assert math.isnan(segmentation.average_precision(relevance, mask))
        return
    inside, outside = relevance[mask], relevance[~mask]
    wins = np.mean([(a > b) + 0.5 * (a == b) for a in inside for b in outside])
    assert segmentation.pixel_auc(relevance, mask) == pytest.approx(wins)
    precision = np.mean([mask[relevance >= value].mean() for value in inside])
    assert segmentation.average_precision(relevance, mask) == pytest.approx(precision)


def test_pointing_game():
    assert segmentation.pointing_game(QUARTER, MASK) == 1
    assert segmentation.pointing_game(QUARTER[::-1], MASK) == 0
    assert segmentation.pointing_game(np.ones((2, 2)), MASK) == pytest.approx(0.25)


def test_a_constant_map_is_chance():
    constant = np.full((3, 3), 0.1)
    assert segmentation.pixel_auc(constant, MASK) == 0.5
    assert segmentation.average_precision(constant, MASK) == pytest.approx(MASK.mean())
    assert math.isnan(segmentation.pixel_accuracy(constant, MASK))
    assert math.isnan(segmentation.mean_iou(constant, MASK))


def value(name, relevance):
    row = METRICS[name]
    if row.needs == "marks":
        return row.function(relevance[None], np.array([[0, 1, 0, 1, 1, 0, 0, 0, 0, 0]], dtype=bool))
    if row.needs == "mask":
        return row.function(relevance.reshape(2, 5), np.array([[0, 1, 0, 1, 1], [0] * 5], dtype=bool).repeat(3, 0))
    if row.needs in ("gradient", "randomised"):
        return row.function(relevance, CONTRIBUTIONS)
    return row.function(relevance, only(1) if row.needs == "correct" else lambda keep: np.minimum(1, additive(keep)))


@pytest.mark.parametrize("name", METRICS)
def test_direction_prefers_the_truth_to_its_opposite(name):
    if name == "randomised-weights":
        assert value(name, CONTRIBUTIONS) == pytest.approx(1)
        assert value(name, -CONTRIBUTIONS) == pytest.approx(1)
        return
    better, worse = value(name, CONTRIBUTIONS), value(name, CONTRIBUTIONS.max() - CONTRIBUTIONS)
    assert better > worse if METRICS[name].direction == "up" else better < worse


@pytest.mark.parametrize("name", [name for name, row in METRICS.items() if row.needs not in ("mask", "marks")])
def test_only_the_order_counts(name):
    assert value(name, np.exp(3 * CONTRIBUTIONS)) == pytest.approx(value(name, CONTRIBUTIONS), abs=1e-12)


@pytest.mark.parametrize("name", [name for name, row in METRICS.items() if row.needs not in ("mask", "marks")])
def test_constant_relevance_is_undefined(name):
    assert math.isnan(value(name, np.full(TOKENS, 0.1)))


@pytest.mark.parametrize("rank", ["spearman", "kendall"])
def test_a_score_that_never_changes_leaves_correlation_undefined(rank):
    assert math.isnan(metrics.blank_out_correlation(CONTRIBUTIONS, lambda keep: np.ones(len(keep)), rank))
    assert math.isnan(metrics.blank_out_correlation(np.array([1.0]), lambda keep: keep.mean(1), rank))


@pytest.mark.parametrize("name", [name for name, row in METRICS.items() if row.needs not in ("mask", "marks")])
@pytest.mark.parametrize("relevance", [np.ones((2, 3)), np.array([1.0, np.nan, 2.0])])
def test_what_is_no_relevance_is_refused(name, relevance):
    with pytest.raises(ValueError, match="finite scores"):
        value(name, relevance)


def test_what_is_no_map_or_mask_is_refused():
    with pytest.raises(ValueError, match="a mask must be booleans"):
        segmentation.pixel_auc(QUARTER, MASK.astype(int))
    with pytest.raises(ValueError, match="finite scores"):
        segmentation.pixel_auc(np.array([[np.nan, 1]]), MASK)
    with pytest.raises(ValueError, match=r"finite scores \(3,\)"):
        metrics.correlation(np.ones(2), np.ones(3))
