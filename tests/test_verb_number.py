"""The verb-number study on the real sentences, little trained: its structure, and what must hold by algebra."""

import copy
import sys
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from attnflow import baselines, capture, cli
from attnflow.faithfulness import metrics
from attnflow.studies import record
from attnflow.studies.comparison import Failures
from attnflow.studies.verb_data import UNKNOWN, read, training_sentences
from attnflow.studies.verb_measure import COLUMN_SUM, GRADIENTS, REFERENCES, STUDIED, correlations, measure
from attnflow.studies.verb_measure import gradients as input_gradients
from attnflow.studies.verb_number import EXAMPLES
from attnflow.studies.verb_training import Recipe, load_checkpoint, save_checkpoint, train


@pytest.fixture(scope="module")
def sentences(data):
    return read(data, seed=0, examples=60, attracted=50)


@pytest.fixture(scope="module")
def trained(sentences):
    return train(sentences, Recipe(seed=0, causal=False, steps=10), lambda done, total: None)


@pytest.fixture(scope="module")
def measured(trained, sentences):
    return list(measure(trained, sentences.test[:12], 0, Failures(), lambda done, total: None))


def test_no_test_sentence_is_trained_on(sentences):
    held_out = sentences.held_out()
    assert len(sentences.test) == 60
    assert all(
        one.words not in held_out for one in islice(training_sentences(sentences, np.random.default_rng(0)), 3000)
    )
    assert not held_out & {one.words for pool in (sentences.natural, sentences.attracted) for one in pool}


def test_the_example_sentences_are_of_known_words(sentences):
    assert {word for one in EXAMPLES for word in one.split()} <= set(sentences.vocabulary())


def test_the_last_noun_does_not_tell_the_number_in_training(sentences):
    """Words that are plural nouns without doubt: as likely last before a singular as before a plural verb."""
    last = [
        one.plural
        for one in islice(training_sentences(sentences, np.random.default_rng(0)), 6000)
        if one.words[-1] == "NNS"
    ]
    natural = [one.plural for one in sentences.natural if one.words[-1] == "NNS"]
    attracted = [one.plural for one in sentences.attracted if one.words[-1] == "NNS"]
    assert np.mean(attracted) < 0.2 < np.mean(last) < 0.8 < np.mean(natural)


def test_a_checkpoint_is_the_model_and_says_how_it_was_made(trained, sentences, tmp_path):
    recipe, path = Recipe(seed=0, causal=False, steps=10), tmp_path / "model.safetensors"
    save_checkpoint(trained, recipe, sentences, path)
    again = load_checkpoint(path, recipe, sentences)
    ids = again.ids([sentences.test[0].words])
    assert torch.equal(again(ids), trained(ids))
    with pytest.raises(ValueError, match="made with another recipe"):
        load_checkpoint(path, replace(recipe, steps=11), sentences)
    with pytest.raises(ValueError, match="made with another data"):
        load_checkpoint(path, recipe, replace(sentences, files={}))


def test_blank_out_and_gradients_are_those_of_the_library(trained, sentences):
    one = next(one for one in sentences.test if len(one.words) > 4)
    (found,) = measure(trained, [one], 0, Failures(), lambda done, total: None)
    ids = trained.ids([one.words])

    def score(keep):
        cases = torch.where(torch.from_numpy(keep), ids, trained.vocabulary.index(UNKNOWN))
        return trained(cases).double().softmax(-1)[:, int(one.plural)].numpy()

    np.testing.assert_allclose(found.references[0], np.abs(metrics.blank_out(score, ids.shape[1])), atol=1e-7)
    trace, inputs = capture(trained.model, ids), {"input_ids": ids}
    expected = {
        "norm": baselines.gradient_norm(trace, trained.model, inputs, target=lambda out: out[:, 0] - out[:, 1]),
        "norm, of the logit": baselines.gradient_norm(trace, trained.model, inputs),
        "|gradient x input|": baselines.gradient_x_input(
            trace, trained.model, inputs, target=lambda out: out[:, 0] - out[:, 1]
        ),
    }
    for name, relevance in expected.items():
        scores = found.references[REFERENCES.index(name)]
        np.testing.assert_allclose(scores, np.abs(relevance.row), rtol=1e-4, atol=1e-8)


