"""The update rules of two streams against the paper, and the flow with a barrier against what defines it."""

import doctest

import numpy as np
import pytest
import torch
import transformers as hf

import reference
from attnflow import METHODS, Trace, capture
from attnflow.methods import relevance
from attnflow.propagate import barrier
from families import IDS
from test_encoder_decoder import DECODER_IDS, bart, build, t5
from toys import numbers

WORDS, PLACES = 7, 5

# Methods that look at the block around attention have tests of their own (test_blocks.py).
WITHOUT_BLOCK = [name for name, row in METHODS.items() if not {"block", "gradient at each layer"} & row.needs]


def last(output):
    """The highest logit of the last token."""
    return output.logits[:, -1].amax(-1)


def with_gradients(tensors):
    """Each (head, query, key) of the first example, with its gradient."""
    return [(one.detach()[0].double().numpy(), one.grad[0].double().numpy()) for one in tensors]


def encoder_decoder(family):
    """(trace, layers as `reference.update_rules` takes them) of a tiny model, whose eager twin gives the weights."""
    model, inputs = build(family)
    inputs = {name: tensor[:1] for name, tensor in inputs.items()}
    trace = capture(model, inputs, target=last)
    twin = type(model)._from_config(model.config, attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    output = twin(**inputs, output_attentions=True)
    streams = output.encoder_attentions, output.decoder_attentions, output.cross_attentions
    for weights in (one for stream in streams for one in stream):
        weights.retain_grad()
    last(output).sum().backward()
    encoder, decoder, cross = (with_gradients(stream) for stream in streams)
    layers = [[("encoder", "encoder", *one)] for one in encoder]
    for own, other in zip(decoder, cross, strict=True):
        layers += [[("decoder", "decoder", *own)], [("decoder", "encoder", *other)]]
    return trace, layers, {"encoder": IDS.shape[1], "decoder": DECODER_IDS.shape[1]}


def co_attention():
    """The same of a tiny LXMERT: words and places of an image that attend to each other, both ways at once."""
    torch.manual_seed(0)
    config = hf.LxmertConfig(
        vocab_size=99,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        l_layers=2,
        r_layers=2,
        x_layers=3,
        visual_feat_dim=8,
        visual_pos_dim=4,
        num_qa_labels=5,
        max_position_embeddings=40,
    )
    model = hf.LxmertForQuestionAnswering(config).eval()
    inputs = {"input_ids": IDS[:1], "visual_feats": numbers(1, PLACES, 8), "visual_pos": numbers(1, PLACES, 4)}

    def answer(output):
        return output.question_answering_score[:, 1]

    trace = capture(model, inputs, target=answer)
    seen = {}

    def keep(name):
        def hook(module, args, output):
            output.retain_grad()
            seen.setdefault(name, []).append(output)

        return hook

    for name, module in model.named_modules():
        if name.endswith(("self.dropout", "att.dropout")):
            module.register_forward_hook(keep(name))
    answer(model(**inputs)).sum().backward()
    # Where the answer is read from words alone, the last layer's image has no part in it.
    found = {name: with_gradients([one for one in kept if one.grad is not None]) for name, kept in seen.items()}
    encoder, layers = "lxmert.encoder.", []
    for number in range(2):
        layers.append([("words", "words", *found[f"{encoder}layer.{number}.attention.self.dropout"][0])])
    for number in range(2):
        layers.append([("places", "places", *found[f"{encoder}r_layers.{number}.attention.self.dropout"][0])])
    for number in range(3):
        crossing = found[f"{encoder}x_layers.{number}.visual_attention.att.dropout"]
        ends = ("words", "places"), ("places", "words")
        layers.append([(*end, *one) for end, one in zip(ends, crossing, strict=False)])
        for stream, part in (("words", "lang"), ("places", "visn")):
            own = found[f"{encoder}x_layers.{number}.{part}_self_att.self.dropout"]
            layers += [[(stream, stream, *one)] for one in own]
    return trace, layers, {"words": WORDS, "places": PLACES}


@pytest.mark.parametrize("model", [t5, bart, co_attention])
def test_update_rules_of_two_streams(model):
    trace, layers, sizes = model() if model is co_attention else encoder_decoder(model)
    first, second = sizes
    assert len(trace.layers) == len(layers)
    assert any(len(calls) == 2 for calls in layers) == (model is co_attention)
    expected = reference.update_rules(layers, sizes)
    found = relevance(trace, "chefer").scores
    blocks = {
        (first, first): found[: sizes[first], : sizes[first]],
        (first, second): found[: sizes[first], sizes[first] :],
        (second, first): found[sizes[first] :, : sizes[first]],
        (second, second): found[sizes[first] :, sizes[first] :],
    }
    assert expected[second, first].any()
    for block, scores in blocks.items():
        np.testing.assert_allclose(scores, expected[block], atol=1e-5 * max(1e-6, abs(expected[block]).max()) + 1e-9)
    product = relevance(trace, edges="gradient-x-attention", carry="product").scores
    assert abs(product - found).max() > 1e-2 * abs(found[sizes[first] :, : sizes[first]]).max()


def test_update_rules_of_every_layer_and_some_queries():
    trace, _, _ = encoder_decoder(t5)
    every = relevance(trace, "chefer", layer="all", query=[11, 2], start_layer=1)
    for layer, scores in zip(every.layers, every.scores, strict=True):
        alone = relevance(trace, "chefer", layer=layer, start_layer=1)
        np.testing.assert_allclose(alone.scores[[11, 2]], scores, rtol=1e-12)


@pytest.mark.parametrize("settings", [{"residual": 0.5}, {"residual": 0}, {"row_normalised": True}])
def test_update_rules_refuse_another_residual(settings):
    trace, _, _ = encoder_decoder(t5)
    with pytest.raises(ValueError, match="chefer adds to what a position has: leave residual and row_normalised out"):
        relevance(trace, "chefer", **settings)


def test_update_rules_refuse_edges_below_zero(minilm_trace):
    with pytest.raises(ValueError, match="signed-gradient-x-attention edges may be negative"):
        relevance(minilm_trace, edges="signed-gradient-x-attention", carry="update-rules")


@pytest.mark.long
@pytest.mark.parametrize("name", WITHOUT_BLOCK)
@pytest.mark.parametrize("model", ["t5", "lxmert"])
def test_every_method_on_two_streams(model, name):
    trace, _, sizes = encoder_decoder(t5) if model == "t5" else co_attention()
    found = relevance(trace, name)
    assert np.isfinite(found.scores).all()
    assert found.scores.any()
    if model == "t5" and found.rows == "query":
        start = sizes["encoder"]
        assert not found.scores[:start, start:].any()  # an encoder knows nothing of the decoder


GRAPHS = {
    "one layer": [(4, 3)],
    "two": [(3, 3), (2, 3)],
    "narrow in the middle": [(4, 3), (2, 4), (3, 2)],
    "deep": [(3, 2), (3, 3), (3, 3), (3, 3)],
}


def graph(name, spread=1.0, share=1.0, seed=0):
    """Layers (query, key), of edges over `spread` powers of ten, of which some have a capacity."""
    rng = np.random.default_rng(seed)
    shapes = GRAPHS.get(name) or [(name, name)] * 4
    return [np.where(rng.random(shape) < share, 10 ** rng.uniform(-spread, 0, shape), 0.0) for shape in shapes]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("gap", [0.1, 0.01])
def test_the_flow_with_a_barrier_is_that_of_a_general_solver(monkeypatch, name, gap):
    monkeypatch.setattr(barrier, "GAP", gap)
    layers = graph(name)
    found = barrier.barrier_flow(layers[-1], layers[:-1])
    assert found.mu == pytest.approx(gap * found.maximum / (2 * sum(layer.size for layer in layers)))
    expected = reference.barrier_flow(layers, found.mu)
    np.testing.assert_allclose(found.received, expected[0].sum(0), atol=1e-6)


@pytest.mark.parametrize("spread", [1, 12])
@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("seed", range(10))
def test_the_value_is_the_maximum_flow_within_the_stated_gap(spread, share, seed):
    layers = graph(8, spread, share, seed)
    whole = reference.flow_between_groups(layers[-1], layers[:-1], range(8), range(8))
    found = barrier.barrier_flow(layers[-1], layers[:-1])
    checks = found.checks()
    assert checks["gap_bound"] == pytest.approx(barrier.GAP if whole else 0)
    assert whole * (1 - checks["gap_bound"]) - 1e-12 <= found.received.sum() <= whole * (1 + 1e-8)
    assert checks["maximum"] == pytest.approx(whole, rel=1e-9)
    assert (found.received >= 0).all()
    assert (found.received <= layers[0].sum(0) + 1e-12).all()


def test_a_flow_with_a_barrier_follows_its_capacities():
    layers = graph(6, seed=3)
    found = barrier.barrier_flow(layers[-1], layers[:-1]).received
    for scale in (1e-30, 1e30):
        scaled = barrier.barrier_flow(scale * layers[-1], [scale * layer for layer in layers[:-1]])
        np.testing.assert_allclose(scaled.received, scale * found, rtol=1e-6)
    order = np.random.default_rng(0).permutation(6)
    turned = barrier.barrier_flow(layers[-1], [*layers[:-2], layers[-2]])
    np.testing.assert_allclose(turned.received, found)
    lowest = layers[0][:, order]
    np.testing.assert_allclose(
        barrier.barrier_flow(layers[-1], [lowest, *layers[1:-1]]).received, found[order], rtol=1e-6
    )


def test_what_tokens_alike_receive_is_alike():
    """A maximum flow could give all to either token; the barrier gives both the same."""
    found = barrier.barrier_flow([[0.1]], [[[1.0, 1.0]]])
    np.testing.assert_allclose(found.received, [0.05, 0.05], rtol=1e-5)


def test_no_way_is_no_flow():
    found = barrier.barrier_flow([[1.0, 0.0]], [[[0.0, 0.0], [1.0, 1.0]]])
    assert found.received.tolist() == [0, 0]
    assert found.checks() == {"maximum": 0, "gap": 0, "gap_bound": 0, "mu": 0, "edges": 0}


def test_generalized_attention_flow_of_a_model(minilm_trace):
    layers = [layer.attention().double().mean(0).numpy() for layer in minilm_trace.layers]
    found = relevance(minilm_trace, edges="attention", carry="barrier-flow", residual=0)
    assert (found.rows, found.scores.shape) == ("target", (1, len(minilm_trace.tokens)))
    expected = barrier.barrier_flow(layers[-1], layers[:-1])
    np.testing.assert_allclose(found.scores[0], expected.received, rtol=1e-6)
    assert found.recipe["checks"]["gap"] <= found.recipe["checks"]["gap_bound"] == pytest.approx(1e-6)
    every = relevance(minilm_trace, edges="attention", carry="barrier-flow", residual=0, layer="all", start_layer=2)
    assert len(every.recipe["checks"]["layers"]) == 4
    alone = relevance(minilm_trace, edges="attention", carry="barrier-flow", residual=0, layer=3, start_layer=2)
    np.testing.assert_allclose(every.scores[1], alone.scores, rtol=1e-9)


def test_a_source_is_made_of_the_queries_that_the_layer_concerns():
    trace, _, sizes = encoder_decoder(t5)
    start = sizes["encoder"]
    method = "generalized-attention-flow"
    np.testing.assert_allclose(
        relevance(trace, method).scores,
        relevance(trace, method, query=range(start, start + 5)).scores,
        rtol=1e-6,
        atol=1e-12,
    )


def test_a_flow_that_cannot_fit_is_refused(monkeypatch):
    from attnflow import memory

    layers = [np.full((50, 50), 0.02)] * 4
    monkeypatch.setattr(memory, "free_memory", lambda device: 1_000_000)
    with pytest.raises(MemoryError, match=r"a flow with a barrier through 4 layers of up to 50 positions"):
        relevance(Trace.from_arrays(layers), edges="attention", carry="barrier-flow")


def test_docstring_examples_run():
    assert doctest.testmod(barrier, raise_on_error=True).attempted
