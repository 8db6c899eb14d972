"""Verb number (Abnar & Zuidema 2020, tables 1 and 2): do methods rank words as blank-out and input gradients do?

Layers count from 1 in the study's tables, as the paper prints them: its layer 1 is the library's layer 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnflow.capturing import capture
from attnflow.faithfulness.results import Summary
from attnflow.files import write_whole
from attnflow.methods import relevance
from attnflow.show.plots import attention_graph, layer_maps, save_figure
from attnflow.studies import Progress, TrainingOptions, verb_report
from attnflow.studies.comparison import STUDIED, Failures
from attnflow.studies.record import Record, Score, check_folder
from attnflow.studies.verb_data import Sentence, VerbData, read
from attnflow.studies.verb_measure import (
    BLANK_OUT,
    COLUMN_SUM,
    GRADIENTS,
    REFERENCES,
    SIDES,
    Floats,
    Measured,
    agreement,
    correlations,
    known_mean,
    summaries,
)
from attnflow.studies.verb_measure import measure as measure_sentences
from attnflow.studies.verb_training import Recipe, Trained, load_checkpoint, save_checkpoint, train

STUDY = "verb-number"
LENGTHS = ((2, 4), (5, 8), (9, 16), (17, 60))
EXAMPLES = ("the keys to the cabinet", "the author of the books that the critics like")


class Loaded(NamedTuple):
    """The sentences, and the models by name with how each was trained, the main one first."""

    options: TrainingOptions
    data: VerbData
    recipes: Mapping[str, Recipe]
    trained: Mapping[str, Trained]

    @property
    def main(self) -> str:
        """The name of the main model."""
        return next(iter(self.trained))


def load(data: Path, options: TrainingOptions, progress: Progress) -> Loaded:
    """The sentences of Linzen et al. 2016, and the models, trained or from their checkpoints.

    Raises FileNotFoundError where data are absent, ValueError for checkpoints made otherwise.
    """
    if options.checkpoints is not None:
        check_folder(options.checkpoints)
    sentences = read(data, seed=options.seed, examples=60 if options.small else 2000)
    recipes = _recipes(options.seed, small=options.small)
    trained = {
        name: _trained(name, recipe, sentences, options.checkpoints, progress) for name, recipe in recipes.items()
    }
    return Loaded(options, sentences, recipes, trained)


def measure(loaded: Loaded, progress: Progress) -> Record:
    """Measure every method of every model on held-out sentences."""
    data, trained, main, seed = loaded.data, loaded.trained, loaded.main, loaded.options.seed
    failures = Failures()
    measured = {
        name: list(measure_sentences(one, data.test, seed, failures, partial(progress, f"measuring: {name}")))
        for name, one in trained.items()
    }
    held_out = {"natural": data.test} | {str(number): some for number, some in data.test_attracted.items()}
    tables: dict[str, Any] = {
        "test sentences": {name: len(some) for name, some in held_out.items()},
        "accuracy": {
            name: {kind: _accuracy(one, some) for kind, some in held_out.items()} for name, one in trained.items()
        },
        "correlations": {
            name: _correlations(some, REFERENCES if name == main else REFERENCES[:2], seed)
            for name, some in measured.items()
        },
        "depth": _depth(measured[main], seed),
        "likeness to the column sum": _likeness(measured[main]),
        "CLS first": _cls_first(measured[main]),
        "gradient sum over norm": _sum_over_norm(measured[main]),
        "lengths": {
            f"{low} to {high}": _last_layer([one for one in measured[main] if low <= one.count <= high])
            for low, high in LENGTHS
        },
        "decisions": {
            kind: _last_layer([one for one in measured[main] if one.right is right])
            for kind, right in (("right", True), ("wrong", False))
        },
        **failures.table,
    }
    return Record(
        study=STUDY,
        settings={
            "seed": seed,
            "split": data.split,
            "training sentences": {"natural": len(data.natural), "with attractors": len(data.attracted)},
            "words known": len(trained[main].vocabulary),
            "models": {name: asdict(recipe) for name, recipe in loaded.recipes.items()},
            "processor minutes of training": {name: round(one.minutes, 1) for name, one in trained.items()},
        },
        data=data.files,
        tables=tables,
        scores=_scores(tables["correlations"][main]),
    )


def sentences(record: Record) -> list[str]:
    """What the numbers say, one sentence each."""
    return verb_report.words(record.tables)


def page(loaded: Loaded, record: Record, path: Path, progress: Progress) -> None:
    """Write the words and tables in Markdown, and figures 1 to 3 beside them."""
    report = verb_report.markdown(record)
    write_whole(path, lambda file: file.write(report.encode()))
    failed = record.tables.get("failed", {})
    if drawn := [name for name in STUDIED if name not in failed]:
        draw(loaded.trained[loaded.main], path.parent, drawn)


def draw(trained: Trained, folder: Path, methods: Sequence[str] = STUDIED) -> list[Path]:
    """Figures 1 (the graph) and 2 and 3 (layer x token maps of CLS) of the paper, for the EXAMPLES.

    Every row is divided by its sum, as the official code does with flow.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for number, sentence in enumerate(EXAMPLES, start=1):
        tokens = (*sentence.split(), "[CLS]")
        trace = capture(trained.model, trained.ids([tokens[:-1]]), tokens=tokens)
        if number == 1:
            panels = {name: relevance(trace, name, layer="all").normalized().every_layer for name in methods}
            paths.append(save_figure(attention_graph(panels, tokens, query=-1), folder / f"{STUDY}-graph.svg"))
        maps = [relevance(trace, name, query=-1, layer="all").normalized() for name in methods]
        paths.append(save_figure(layer_maps(maps), folder / f"{STUDY}-maps-{number}.png"))
    return paths


