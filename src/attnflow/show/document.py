"""The one way in which a page of HTML is written: a template, a style, scripts, and the data in a block of their own.

Nothing is fetched: a policy in the page forbids it, and runs no script but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files as resources
from string import Template
from typing import Any

from attnflow.files import plain, to_json


def document(title: str, scripts: Sequence[str], data: Any) -> str:
    """A page of some of the scripts in show/static and the data that they draw."""
    style, script = _static("report.css"), "".join(map(_static, scripts))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_static("report.html")).substitute(
        policy=policy, title=escape(title), style=style, data=in_script(to_json(plain(data))), script=script
    )


def in_script(text: str) -> str:
    r"""JSON that stands in an element of HTML as it is: what could end the element, or a line, as \u escapes."""
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _static(name: str) -> str:
    return resources("attnflow.show").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
