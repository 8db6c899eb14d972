"""Routes of conserved relevance: what was really carried, from the score down to tokens, biases and what cancels."""

import doctest
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

import attnflow
import reference
from attnflow import capture
from attnflow.propagate import signed
from attnflow.routes import group_flow, min_cut, paths
from attnflow.show.report import python_lines
from classifiers import small_bert, sst2, sst2_examples, tokenizer
from test_conserved import example_of
from test_rules import score_of

EDGES = "conserved-relevance"


def kept(model, inputs, target=1, rules="cp-lrp", **settings):
    return capture(model, inputs, target=target, rules=rules, keep="relevance", **settings)


def flow_of(seed, depth=3, width=4):
    """A random signed flow, and what ends at its nodes; some edges and some ends are 0."""
    rng = np.random.default_rng(seed)
    coming = rng.normal(size=width)
    layers, taken = [], []
    for _ in range(depth):
        layer = rng.normal(size=(width, width)) * (rng.random((width, width)) < 0.7)
        ends = rng.normal(size=width) * (rng.random(width) < 0.5)
        layer[np.diag_indices(width)] += coming - ends - layer.sum(1)
        layers.insert(0, layer)
        taken.insert(0, ends)
        coming = layer.sum(0)
    return layers, [2 * rng.normal(size=width) * (rng.random(width) < 0.7), *taken]


def check(found, layers, taken):
    """Routes add up: over every edge, at every token, in what was taken; what cancels is nothing over both signs."""
    over, ends, tokens = [np.zeros_like(layer) for layer in layers], [np.zeros_like(one) for one in taken], {}
    for amount, level, nodes, end in found:
        for at, (query, key) in enumerate(pairwise(nodes)):
            over[level - 1 - at][query, key] += amount
            assert amount * layers[level - 1 - at][query, key] > 0
        if end == "token":
            tokens[nodes[-1]] = tokens.get(nodes[-1], 0) + amount
        elif end == "biases":
            ends[level - len(nodes) + 1][nodes[-1]] += amount
    largest = max(float(np.abs(layer).max()) for layer in layers)
    for expected, one in zip([*layers, *taken], [*over, *ends], strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-6 * largest)
    column = layers[0].sum(0) - taken[0]
    np.testing.assert_allclose([tokens.get(at, 0) for at in range(len(column))], column, atol=1e-6 * largest)


def test_docstring_examples_run():
    assert doctest.testmod(signed, raise_on_error=True).attempted


@pytest.mark.parametrize("seed", range(6))
def test_every_route_is_the_widest_of_those_that_are_left(seed):
    layers, taken = flow_of(seed)
    found = signed.routes(layers, taken)
    for sign in (1, -1):
        room = reference.room_of_signed(layers, taken, sign)
        for amount, level, nodes, end in found:
            if amount * sign > 0:
                assert sign * amount == pytest.approx(reference.widest("begin", room)[0])
                route = ["begin", *((level - at, node) for at, node in enumerate(nodes))]
                for edge in pairwise([*route, ("token", nodes[-1]) if end == "token" else end]):
                    room[edge] -= sign * amount
        assert max(map(abs, room.values())) < 1e-12
    check(found, layers, taken)
    assert signed.routes(layers, taken, count=5) == found[:5]
    assert {route.end for route in found} == {"token", "biases", "cancelled"}
    assert sum(route.amount for route in found) == pytest.approx(layers[-1].sum() + taken[-1].sum())


