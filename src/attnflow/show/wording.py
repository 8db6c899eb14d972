"""What is written beside the colours: tokens that show every character, numbers, and the recipe as a caption."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.show.colour import Scale, is_signed

LONGEST_LABEL = 24
SATURATED = 0.5  # the share of values that no longer depend on the query from which it is said
PROOFS = ("dataflow", "isolation", "reproduction", "places")  # of a capture, that every view may name
NAMED = 4  # tokens beyond a scale that are named
APART = ("written", "from")  # kinds of rows that are not drawn as layers are (`rows`)
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


def number(score: float, digits: int, *, signed: bool) -> str:
    """A score as text: with its sign if others may have another one, and 0 alone where it is exactly 0."""
    return "0" if score == 0 else f"{score:{'+' if signed else ''}.{digits}f}"


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
    if relevance.rows == "target":
        asked = relevance.recipe.get("settings", {}).get("query")
        own = [asked] if isinstance(asked, int) else asked if isinstance(asked, list) else []
        return "of the target" + (
            f", at {'query' if len(own) == 1 else 'queries'} {', '.join(map(str, own))} alone" if own else ""
        )
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
    Of a target that no layer explains it is one row of no kind.
    """
    labels = [shortened(token) for token in relevance.query_tokens]
    if written(relevance) and len(relevance.layers) == 1:
        return relevance.every_layer[0], labels, "written"
    if "groups" in relevance.recipe.get("settings", {}) and len(relevance.layers) == 1:
        return relevance.every_layer[0], labels, "from"
    if not of_layers(relevance):
        return relevance.every_layer[0], labels, ""
    return relevance.every_layer.mean(axis=1), [str(layer) for layer in relevance.layers], "layer"


def of_layers(relevance: Relevance) -> bool:
    """Whether the scores explain layers: a baseline explains the target of the whole model, unless it took a layer."""
    own = relevance.rows != "target" or len(relevance.layers) > 1
    return own or "layer" in relevance.recipe.get("settings", {})


def title_with(relevance: Relevance, layer: str) -> str:
    """The title of a picture with what it says of a layer, if the scores are of any."""
    return f"{method_and_query(relevance)}, {layer}" if of_layers(relevance) else method_and_query(relevance)


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
    parts = [title_with(relevance, layers(relevance))]
    if (mixers := unseen_mixers(relevance)) is not None:
        parts.append(f"{mixers} mixes positions unseen")
    if (residual := settings.get("residual")) is not None:
        said = {"add": "added", "measured": "as measured"}
        parts.append(f"residual {said[residual] if residual in said else format(residual, 'g')}")
    if settings.get("head") is not None:
        parts.append(f"head {settings['head']}")
    if settings.get("head_fusion") is not None:
        parts.append(f"{settings['head_fusion']} over heads" + (" below" if settings.get("head") is not None else ""))
    for name in ("row_normalised", "discard_ratio", "remove_column_mean"):
        if settings.get(name):
            said = name.replace("_", " ")
            parts.append(said if settings[name] is True else f"{said} {settings[name]:g}")
    if target := relevance.recipe.get("target"):
        by = f" by {target['rules']}" if "rules" in target else ""
        parts.append(f"target {target['target']}{by}")
    if left_out := relevance.recipe.get("left_out"):
        parts.append(f"without {' and '.join(left_out['roles'])} tokens, which hold {left_out['share']:.0%}")
    return visible(", ".join(parts))


def about(relevance: Relevance) -> str:
    """The model, what its capture proved, and the target, in one line, as far as the recipe tells them."""
    model = relevance.recipe.get("model", {})
    name, kind = model.get("name"), model.get("class")
    parts = [f"{name} ({kind})" if name and kind else str(name or kind or "model unknown")]
    if "layers" in model and "heads" in model:
        parts.append(f"{model['layers']} layers of {model['heads']} heads")
    parts.append(f"{len(relevance.tokens)} tokens")
    proofs = model.get("proofs", {})
    if proved := [f"{name} {proofs[name]}" for name in PROOFS if name in proofs]:
        parts.append(f"capture: {', '.join(proved)}")
    if target := relevance.recipe.get("target"):
        parts.append(f"target {target['target']}" + (f" by {target['rules']}" if "rules" in target else ""))
    return visible("; ".join(parts))


def notes(relevance: Relevance, scores: NDArray[np.float64], ends: Scale, *, zero: str) -> list[str]:
    """What must be known to read `scores` as drawn on the scale `ends`, a clause each; for the foot of every view.

    scores: any shape whose last axis is that of the tokens, or of a picture's patches. zero: how the view draws what is
    exactly 0, for instance "hatched".
    """
    return [
        note
        for note in (
            saturation(relevance),
            _evenness(ends),
            _sign(relevance),
            _beyond(relevance, scores, ends),
            _zeros(relevance, scores, zero),
        )
        if note is not None
    ]