def _recipes(seed: int, *, small: bool) -> dict[str, Recipe]:
    """The models, the main one first: without a mask, as in the paper, from three seeds; with one; and trained less."""
    steps = 20 if small else 8000
    seeds = range(seed, seed + (1 if small else 3))
    recipes = {f"no mask, seed {one}": Recipe(seed=one, causal=False, steps=steps) for one in seeds}
    recipes["causal mask"] = Recipe(seed=seed, causal=True, steps=steps)
    return recipes if small else recipes | {"no mask, 1/10 of the training": Recipe(seed, False, steps // 10)}


def _trained(name: str, recipe: Recipe, data: VerbData, folder: Path | None, progress: Progress) -> Trained:
    """The model from its checkpoint, or trained, and its checkpoint written."""
    path = folder and folder / f"{name.replace(' ', '-').replace(',', '').replace('/', '-')}.safetensors"
    if path is not None and path.exists():
        return load_checkpoint(path, recipe, data)
    trained = train(data, recipe, partial(progress, f"training: {name}"))
    if path is not None:
        save_checkpoint(trained, recipe, data, path)
    return trained


def _accuracy(trained: Trained, sentences: Sequence[Sentence]) -> float:
    """The share of sentences whose verb the model gets right."""
    by_length: dict[int, list[Sentence]] = defaultdict(list)
    for one in sentences:
        by_length[len(one.words)].append(one)
    right = 0
    for some in by_length.values():
        plural = trained(trained.ids([one.words for one in some])).argmax(-1).bool().tolist()
        right += sum(said == one.plural for said, one in zip(plural, some, strict=True))
    return right / len(sentences)


def _correlations(measured: Sequence[Measured], references: Sequence[str], seed: int) -> dict[str, Any]:
    """Side -> reference -> method -> its numbers, one for each layer."""
    values = {side: agreement(measured, side) for side in SIDES}
    return {
        side: {
            reference: _numbers(summaries(values[side][..., column], measured[0].scorers, reference, seed))
            for column, reference in enumerate(references)
        }
        for side in SIDES
    }


def _depth(measured: Sequence[Measured], seed: int) -> dict[str, Any]:
    """Side -> reference -> method -> its last layer's correlation less the column sum's, sentence by sentence."""
    scorers = measured[0].scorers
    last = {name: place for place, (name, layer) in enumerate(scorers) if layer is not None}
    found: dict[str, Any] = {}
    for side in SIDES:
        values = agreement(measured, side)
        gains = values[:, list(last.values())] - values[:, [scorers.index((COLUMN_SUM, None))]]
        found[side] = {
            reference: _numbers(summaries(gains[..., column], [(name, None) for name in last], reference, seed))
            for column, reference in enumerate(REFERENCES)
        }
    return found


def _likeness(measured: Sequence[Measured]) -> dict[str, float]:
    """Method -> the mean rank correlation of its last layer with the first layer's column sum, without CLS."""
    scorers = measured[0].scorers
    column = scorers.index((COLUMN_SUM, None))
    values = np.stack([correlations(one.scores[:, :-1], one.scores[[column], :-1]) for one in measured])
    means = known_mean(values, (0, 2))
    return {name: round(float(means[place]), 4) for place, (name, layer) in enumerate(scorers) if layer is not None}


def _cls_first(measured: Sequence[Measured]) -> dict[str, float]:
    """Reference or first layer of a method -> the share of sentences in which no token has more than CLS."""
    places = {name: place for place, (name, layer) in enumerate(measured[0].scorers) if layer == 0}
    rows = {reference: [one.references[place] for one in measured] for place, reference in enumerate(REFERENCES)}
    rows |= {f"{name}, layer 1": [one.scores[place] for one in measured] for name, place in places.items()}
    return {name: _share_of_cls(some) for name, some in rows.items()}


def _share_of_cls(rows: Sequence[Floats]) -> float:
    """The share of rows (token,) whose largest value is the last; rows of a method that failed do not count."""
    first = [row[-1] >= row.max() for row in rows if not np.isnan(row).any()]
    return round(float(np.mean(first)), 4) if first else math.nan


def _sum_over_norm(measured: Sequence[Measured]) -> float:
    """The sum of the gradient over the embedding as a share of its norm, the mean over the tokens of all sentences."""
    norm, total = REFERENCES.index("norm"), REFERENCES.index("|sum|")
    return float(np.mean(np.concatenate([one.references[total] / one.references[norm] for one in measured])))


def _last_layer(measured: Sequence[Measured]) -> dict[str, Any]:
    """Reference -> method -> mean at its last layer without CLS; and the number of sentences."""
    if not measured:
        return {"n": 0}
    last = {name: place for place, (name, _) in enumerate(measured[0].scorers)}
    means = known_mean(agreement(measured, "CLS outside"))
    by_reference = {
        reference: {name: round(float(means[place, column]), 4) for name, place in last.items()}
        for column, reference in enumerate(REFERENCES)
    }
    return {"n": len(measured), **by_reference}


def _numbers(found: Sequence[Summary]) -> dict[str, dict[str, Any]]:
    """Method -> mean, deviation and interval at each layer, and the number of sentences that define them."""
    by_method: dict[str, list[Summary]] = defaultdict(list)
    for one in found:
        by_method[one.method].append(one)
    return {
        method: {
            **{name: [round(getattr(one, name), 4) for one in some] for name in ("mean", "deviation", "low", "high")},
            "n": some[0].n,
        }
        for method, some in by_method.items()
    }


def _scores(by_side: Mapping[str, Any]) -> list[Score]:
    """The last layer of every method, and the trivial scores, without CLS."""
    found: list[Score] = []
    for task, reference in (("blank-out", BLANK_OUT), ("gradient", GRADIENTS[0])):
        for method, numbers in by_side["CLS outside"][reference].items():
            if (task, method) != ("gradient", "gradient-norm"):
                mean, low, high = (numbers[name][-1] for name in ("mean", "low", "high"))
                found.append(
                    Score(f"{task} correlation, last layer, CLS outside", "up", method, mean, low, high, numbers["n"])
                )
    return found
