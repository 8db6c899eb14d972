"""Models are loaded whole or not at all, by every command: broken folders, every format of weights, odd tokenizers."""

import doctest
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import attnflow
from attnflow import cli
from attnflow.capturing import demo, models
from classifiers import small_bert, small_vit, tokenizer

WEIGHTS = "model.safetensors"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line: (exit code, standard output, standard error)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnflow", *map(str, arguments)])
        capsys.readouterr()  # of what made the folder
        code = 0
        try:
            cli.main()
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def minilm_folder(tmp_path):
    """A folder of the packaged MiniLM of which every file may be changed; its weights are a link."""
    folder = tmp_path / "minilm"
    folder.mkdir()
    for file in demo.text_folder().iterdir():
        if file.is_file() and file.name != WEIGHTS:
            shutil.copy(file, folder)
    (folder / WEIGHTS).symlink_to(demo.text_folder() / WEIGHTS)
    return folder


@pytest.fixture
def bert_folder(tmp_path):
    """A small BERT with the tokenizer of MiniLM."""
    small_bert().save_pretrained(tmp_path / "bert")
    tokenizer().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def configured(**settings):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))

    return change


def reweighted(rename):
    """Weights under other names; those that are renamed to None are left out."""

    def change(folder):
        weights = {rename(name): value for name, value in load_file(folder / WEIGHTS).items()}
        (folder / WEIGHTS).unlink()
        save_file({name: value for name, value in weights.items() if name}, folder / WEIGHTS, {"format": "pt"})

    return change


def written(name, content):
    def change(folder):
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content)

    return change


PICKLE = b"cos\nsystem\n(S'touch unpickled'\ntR."
FAULTS = {
    "more layers than weights": (
        configured(num_hidden_layers=9),
        "it lacks 48 of its 151 weights, which would be drawn",
    ),
    "fewer layers than weights": (configured(num_hidden_layers=4), "32 of its stored weights belong to layers that"),
    "renamed attention": (
        reweighted(lambda name: name.replace("attention.self", "attn.own")),
        "it lacks 36 of its 103 weights, which would be drawn at random: encoder.layer.0.attention.self.key.bias,",
    ),
    "a missing block": (
        reweighted(lambda name: None if "layer.3.attention" in name else name),
        "it lacks 10 of its 103 weights",
    ),
    "weights beside those of a block": (
        reweighted(lambda name: name.replace("layer.5.output.dense", "layer.5.adapter.dense")),
        "it lacks 2 of its 103 weights",
    ),
    "another width": (configured(intermediate_size=100), "18 of its weights have another size than config.json says"),
    "another vocabulary": (
        configured(vocab_size=99),
        "word_embeddings.weight is (30522, 384), and (99, 384) is expected",
    ),
    "no type": (lambda folder: (folder / "config.json").write_text("{}"), "Unrecognized model in"),
    "a list": (lambda folder: (folder / "config.json").write_text("[1]"), "it is no such model"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("hello"), "is not a valid JSON file"),
    "unknown type": (configured(model_type="brain"), "has model type `brain`"),
    "code of its own": (
        configured(model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}),
        "it needs code of its own, which is never run",
    ),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
    "cut weights": (
        lambda folder: written(WEIGHTS, (folder / WEIGHTS).read_bytes()[:5000])(folder),
        "its weights cannot be read, the file may be cut short",
    ),
    "no tensors": (written("pytorch_model.bin", PICKLE), "hold Python objects, which are never loaded"),
    "broken tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "one of its files is no JSON"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_broken_folder_is_refused_in_one_line(run, minilm_folder, monkeypatch, case):
    spoil, message = FAULTS[case]
    spoil(minilm_folder)
    monkeypatch.chdir(minilm_folder)
    code, out, err = run("text", "The keys to the cabinet", "--model", minilm_folder)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("attnflow: error: cannot load a text model from ")
    assert message in err
    assert not (minilm_folder / "unpickled").exists()


@pytest.mark.parametrize("task", ["text", "text-generation", "text-classification", "fill-mask"])
def test_every_task_refuses_a_random_encoder(minilm_folder, task):
    configured(num_hidden_layers=9)(minilm_folder)
    with pytest.raises(ValueError, match=r"it lacks \d+ of its \d+ weights, which would be drawn at random: "):
        attnflow.load_model(minilm_folder, task=task)


