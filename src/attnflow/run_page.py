"""The page of a run: what its examples say together, mean maps of classes, and examples to look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from attnflow.answer import Relevance
from attnflow.capturing.vision import open_image
from attnflow.files import named
from attnflow.running.overview import Mean, Overview
from attnflow.running.results import Run
from attnflow.running.shards import BESIDE
from attnflow.show.colour import is_signed
from attnflow.show.listing import Listed, map_image, save_list
from attnflow.show.overlay import blended
from attnflow.show.wording import patches

SHOWN = 90  # examples, where there are more
_TOLD = 5  # sinks and failures that are told, and tokens of an example


def save_run_page(run: Run, path: Path) -> Path:
    """Write one page of HTML about a run, all from its shards: `Run.summary`, `Run.overview`, and up to 90 examples.

    Raises ValueError for a run without any answer.
    """
    found = run.overview()
    if not found.examples.num_rows:
        raise ValueError(f"{named(run.path)} holds no answer yet, so there is nothing to show")
    chosen, which = _chosen(found)
    means = [_mean(found, name) for name in dict.fromkeys(one.label for one in found.maps)]
    answers = run.answers([facts["example"] for facts in chosen])
    examples = [_listed(run, facts, answers[facts["example"]]) for facts in chosen]
    return save_list(
        path, f"The run {run.path.name}", examples=examples, means=means, words=[*_words(run, found), which]
    )


def _mean(found: Overview, label: str) -> Listed:
    """The mean maps of a class, by each method."""
    own = [one for one in found.maps if one.label == label]
    count = own[0].examples
    return Listed(
        f"{found.classes} {label}",
        facts=f"mean of {count:,} image{'s' if count > 1 else ''}",
        pictures={one.method: map_image(one.scores) for one in own if one.scores.ndim == 2},
    )


def _chosen(found: Overview) -> tuple[list[dict[str, Any]], str]:
    """The examples that a page shows, and a sentence that says which."""
    every: list[dict[str, Any]] = found.examples.to_pylist()
    if len(every) <= SHOWN:
        return every, "All examples that were explained are listed."
    orders = {
        "those on which the methods agree least": ("agreement", 1),
        "those of which the model is least sure": ("probability", 1),
        "those of which it is most sure": ("probability", -1),
    }
    known = {what: key for what, key in orders.items() if any(one[key[0]] is not None for one in every)}
    if not known:
        return every[:SHOWN], f"Of {len(every):,} examples the first {SHOWN} are listed."
    numbers = set[int]()
    for name, sign in known.values():
        ordered = sorted(
            (one for one in every if one[name] is not None), key=lambda one, name=name, sign=sign: sign * one[name]
        )
        numbers |= {one["example"] for one in ordered[: SHOWN // len(known)]}
    chosen = [one for one in every if one["example"] in numbers]
    return chosen, f"Of {len(every):,} examples {len(chosen)} are listed: {'; '.join(known)}."


def _listed(run: Run, facts: Mapping[str, Any], answers: Mapping[str, Relevance]) -> Listed:
    photograph = _photograph(run, facts["name"])
    said = [f"label {facts['label']}"] if facts["label"] is not None else []
    if facts["prediction"] is not None:
        said.append(f"predicted {facts['prediction']} with {facts['probability']:.2f}")
    first = next(iter(answers.values()))
    text = "" if first.grid else " ".join((first if first.words is None else first.by_word()).tokens)
    if not first.grid:
        said += [f"{method}: {_top(one)}" for method, one in answers.items()]
    maps = {method: patches(one, one.row) for method, one in answers.items() if one.grid and len(one.grid) == 2}
    pictures = {} if photograph is None or not maps else {"photograph": photograph}
    for method, grid in maps.items():
        signed = is_signed(answers[method].scores)
        plain = map_image(grid, signed=signed)
        pictures[method] = plain if photograph is None or signed else blended(grid, photograph)
    numbers = {"agreement": facts["agreement"], "probability": facts["probability"], "tokens": len(first.tokens)}
    return Listed(
        facts["name"],
        text=text,
        facts="; ".join(said),
        pictures=pictures,
        numbers={name: float(value) for name, value in numbers.items() if value is not None},
    )


def _photograph(run: Run, name: str) -> Image.Image | None:
    """The photograph of an example, if it still stands where it was read."""
    data = run.manifest["data"]
    path = Path(data["source"]) / name
    if data["kind"] != "photographs" or not path.is_file():
        return None
    image = open_image(path)
    image.thumbnail((640, 640))
    return image


def _top(relevance: Relevance) -> str:
    """The tokens that are neither special nor prefix tokens with the largest scores."""
    kept = np.flatnonzero(~np.isin(relevance.roles, BESIDE))
    best = kept[np.argsort(-np.abs(relevance.row[kept]), kind="stable")[:_TOLD]]
    return " ".join(relevance.tokens[place] for place in best)


def _words(run: Run, found: Overview) -> Iterator[str]:
    summary, recipe, data = run.summary(), run.manifest["recipe"], run.manifest["data"]
    model = recipe["model"]
    yield (
        f"{model['class']} (weights {model['sha256'][:12]}) on {summary['examples']:,} examples of {data['source']}, "
        f"by {', '.join(recipe['methods'])}; {summary['failed']:,} failed. "
        "Each row explains one layer, or the target as a whole."
    )
    beside = [f"{name} {one['special']:.0%}" for name, one in summary["methods"].items() if one["special"] is not None]
    if beside:
        yield f"Share of the relevance on special and prefix tokens: {', '.join(beside)}."
    for name, one in summary["methods"].items():
        if one["saturated"] is not None:
            yield (
                f"Of the pairs of {name}, {one['saturated']:.1%} are saturated (their ends alone decide), and "
                f"{one['fixed']:.1%} are fixed by layer 0 and what the query keeps of itself, whatever lies between."
            )
    for one in found.sinks[:_TOLD]:
        yield (
            f"{one.token} holds at least 30 % of the relevance by {one.method} in {one.examples:,} examples, and "
            f"{one.share:.0%} of it there."
        )
    for one in found.agreement:
        yield f"{one.method} and {one.other} rank tokens with a correlation (Spearman) of {_said(one.correlation)}."
    if found.partial:
        yield f"Of {found.partial:,} examples the highest scores alone were kept, so that nothing can be ranked."
    if found.maps:
        yield (
            f"Means of classes are by {found.classes}: each image's map divided by its sum, patches averaged by their "
            "place in the frame of the image alone. Nothing aligns what the images show. Bright is more; each map has "
            "a scale of its own."
        )
        if found.left_out:
            yield f"{found.left_out:,} maps are left out of the means, since their grids are others."
    for one in run.failed[:_TOLD]:
        yield f"Failed: {one.name}, {one.method or 'all methods'}: {one.error}"


def _said(mean: Mean) -> str:
    if not mean.n:
        return f"no value: it is undefined on all {mean.undefined:,} examples"
    within = f" (95 % {mean.low:.2f} to {mean.high:.2f})" if mean.n > 1 else ""
    return f"{mean.mean:.2f}{within} over {mean.n:,} examples"
