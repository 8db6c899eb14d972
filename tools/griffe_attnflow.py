"""Docstrings as mkdocs shows them: settings as a list, doctests as code."""

import re

from griffe import Docstring, Extension, Object

_SETTING = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Docstrings(Extension):
    """Our docstrings hold one setting a line, `name: what it is`, and doctests without a heading."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """The text of a docstring in Markdown."""
    paragraphs = text.split("\n\n")
    listed = [_SETTING.sub(r"\n- **\1**: ", one) for one in paragraphs[1:]]
    return _DOCTEST.sub(r"```pycon\n\g<0>\n```", "\n\n".join([paragraphs[0], *listed]))
