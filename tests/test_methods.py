"""raw, rollout and flow with all their settings, against reference.py and the paper's examples."""

import doctest

import numpy as np
import pytest
import torch

import attnflow
import attnflow.methods
import reference
from attnflow import METHODS, Trace
from families import FAMILIES


def attention(*shape, seed=0):
    """Random attention weights whose rows sum to 1."""
    weights = np.random.default_rng(seed).gamma(0.3, size=shape) + 1e-3
    return weights / weights.sum(-1, keepdims=True)


WEIGHTS = attention(4, 3, 6, 6)
TRACE = Trace.from_arrays(WEIGHTS)


def slowly(method, layers):
    """The reference's answer for a whole stack of transitions, layer 0 first."""
    *below, top = layers
    if method == "rollout":
        return reference.rollout(top, below)
    pairs = np.ndindex(top.shape[0], layers[0].shape[1])
    return np.array([reference.flow_by_networkx(top, below, *pair) for pair in pairs]).reshape(top.shape[0], -1)


def mixed(fused, residual):
    return (1 - residual) * fused + residual * np.eye(len(fused))


def test_worked_example_rollout():
    lower, top = [[0.7, 0.3], [0.2, 0.8]], [[0.6, 0.4], [0.5, 0.5]]
    np.testing.assert_allclose(attnflow.rollout([lower, top], query=0, residual=0).scores, [[0.5, 0.5]])


def test_worked_examples_flow():
    first = attnflow.flow([[[0.1], [0.1], [0.0]], [[0.1, 0.1, 0.8]]], residual=0)
    np.testing.assert_allclose(first.scores, [[0.2]])
    shared_pipe = attnflow.flow([[[1.0], [1.0]], [[0.4, 0.3]], [[0.5]]], residual=0)
    np.testing.assert_allclose(shared_pipe.scores, [[0.5]])


