"""The README tells the truth: its ten lines print what it says, its table is METHODS, its links lead somewhere."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from attnflow import METHODS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_print_what_stands_below_them(tmp_path, monkeypatch):
    code, expected = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == expected
    assert (tmp_path / "keys.json").is_file()


def test_the_table_is_the_table_of_methods():
    rows = re.findall(r"^\| (\w+) \| (.*) \| (.*) \| (.*) \|$", README.split("## Methods")[1], re.MULTILINE)
    table = [(name, row.edges, row.carried, row.source) for name, row in METHODS.items()]
    assert rows[1:] == table


def test_links_lead_somewhere():
    for page in (README, (ROOT / "docs/design.md").read_text()):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page):
            assert (ROOT / target).exists(), target