@pytest.mark.parametrize("task", ["image", "image-classification"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 3}, "it lacks 16 of its"),
        ({"num_hidden_layers": 1}, "16 of its stored weights belong to layers"),
        ({"intermediate_size": 7}, "6 of its weights have another size"),
    ],
)
def test_every_task_refuses_a_random_vision_model(tmp_path, task, settings, message):
    small_vit().save_pretrained(tmp_path)
    configured(**settings)(tmp_path)
    with pytest.raises(ValueError, match=message):
        attnflow.load_model(tmp_path, task=task)


@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: None if "blocks.1.attn" in name else name, r"4 of its weights are missing.*: blocks.1.attn.qkv"),
        (lambda name: name.replace("blocks.1", "layers.1"), r"24 of its weights are missing, left over.* and 21 more"),
    ],
)
def test_a_broken_timm_folder_is_refused(tmp_path, classes, change, message):
    timm_folder(tmp_path, classes)
    reweighted(change)(tmp_path)
    with pytest.raises(ValueError, match=f"cannot load a vision model from .*{message}"):
        attnflow.load_model(tmp_path, task="image")


def test_a_timm_folder_whose_weights_nobody_would_check_is_refused(tmp_path):
    timm_folder(tmp_path, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"]["num_classes"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="gives it 0 classes and says that its weights have 3"):
        attnflow.load_model(tmp_path, task="image")


def timm_folder(folder, classes):
    """A ViT of timm with two layers of random weights."""
    import timm

    arguments = {"img_size": 32, "embed_dim": 48, "num_heads": 4, "depth": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **arguments)
    save_file(model.state_dict(), folder / WEIGHTS)
    cfg = {"input_size": [3, 32, 32], "num_classes": classes, "classifier": "head"}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": classes, "model_args": arguments}
    (folder / "config.json").write_text(json.dumps(config | {"pretrained_cfg": cfg}))


def as_bin(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def in_shards(folder):
    model = small_bert()
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


def in_half(dtype):
    return lambda folder: small_bert().to(dtype).save_pretrained(folder)


FORMATS = {"bin": as_bin, "shards": in_shards, "half": in_half(torch.float16), "bfloat": in_half(torch.bfloat16)}


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_stored_weights(run, bert_folder, form):
    FORMATS[form](bert_folder)
    model, words = attnflow.load_model(bert_folder, task="text-classification")
    for name, value in small_bert().state_dict().items():
        assert torch.equal(model.state_dict()[name], value.to(model.dtype)), name
    expected = attnflow.raw(attnflow.capture(model, "The keys", tokenizer=words))
    code, out, err = run("text", "The keys", "--model", bert_folder, "--layer", "-1", "--query", "all", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["scores"] == expected.scores.tolist()


def test_a_shard_that_is_missing_is_said(bert_folder):
    in_shards(bert_folder)
    sorted(bert_folder.glob("model-*.safetensors"))[-1].unlink()
    with pytest.raises(ValueError, match="cannot load a text model from"):
        attnflow.load_model(bert_folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_photographs_take_the_precision_of_the_model(run, tmp_path, dtype):
    transformers.ViTModel(small_vit().config).to(dtype).save_pretrained(tmp_path)
    transformers.ViTImageProcessor().save_pretrained(tmp_path)
    Image.effect_noise((40, 30), 50).save(tmp_path / "photo.png")
    code, out, err = run("image", tmp_path / "photo.png", "--model", tmp_path, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["grid"] == [4, 4]


def test_a_pooler_may_be_missing_and_is_said(run, bert_folder):
    whole, words = attnflow.load_model(bert_folder)
    reweighted(lambda name: None if "pooler" in name or "classifier" in name else name)(bert_folder)
    model, _ = attnflow.load_model(bert_folder)
    assert model.pooler is None
    said = ["no weights are stored for the pooler: it is left out; attention does not depend on it"]
    trace = attnflow.capture(model, "The keys", tokenizer=words)
    relevance = attnflow.rollout(trace)
    assert relevance.recipe["model"]["notes"] == said
    other = attnflow.capture(whole, "The keys", tokenizer=words)
    assert "notes" not in other.model
    assert (relevance.scores == attnflow.rollout(other).scores).all()
    code, _, err = run("text", "The keys", "--model", bert_folder)
    assert (code, err) == (0, f"attnflow: {said[0]}\n")
    for task in ("text-classification", "fill-mask"):
        with pytest.raises(ValueError, match="it lacks|it was not trained to"):
            attnflow.load_model(bert_folder, task=task)


def test_a_missing_image_processor_is_said(run, tmp_path):
    small_vit().save_pretrained(tmp_path)
    Image.effect_noise((40, 30), 50).save(tmp_path / "photo.png")
    code, _, err = run("image", tmp_path / "photo.png", "--model", tmp_path)
    assert code == 0
    said = ["no weights are stored for the pooler", "no image processor says how the model wants its pixels"]
    for line, message in zip(err.splitlines(), said, strict=True):
        assert line.startswith(f"attnflow: {message}")


def test_a_tokenizer_without_its_vocabulary_is_refused(run, minilm_folder):
    for file in ("tokenizer.json", "vocab.txt"):
        (minilm_folder / file).unlink()
    code, out, err = run("text", "The keys to the cabinet", "--model", minilm_folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "5 of 5 tokens are unknown to the tokenizer ([UNK]), which has no vocabulary" in err


def test_a_text_that_is_mostly_unknown_is_warned_of(minilm):
    model, words = minilm
    with pytest.warns(UserWarning, match="3 of 5 tokens are unknown"):
        attnflow.capture(model, "☃ ☃ ☃ the keys", tokenizer=words)
    attnflow.capture(model, "☃ ☃ the keys", tokenizer=words)


def test_ids_beyond_the_model_are_refused(run, bert_folder):
    words = tokenizer()
    words.add_tokens(["zyzzyva"])
    words.save_pretrained(bert_folder)
    message = "the token id 30522 ('zyzzyva') is out of range: the model has 30522 tokens, 0 to 30521"
    code, out, err = run("text", "zyzzyva", "--model", bert_folder)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    model, _ = attnflow.load_model(bert_folder)
    for wrong in (-1, 30522):
        with pytest.raises(ValueError, match=f"the token id {wrong} is out of range"):
            attnflow.capture(model, {"input_ids": torch.tensor([[101, wrong, 102]])})


NAMES = {
    "/nowhere/at/all": "there is no such folder",
    "./nowhere": "there is no such folder",
    "a/b/c": "there is no such folder",
    "no/such-model": "there is no such folder, and the hub gives no answer",
    "timm/no-such-model": "there is no such folder, and the hub gives no answer",
    "": "the name is empty",
    __file__: "it is a file",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task", ["text", "image", "image-text", "text-classification"])
def test_what_is_no_folder_is_one_line(name, task):
    with pytest.raises(ValueError, match=f"^cannot load an? [a-z ]+ from .*: {NAMES[name]}; give a folder[^\n]*$"):
        attnflow.load_model(name, task=task)


def test_without_a_connection_a_hub_name_is_asked_for_once():
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}  # where nothing listens
    code = "from attnflow.cli import main; main()"
    command = [sys.executable, "-c", code, "text", "The keys", "--model", "no/such-model"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("attnflow: error: cannot load a text model from 'no/such-model': there is no such")
    assert done.stderr.count("\n") == 1  # the hub's own client says so each time that it tries again


def test_tasks_and_devices_are_checked():
    with pytest.raises(ValueError, match="task 'poetry' is unknown; choose one of text, text-generation"):
        attnflow.load_model(task="poetry")
    with pytest.raises(ValueError, match="device 'abacus' cannot be used here"):
        attnflow.load_model(device="abacus")
    with pytest.raises(ValueError, match="there is no packaged model of image and text"):
        attnflow.load_model(task="image-text")


def test_docstring_examples_run():
    assert doctest.testmod(models, raise_on_error=True).attempted > 0


def test_the_packaged_models_have_nothing_to_say():
    model, words = attnflow.load_model()
    facts = attnflow.capture(model, "The keys", tokenizer=words).model
    assert facts["name"] == demo.TEXT
    assert "notes" not in facts
    assert attnflow.load_model(task="image", device=torch.device("cpu")).multiple == 14
