"""What is written beside the colours: tokens that show every character, numbers, and the recipe as a caption."""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray

from attnflow.relevance import Relevance

LONGEST_LABEL = 24
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_JOINERS = "\u200c\u200d"  # part of ordinary words in Persian and in Indic scripts, and of emoji


def visible(token: str) -> str:
    r"""The token with control, formatting and unassigned characters written as escapes, as in \n or \u202e.

    Terminals and files obey or refuse these characters. A token of nothing but spaces becomes ␣.
    """
    shown = "".join(_visible_character(character) for character in token)
    return shown if shown.strip() else "␣" * len(shown)


def _visible_character(character: str) -> str:
    category = unicodedata.category(character)
    if (category[0] != "C" and category not in ("Zl", "Zp")) or character in _JOINERS:
        return character
    code = ord(character)
    default = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return _ESCAPES.get(character, default)


def shortened(token: str) -> str:
    """The visible token as a label: at most 24 characters, ending in an ellipsis where some were left out."""
    label = visible(token)
    return label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 1] + "…"


def decimals(scores: NDArray[np.float64]) -> int:
    """Three, or as many as give the largest of many small scores three digits."""
    largest = float(np.abs(scores[np.isfinite(scores)]).max(initial=0.0))
    if largest == 0 or largest >= 0.1:
        return 3
    return min(12, 2 - int(np.floor(np.log10(largest))))


def method_and_query(relevance: Relevance) -> str:
    """The title of a picture: the method, whose query it explains, and what its scores were divided by."""
    scaling = relevance.recipe.get("scaling")
    title = f"{relevance.recipe.get('method', 'relevance')}, {query(relevance)}"
    if (mixers := unseen_mixers(relevance)) is not None:
        title = f"{title} ({mixers} mixes positions unseen)"
    return f"{title}, {scaling}" if scaling else title


def unseen_mixers(relevance: Relevance) -> str | None:
    """The module that moves information between positions beside the attention explained, if one was allowed."""
    return relevance.recipe.get("model", {}).get("proofs", {}).get("mixers")


def query(relevance: Relevance) -> str:
    """Which query the scores explain, by its label and position."""
    if written(relevance):
        many = len(relevance.queries)
        mean = "" if many == 1 or len(relevance.layers) == 1 else "mean over "
        return f"{mean}{many} token{'' if many == 1 else 's'} written"
    if "groups" in relevance.recipe.get("settings", {}):
        return "between groups" if len(relevance.layers) == 1 else f"mean over {len(relevance.queries)} groups"
    if len(relevance.queries) == 1:
        return f"query {shortened(relevance.query_tokens[0])} at {relevance.queries[0]}"
    return f"mean over {len(relevance.queries)} queries"


def written(relevance: Relevance) -> bool:
    """Whether the queries are those that wrote tokens."""
    return relevance.recipe.get("settings", {}).get("query") == "generated"


def rows(relevance: Relevance) -> tuple[NDArray[np.float64], list[str], str]:
    """What tables and maps set against the tokens: scores (row, token), the label of each row, and what rows are.

    A row for each layer, the mean over its queries; of one layer, tokens that a model wrote and groups have a row each.
    """
    labels = [shortened(token) for token in relevance.query_tokens]
    if written(relevance) and len(relevance.layers) == 1:
        return relevance.every_layer[0], labels, "written"
    if "groups" in relevance.recipe.get("settings", {}) and len(relevance.layers) == 1:
        return relevance.every_layer[0], labels, "from"
    return relevance.every_layer.mean(axis=1), [str(layer) for layer in relevance.layers], "layer"


def layers(relevance: Relevance) -> str:
    """Which layers the scores explain."""
    numbers = relevance.layers
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"layers {numbers[0]} to {numbers[-1]}"
    return "layers " + ", ".join(str(number) for number in numbers)


def caption(relevance: Relevance) -> str:
    """The recipe in one line: method, query, layers, residual, and heads, as far as the recipe tells them."""
    settings = relevance.recipe.get("settings", {})
    parts = [method_and_query(relevance), layers(relevance)]
    if (mixers := unseen_mixers(relevance)) is not None:
        parts.append(f"{mixers} mixes positions unseen")
    if (residual := settings.get("residual")) is not None:
        said = {"add": "added", "measured": "as measured"}
        parts.append(f"residual {said[residual] if residual in said else format(residual, 'g')}")
    if settings.get("head") is not None:
        parts.append(f"head {settings['head']}")
    if settings.get("head_fusion") is not None:
        parts.append(f"{settings['head_fusion']} over heads" + (" below" if settings.get("head") is not None else ""))
    if left_out := relevance.recipe.get("left_out"):
        parts.append(f"without {' and '.join(left_out['roles'])} tokens, which hold {left_out['share']:.0%}")
    return visible(", ".join(parts))


def patches(relevance: Relevance, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """The patches of one row of `scores` (token,) at their places (row, column), or (frame, row, column) in a video."""
    if relevance.grid is None:
        raise ValueError(
            "these scores have no grid of patches: the input was no image or video, or its grid is unknown"
        )
    return scores[np.array(relevance.roles) == "patch"].reshape(relevance.grid)


def prefix(relevance: Relevance) -> list[int]:
    """The positions of the tokens that are not patches."""
    return [position for position, role in enumerate(relevance.roles) if role != "patch"]
