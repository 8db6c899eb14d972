"""route_test(): which edges of a method are the strongest, counted by other means, and what taking them out does."""

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from attnflow import capture, flow, knockout, min_cut, paths
from attnflow.faithfulness.routes import route_test
from classifiers import small_bert, small_vit, sst2, sst2_examples, tokenizer
from families import images

TEXT = "The keys to the cabinet are on the table."
K = 6


@pytest.fixture(scope="module")
def bert():
    return small_bert(), tokenizer()


@pytest.fixture(scope="module")
def trace(bert):
    return capture(bert[0], TEXT, tokenizer=bert[1], target=0)


def strongest(carried):
    """The K edges (layer, query, key) between positions that carry most, of the last layer from [CLS]."""
    own = {edge: amount for edge, amount in carried.items() if edge[1] != edge[2] and (edge[0] < 1 or edge[1] == 0)}
    return sorted(own, key=lambda edge: -own[edge])[:K]


def by_raw(trace):
    return {
        (number, query, key): float(layer.attention().mean(0)[query, key])
        for number, layer in enumerate(trace.layers)
        for query, key in product(range(len(trace.tokens)), repeat=2)
    }


def by_rollout(trace):
    """Every route from [CLS] down, each with the product of its edges."""
    lower, upper = (0.5 * layer.attention().mean(0).double() + 0.5 * torch.eye(12) for layer in trace.layers)
    carried = Counter()
    for middle, token in product(range(len(trace.tokens)), repeat=2):
        amount = float(upper[0, middle] * lower[middle, token])
        carried[1, 0, middle] += amount
        carried[0, middle, token] += amount
    return carried


def by_flow(trace):
    carried = Counter()
    for token in range(len(trace.tokens)):
        for path in paths(trace, 0, token, top=None):
            for upper, lower in pairwise(path.steps):
                carried[upper.layer, upper.position, lower.position] += path.amount
    return carried


def by_gradient(trace):
    return {
        edge: abs(float((layer.attention() * layer.gradient.of(slice(None))).mean(0)[edge[1:]]))
        for number, layer in enumerate(trace.layers)
        for edge in product([number], range(len(trace.tokens)), range(len(trace.tokens)))
    }


BY_HAND = {"raw": by_raw, "rollout": by_rollout, "flow": by_flow, "size-of-gradient-sum-over-layers": by_gradient}


def test_the_strongest_edges_are_taken_out(bert, trace):
    model, words = bert
    found = route_test(model, TEXT, words, 0, list(BY_HAND), K, draws=2)
    for name, by_hand in BY_HAND.items():
        edges = strongest(by_hand(trace))
        expected = knockout(model, TEXT, [edges], target=0, tokenizer=words)
        assert found.taken[name].change == pytest.approx(expected.changes[0], rel=1e-3, abs=1e-4), name
        assert found.taken[name].edges == K
    assert found.base == pytest.approx(expected.base)
    assert len({round(taken.change, 4) for taken in found.taken.values()}) > 2


def test_the_minimum_cut_of_the_strongest_token(bert, trace):
    model, words = bert
    text = [place for place, role in enumerate(trace.roles) if role == "text"]
    token = text[int(flow(trace, query=0).row[text].argmax())]
    cut = [edge[:3] for edge in min_cut(trace, 0, token) if edge.query != edge.key]
    found = route_test(model, TEXT, words, 0, ["flow"], K, draws=1).taken["minimum cut"]
    assert found.edges == len(cut)
    assert found.change == pytest.approx(knockout(model, TEXT, [cut], target=0, tokenizer=words).changes[0], rel=1e-3)


def test_random_edges_are_those_of_the_seed(bert):
    model, words = bert
    one, again, other = (route_test(model, TEXT, words, 0, ["rollout"], K, seed, draws=3) for seed in (1, 1, 2))
    assert one == again
    assert one.taken["rollout"].change == pytest.approx(other.taken["rollout"].change)
    assert one.taken["rollout"].random != other.taken["rollout"].random
    whole = route_test(model, TEXT, words, 0, ["rollout"], 12 * 11 + 11, draws=2).taken["rollout"]
    assert whole.change == pytest.approx(whole.random, rel=1e-3) == pytest.approx(whole.same_queries, rel=1e-3)


def test_routes_of_a_real_classifier_matter_more_than_random_ones(data):
    model, words = sst2(data)
    (text, _), *_ = sst2_examples(data, 1)
    found = route_test(model, text, words, methods=["rollout", "gradient-flow", "chefer", "alti"], draws=3)
    for name in ("rollout", "gradient-flow", "chefer", "alti"):
        assert found.taken[name].change > 3 * abs(found.taken[name].random)
    assert found.taken["raw"].change < 0.5 * found.taken["gradient-flow"].change


def test_images_and_how():
    hidden, zeroed = (
        route_test(small_vit(), images()[:1], target=1, k=4, draws=2, how=how) for how in ("hide", "zero")
    )
    assert set(hidden.taken) == {"raw", "rollout", "flow", "minimum cut"}
    assert hidden.taken["raw"].change != zeroed.taken["raw"].change
    assert np.isfinite([taken.change for taken in hidden.taken.values()]).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ["magic"]}, "method 'magic' is unknown"),
        ({"methods": ["generalized-attention-flow"]}, "says what reaches each token, and not what runs over an edge"),
        ({"k": 0}, "k must lie between 1 and 143, the number of edges between positions; it is 0"),
        ({"k": 144}, "it is 144"),
        ({"how": "drop"}, "how='drop' is unknown"),
        ({"draws": 0}, "draws must be 1 or more; it is 0"),
    ],
)
def test_errors(bert, given, message):
    with pytest.raises(ValueError, match=message):
        route_test(bert[0], TEXT, bert[1], **given)