@pytest.mark.parametrize("residual", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("method", ["rollout", "flow"])
def test_settings_against_reference(method, residual):
    layers = [mixed(layer.mean(0), residual) for layer in WEIGHTS]
    expected = slowly(method, layers)
    scores = getattr(attnflow, method)(TRACE, residual=residual).scores
    np.testing.assert_allclose(scores, expected, atol=1e-12)


@pytest.mark.parametrize("method", ["rollout", "flow"])
def test_every_layer_is_the_stack_of_single_layers(method):
    function = getattr(attnflow, method)
    every = function(TRACE, layer="all", start_layer=1, query=[2, 0])
    assert every.layers == (1, 2, 3)
    assert every.queries == (2, 0)
    for layer, scores in zip(every.layers, every.scores, strict=True):
        single = function(TRACE, layer=layer, start_layer=1, query=[2, 0])
        np.testing.assert_array_equal(single.scores, scores)
        expected = slowly(method, [mixed(w.mean(0), 0.5) for w in WEIGHTS[1 : layer + 1]])
        np.testing.assert_allclose(scores, expected[[2, 0]], atol=1e-12)


@pytest.mark.parametrize("method", ["rollout", "flow"])
def test_a_head_is_its_own_matrix_over_the_mean_of_the_layers_below(method):
    for layer in (0, 3):
        layers = [mixed(w.mean(0), 0.5) for w in WEIGHTS[:layer]] + [mixed(WEIGHTS[layer, 1], 0.5)]
        scores = getattr(attnflow, method)(TRACE, head=1, layer=layer).scores
        np.testing.assert_allclose(scores, slowly(method, layers), atol=1e-12)
        np.testing.assert_array_equal(scores, getattr(attnflow, method)(TRACE, head=-2, layer=layer).scores)


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_head_fusion(fusion):
    fused = getattr(WEIGHTS, fusion)(1)
    np.testing.assert_allclose(attnflow.raw(TRACE, head_fusion=fusion).scores, fused[-1])
    rows = [mixed(layer / layer.sum(-1, keepdims=True), 0.5) for layer in fused]
    np.testing.assert_allclose(attnflow.rollout(TRACE, head_fusion=fusion).scores, slowly("rollout", rows), atol=1e-12)


def test_raw_is_one_layer_of_the_models_attention():
    np.testing.assert_allclose(attnflow.raw(TRACE).scores, WEIGHTS[-1].mean(0))
    np.testing.assert_allclose(attnflow.raw(TRACE, layer=1, head=2, query=3).scores, WEIGHTS[1, 2, 3:4])
    np.testing.assert_allclose(attnflow.raw(TRACE, layer="all").scores, WEIGHTS.mean(1))
    np.testing.assert_allclose(attnflow.raw(TRACE, residual=0.5).scores, mixed(WEIGHTS[-1].mean(0), 0.5))


def test_at_the_first_layer_rollout_and_flow_are_the_same():
    np.testing.assert_allclose(
        attnflow.rollout(TRACE, layer=0).scores, attnflow.flow(TRACE, layer=0).scores, atol=1e-15
    )


def test_real_attention_against_reference(minilm_trace):
    layers = [0.5 * layer.attention().double().mean(0).numpy() + 0.5 * np.eye(12) for layer in minilm_trace.layers]
    rollout = attnflow.rollout(minilm_trace)
    np.testing.assert_allclose(rollout.scores, slowly("rollout", layers), atol=1e-12)
    np.testing.assert_allclose(rollout.scores.sum(-1), 1, atol=1e-6)
    flow = attnflow.flow(minilm_trace, query="[CLS]")
    expected = slowly("flow", [*layers[:-1], layers[-1][:1]])
    np.testing.assert_allclose(flow.scores, expected, atol=1e-9)
    assert (attnflow.flow(minilm_trace).scores >= rollout.scores - 1e-9).all()


def test_eager_and_fused_models_give_the_same_relevance(minilm, minilm_eager, minilm_trace):
    from conftest import SENTENCE

    with torch.no_grad():
        output = minilm_eager(**minilm[1](SENTENCE, return_tensors="pt"), output_attentions=True)
    given = Trace.from_arrays(output.attentions, tokens=minilm_trace.tokens)
    for method in ("raw", "rollout", "flow"):
        function = getattr(attnflow, method)
        np.testing.assert_allclose(function(given).scores, function(minilm_trace).scores, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa", "mistral_sliding_window", "t5_encoder", "bert"])
def test_tiles_add_up_to_the_whole(monkeypatch, family):
    model, inputs, _ = FAMILIES[family]()
    trace = attnflow.capture_batch(model, inputs)[1]
    settings = [{}, {"query": [5, 2]}, {"head_fusion": "max"}, {"head": 1, "layer": 1}, {"residual": 0}]
    whole = [attnflow.rollout(trace, **one).scores for one in settings]
    monkeypatch.setattr("attnflow.mixing.TILE", 70)  # two or three queries at a time
    for one, expected in zip(settings, whole, strict=True):
        np.testing.assert_allclose(attnflow.rollout(trace, **one).scores, expected, atol=1e-6)


def test_a_causal_model_never_draws_on_the_future():
    weights = np.tril(attention(3, 2, 5, 5))
    weights /= weights.sum(-1, keepdims=True)
    trace = Trace.from_arrays(weights)
    assert trace.readout == 4
    for method in ("raw", "rollout", "flow"):
        scores = getattr(attnflow, method)(trace).scores
        assert not scores[np.triu_indices(5, 1)].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 4}, "layer 4 is out of range: there are 4 layers, 0 to 3"),
        ({"layer": "top"}, "layer 'top' is out of range"),
        ({"start_layer": -5}, "start_layer -5 is out of range"),
        ({"layer": 1, "start_layer": 2}, "start_layer 2 lies above the explained layer 1"),
        ({"head": 3}, "head 3 is out of range: layer 3 has 3 heads, 0 to 2"),
        ({"head_fusion": "median"}, "head_fusion 'median' is unknown; choose one of mean, max, min"),
        ({"residual": 1.5}, "residual must lie between 0 and 1; it is 1.5"),
        ({"residual": float("nan")}, "residual must lie between 0 and 1; it is nan"),
        ({"residual": "a"}, "residual must lie between 0 and 1; it is 'a'"),
        ({"head": "a"}, "head 'a' is out of range"),
        ({"query": 6}, "query 6 is out of range"),
    ],
)
@pytest.mark.parametrize("method", ["rollout", "flow"])
def test_bad_settings(method, settings, message):
    with pytest.raises(ValueError, match=message):
        getattr(attnflow, method)(TRACE, **settings)


def test_every_layer_needs_as_many_queries():
    with pytest.raises(ValueError, match=r"layer='all' needs as many queries in every layer; there are \[3, 4\]"):
        attnflow.rollout([attention(4, 6), attention(3, 4)], layer="all")


def test_one_token_and_one_layer():
    for method in ("raw", "rollout", "flow"):
        assert getattr(attnflow, method)([[[1.0]]]).scores.tolist() == [[1.0]]


def test_results_are_float64_on_any_input():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        trace = Trace.from_arrays(torch.tensor(WEIGHTS).to(dtype))
        for method in ("raw", "rollout", "flow"):
            scores = getattr(attnflow, method)(trace).scores
            assert scores.dtype == np.float64
            np.testing.assert_allclose(scores, getattr(attnflow, method)(TRACE).scores, atol=2e-2)


def test_the_table_holds_every_public_method():
    for name in ("raw", "rollout", "flow"):
        assert name in METHODS
        assert getattr(attnflow, name).__doc__
    for name, method in METHODS.items():
        assert method.edges in attnflow.EDGES, name
        assert method.carry in attnflow.CARRIERS, name
        assert method.source, name


def test_docstring_examples_run():
    assert doctest.testmod(attnflow.methods, raise_on_error=True).attempted > 0