def test_routes_of_one_layer_and_of_nothing():
    found = signed.routes([np.array([[2.0, -3.0]])], [np.zeros(2), np.array([0.5])])
    assert [(route.amount, route.nodes, route.end) for route in found] == [
        (-3.0, (0, 1), "token"),
        (2.0, (0, 0), "token"),
        (0.5, (0,), "biases"),
    ]
    assert signed.routes([np.zeros((2, 2))], [np.zeros(2)] * 2) == []
    # Of 2 a token's biases take 3: what they lack speaks against it.
    found = signed.routes([np.array([[2.0]])], [np.array([3.0]), np.zeros(1)])
    assert [(route.amount, route.level, route.nodes, route.end) for route in found] == [
        (2.0, 1, (0, 0), "biases"),
        (1.0, 0, (0,), "biases"),
        (-1.0, 0, (0,), "token"),
    ]


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit"])
def test_routes_of_a_model_add_up_to_what_leaves_its_last_layer(family):
    model, inputs = example_of(family)
    trace = kept(model, inputs, score_of)
    found = paths(trace, edges=EDGES, top=None)
    own = [layer.carried for layer in trace.layers]
    layers = [attnflow.relevance(trace, edges=EDGES, carry="layer", layer=at).scores for at in range(len(own))]
    between = [under.biases + above.key_biases for under, above in pairwise(own)]
    check(
        [(one.amount, one.steps[0].layer + 1, [step.position for step in one.steps], one.end) for one in found],
        layers,
        [one.numpy() for one in (own[0].key_biases, *between, own[-1].biases)],
    )
    assert sum(one.amount for one in found) == pytest.approx(float(own[-1].leaving.sum()), rel=1e-9)
    score = trace.target["score"]
    np.testing.assert_allclose([one.share for one in found], [one.amount / score for one in found])


def test_routes_of_a_sentence_add_up_to_its_score(data):
    model, words = sst2(data)
    for text, _ in sst2_examples(data, 3):
        trace = kept(model, text, "predicted", tokenizer=words)
        found = paths(trace, "[CLS]", edges=EDGES, top=None)
        score, leaving = trace.target["score"], float(trace.layers[-1].carried.leaving.sum())
        above = score - leaving  # what biases of the pooler and the classifier took
        assert sum(one.amount for one in found) + above == pytest.approx(score, abs=1e-5)
        for token, entering in enumerate(trace.layers[0].carried.entering.tolist()):
            own = paths(trace, "[CLS]", token, edges=EDGES, top=None)
            assert sum(one.amount for one in own) == pytest.approx(entering, abs=1e-5)
            assert paths(trace, token=token, edges=EDGES, top=2) == own[:2]
            assert all(one.end == "token" and one.steps[-1][:2] == (-1, token) for one in own)
        assert sum(one.amount for one in found if one.end == "cancelled") == pytest.approx(0, abs=1e-5)
        biases = sum(float((one.carried.biases + one.carried.key_biases).sum()) for one in trace.layers)
        assert sum(one.amount for one in found if one.end == "biases") == pytest.approx(biases, abs=1e-5)


def test_routes_of_a_model_without_biases_are_the_whole_score(stories):
    model, words = stories
    trace = kept(model, "Once upon a time there was a", "predicted", tokenizer=words)
    found = paths(trace, -1, edges=EDGES, top=None)
    assert {one.end for one in found} == {"token", "cancelled"}
    # The norm behind the last block, and the head, have no biases either.
    assert sum(one.amount for one in found) == pytest.approx(trace.target["score"], rel=1e-5)
    assert sum(one.share for one in found) == pytest.approx(1, rel=1e-5)


def test_layers_between_have_routes_of_their_own():
    model, inputs = example_of("bert")
    trace = kept(model, inputs, score_of)
    found = paths(trace, edges=EDGES, layer=0, top=None)
    assert max(one.steps[0].layer for one in found) == 0
    assert sum(one.amount for one in found) == pytest.approx(float(trace.layers[0].carried.leaving.sum()), rel=1e-9)
    found = paths(trace, token=2, edges=EDGES, start_layer=1, top=None)
    assert {one.steps[-1].layer for one in found} == {0}
    assert sum(one.amount for one in found) == pytest.approx(float(trace.layers[1].carried.entering[2]), rel=1e-9)


