"""Relevance as one page of HTML that works offline: the data in a block of their own, and a script that draws them.

Nothing is fetched: a policy in the page forbids it, and runs no script but the page's own. Scores are kept as float32.
"""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.files import plain, write_whole
from attnflow.memory import check_memory
from attnflow.show.colour import GROUND, PAPER, SIGNED, Ramp, is_signed, rgb
from attnflow.show.document import document
from attnflow.show.listing import examples_of
from attnflow.show.wording import (
    about,
    method_and_query,
    of_layers,
    query,
    saturation,
    unseen_mixers,
    visible,
    why_zero,
)

SCRIPTS = ("numbers.js", "flow.js", "draw.js", "list.js", "page.js")
LARGEST = 200_000_000  # bytes of a page; browsers hold no longer text in one piece with ease
PHOTOGRAPH = 1024  # pixels, the longer side
GRAPH_EDGES = 200_000  # that a page holds; of more the strongest of each query


@dataclass(frozen=True, eq=False)
class Carried:
    """What is known of a graph whose edges are conserved relevance, what each layer really carried.

    score: what came down. leaving: what of it leaves the topmost layer. biases: what those of each layer took.
    received: what each token did. routes: the largest, as mappings of "level" (of the first step: 0 is the input, 1
    what leaves the lowest layer), "steps" (positions, down), "amount" and "end". all_routes: whether there are no more.
    """

    score: float
    leaving: float
    biases: Sequence[float]
    received: Sequence[float]
    routes: Sequence[Mapping[str, Any]]
    all_routes: bool


@dataclass(frozen=True, eq=False)
class Graph:
    """The edges of a page's graph: one array (query, key) per layer, the lowest first, of 0 or more unless `carried`.

    numbers: of the layers. tokens: labels of the input. edges: what an edge weighs, in words. left_out: of each layer
    the positions that it does not concern. routes: those of pairs that a page does not work out itself, since it does
    not hold all edges (`holds_all`), as mappings of "query", "token", "flow", "paths" (with "amount", "share" and
    "steps", the positions from the query down) and "cut" (with "layer", "query", "key", "capacity"), with layers as
    places in `layers`.
    """

    layers: Sequence[NDArray[np.float64]]
    numbers: Sequence[int]
    tokens: Sequence[str]
    edges: str
    left_out: Sequence[Sequence[int]]
    routes: Sequence[Mapping[str, Any]] = ()
    carried: Carried | None = None


def holds_all(layers: Sequence[NDArray[np.float64]]) -> bool:
    """Whether a page holds all edges of a graph."""
    return sum(layer.size for layer in layers) <= GRAPH_EDGES


@dataclass(frozen=True, eq=False)
class Heads:
    """The raw attention of each head, which the view of tokens has a choice of, or why the page does not hold it.

    each: an answer per head, of the same layers and queries. limit: what is left out, in words; "" if nothing is.
    """

    each: Sequence[Relevance] = ()
    limit: str = ""


@dataclass(frozen=True)
class Start:
    """What a page shows when it is opened.

    query: the position of a query, or None for the mean over all where there are several. words: pieces of words
    merged. drop: roles that are left out.
    """

    query: int | None = None
    words: bool = False
    drop: tuple[str, ...] = ()


def save_page(
    relevances: Sequence[Relevance],
    path: Path,
    *,
    names: Sequence[str] | None = None,
    image: Any = None,
    graph: Graph | None = None,
    heads: Heads | None = None,
    command: str | None = None,
    start: Start = Start(),
) -> Path:
    """Write `page` to a file, whole or not at all."""
    text = page(relevances, names=names, image=image, graph=graph, heads=heads, command=command, start=start)
    return write_whole(path, lambda file: file.write(text.encode()))


