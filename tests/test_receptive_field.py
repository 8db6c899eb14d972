"""Scores divided by what places alone would have: the formula, by hand, and on every kind of layer."""

import numpy as np
import pytest
import torch

import attnflow
from attnflow import capture, capture_batch
from attnflow.methods import relevance
from attnflow.show.wording import caption, method_and_query
from families import FAMILIES, IDS
from test_encoder_decoder import build, t5


def even(visible):
    """A0(i, j) = 1 / |visible(i)|."""
    return visible / visible.sum(-1, keepdims=True)


def by_hand(visible, residual=0.5):
    result = np.eye(visible[0].shape[1])
    for layer in visible:
        result = ((1 - residual) * even(layer) + residual * np.eye(len(layer))) @ result
    return result


@pytest.mark.parametrize(
    "family", ["llama_gqa", "mistral_sliding_window", "bloom_alibi", "gemma2_soft_capping", "bert"]
)
def test_rollout_is_divided_by_the_field_of_the_masks(family):
    """ALiBi's biases and a head's preferences are no part of the field, windows and the future are."""
    model, inputs, expected = FAMILIES[family]()
    trace = capture_batch(model, inputs)[1]
    visible = [(layer[1] != 0).any(0).numpy() for layer in expected()]
    plain = attnflow.rollout(trace)
    divided = attnflow.rollout(trace, receptive_field=True)
    field = by_hand(visible)
    inside = field > 0
    np.testing.assert_allclose(divided.scores[inside], (plain.scores[inside] / field[inside]), rtol=1e-6)
    assert (divided.scores[~inside] == 0).all()
    assert divided.recipe["scaling"] == "divided by the receptive field"


@pytest.mark.parametrize("method", ["raw", "rollout", "flow"])
@pytest.mark.parametrize("layer", [-1, "all"])
def test_a_model_that_attends_evenly_is_all_place(method, layer):
    causal = even(np.tril(np.ones((6, 6))))
    function = getattr(attnflow, method)
    divided = function([causal] * 3, residual=0.5, layer=layer, receptive_field=True)
    np.testing.assert_allclose(
        divided.every_layer, np.broadcast_to(np.tril(np.ones((6, 6))), divided.every_layer.shape)
    )


def test_early_tokens_no_longer_win_by_their_place(stories):
    """On stories that a real causal model writes, flow falls with the place; divided by the field it does not."""
    model, tokenizer = stories
    leans = {}
    for divide in (False, True):
        rows = []
        for start in ("Once upon a time", "The little girl", "Tom had a dog", "One day the sun"):
            trace = capture(model, {"input_ids": torch.tensor([tokenizer.encode(start)])}, generate=30)
            rows.append(attnflow.flow(trace, query=29, receptive_field=divide).row[1:29])  # 0 is a sink
        leans[divide] = np.corrcoef(np.arange(28), np.mean(rows, axis=0))[0, 1]
    assert leans[False] < -0.5
    assert leans[True] > 0


def test_the_field_of_an_encoder_decoder_is_joint():
    model, inputs = build(t5)
    trace = capture_batch(model, inputs)[0]
    divided = attnflow.rollout(trace, query=-1, receptive_field=True)
    field = relevance(trace, edges="uniform", carry="product", query=-1)
    np.testing.assert_allclose(field.scores.sum(), 1)
    np.testing.assert_allclose(divided.scores * field.scores, attnflow.rollout(trace, query=-1).scores, rtol=1e-6)


def test_flow_is_divided_by_the_flow_of_the_field():
    model = FAMILIES["llama_gqa"]()[0]
    trace = capture_batch(model, {"input_ids": IDS})[0]
    divided = attnflow.flow(trace, query=[3, 6], receptive_field=True)
    field = relevance(trace, edges="uniform", carry="flow", query=[3, 6])
    plain = attnflow.flow(trace, query=[3, 6])
    inside = field.scores > 0
    np.testing.assert_allclose(divided.scores[inside], plain.scores[inside] / field.scores[inside], rtol=1e-9)
    assert divided.recipe["checks"] == plain.recipe["checks"]


def test_pictures_and_tables_say_what_scores_were_divided_by(minilm_trace):
    divided = attnflow.rollout(minilm_trace, query=0, receptive_field=True)
    assert method_and_query(divided) == "rollout, query [CLS] at 0, divided by the receptive field"
    assert caption(divided).count("divided by the receptive field") == 1
