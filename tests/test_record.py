"""The record of a study: what is written is what is read, and the leaderboard is made of all records."""

import json
import math
from pathlib import Path

import pytest

from attnflow.studies.record import Record, Score, checksums, leaderboard, load, required

STUDIES = Path(__file__).parents[1] / "docs" / "studies"


def record(study, *scores, words=("One sentence.",)):
    settings, tables = {"seed": 1}, {"table 1": {"raw": [0.5, math.nan]}}
    return Record(study=study, settings=settings, data={}, tables=tables, scores=scores, words=words)


RAW = Score("agreement", "up", "raw", 0.5, 0.4, 0.6, 20)
RANDOM = Score("agreement", "up", "random", 0.0, -0.1, 0.1, 20)


def test_what_is_written_is_read(tmp_path):
    path = record("one", RAW, RANDOM._replace(mean=math.nan)).save(tmp_path / "studies")
    read = load(path)
    assert read.scores[0] == RAW
    assert math.isnan(read.scores[1].mean)
    assert read.tables == {"table 1": {"raw": [0.5, None]}}
    assert read.versions["torch"]
    assert read.settings == {"seed": 1}


def test_the_leaderboard_holds_every_study_of_the_folder(tmp_path):
    record("one", RAW, RANDOM).save(tmp_path)
    record("two", RAW._replace(direction="down"), RANDOM._replace(direction="down"), words=["Random wins."]).save(
        tmp_path
    )
    table = (tmp_path / "leaderboard.md").read_text()
    assert "| one: agreement ↑ | **0.500** (0.400 to 0.600) | 0.000 (-0.100 to 0.100) |" in table
    assert "| two: agreement ↓ | 0.500 (0.400 to 0.600) | **0.000** (-0.100 to 0.100) |" in table
    assert "## two\n\n- Random wins.\n" in table


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"format": "attnflow-1"}))
    with pytest.raises(ValueError, match="x.json does not hold a study"):
        load(path)


def test_data_that_are_absent_are_named_with_where_to_get_them(tmp_path):
    (tmp_path / "here.txt").write_text("x")
    assert required(tmp_path, "here.txt", published="https://example.org") == [tmp_path / "here.txt"]
    with pytest.raises(FileNotFoundError, match=r"there\.txt, which is not there; the data are published at https"):
        required(tmp_path, "here.txt", "there.txt", published="https://example.org")
    assert checksums([tmp_path / "here.txt"])["here.txt"].startswith("2d711642b726b044")


def test_the_leaderboard_in_the_docs_is_that_of_the_records_beside_it():
    records = [load(path) for path in sorted(STUDIES.glob("*.json"))]
    assert leaderboard(records) == (STUDIES / "leaderboard.md").read_text()
    assert all(one.settings["seed"] == 0 and one.versions and one.data for one in records)
