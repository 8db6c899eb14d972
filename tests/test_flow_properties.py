"""What holds for every attention graph: hypothesis looks for one where it does not."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from attnflow.propagate.cuts import min_cut
from attnflow.propagate.flow import bound_by_lowest, flow

SETTINGS = settings(max_examples=60, deadline=None)
CAPACITIES = st.one_of(
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.floats(0, 1),
    st.floats(-30, 3).map(lambda power: 10.0**power),
)


@st.composite
def stacks(draw, least=1, most=6, square=False):
    """Layers of a graph, the one nearest the input first, with few or many distinct values."""
    depth = draw(st.integers(least, most))
    widths = (
        [draw(st.integers(1, 6))] * (depth + 1)
        if square
        else draw(st.lists(st.integers(1, 6), min_size=depth + 1, max_size=depth + 1))
    )
    return [
        np.array(draw(st.lists(CAPACITIES, min_size=q * k, max_size=q * k)), dtype=float).reshape(q, k)
        for k, q in pairwise(widths)
    ]


def solve(layers):
    return flow(layers[-1], layers[:-1]).values


@SETTINGS
@given(stacks(most=4), st.data())
def test_equals_networkx_and_its_cut(layers, data):
    values = solve(layers)
    query, token = (data.draw(st.integers(0, size - 1)) for size in values.shape)
    value = values[query, token]
    expected = reference.flow_by_networkx(layers[-1], layers[:-1], query, token)
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)
    cut = min_cut(layers[-1], layers[:-1], query, token)
    np.testing.assert_allclose(sum(edge.capacity for edge in cut), value, rtol=1e-9)
    assert not reference.carries(layers[-1], layers[:-1], query, token, {edge[:3] for edge in cut})


@SETTINGS
@given(stacks(), st.sampled_from([1e-30, 1e-3, 7.0, 1e30]))
def test_scales_with_the_capacities(layers, scale):
    np.testing.assert_allclose(solve([layer * scale for layer in layers]), solve(layers) * scale, rtol=1e-9)


@SETTINGS
@given(stacks(), st.integers(0, 2**32 - 1))
def test_permuting_nodes_permutes_the_flow(layers, seed):
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(size) for size in (layers[0].shape[1], *(layer.shape[0] for layer in layers))]
    permuted = [layer[orders[m + 1]][:, orders[m]] for m, layer in enumerate(layers)]
    np.testing.assert_allclose(solve(permuted), solve(layers)[orders[-1]][:, orders[0]], rtol=1e-9)


@SETTINGS
@given(stacks(square=True))
def test_is_at_least_rollout_where_rows_sum_to_one(layers):
    layers = [(layer + 1e-3) / (layer + 1e-3).sum(1, keepdims=True) for layer in layers]
    assert (solve(layers) >= reference.rollout(layers[-1], layers[:-1]) * (1 - 1e-9)).all()


@SETTINGS
@given(stacks(most=1))
def test_of_one_layer_is_the_edge(layers):
    np.testing.assert_array_equal(solve(layers), layers[0])


@SETTINGS
@given(stacks(least=2, most=2))
def test_of_two_layers_is_a_sum_of_minima(layers):
    below, top = layers
    expected = np.minimum(top[:, :, None], below[None, :, :]).sum(1)
    np.testing.assert_allclose(solve(layers), expected, rtol=1e-12)


@SETTINGS
@given(stacks(), st.data())
def test_grows_with_each_capacity_and_by_no_more(layers, data):
    before = solve(layers)
    number = data.draw(st.integers(0, len(layers) - 1))
    query, key = (data.draw(st.integers(0, size - 1)) for size in layers[number].shape)
    more = data.draw(st.sampled_from([1e-6, 0.1, 5.0]))
    layers[number] = layers[number].copy()
    layers[number][query, key] += more
    after = solve(layers)
    assert (after >= before * (1 - 1e-9)).all()
    assert (after <= before + more + 1e-9 * (before + more)).all()


@SETTINGS
@given(stacks(least=2))
def test_saturated_means_as_much_as_the_ends_allow(layers):
    result = flow(layers[-1], layers[:-1])
    ends = np.minimum(layers[-1].sum(1)[:, None], layers[0].sum(0)[None, :])
    assert (result.values <= ends * (1 + 1e-9)).all()
    np.testing.assert_array_equal(result.saturated, np.isclose(result.values, ends, rtol=1e-9, atol=0))


@SETTINGS
@given(stacks(least=2), st.data())
def test_the_lowest_layer_and_what_a_query_keeps_bound_the_flow(layers, data):
    """Whatever positions the queries have: each is a cut."""
    highest = data.draw(st.sampled_from([3, min(len(layer) for layer in layers[:-1])])) - 1
    queries = data.draw(st.lists(st.integers(0, highest), min_size=len(layers[-1]), max_size=len(layers[-1])))
    result = flow(layers[-1], layers[:-1], queries=queries)
    bound = bound_by_lowest(layers[-1], layers[:-1], queries)
    assert (result.values <= bound * (1 + 1e-9)).all()
    assert (bound <= bound_by_lowest(layers[-1], layers[:-1], None)).all()
    np.testing.assert_array_equal(result.fixed, np.isclose(result.values, bound, rtol=1e-9, atol=0))
    assert (result.fixed | ~result.saturated).all()