def test_the_gradient_of_the_difference_ranks_words_as_that_of_the_probabilities_does(trained, sentences):
    ids = trained.ids([next(one.words for one in sentences.test if len(one.words) > 4)])
    trace, inputs = capture(trained.model, ids), {"input_ids": ids}
    of_chances = baselines.gradient_norm(
        trace, trained.model, inputs, target=lambda out: out.softmax(-1)[:, 0] - out.softmax(-1)[:, 1]
    ).row
    of_logits = input_gradients(trained, ids)[0, 0]
    np.testing.assert_allclose(of_chances / of_chances.sum(), of_logits / of_logits.sum(), rtol=1e-3)


def test_the_sum_of_the_gradient_is_rounding(trained, sentences):
    """By algebra: the number added to all of an embedding goes down the residual stream to the last LayerNorm."""
    ids = trained.ids([sentences.test[0].words])
    values = replace(trained, model=copy.deepcopy(trained.model).double())
    found = dict(zip(GRADIENTS, input_gradients(values, ids)[0], strict=True))
    assert (found["|sum|"] < 1e-12 * found["norm"]).all()


def test_correlations_are_those_of_the_metrics(measured):
    for one in measured:
        values = correlations(one.scores, one.references)
        expected = [[metrics.correlation(row, other) for other in one.references] for row in one.scores]
        np.testing.assert_allclose(values, expected, atol=1e-12)


def test_without_cls_raw_rollout_and_flow_rank_the_words_alike_at_layer_1(measured):
    for one in measured:
        raw, rollout, flow = (one.scores[one.scorers.index((name, 0))] for name in ("raw", "rollout", "flow"))
        np.testing.assert_allclose(rollout, flow, rtol=1e-12)
        np.testing.assert_allclose(rollout[:-1], raw[:-1] / 2, rtol=1e-12)
        assert np.argsort(rollout[:-1]).tolist() == np.argsort(raw[:-1]).tolist()


@pytest.mark.long
def test_the_command_writes_everything(data, tmp_path, monkeypatch, capsys):
    checkpoints = tmp_path / "checkpoints"
    arguments = ["study", "verb-number", "--data", data, "-o", tmp_path, "--checkpoints", checkpoints, "--small"]
    monkeypatch.setattr(sys, "argv", ["attnflow", *map(str, arguments)])
    cli.main()
    assert "blank-out correlation, last layer" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "small"}  # no full study is overwritten
    written = tmp_path / "small"
    assert {path.suffix for path in written.iterdir()} == {".json", ".md", ".svg", ".png"}
    assert len(list(checkpoints.iterdir())) == 2
    found = record.load(written / "verb-number.json")
    assert found.data["numpred.val.gz"]
    for by_side in found.tables["correlations"].values():
        for side, by_reference in by_side.items():
            for numbers in by_reference.values():
                first = {name: numbers[name]["mean"][0] for name in STUDIED}
                assert first["rollout"] == first["flow"]
                assert side == "CLS inside" or first["raw"] == first["rollout"]
                assert all(len(numbers[name]["mean"]) == 6 for name in STUDIED)
                assert -1 <= numbers[COLUMN_SUM]["mean"][0] <= 1
    assert all(sentence in (written / "verb-number.md").read_text() for sentence in found.words)


def test_without_data_it_says_where_they_are_published(tmp_path, monkeypatch, capsys):
    arguments = ["study", "verb-number", "--data", str(tmp_path), "-o", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["attnflow", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "published at https://github.com/TalLinzen/rnn_agreement" in capsys.readouterr().err