def said_of(relevances: Sequence[Relevance], rows: Sequence[NDArray[np.float64]], scales: Sequence[Scale]) -> list[str]:
    """The notes of what is drawn of several, each on its scale; before what is not said of all stands the method."""
    drawn = zip(relevances, rows, scales, strict=True)
    each = [notes(one, scores, ends, zero="hatched") for one, scores, ends in drawn]
    return [
        note if all(note in others for others in each) else f"{one.recipe.get('method', 'relevance')}: {note}"
        for one, own in zip(relevances, each, strict=True)
        for note in own
    ]


def saturation(relevance: Relevance) -> str | None:
    """That most values of a flow are fixed by the lowest layer, if they are (`FlowResult.fixed`)."""
    checks = relevance.recipe.get("checks", {})
    checks = checks["layers"][-1] if "layers" in checks else checks
    share = checks.get("fixed_by_layer_0", checks.get("saturated", 0.0))  # the second in files of older versions
    if share <= SATURATED:
        return None
    start = relevance.recipe.get("settings", {}).get("start_layer") or 0
    where = f" at layer {relevance.layers[-1]}" if len(relevance.layers) > 1 else ""
    advice = "try a lower layer, one head, or a larger residual"
    if relevance.rows == "group":
        return (
            f"{share:.0%} of these values{where} are as much as the two groups give and take: the layers between them "
            f"no longer matter; {advice}"
        )
    one = len(relevance.queries) == 1
    what, query, these = ("this row", "the query", "these") if one else ("these rows", "each query", "its")
    return (
        f"{share:.0%} of {what}{where} is fixed by layer {start} and by how much {query} keeps to itself above it: the "
        f"layers above cannot change which of {these} tokens ranks higher; {advice}"
    )


def doubts(relevance: Relevance) -> list[str]:
    """What makes less of the scores than any picture of them shows: saturation, and mixing that was not seen."""
    mixers = unseen_mixers(relevance)
    said = [saturation(relevance), None if mixers is None else f"{mixers} mixes positions unseen"]
    return [one for one in said if one is not None]


def _evenness(ends: Scale) -> str | None:
    if ends.even is None:
        return None
    differ = f"{100 * ends.even:.1g}" if ends.even >= 1e-6 else "0"
    return f"the scores are even to within {differ} %, and drawn flat"


def _sign(relevance: Relevance) -> str | None:
    if not is_signed(relevance.scores):
        return None
    speaks = "positive (blue) speaks for, negative (orange) against"
    where = f" at layer {relevance.layers[-1]}" if len(relevance.layers) > 1 else ""
    of = ""
    if "completeness_error" in relevance.recipe.get("checks", {}) and "score" in (relevance.recipe.get("target") or {}):
        of = f", of a target of {relevance.recipe['target']['score']:+.3g} (the rest: biases, and what the rules lose)"
    return f"{speaks}; the scores{where} sum to {relevance.row.sum():+.3g}{of}"


def _beyond(relevance: Relevance, scores: NDArray[np.float64], ends: Scale) -> str | None:
    """Which tokens lie beyond the scale, if some do; patches have no names, and a picture's scale tells the highest."""
    count = len(relevance.tokens)
    if ends.highest is None or scores.shape[-1] != count:
        return None
    flat = scores.ravel()
    far = [i for i in np.argsort(-np.abs(flat), kind="stable").tolist() if abs(flat[i]) > ends.high]
    named = [f"{shortened(relevance.tokens[i % count])} at {i % count} ({flat[i]:.3g})" for i in far[:NAMED]]
    more = f" and {len(far) - NAMED} more" if len(far) > NAMED else ""
    return f"the colours end at {ends.high:.3g}; beyond it: {', '.join(named)}{more}"


def _zeros(relevance: Relevance, scores: NDArray[np.float64], zero: str) -> str | None:
    return f"{zero}: exactly 0, {why_zero(relevance)}" if (scores == 0).any() else None


def why_zero(relevance: Relevance) -> str:
    """Why tokens that score exactly 0 do: what the method says of them, a mask, or that nothing reaches them."""
    if (said := relevance.recipe.get("zeros")) is not None:
        return visible(said)
    return "the tokens after a query, hidden from it" if _causal(relevance) else "nothing comes from there"


def _causal(relevance: Relevance) -> bool:
    """Whether every token after each query scores exactly 0, and no other: the mark of a causal mask."""
    if "left_out" in relevance.recipe:
        return False  # the tokens have lost their places
    # A token was written by the position before it, which does not see the token either.
    sees = np.array(relevance.queries) - written(relevance)
    after = np.arange(len(relevance.tokens)) > sees[:, None]
    zero = relevance.every_layer == 0
    return bool(after.any() and (zero == after).all())


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
