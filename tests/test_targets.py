"""Targets: which number of an output is explained, with gradients against those of the same number made by hand."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from attnflow import (
    Answer,
    Contrast,
    Direction,
    Token,
    capture,
    capture_batch,
    evaluate,
    explain,
    pooled,
    similar_to,
    similarity_to,
)
from attnflow.capturing.embeddings import saved_pooling
from attnflow.cli import main
from classifiers import sharpened, small_bert, tokenizer

TEXT = "The keys to the cabinet are on the table."


@pytest.fixture(scope="module")
def named():
    """A classifier whose classes have names."""
    model = small_bert()
    model.config.id2label = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}
    return model


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def causal():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=49)
    return sharpened(transformers.GPT2LMHeadModel(config))


def same_as(function, target, model, inputs, **more):
    """The trace of a target, which has the score and the gradients of a function of the output."""
    expected, found = (capture(model, inputs, target=one, **more) for one in (function, target))
    assert found.target["score"] == pytest.approx(expected.target["score"], rel=1e-5)
    for one, other in zip(expected.layers, found.layers, strict=True):
        np.testing.assert_allclose(one.gradient.of([0]), other.gradient.of([0]), rtol=1e-3, atol=1e-6)
    assert max(float(layer.gradient.output.abs().max()) for layer in found.layers) > 0
    return found.target["target"]


def test_a_contrast_is_the_difference_of_two_logits(named, words):
    for target in ((2, 0), Contrast(2, against=0), ("POSITIVE", "negative"), Contrast("POSITIVE", 0)):
        said = same_as(lambda y: y.logits[:, 2] - y.logits[:, 0], target, named, TEXT, tokenizer=words)
        assert said == "2 rather than 0"
    best = capture(named, TEXT, tokenizer=words, target="predicted").target["target"]
    other = (best + 1) % 3
    found = capture(named, TEXT, tokenizer=words, target=Contrast("predicted", against=other))
    assert found.target["target"] == f"{best} rather than {other}"


def test_a_class_by_name(named, words):
    assert capture(named, TEXT, tokenizer=words, target="POSITIVE").target["target"] == 2
    for method in ("chefer", "gradient-norm", "integrated-gradients"):
        one, other = (explain(named, TEXT, method, tokenizer=words, target=target) for target in ("neutral", 1))
        np.testing.assert_array_equal(one.scores, other.scores)
    # A name that is another class's but for its case is that one's own.
    named.config.id2label = {0: "us", 1: "US", 2: "x"}
    assert capture(named, TEXT, tokenizer=words, target="US").target["target"] == 1
    named.config.id2label = {0: "NEGATIVE", 1: "NEUTRAL", 2: "POSITIVE"}


def test_each_example_of_a_batch_has_its_own(named, words):
    batch = words([TEXT, "It is late."], return_tensors="pt", padding=True)
    traces = capture_batch(named, dict(batch), target=Contrast("predicted", against="NEUTRAL"))
    for trace, text in zip(traces, (TEXT, "It is late."), strict=True):
        alone = capture(named, text, tokenizer=words, target=Contrast("predicted", against=1))
        assert trace.target["target"] == alone.target["target"]
        assert trace.target["score"] == pytest.approx(alone.target["score"], rel=1e-4)
    classes = [trace.target["target"] for trace in capture_batch(named, dict(batch), target=[2, 0])]
    assert classes == [2, 0]


def test_a_token_at_a_position():
    model, ids = causal(), torch.arange(3, 12)[None]
    assert same_as(lambda y: y.logits[:, 4, 7], Token(4, 7), model, {"input_ids": ids}) == "token 7 at position 4"
    best = int(model(ids).logits[0, 4].argmax())
    assert capture(model, ids, target=Token(4)).target["target"] == f"token {best} at position 4"
    padded = {"input_ids": F.pad(ids, (3, 0)), "attention_mask": F.pad(torch.ones_like(ids), (3, 0))}
    same_as(lambda y: y.logits[:, 7, 7], Token(4, 7), model, padded)
    same_as(lambda y: y.logits[:, 11, 7], Token(-1, 7), model, padded)


def test_the_tokens_of_an_answer():
    model, ids = causal(), torch.arange(3, 12)[None]

    def by_hand(output):
        rows = output.logits[:, 5:8].log_softmax(-1)
        return rows[:, 0, 9] + rows[:, 1, 10] + rows[:, 2, 11]

    said = same_as(by_hand, Answer((9, 10, 11)), model, {"input_ids": ids})
    assert said == "log-probability of the last 3 tokens"
    written = capture(model, {"input_ids": ids}, generate=4, target="answer")
    whole = model.generate(ids, max_new_tokens=4, do_sample=False)
    wanted = tuple(whole[0, 9:].tolist())
    alone = capture(model, {"input_ids": whole}, target=Answer(wanted))
    assert written.target == alone.target
    assert written.generated_from == 9
    torch.testing.assert_close(written.layers[0].gradient.output, alone.layers[0].gradient.output)


def test_how_similar_two_texts_are(minilm):
    model, words = minilm
    batch = words(["A door.", TEXT], return_tensors="pt", padding=True)
    with torch.no_grad():
        embeddings = pooled(model(**batch), "mean", batch["attention_mask"])
        alone = model(**words("A door.", return_tensors="pt")).last_hidden_state.mean(1)[0]
    torch.testing.assert_close(embeddings[0], alone, rtol=1e-4, atol=1e-5)

    def cosine(output):
        return F.cosine_similarity(output.last_hidden_state.mean(1), alone[None], dim=-1)

    said = same_as(cosine, similarity_to(embeddings[0], "mean"), model, TEXT, tokenizer=words)
    assert said == "cosine similarity of the embedding (mean of the tokens) to a given one"
    itself = capture(model, TEXT, tokenizer=words, target=similarity_to(embeddings[1], "mean"))
    assert itself.target["score"] == pytest.approx(1, abs=1e-5)
    said = same_as(lambda y: y.last_hidden_state[:, 0] @ alone, Direction(alone, "first"), model, TEXT, tokenizer=words)
    assert said == "embedding (first of the tokens) along a given direction"
    found = explain(model, TEXT, "gradient-norm", tokenizer=words, target=similarity_to(embeddings[0], "mean"))
    assert (found.scores > 0).all()


def test_evaluation_of_a_contrast(named, words):
    given = {"tokenizer": words, "methods": ["raw"], "metrics": ["deletion"]}
    texts = [(TEXT, 0), ("It is late, and the door is shut.", 1)]
    by_pair = evaluate(named, texts, target=("POSITIVE", "NEGATIVE"), **given)
    by_hand = evaluate(named, texts, target=lambda y: y.logits[:, 2] - y.logits[:, 0], **given)
    raw = [[row.value for row in one.rows if row.method == "raw"] for one in (by_pair, by_hand)]
    np.testing.assert_allclose(*raw, rtol=1e-5)
    assert by_pair.recipe["target"] == "2 rather than 0"
    assert not by_pair.failures
    names, numbers = (evaluate(named, texts, target=target, **given) for target in ("POSITIVE", 2))
    assert names.rows == numbers.rows
    assert names.recipe["target"] == 2
    predicted = evaluate(named, texts, target=Contrast("predicted", against=1), **given)
    assert not [one for one in predicted.failures if "no contrast" not in one.error]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "POSITIV",
            r"target 'POSITIV' is no class of BertForSequenceClassification: it has NEGATIVE, NEUTRAL, POSITIVE",
        ),
        ("answer", 'the target "answer" is what a model writes: let it write with generate='),
        ((1, 1), "1 rather than 1 is no contrast: give two different classes"),
        ((1, 3), "target 3 does not fit logits"),
        ((1, "x"), "target 'x' is no class"),
        (1.5, "a target is an index, a name, a pair .*; 1.5 was given"),
        (True, "a target is an index, a name, a pair .*; True was given"),
        (np.False_, "a target is an index, a name, a pair .*; .* was given"),
        ([True], r"target \(True,\) does not fit logits"),
        ((True, False), "target True does not fit logits"),
        (Token(0, 1), r"token 1 at position 0 needs logits \(batch, token, vocabulary\); they are \(1, 3\)"),
        (Answer((1,)), r"the text ends with the tokens \[102\], and the answer is \[1\]"),
        (Answer((102,)), r"an answer of 1 tokens needs logits \(batch, token, vocabulary\)"),
        (similarity_to(torch.ones(16)), "holds no embedding .* pooling='mean', 'first' or 'last'"),
        (Direction(torch.ones(16), "mean"), "holds no vectors of tokens"),
        (Direction(torch.ones(16), "middle"), "pooling 'middle' is unknown; choose one of output, mean, first, last"),
    ],
)
def test_errors(named, words, target, message):
    with pytest.raises(ValueError, match=message):
        capture(named, TEXT, tokenizer=words, target=target)


def test_more_errors(minilm, named):
    model, words = minilm
    with pytest.raises(ValueError, match="has 16 numbers, and the model's embedding 384"):
        capture(model, TEXT, tokenizer=words, target=Direction(torch.ones(16), "mean"))
    with pytest.raises(ValueError, match="out of range: the model returns logits of 9 positions"):
        capture(causal(), torch.arange(3, 12)[None], target=Token(9, 1))
    with pytest.raises(ValueError, match="a token stands at a position, a number; True was given"):
        Token(True, 1)
    for given in ({"query": True}, {"target": True}):
        with pytest.raises(ValueError, match="^a (query|target) is [^\n]*; True was given$"):
            explain(named, TEXT, "chefer", tokenizer=tokenizer(), **given)
    with pytest.raises(ValueError, match="at least one token"):
        Answer(())


def test_the_command_line(tmp_path, capsys, monkeypatch, named, words):
    named.save_pretrained(tmp_path / "named")
    capsys.readouterr()
    words.save_pretrained(tmp_path / "named")

    def printed(*options):
        given = ["text", TEXT, "--model", str(tmp_path / "named"), "--method", "chefer", "--json", "-q", *options]
        monkeypatch.setattr("sys.argv", ["attnflow", *given])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    assert '"target": "2 rather than 0"' in printed("--target", "POSITIVE", "--against", "NEGATIVE")[1]
    assert '"target": "2 rather than 1"' in printed("--target", "2", "--against", "1")[1]
    assert '"target": 1,' in printed("--target", "neutral")[1]
    code, _, err = printed("--target", "GOOD")
    assert code == 2
    assert "'GOOD' is no class" in err
    assert err.count("\n") == 1


def test_a_text_to_be_similar_to_is_run_as_the_model_runs_it(minilm):
    model, tokenizer = minilm
    target = similar_to(model, "Where are my keys?", tokenizer=tokenizer, pooling="mean")
    with torch.no_grad():
        other = model(**tokenizer("Where are my keys?", return_tensors="pt")).last_hidden_state[0].mean(0)
    torch.testing.assert_close(target.embedding, other, rtol=1e-5, atol=1e-6)
    assert "'Where are my keys?'" in target.words
    with pytest.raises(ValueError, match="one example; 2 were given"):
        similar_to(model, ["one", "two"], tokenizer=tokenizer, pooling="mean")


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}', "first"),
        ('{"pooling_mode_lasttoken": true}', "last"),
        ('{"pooling_mode_max_tokens": true}', "pools by pooling_mode_max_tokens"),
        ('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}', "pools by pooling_mode_cls_token, "),
        ("[]", "pools by nothing"),
        ("{", "cannot be read as JSON"),
        (None, "no folder .* here says how its embedding is made"),
    ],
)
def test_how_a_saved_model_pools(tmp_path, saved, expected):
    if saved is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(saved)
    if expected in ("first", "last"):
        assert saved_pooling(str(tmp_path)) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            saved_pooling(str(tmp_path))


def test_a_layer_behind_the_pooling_is_not_passed_over(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "2_Normalize").mkdir()
    assert saved_pooling(str(tmp_path)) == "mean"  # a cosine does not see it
    (tmp_path / "2_Dense").mkdir()
    with pytest.raises(ValueError, match="behind the pooling, by 2_Dense"):
        saved_pooling(str(tmp_path))


@pytest.mark.parametrize("first", [lambda output: output.logits[:1, 1], lambda output: output.logits[:, 1].sum()])
def test_a_function_that_gives_fewer_scores_than_examples_is_refused(first):
    model, words = small_bert(), tokenizer()
    inputs = dict(words(["a film", "good film"], return_tensors="pt", padding=True))
    with pytest.raises(ValueError, match="one score per example, a tensor .* it gave 1 of 2 examples"):
        capture_batch(model, inputs, tokenizer=words, target=first)
