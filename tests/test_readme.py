"""The README tells the truth: its ten lines print what it says, its table is METHODS, its links lead somewhere."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from attnflow import METHODS
from attnflow.capturing import demo

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_print_what_stands_below_them(tmp_path, monkeypatch):
    code, expected = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    hub, packaged = '"sentence-transformers/all-MiniLM-L6-v2"', repr(str(demo.text_folder()))  # the same weights
    assert code.count(hub) == 1
    code = code.replace(hub, packaged)
    monkeypatch.chdir(tmp_path)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == expected
    assert (tmp_path / "keys.json").is_file()


def test_the_table_is_the_table_of_methods():
    rows = re.findall(
        r"^\| ([\w-]+) \| (.*) \| (.*) \| (.*) \|$", README.split("## Methods")[1].split("\n## ")[0], re.MULTILINE
    )
    table = [(name, row.formula, row.carried, row.source) for name, row in METHODS.items()]
    assert rows[2:] == table  # behind its head


@pytest.mark.parametrize(
    "page", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "docs/studies/README.md"])
def test_figures_of_studies_are_those_of_their_records(page):
    """Every figure in the rows of the table of jobs stands, as it is, among the findings that the studies wrote."""
    leaderboard = re.sub(r"\([^)]*\)", "", (ROOT / "docs/studies/leaderboard.md").read_text())  # without the intervals
    table = (ROOT / page).read_text().split("| job |")[1].split("\n\n")[0]
    figures = re.findall(r"-?\.\d+", table)
    assert len(figures) > 15
    for figure in figures:
        assert re.search(rf"(?<![\d-]){re.escape(figure.replace('.', '0.'))}(?!\d)", leaderboard), figure


def test_figures_of_the_leaderboard_are_those_of_its_page():
    page = (ROOT / "docs/leaderboard.md").read_text()
    table = README.split("## Which to believe")[1].split("\n\n")[2]
    figures = re.findall(r"-?\.\d+", table)
    assert len(figures) > 50
    for figure in figures:
        assert re.search(rf"(?<![\d-]){re.escape(figure.replace('.', '0.'))}(?!\d)", page), figure