def test_a_route_says_where_it_ends():
    model, inputs = example_of("bert")
    found = paths(kept(model, inputs, score_of), edges=EDGES, top=None)
    for end in ("biases", "cancelled"):
        route = next(one for one in found if one.end == end)
        assert str(route).endswith(f"{route.steps[-1].token} @ {route.steps[-1].layer} -> {end}")
    assert str(next(one for one in found if one.end == "token")).endswith("@ input")


def test_groups_exchange_what_the_edges_between_them_carry(data):
    model, words = sst2(data)
    text = sst2_examples(data, 1)[0][0]
    trace = kept(model, text, "predicted", tokenizer=words)
    groups = {"noun": [3, 4], "start": [0], "rest": [1, 2, *range(5, len(trace.tokens))]}
    found = group_flow(trace, groups, edges=EDGES)
    assert found.scores.shape == (6, 3, 3)
    for number, layer in enumerate(found.scores):
        edges = attnflow.relevance(trace, edges=EDGES, carry="layer", layer=number).scores
        assert layer[0, 1] == pytest.approx(edges[3, 0] + edges[4, 0])
        own = trace.layers[number].carried
        assert layer.sum() == pytest.approx(float((own.leaving - own.biases).sum()), abs=1e-5)
    np.testing.assert_allclose(group_flow(trace, groups, edges=EDGES, layer=2).scores, found.scores[2])
    checks = json.loads(json.dumps(found.recipe))["checks"]
    assert len(checks["bias_shares"]) == 6
    assert checks["conservation"] < 1e-5
    with pytest.raises(ValueError, match="of one layer alone, so that start_layer has no part in it"):
        group_flow(trace, groups, edges=EDGES, start_layer=1)


def test_the_lines_of_python_name_the_edges_of_groups():
    words, model = tokenizer(), small_bert()
    trace = capture(model, "the keys are here", tokenizer=words, target=1)
    first = group_flow(trace, {"one": [1], "two": [2, 3]}, edges="gradient-x-attention")
    assert first.recipe["method"] == "group flow of gradient-x-attention"
    given = {"attnflow": attnflow, "model": model, "inputs": dict(words("the keys are here", return_tensors="pt"))}
    lines = python_lines(first).rsplit("\n", 1)[0]
    exec(lines, given)
    np.testing.assert_allclose(given["relevance"].scores, first.scores)


@pytest.mark.parametrize("rules", ["libra", "attnlrp"])
def test_rules_that_lose_relevance_have_no_routes(rules, data):
    model, words = sst2(data)
    trace = kept(model, sst2_examples(data, 1)[0][0], "predicted", rules, tokenizer=words)
    for function in (paths, group_flow):
        with pytest.raises(ValueError, match=f"rules='{rules}' misses up to .* take rules='cp-lrp'"):
            function(trace, edges=EDGES)


def test_what_has_no_routes_is_said():
    model = small_bert()
    inputs = {"input_ids": torch.arange(5)[None]}
    plain = capture(model, inputs, target=1, rules="cp-lrp")
    with pytest.raises(ValueError, match="needs the relevance that every block carries: capture"):
        paths(plain, edges=EDGES)
    trace = kept(model, inputs)
    for settings, match in (
        ({"query": 2}, "100.0% of what leaves layer 1 is from other positions than the query, such as 0"),
        ({"layer": 0, "query": 0}, "% of what leaves layer 0 is from other positions .* leave query out"),
        ({"head": 0}, "head has no part in conserved-relevance"),
        ({"residual": 0.5}, "residual has no part in conserved-relevance"),
        ({"layer": "all"}, 'layer="all" cannot be had here'),
        ({"token": 9}, "token 9 is not an input"),
        ({"top": -1}, "must not be negative"),
        ({"top": -1, "token": 0}, "must not be negative"),
        ({"edges": "entering-relevance"}, "may be negative, which maximum flow cannot carry"),
    ):
        with pytest.raises(ValueError, match=match):
            paths(trace, **{"edges": EDGES, **settings})
    with pytest.raises(ValueError, match="is a flow already, and has no capacities"):
        min_cut(trace, 0, 1, edges=EDGES)
