"""Each study runs on real data with small settings, and says what it found."""

import csv
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from attnflow.cli import main
from attnflow.methods import METHODS
from attnflow.studies import STUDIES, PhotographOptions, page, probe, pronouns, retinopathy, run, stories
from attnflow.studies.comparison import STUDIED
from attnflow.studies.record import load


@pytest.fixture
def study(monkeypatch, capsys, tmp_path):
    """Runs `attnflow study NAME DATA --small` and returns its record."""

    def run(data, name, *arguments):
        options = ["--output", str(tmp_path), "--small", "--quiet", "--json"]
        monkeypatch.setattr("sys.argv", ["attnflow", "study", name, str(data), *map(str, arguments), *options])
        main()
        out = capsys.readouterr().out
        record = load(tmp_path / "small" / f"{name}.json")
        assert json.loads(out)["study"] == name
        assert str(data) not in out
        assert record.words == STUDIES[name].steps.sentences(record)
        return record

    return run


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_without_its_data_says_where_they_are_published(name, monkeypatch, capsys, tmp_path):
    options = ["--data", str(tmp_path), "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["attnflow", "study", name, *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "published at https://" in capsys.readouterr().err


@pytest.mark.parametrize("name", STUDIES)
def test_help_says_where_the_data_are_published(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["attnflow", "study", name, "--help"])
    main()
    assert "https://" in capsys.readouterr().out


@pytest.mark.parametrize("name", STUDIES)
def test_committed_sentences_are_what_the_code_says_of_the_committed_numbers(name):
    record = load(Path(__file__).parents[1] / "docs" / "studies" / f"{name}.json")
    assert STUDIES[name].steps.sentences(record) == record.words


@pytest.mark.parametrize("name", ["pronouns", pytest.param("verb-number", marks=pytest.mark.long)])
def test_a_method_that_always_fails_is_counted_and_loses_no_other(name, study, data, monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "flow", METHODS["alti"])  # which needs values, and studies keep none
    record = study(data, name)
    failed = record.tables["failed"]
    assert failed.keys() == {"flow"}
    assert failed["flow"]["examples"] > 10
    assert "keep=" in failed["flow"]["error"]
    means = {one.method: one.mean for one in record.scores}
    assert math.isnan(means.get("flow", math.nan))
    assert not math.isnan(means["raw"] + means["rollout"])
    assert (tmp_path / "small" / STUDIES[name].page).stat().st_size > 1000


def test_numbers_are_on_disk_before_a_sentence_is_made(data, monkeypatch, tmp_path):
    def fault(record):
        raise KeyError("flow")

    monkeypatch.setattr(pronouns, "sentences", fault)
    with pytest.raises(KeyError):
        run(STUDIES["pronouns"], data, tmp_path, pronouns.ModelOptions(small=True))
    kept = load(tmp_path / "pronouns.json")
    assert len(kept.scores) > 5
    assert kept.words == []


def test_a_missing_extra_is_named_before_any_work(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    monkeypatch.delitem(sys.modules, "attnflow.studies.retinopathy")
    code, _, err = command("study", "retinopathy", tmp_path, "-o", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "the study retinopathy needs sklearn: pip install 'attnflow[studies]'" in err


def test_a_study_refuses_what_it_does_not_take(command, tmp_path):
    code, _, err = command("study", "segmentation", "--model", "x", "-o", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "--model" in err
    code, _, err = command("study", "retinopathy", "--limit", "1.5", "-o", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "takes a whole number; '1.5' was given" in err


@pytest.mark.long
def test_segmentation(study, data):
    record = study(data, "segmentation")
    auc = {one.method: one.mean for one in record.scores if one.task == "pixel-auc, from [CLS]"}
    assert auc["raw"] > 0.85 > auc["centre"] > auc["random"]
    assert record.tables["from [CLS]"]["pixel-auc"]["raw"].keys() == {str(layer) for layer in range(12)}
    assert record.tables["flow from [CLS] by layer"]["saturated"][-1] > 0.9
    assert len(record.data) == 4


@pytest.mark.long
def test_sst2(study, data):
    record = study(data, "sst2")
    assert record.tables["accuracy"] > 0.7
    leaderboard = {(one.task, one.method): one for one in record.scores}
    task = "correlation with gradient-norm, from [CLS], special tokens out"
    assert leaderboard[task, "gradient-x-input"].mean > 0.3 > leaderboard[task, "random"].mean
    assert (task, "gradient-norm") not in leaderboard
    table = record.tables["gradient-sum, max over positions, special tokens in"]
    assert table["flow"].keys() == {str(layer) for layer in range(6)}
    assert table["flow"]["0"]["mean"] == table["rollout"]["0"]["mean"]


@pytest.mark.long
def test_retinopathy(study, data, tmp_path):
    record = study(data, "retinopathy")
    quality = record.tables["probe"]
    assert 0 < quality["disease AUC"] < 1
    assert (quality["photographs"], quality["with disease"]) == (60, 54)
    assert {one.task for one in record.scores} >= {"deletion-gap, from [CLS]", "insertion, from [CLS]"}
    written = tmp_path / "small" / "retinopathy"
    shown, _ = listed(written / "index.html")
    pictures = [picture for one in shown["examples"] for picture in one["pictures"]]
    assert len(pictures) == 2 * (2 + len(STUDIED))
    assert all(picture["href"].startswith("data:image/jpeg") for picture in pictures)
    assert f"AUC {quality['disease AUC']:.2f}" in " ".join([shown["warning"], *shown["words"]])
    assert "Not a diagnosis" in " ".join([shown["warning"], *shown["words"]])


def listed(page):
    """What the page of a list holds, and its text."""
    text = page.read_text()
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(block), text


def test_the_layout_of_aptos_is_read(tmp_path):
    (tmp_path / "train_images").mkdir()
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id_code", "diagnosis"), ("000c1434d8d7", 2), ("001639a390f0", 0)])
    (tmp_path / "train_images" / "000c1434d8d7.png").touch()
    with pytest.raises(FileNotFoundError, match=r"001639a390f0\.png, which is not there; .*kaggle\.com"):
        retinopathy.photographs(tmp_path)
    (tmp_path / "train_images" / "001639a390f0.png").touch()
    assert [(one.path.name, one.grade) for one in retinopathy.photographs(tmp_path)] == [
        ("000c1434d8d7.png", 2),
        ("001639a390f0.png", 0),
    ]


def test_a_folder_without_disease_is_refused(shipped, tmp_path):
    for number in range(10):
        shutil.copy(shipped / "images" / "hopper.jpg", tmp_path / f"1_{number:03d}.jpg")
    with pytest.raises(ValueError, match=r"at least 5 photographs without disease \(grade 1\) and with"):
        retinopathy.load(tmp_path, PhotographOptions(), lambda what, done, total: None)


def test_the_probe_learns_what_can_be_learnt_and_no_more():
    rng = np.random.default_rng(0)
    grades = np.repeat([0, 1, 2], 40)
    signal = torch.from_numpy(grades[:, None] + rng.normal(size=(120, 1)) * 0.2)
    noise = torch.from_numpy(rng.normal(size=(120, 8)))
    learnt = probe.cross_validated(torch.cat([signal, noise], 1), grades, seed=0)
    assert roc_auc_score(grades > 0, learnt.disease) > 0.95
    chance = probe.cross_validated(noise, grades, seed=0)
    assert 0.35 < roc_auc_score(grades > 0, chance.disease) < 0.65
    assert all(np.bincount(grades[learnt.fold == fold]).tolist() == [8, 8, 8] for fold in range(5))


def test_names_on_the_page_stay_text(tmp_path, shipped):
    path = tmp_path / "<script>alert(1)</script> & 1.jpg".replace("/", "_")
    shutil.copy(shipped / "images" / "hopper.jpg", path)
    shown = page.Explained(path, 1, 2, 0.5, {"raw": np.arange(16.0).reshape(4, 4)})
    held, text = listed(page.write_page(tmp_path / "page.html", [shown], ["5 < 6"]))
    assert "<script>alert" not in text
    assert held["examples"][0]["name"].startswith("<script>alert(1)")
    assert "5 < 6" in held["words"]
    assert re.findall(r"https?://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]


@pytest.mark.long
def test_pronouns(study, data, tmp_path):
    record = study(data, "pronouns")
    assert record.settings["kind"] == "causal"
    assert [entry["text"] for entry in record.tables["figure 4"]] == [case.before for case in pronouns.FIGURE]
    assert (tmp_path / "small" / "pronouns.png").stat().st_size > 10_000
    rates = {one.method: one.mean for one in record.scores}
    assert 0 <= rates["position"] <= 1


@pytest.mark.long
def test_a_masked_model_is_asked_at_its_mask(study, shipped, tmp_path):
    import transformers

    from attnflow.capturing import demo

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.text_folder())
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "masked-lm")
    tokenizer.save_pretrained(tmp_path / "masked-lm")
    record = study(shipped, "pronouns", "--model", tmp_path / "masked-lm")
    assert (record.settings["kind"], record.settings["model"]) == ("masked", "masked-lm")
    assert record.tables["figure 4"][0]["text"] == "The author talked to Sara about [MASK] book."


def test_a_model_without_a_head_is_no_language_model():
    from attnflow.capturing import demo

    with pytest.raises(ValueError, match="was not trained to fill in masks: it has no weights for cls"):
        pronouns.language_model(str(demo.text_folder()))


def test_stories260k_tells_a_story(data):
    model, tokenizer = stories.load(data / "stories260k")
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    assert tokenizer.convert_ids_to_tokens(ids[0].tolist()) == ["<s>", "▁Once", "▁upon", "▁a", "▁time"]
    told = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(told[0], skip_special_tokens=True) == "Once upon a time, there was a little girl named"
