"""Each study runs on real data with small settings, and says what it found."""

import json

import pytest

import attnflow
from attnflow.cli import main
from attnflow.studies.record import load


@pytest.fixture
def study(monkeypatch, capsys, tmp_path, data):
    """Runs `attnflow study NAME --small` on the data and returns its record."""

    def run(name, *arguments):
        options = ["--data", str(data), "--output", str(tmp_path), "--small", "--quiet", "--json"]
        monkeypatch.setattr("sys.argv", ["attnflow", "study", name, *map(str, arguments), *options])
        main()
        out = capsys.readouterr().out
        record = load(tmp_path / f"{name}.json")
        assert json.loads(out)["study"] == name
        assert str(data) not in out
        assert set(attnflow.METHODS) <= {one.method for one in record.standings}
        assert record.words
        return record

    return run


@pytest.mark.parametrize("name", ["segmentation", "sst2"])
def test_a_study_without_its_data_says_where_they_are_published(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["attnflow", "study", name, "--data", str(tmp_path), "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "published at https://" in capsys.readouterr().err


def test_segmentation(study):
    record = study("segmentation")
    auc = {one.method: one.mean for one in record.standings if one.task == "pixel-auc, from [CLS]"}
    assert auc["raw"] > 0.85 > auc["centre"] > auc["random"]
    assert record.tables["from [CLS]"]["pixel-auc"]["raw"].keys() == {str(layer) for layer in range(12)}
    assert record.tables["flow from [CLS] by layer"]["saturated"][-1] > 0.9
    assert len(record.data) == 8


def test_sst2(study):
    record = study("sst2")
    assert record.tables["accuracy"] > 0.7
    league = {(one.task, one.method): one for one in record.standings}
    task = "correlation with gradient-norm, from [CLS], special tokens out"
    assert league[task, "gradient-x-input"].mean > 0.3 > league[task, "random"].mean
    assert (task, "gradient-norm") not in league
    layers = record.tables["gradient-sum, max over positions, special tokens in"]["flow"]
    assert layers.keys() == {str(layer) for layer in range(6)}
    assert layers["0"] == record.tables["gradient-sum, max over positions, special tokens in"]["rollout"]["0"]