def page(
    relevances: Sequence[Relevance],
    *,
    names: Sequence[str] | None = None,
    image: Any = None,
    graph: Graph | None = None,
    heads: Heads | None = None,
    command: str | None = None,
    start: Start = Start(),
) -> str:
    """The page of one or several relevances; where they are of different inputs, with a list of these to choose from.

    names: what each relevance is called, such as its file; by default the beginning of its text.
    image: the photograph that the patches tile, as `overlay` takes it. graph: what the view of routes draws. heads:
    of the raw attention of the input. command: the command line that made the page. start: what is shown first.

    Raises ValueError for no relevance, scores that are not finite, an image without patches to lie under, and a page
    that no browser would hold; MemoryError for what cannot be held here.
    """
    if not relevances:
        raise ValueError("no relevance was given; a page shows at least one")
    if image is not None and not any(one.grid and len(one.grid) == 2 for one in relevances):
        raise ValueError("an image was given, but none of the relevances has a grid of patches that lies over one")
    size = sum(4 * one.scores.size for one in relevances) * 4 // 3
    if size > LARGEST:
        raise ValueError(
            f"the page would hold {size / 1e6:.0f} MB of scores, more than the {LARGEST / 1e6:.0f} that a browser "
            "opens: explain fewer queries or layers, or write .npz"
        )
    check_memory(4 * size, f"a page with {size / 1e6:.0f} MB of scores", "explain fewer queries or layers")
    places, examples = examples_of(relevances, names)
    title = f"attnflow: {', '.join(dict.fromkeys(visible(_method(one)) for one in relevances))}"
    data = {
        "answers": [_answer(one, place) for one, place in zip(relevances, places, strict=True)],
        "ramps": {name: _hex(ramp) for name, ramp in (("ground", GROUND), ("paper", PAPER), ("signed", SIGNED))},
        "photograph": None if image is None else _photograph(image),
        "graph": None if graph is None else _graph(graph),
        "heads": None if heads is None else _heads(heads),
        "examples": examples,
        "command": command,
        "start": {"query": start.query, "words": start.words, "drop": list(start.drop)},
    }
    return document(title, SCRIPTS, data)


def pack(numbers: NDArray[Any]) -> str:
    """The numbers as float32 in base64; one that is not 0 does not become 0, which is the mark of a mask."""
    with np.errstate(over="ignore", under="ignore"):
        small = np.asarray(numbers, dtype=np.float64).astype("<f4")
    largest, least = np.finfo(np.float32).max, np.float32(np.finfo(np.float32).smallest_subnormal)
    small = np.where((small == 0) & (numbers != 0), np.copysign(least, numbers), small)
    return base64.b64encode(np.clip(small, -largest, largest).astype("<f4").tobytes()).decode()


def python_lines(relevance: Relevance) -> str:
    """The lines of Python that make the scores again, from a model and an input that the recipe cannot hold."""
    recipe = relevance.recipe
    method, model, target = _method(relevance), recipe.get("model", {}), recipe.get("target") or {}
    given = {name: value for name, value in recipe.get("settings", {}).items() if value is not None}
    target = target or {name: given[name] for name in ("target",) if name in given}
    edges, _, carry = method.partition(" by ")
    if given.get("query") == "all":
        del given["query"]
    if "layer" in (carry, "layer" * (method == "raw")):
        given.pop("start_layer", None)  # which has no part in one layer alone
    groups = given.pop("groups", None)
    settings = "".join(f", {name}={value!r}" for name, value in plain(given).items())
    gradient = {name: target[name] for name in ("target", "rules", "at_each_layer") if target.get(name) is not None}
    words = gradient.get("target")
    if isinstance(words, str) and words != "predicted":  # of a value or a function, which the recipe cannot hold
        del gradient["target"]
        asked, of = ", target=target", f"; target: {visible(words)}"
    else:
        asked, of = "", ""
    asked += "".join(f", {name}={value!r}" for name, value in plain(gradient).items())
    if "keep" in recipe:
        asked += f", keep={recipe['keep']!r}"
    capture = f"trace = attnflow.capture(model, inputs{asked})  # with its tokenizer, if it has one{of}"
    if groups is not None:
        asked_edges = f", edges={method.removeprefix('group flow of ')!r}" if " of " in method else ""
        lines = [capture, f"relevance = attnflow.group_flow(trace, {plain(groups)!r}{asked_edges}{settings})"]
    elif method.startswith("flow, "):
        lines = [capture, f"relevance = attnflow.flow_bounds(trace{settings}).{method.split()[1]}"]
    elif carry:
        lines = [capture, f"relevance = attnflow.relevance(trace, edges={edges!r}, carry={carry!r}{settings})"]
    elif recipe.get("keep") == "relevance":  # by a set of rules, which explain captures under
        by = f", target={'target' if of else repr(gradient.get('target'))}"
        call = f"relevance = attnflow.explain(model, inputs, {method!r}{by}{settings})"
        lines = [f"{call}  # with its tokenizer, if it has one{of}"]
    elif "edges" in recipe:
        lines = [capture, f"relevance = attnflow.relevance(trace, {method!r}{settings})"]
    else:
        own = {name: value for name, value in given.items() if name not in ("target", "removed")}
        more = "".join(f", {name}={value!r}" for name, value in plain(own).items())
        call = f"relevance = attnflow.explain(model, inputs, {method!r}{asked}{more})"
        lines = [f"{call}  # with its tokenizer, if it has one{of}"]
    if "pieces" in recipe:
        lines.append("relevance = relevance.by_word()")
    if left_out := recipe.get("left_out"):
        lines.append(f"relevance = relevance.without({', '.join(map(repr, left_out['roles']))})")
    if name := " ".join(visible(str(model[key])) for key in ("name", "class") if key in model):
        lines.insert(0, f"# model: {name}")
    return "\n".join(["import attnflow", "", *lines, 'relevance.save("page.html")'])


