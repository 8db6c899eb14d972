"""What the commands are given: numbers, lists of names, models, devices and files, each refused in one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token

from attnflow.files import destination, named


def _whole(_kind: Any, tokens: Sequence[Token]) -> int:
    return integer("it", tokens[0].value, "a whole number")


# A whole number; 1.5 is none, where cyclopts would round it.
Integer = Annotated[int, Parameter(converter=_whole)]


def integer(name: str, value: str, expected: str) -> int:
    """The number given to an option, which takes what `expected` says."""
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 19):
        raise ValueError(f"{name} takes {expected}; {value!r} was given")
    return int(value)


def layer(value: str) -> Any:
    """The number of a layer, or "all"."""
    return value if value == "all" else integer("--layer", value, 'a number or "all"')


def target(wanted: str | None, against: str | None) -> Any:
    """What --target and --against ask for: an index, a name, or a pair of these; predicted where there is no target."""
    if against is None:
        return None if wanted is None else _class("--target", wanted)
    if wanted == "label":
        raise ValueError("--against goes with one class as --target, or predicted; label is another in each example")
    return _class("--target", wanted or "predicted"), _class("--against", against)


def _class(option: str, value: str) -> int | str:
    """The index of a class, or its name, which the model knows."""
    if not value.strip():
        raise ValueError(f"{option} is empty; give the index or the name of a class")
    number = value.removeprefix("-")
    if not (number.isascii() and number.isdecimal()):
        return value
    index = integer(option, value, expected := "an index from 0 on, or a name")
    if index < 0:
        raise ValueError(f"{option} takes {expected}; {value!r} was given")
    return index


def names(text: str) -> list[str]:
    """The names in a list with commas between them."""
    return [name.strip() for name in text.split(",")]


def check_model(name: str | None, default: str | None = None) -> str | None:
    """The model named, or the default; an empty name is none."""
    if name is not None and not name.strip():
        raise ValueError("--model is empty; give a local folder or a hub name")
    return default if name is None else name


def check_outputs(outputs: Iterable[Path], suffixes: Sequence[str], *inputs: str | Path | None) -> None:
    """Refuse, before any work, an output that cannot be written, or that is one of the files that are read."""
    read = [Path(one).resolve() for one in inputs if one is not None and Path(one).exists()]
    for path in outputs:
        if path.suffix.lower() not in suffixes:
            raise ValueError(f"cannot write {named(path.name)!r}: the suffix must be one of {', '.join(suffixes)}")
        real = destination(path).resolve()
        for one in read:
            if real.exists() and (real.samefile(one) or real.is_relative_to(one)):
                raise ValueError(f"cannot write {named(path)}: it is read as input; give another file")
