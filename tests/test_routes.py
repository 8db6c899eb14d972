"""Cuts, routes and flow between groups: against the flow itself, against networkx with super nodes, and wrong input."""

import doctest
import json

import numpy as np
import pytest

import fuzz_flow
import reference
from attnflow import routes
from attnflow.methods import flow
from attnflow.routes import group_flow, min_cut, paths
from attnflow.show.wording import method_and_query, rows

CLOSE = {"rtol": 1e-9, "atol": 1e-15}


def stack(seed, depth=4, width=7):
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(width, 0.3), width) for _ in range(depth)]


def test_docstring_examples_run():
    assert doctest.testmod(routes, raise_on_error=True).attempted


@pytest.mark.parametrize(
    "settings", [{}, {"layer": 2}, {"layer": 0}, {"layer": 4, "start_layer": 3}, {"head": 3}, {"head_fusion": "max"}]
)
def test_cuts_and_paths_of_a_model_carry_its_flow(minilm_trace, settings):
    expected = flow(minilm_trace, query="[CLS]", **settings).scores[0]
    for token in (0, "keys", -1):
        position = minilm_trace.tokens.index(token) if isinstance(token, str) else token
        cut = min_cut(minilm_trace, "[CLS]", token, **settings)
        found = paths(minilm_trace, "[CLS]", token, top=None, **settings)
        np.testing.assert_allclose(sum(edge.capacity for edge in cut), expected[position], **CLOSE)
        np.testing.assert_allclose(sum(path.amount for path in found), expected[position], **CLOSE)
        np.testing.assert_allclose(sum(path.share for path in found), 1, rtol=1e-9)
        assert paths(minilm_trace, "[CLS]", token, top=2, **settings) == found[:2]


def test_edges_and_steps_name_layers_and_tokens(minilm_trace):
    tokens = minilm_trace.tokens
    for edge in min_cut(minilm_trace, 3, 2, layer=4, start_layer=1):
        assert 1 <= edge.layer <= 4
        assert (edge.query_token, edge.key_token) == (tokens[edge.query], tokens[edge.key])
    (path,) = paths(minilm_trace, 3, 2, top=1, layer=4, start_layer=1)
    assert [step.layer for step in path.steps] == [4, 3, 2, 1, 0]
    assert all(step.token == tokens[step.position] for step in path.steps)
    assert (path.steps[0].position, path.steps[-1].position) == (3, 2)
    (path,) = paths(minilm_trace, "[CLS]", "keys", top=1)
    assert str(path).endswith("keys @ input")
    assert str(path.steps[0]) == "[CLS] @ 5"


def test_the_first_route_is_the_widest_of_the_graph():
    layers = [np.array([[0.5, 0.3], [0.2, 0.9]]), np.array([[0.1, 0.7], [0.6, 0.4]]), np.array([[0.3, 0.8]])]
    first = paths(layers, 0, 1, top=1, residual=0)[0]
    # All routes from query 0 to token 1: the widest goes over key 1, then key 0 or 1.
    assert [step.position for step in first.steps] == [0, 1, 1, 1]
    np.testing.assert_allclose(first.amount, 0.4)


@pytest.mark.parametrize("seed", range(5))
def test_several_queries_and_tokens_act_as_one(seed):
    layers = stack(seed)
    queries, tokens = [0, 2, 5], [1, 6]
    expected = reference.flow_between_groups(layers[-1], layers[:-1], queries, tokens)
    cut = min_cut(layers, queries, tokens, residual=0)
    np.testing.assert_allclose(sum(edge.capacity for edge in cut), expected, **CLOSE)
    found = paths(layers, queries, tokens, top=None, residual=0)
    np.testing.assert_allclose(sum(path.amount for path in found), expected, **CLOSE)
    assert {path.steps[0].position for path in found} <= set(queries)
    assert {path.steps[-1].position for path in found} <= set(tokens)
    carried = np.zeros((4, 7, 7))
    for path in found:
        for above, under in zip(path.steps, path.steps[1:], strict=False):
            carried[above.layer, above.position, under.position] += path.amount
    assert (carried <= np.array(layers) + 1e-12).all()