def command_of(arguments: Sequence[str]) -> str:
    """A command line as a shell takes it, on one line."""
    return visible(shlex.join(["attnflow", *arguments]))


def _method(relevance: Relevance) -> str:
    return str(relevance.recipe.get("method", "relevance"))


def _answer(relevance: Relevance, example: int) -> dict[str, Any]:
    if not np.isfinite(relevance.scores).all():
        raise ValueError("some of the scores are not finite, which no page can show")
    mixers = unseen_mixers(relevance)
    words = None if relevance.words is None else [visible(word) for word in relevance.by_word().tokens]
    return {
        "example": example,
        "method": visible(_method(relevance)),
        "title": visible(method_and_query(relevance)),
        "asked": visible(query(relevance)),
        "about": about(relevance),
        "file": relevance.as_dict(with_scores=False),
        "tokens": [visible(token) or "␣" for token in relevance.tokens],
        "query_tokens": [visible(token) or "␣" for token in relevance.query_tokens],
        "word_labels": words,
        "shape": relevance.every_layer.shape,
        "of_layers": of_layers(relevance),
        "three": relevance.scores.ndim == 3,
        "scores": pack(relevance.scores),
        "signed": is_signed(relevance.scores),
        "saturation": [saturation(_up_to(relevance, place)) for place in range(len(relevance.layers))],
        "zero": why_zero(relevance),
        "mixers": None if mixers is None else visible(mixers),
        "python": python_lines(relevance),
    }


def _up_to(relevance: Relevance, place: int) -> Relevance:
    """The same up to one of its layers, so that what is said of the topmost is said of this one."""
    checks = dict(relevance.recipe.get("checks", {}))
    if "layers" in checks:
        checks["layers"] = checks["layers"][: place + 1]
    elif place < len(relevance.layers) - 1:
        checks = {}
    layers = relevance.layers[: place + 1] if place else (relevance.layers[0],)
    scores = relevance.every_layer[: place + 1]
    return replace(relevance, scores=scores, layers=layers, recipe={**relevance.recipe, "checks": checks})


def _graph(graph: Graph) -> dict[str, Any]:
    layers = list[dict[str, Any]]()
    for layer in graph.layers:
        edges = np.asarray(layer, dtype=np.float64)
        most = max(1, int(GRAPH_EDGES / sum(len(one) for one in graph.layers)))
        if holds_all(graph.layers) or most >= edges.shape[1]:
            layers.append({"shape": edges.shape, "weights": pack(edges), "kept": 1.0})
            continue
        keys = np.sort(np.argpartition(-np.abs(edges), most - 1, axis=1)[:, :most], axis=1)
        weights = np.take_along_axis(edges, keys, axis=1)
        kept = float(np.abs(weights).sum() / (np.abs(edges).sum() or 1))
        layers.append({"shape": edges.shape, "weights": pack(weights), "keys": pack(keys), "kept": kept})
    return {
        "layers": layers,
        "numbers": list(graph.numbers),
        "tokens": [visible(token) or "␣" for token in graph.tokens],
        "edges": graph.edges,
        "left_out": graph.left_out,
        "routes": graph.routes,
        "carried": None if graph.carried is None else asdict(graph.carried),
    }


def _heads(heads: Heads) -> dict[str, Any]:
    if not heads.each:
        return {"scores": [], "limit": heads.limit}
    first = heads.each[0]
    return {
        "tokens": [visible(token) or "␣" for token in first.tokens],
        "layers": first.layers,
        "queries": first.queries,
        "query_tokens": [visible(token) or "␣" for token in first.query_tokens],
        "shape": first.every_layer.shape,
        "zero": why_zero(first),
        "scores": [pack(one.scores) for one in heads.each],
        "limit": heads.limit,
    }


def _photograph(image: Any) -> dict[str, Any]:
    from PIL import Image

    from attnflow.show.overlay import photograph

    pixels = Image.fromarray(photograph(image))
    pixels.thumbnail((PHOTOGRAPH, PHOTOGRAPH))
    content = io.BytesIO()
    pixels.save(content, format="JPEG", quality=92, subsampling=0)
    address = f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
    return {"href": address, "width": pixels.width, "height": pixels.height}


def _hex(ramp: Ramp) -> list[str]:
    return ["#" + bytes(rgb(ramp, share)).hex() for share in np.linspace(0, 1, 256).tolist()]
