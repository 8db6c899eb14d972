"""Cascading randomisation: the order of the modules, what stays as it was, and where the last step ends."""

import math

import pytest
import torch

from attnflow.faithfulness.randomisation import cascade, modules_from_output
from attnflow.faithfulness.run import evaluate
from classifiers import small_vit, sst2, sst2_examples

LAYERS = [f"bert.encoder.layer.{layer}" for layer in range(6)]
SETTINGS = {"methods": ["raw", "rollout"], "layer": "all"}


@pytest.fixture(scope="module")
def classifier(data):
    return sst2(data)


@pytest.fixture(scope="module")
def examples(data):
    return sst2_examples(data, 3)


@pytest.fixture(scope="module")
def steps(classifier, examples):
    model, tokenizer = classifier
    done = []
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = cascade(model, iter(examples), tokenizer=tokenizer, progress=lambda *step: done.append(step), **SETTINGS)
    assert done == [(number, 24) for number in range(1, 25)]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    return found


def values(evaluation, method, layer):
    return [row.value for row in evaluation.rows if row[1:3] == (method, layer)]


@pytest.mark.long
def test_modules_are_randomised_from_the_head_to_the_embeddings(steps, classifier, examples):
    assert list(steps) == ["head", *reversed(LAYERS), "embeddings"]
    model, tokenizer = classifier
    modules = modules_from_output(model, dict(tokenizer(examples[0][0], return_tensors="pt")))
    assert modules["head"] == [
        f"{name}.{part}" for name in ("bert.pooler.dense", "classifier") for part in ("weight", "bias")
    ]
    assert all(name.startswith("bert.embeddings.") for name in modules["embeddings"])
    assert sorted(name for names in modules.values() for name in names) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.long
def test_raw_attention_changes_when_its_own_layer_is_randomised(steps):
    for step, evaluation in steps.items():
        lowest = LAYERS.index(step) if step in LAYERS else 6 if step == "head" else 0
        for layer in range(6):
            found = values(evaluation, "raw", layer)
            if layer < lowest:
                assert found == pytest.approx([1] * 3, abs=1e-9)
            else:
                assert max(found) < 0.999, (step, layer)


@pytest.mark.long
def test_the_last_step_is_the_model_that_forgot_all(steps, classifier, examples):
    model, tokenizer = classifier
    whole = evaluate(model, examples, tokenizer=tokenizer, metrics=["randomised-weights"], **SETTINGS)
    last = steps["embeddings"]
    assert [row[:4] for row in last.rows] == [row[:4] for row in whole.rows]
    assert [row.value for row in last.rows] == pytest.approx([row.value for row in whole.rows], abs=1e-9)
    assert whole.recipe["shuffled"] is None
    assert len({step.recipe["shuffled"] for step in steps.values()}) == 8


@pytest.mark.long
def test_the_gradient_forgets_with_the_head_alone(steps):
    gradient = [row.value for row in steps["head"].rows if row.method == "gradient-norm"]
    assert max(gradient) < 0.999
    assert not any(math.isnan(value) for value in gradient)


def test_weights_belong_to_the_module_that_uses_them_first():
    from families import FAMILIES

    model, inputs, _ = FAMILIES["t5_encoder"]()
    modules = modules_from_output(model, inputs)
    assert list(modules) == ["head", *(f"encoder.block.{block}" for block in (2, 1, 0)), "embeddings"]
    assert (modules["head"], modules["embeddings"]) == (["encoder.final_layer_norm.weight"], ["shared.weight"])


def test_photographs_are_taken_as_pixels_or_as_functions_that_open_them():
    pixels = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))

    def broken():
        raise ValueError("not an image")

    found = cascade(small_vit(), [broken, lambda: (pixels, 0)], methods=["raw"])
    assert list(found) == ["head", "vit.layers.1", "vit.layers.0", "embeddings"]
    assert [failure.error for failure in found["head"].failures] == ["not an image"]
    assert values(found["head"], "raw", 1) == pytest.approx([1])