@pytest.mark.parametrize("seed", range(4))
def test_group_flow_equals_networkx_with_super_nodes(seed):
    layers = stack(seed, depth=4)
    groups = {"one": [3], "word": [0, 1], "rest": [2, 4, 5, 6], "overlapping": [1, 2, -1]}
    result = group_flow(layers, groups, residual=0)
    assert result.scores.shape == (4, 4, 4)
    assert result.tokens == result.query_tokens == tuple(groups)
    for number in range(4):
        for i, queries in enumerate(groups.values()):
            for j, tokens in enumerate(groups.values()):
                queries, tokens = ([position % 7 for position in group] for group in (queries, tokens))
                expected = reference.flow_between_groups(layers[number], layers[:number], queries, tokens)
                np.testing.assert_allclose(result.scores[number, i, j], expected, **CLOSE)
    np.testing.assert_allclose(group_flow(layers, groups, layer=2, residual=0).scores, result.scores[2], **CLOSE)
    np.testing.assert_allclose(
        group_flow(layers, groups, layer=2, start_layer=1, residual=0).scores,
        group_flow(layers[1:3], groups, layer=1, residual=0).scores,
    )


def test_groups_of_one_are_the_tokens(minilm_trace):
    tokens = minilm_trace.tokens
    groups = {f"{position} {token}": [position] for position, token in enumerate(tokens)}
    np.testing.assert_allclose(group_flow(minilm_trace, groups).scores, flow(minilm_trace, layer="all").scores, **CLOSE)


def test_the_recipe_of_group_flow_is_complete_and_plain(minilm_trace, tmp_path):
    result = group_flow(minilm_trace, {"first": range(3), "rest": range(3, 12)}, layer=-1)
    recipe = json.loads(json.dumps(result.recipe))
    assert recipe["method"] == "group flow"
    assert recipe["settings"]["groups"] == {"first": [0, 1, 2], "rest": list(range(3, 12))}
    assert recipe["checks"]["known_by_bound"] + recipe["checks"]["known_by_cut"] == 1
    assert result.save(tmp_path / "groups.json").exists()


def test_nothing_flows_where_nothing_can():
    zeros = [np.zeros((3, 3)), np.eye(3)]
    assert min_cut(zeros, 0, 0, residual=0) == []
    assert paths(zeros, 0, 0, residual=0) == []
    assert paths([np.eye(3)] * 3, 0, 1, residual=0) == []
    assert not group_flow(zeros, {"all": [0, 1, 2]}, residual=0).scores[1].any()
    assert [path.amount for path in paths([[[0.25]]], 0, 0, residual=0)] == [0.25]
    assert [edge[:4] for edge in min_cut([[[0.25]]], 0, 0, residual=0)] == [(0, 0, 0, 0.25)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "no groups"),
        ({"none": []}, "'none' must hold at least one"),
        ({"far": [7]}, "'far': position 7 is out of range: there are 7"),
        ({"twice": [1, 1]}, "none twice"),
        ({"twice": [6, -1]}, "none twice"),
    ],
)
def test_groups_that_are_not(groups, message):
    with pytest.raises(ValueError, match=message):
        group_flow(stack(0), groups, residual=0)


def test_groups_need_as_many_queries_as_inputs():
    with pytest.raises(ValueError, match="there are 2 queries and 3 inputs"):
        group_flow([np.ones((4, 3)), np.ones((2, 4))], {"all": [0]}, layer=1, residual=0)


def test_wrong_tokens_and_counts():
    with pytest.raises(ValueError, match="token 9 is not an input"):
        min_cut(stack(0), 0, 9, residual=0)
    with pytest.raises(ValueError, match="query 9 is out of range"):
        paths(stack(0), 9, 0, residual=0)
    with pytest.raises(ValueError, match="must not be negative"):
        paths(stack(0), 0, 0, top=-1, residual=0)


@pytest.mark.parametrize("kind", fuzz_flow.KINDS)
def test_paths_of_random_graphs(kind):
    rng = np.random.default_rng(fuzz_flow.KINDS.index(kind))
    for _ in range(10):
        layers = [fuzz_flow.capacities(rng, kind, (12, 12)) for _ in range(5)]
        value = sum(edge.capacity for edge in min_cut(layers, 2, 3, residual=0))
        fuzz_flow.check_paths(layers, 2, 3, value)


def test_tables_show_what_groups_exchange(minilm_trace):
    exchange = group_flow(minilm_trace, {"noun": [2], "rest": [4, 5]}, layer=-1)
    scores, labels, name = rows(exchange)
    np.testing.assert_array_equal(scores, exchange.every_layer[-1])
    assert (labels, name) == (["noun", "rest"], "from")
    assert method_and_query(exchange) == "group flow, between groups"


@pytest.mark.parametrize("wrong", [["keys"], [0.5]])
def test_groups_of_anything_but_positions_are_refused(minilm_trace, wrong):
    with pytest.raises(ValueError, match=r"group 'a' holds positions, whole numbers; it is \["):
        group_flow(minilm_trace, groups={"a": wrong})
