"""The docs tell the truth: code and commands run, notebooks print what they show, written pages are current."""

import ast
import contextlib
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnflow
from attnflow import CARRIERS, EDGES
from attnflow.cli import main

ROOT = Path(__file__).parents[1]
PAGES = ("docs/start.md", "docs/extending.md", "docs/paper.md")
TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.ipynb"))


def blocks(page, language):
    """The fenced blocks of a language, each with the text block right behind it, or None."""
    found = re.findall(
        rf"^```{language}\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [(code, shown or None) for code, shown in found]


@pytest.mark.parametrize("page", PAGES)
def test_code_runs_and_prints_what_stands_below_it(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EDGES, "squared", None)  # the rows that docs/extending.md adds go again
    monkeypatch.setitem(CARRIERS, "widest", None)
    found, names = blocks(ROOT / page, "python"), {}
    assert found
    for code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == (shown or "")


def commands(page):
    return [line for code, _ in blocks(ROOT / page, "console") for line in code.splitlines()]


@pytest.mark.parametrize("command", sorted({*commands("README.md"), *commands("docs/start.md")}))
def test_commands_run_and_write_what_they_name(command, shipped, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(shipped / "images" / "dogs.jpg", "photograph.jpg")
    program, *arguments = shlex.split(command)
    assert program == "attnflow"
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    main()
    assert capsys.readouterr().out
    for option, value in itertools.pairwise(arguments):
        if option == "-o":
            assert Path(value).stat().st_size > 1000


def ran(source, names):
    """What a cell prints, with the text of its last line if that is an expression, as a notebook shows it."""
    body = ast.parse(source).body
    last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = eval(compile(last, "cell", "eval"), names) if last else None
    return printed.getvalue() + ("" if value is None else re.sub(r" at 0x\w+", "", repr(value)))


def shown(cell):
    texts = [one.get("text") or one["data"]["text/plain"] for one in cell["outputs"]]
    return "".join("".join(text) for text in texts)


NUMBER = re.compile(r"-?\d+\.\d+")


@pytest.mark.long
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_notebooks_print_what_they_show(path, data, monkeypatch):
    """The words are the same, and numbers but for their last digits, in which machines differ."""
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("ATTNFLOW_DATA", str(data))
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 4
    names = {}
    for cell in cells:
        now, before = ran("".join(cell["source"]), names), shown(cell)
        assert NUMBER.sub("#", now).split() == NUMBER.sub("#", before).split()
        numbers = [[float(one) for one in NUMBER.findall(text)] for text in (now, before)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.02)


def test_pages_that_code_writes_are_current():
    subprocess.run([sys.executable, ROOT / "tools" / "reference.py", "--check"], check=True)


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text()
    for name in attnflow.__all__:
        assert f"::: attnflow.{name}\n" in page or f"`{name}`" in page, name


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r": ([\w/-]+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for kind in ("md", "ipynb") for path in docs.rglob(f"*.{kind}")}
    assert named == pages
