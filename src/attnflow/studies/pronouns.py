"""Figure 4 of Abnar & Zuidema 2020: of two referents, does relevance point to the one that the model prefers?

A language model is asked for a pronoun, masked or as the next word, in sentences about a boy and a girl: the templates
of Winogender with both in both places. It prefers the one whose pronoun is more probable, and a method points to the
one whose pieces have more relevance, summed, from the position at which the pronoun is predicted.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from attnflow.capturing import huggingface
from attnflow.capturing.models import load_model
from attnflow.faithfulness.results import Row
from attnflow.show import canvas
from attnflow.show.colour import PAPER
from attnflow.studies import ModelOptions, Progress, stories
from attnflow.studies.comparison import (
    STUDIED,
    Failures,
    Floats,
    baselines,
    best,
    means,
    methods,
    ranked,
    summaries,
    table,
    topmost,
    traced,
)
from attnflow.studies.record import Record, checksums, required, scored
from attnflow.trace import Trace

PUBLISHED = "https://github.com/rudinger/winogender-schemas (data/templates.tsv)"
PRONOUNS = {"$NOM_PRONOUN": ("he", "she"), "$POSS_PRONOUN": ("his", "her"), "$ACC_PRONOUN": ("him", "her")}
PEOPLE = ("boy", "girl")
TASK = "points to the referent that the model prefers"
NEARER, FARTHER = "the nearer", "the farther"
SMALL = 12


class Case(NamedTuple):
    """A sentence with a gap for a pronoun: referents and pronouns (his, hers) belong together in this order."""

    before: str
    after: str
    referents: tuple[str, str]
    pronouns: tuple[str, str]


# The paper's two sentences. The author may be either; he is who "his" is left to.
FIGURE = (
    Case("The author talked to Sara about", "book.", ("author", "Sara"), ("his", "her")),
    Case("Mary convinced John of", "love.", ("John", "Mary"), ("his", "her")),
)


class Model(NamedTuple):
    """A language model with a usable head. masked: whether it fills a gap, or only goes on with what stands before."""

    model: torch.nn.Module
    tokenizer: Any
    masked: bool

    def text(self, case: Case) -> str:
        """What the model reads."""
        return f"{case.before} {self.tokenizer.mask_token} {case.after}" if self.masked else case.before

    def ids(self, case: Case) -> tuple[int, int] | None:
        """The ids of the two pronouns, as words in a sentence; None where one is no single token."""
        found = [self.tokenizer(f"a {word}", add_special_tokens=False)["input_ids"] for word in case.pronouns]
        alone = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = all(len(one) == len(alone) + 1 and one[-1] != self.tokenizer.unk_token_id for one in found)
        return (found[0][-1], found[1][-1]) if whole else None


class Answer(NamedTuple):
    """What the model and the methods say of a case.

    probabilities: of his and hers. relevance: of the two referents (layer, 2) by every method, and baselines' (1, 2).
    """

    probabilities: tuple[float, float]
    relevance: Mapping[str, Floats]


class Loaded(NamedTuple):
    """A language model, the sentences that it can be asked about, and the files that were read."""

    options: ModelOptions
    asked: Model
    cases: list[Case]
    files: list[Path]


def load(data: Path, options: ModelOptions, progress: Progress) -> Loaded:
    """The templates of Winogender, and a masked or causal language model: by default stories260K.

    Raises FileNotFoundError without the templates or stories260K, ValueError for a model without a trained head or
    without pronouns.
    """
    (file,) = required(data / "pronoun", "winogender_templates.tsv", published=PUBLISHED)
    used = [file]
    if options.model is None:
        used += required(data / "stories260k", *stories.FILES, published=stories.PUBLISHED)
        asked = Model(*stories.load(used[1].parent), masked=False)
    else:
        asked = language_model(options.model)
    chosen = [case for case in cases(file) if asked.ids(case)][: SMALL if options.small else None]
    if not chosen:
        raise ValueError("no pronoun is a single token of this model; take another model")
    return Loaded(options, asked, chosen, used)


def measure(loaded: Loaded, progress: Progress) -> Record:
    """Count how often every method, at every layer, points to the referent that the model prefers."""
    options, asked = loaded.options, loaded.asked
    rows: dict[str, list[Row]] = {NEARER: [], FARTHER: []}
    boys = 0
    failures = Failures()
    for place, case in enumerate(loaded.cases):
        answer = ask(asked, case, options.seed, failures)
        his = answer.probabilities[0] > answer.probabilities[1]
        boys += his
        last = case.before.rfind(PEOPLE[0]) > case.before.rfind(PEOPLE[1])
        rows[NEARER if his == last else FARTHER] += _rows(place, answer, his=his)
        progress("sentences", place + 1, len(loaded.cases))
    measured = {TASK: summaries([*rows[NEARER], *rows[FARTHER]], options.seed)}
    measured |= {_of_side(side): summaries(found, options.seed) for side, found in rows.items() if found}
    figure = [_shown(asked, case, ask(asked, case, options.seed, Failures())) for case in FIGURE if asked.ids(case)]
    return Record(
        study="pronouns",
        settings={
            "model": Path(options.model).name if options.model else "stories260K",
            "kind": "masked" if asked.masked else "causal",
            "sentences": len(loaded.cases),
            "people": list(PEOPLE),
            "query": "the mask" if asked.masked else "the last position before the pronoun",
            "target": "log-odds of the two pronouns",
            "seed": options.seed,
        },
        data=checksums(loaded.files),
        tables={
            "the model prefers the boy": round(boys / len(loaded.cases), 4),
            **{task: table(entries)["pointing-game"] for task, entries in measured.items()},
            "figure 4": figure,
            **failures.table,
        },
        scores=[one for task, entries in measured.items() for one in scored(task, topmost(entries, "pointing-game"))],
    )


def sentences(record: Record) -> list[str]:
    """What the numbers say, one sentence each."""
    tasks = list(dict.fromkeys(one.task for one in record.scores))
    rates = {task: means(record.of(task)) for task in tasks}
    place = rates[TASK]["position"]
    words = [
        f"A {record.settings['kind']} language model, {record.settings['sentences']} sentences: it prefers the boy in "
        f"{record.tables['the model prefers the boy']:.0%} of them and the nearer referent in {place:.0%}; so always "
        f"naming the farther one would be right in {1 - place:.0%}.",
        *(
            f"{task[0].upper()}{task[1:]} ({record.of(task)[0].n} sentences), top layer: {ranked(record.of(task))}."
            for task in tasks
        ),
    ]
    if len(tasks) == 3:
        words.append(_beyond_place(rates[_of_side(NEARER)], rates[_of_side(FARTHER)]))
    return words + [_sentence(case, shown) for case, shown in _figure(record)]


def page(loaded: Loaded, record: Record, path: Path, progress: Progress) -> None:
    """Draw the paper's two sentences as its figure 4 shows them, of those whose pronouns the model has."""
    if figure := _figure(record):
        canvas.save_figure(_figure4(figure), path)


def _of_side(side: str) -> str:
    """The task of the sentences where the model prefers the referent of one side."""
    return f"{TASK}, where that is {side}"


def language_model(name: str) -> Model:
    """A masked or causal language model: masked if its tokenizer has a mask.

    Raises ValueError if there is none of this name, or it has no trained head.
    """
    tokenizer = huggingface.load_tokenizer(name)
    masked = tokenizer.mask_token is not None
    model, tokenizer = load_model(name, task="fill-mask" if masked else "text-generation")
    return Model(model, tokenizer, masked)


def cases(file: Path) -> list[Case]:
    """Every template of Winogender with the boy and the girl in both places."""
    found: list[Case] = []
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t"):
            for first, second in (PEOPLE, PEOPLE[::-1]):
                sentence = row["sentence"].replace("$OCCUPATION", first).replace("$PARTICIPANT", second)
                gap = next(mark for mark in PRONOUNS if mark in sentence)
                before, _, after = sentence.partition(gap)
                if all(person in before for person in PEOPLE):  # else one is yet to come
                    found.append(Case(before.strip(), after.strip(), PEOPLE, PRONOUNS[gap]))
    return found


def ask(asked: Model, case: Case, seed: int, failures: Failures) -> Answer:
    """The model's probabilities and the relevance of the two referents, pieces summed, from where the gap is read."""
    ids = asked.ids(case)
    assert ids
    inputs = huggingface.tokenize(asked.text(case), asked.model, asked.tokenizer)
    tokens = inputs["input_ids"][0].tolist()
    query = tokens.index(asked.tokenizer.mask_token_id) if asked.masked else len(tokens) - 1

    def log_odds(output: Any) -> torch.Tensor:
        logits = output.logits[:, query]
        return logits[:, ids[0]] - logits[:, ids[1]]

    trace = traced(asked.model, inputs, log_odds, asked.tokenizer)
    shares = trace.output.logits[0, query].detach().double().softmax(-1)
    places = [_places(trace, word) for word in case.referents]
    found: dict[str, Floats] = {}
    for name, relevance in methods(trace, query=query, layer="all", failures=failures):
        found[name] = _of(relevance.every_layer[:, 0], places)
    known = baselines(trace, asked.model, inputs, target=log_odds, seed=seed)
    known["gradient-x-input"] = np.abs(known["gradient-x-input"])
    found |= {name: _of(scores[None], places) for name, scores in known.items()}
    found["position"] = np.array([[float(max(place)) for place in places]])  # which do not add up as pieces do
    return Answer((float(shares[ids[0]]), float(shares[ids[1]])), found)


def _places(trace: Trace, word: str) -> list[int]:
    """The positions of the pieces of a word that occurs once."""
    pieces: dict[int, list[int]] = {}
    for position, word_number in enumerate(trace.words or ()):
        pieces.setdefault(word_number, []).append(position)
    for place in pieces.values():
        label = "".join(trace.tokens[position].removeprefix("##") for position in place)
        if label.removeprefix("␣").casefold() == word.casefold():
            return place
    raise ValueError(f"{word!r} is no word of {' '.join(trace.tokens)}")


def _of(scores: Floats, places: Sequence[Sequence[int]]) -> Floats:
    """Scores (layer, token) summed over the pieces of each referent (layer, referent)."""
    return np.stack([scores[:, list(place)].sum(axis=1) for place in places], axis=1)


def _rows(example: int, answer: Answer, *, his: bool) -> Iterator[Row]:
    """Whether each method points to the preferred referent; a tie counts half."""
    preferred, other = (0, 1) if his else (1, 0)
    for name, scores in answer.relevance.items():
        for layer, pair in enumerate(scores):
            value = float(np.sign(pair[preferred] - pair[other]) + 1) / 2
            yield Row(example, name, layer if name in STUDIED else None, "pointing-game", value)


def _shown(asked: Model, case: Case, answer: Answer) -> dict[str, Any]:
    """A case of figure 4 as JSON takes it."""
    return {
        "text": asked.text(case),
        "probability": dict(zip(case.pronouns, np.round(answer.probabilities, 6).tolist(), strict=True)),
        "referents": list(case.referents),
        "relevance by layer": {
            name: np.round(scores, 6).tolist() for name, scores in answer.relevance.items() if name in STUDIED
        },
    }


def _figure(record: Record) -> list[tuple[Case, Mapping[str, Any]]]:
    """The paper's sentences that were asked, each with its entry in the record."""
    cases = {case.referents: case for case in FIGURE}
    return [(cases[tuple(entry["referents"])], entry) for entry in record.tables["figure 4"]]


def _figure4(figure: Sequence[tuple[Case, Mapping[str, Any]]]) -> Any:
    """Layer x referent maps beside bars of the probabilities."""
    names = [name for name in STUDIED if all(name in shown["relevance by layer"] for _, shown in figure)]
    drawn = canvas.blank(1.7 * len(names) + 2.2, 2.6 * len(figure))
    grid = drawn.subplots(len(figure), len(names) + 1, squeeze=False)
    for panels, (case, shown) in zip(grid, figure, strict=True):
        for axes, name in zip(panels, names, strict=False):
            _panel(axes, np.array(shown["relevance by layer"][name]), case.referents)
            canvas.title(axes, name)
        panels[0].set_ylabel("layer")
        panels[-1].bar(case.pronouns, [*shown["probability"].values()], color="#475569", width=0.6)
        panels[-1].tick_params(labelsize=8)
        canvas.title(panels[-1], "probability")
    return drawn


def _panel(axes: Any, relevance: Floats, referents: tuple[str, str]) -> None:
    """Each referent's share of the two (layer, referent), in colour and in numbers; layer 0 at the foot."""
    total = relevance.sum(axis=1, keepdims=True)
    share = np.divide(relevance, total, out=np.full_like(relevance, 0.5), where=total > 0)
    axes.pcolormesh(share, cmap=canvas.colour_map(PAPER), vmin=0, vmax=1, edgecolors="white")
    for (layer, referent), value in np.ndenumerate(share):
        ink = "white" if value > 0.5 else "black"
        axes.text(referent + 0.5, layer + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=7, color=ink)
    axes.set_xticks([0.5, 1.5], referents, fontsize=8)
    axes.set_yticks(np.arange(len(share)) + 0.5, [str(layer) for layer in range(len(share))], fontsize=8)
    axes.tick_params(length=0)


def _beyond_place(nearer: Mapping[str, float], farther: Mapping[str, float]) -> str:
    """What the methods know beside place, of the rates on the two sides."""
    both = defaultdict(lambda: math.nan, {name: (nearer[name] + farther[name]) / 2 for name in nearer})
    listed = ", ".join(f"{name} {value:.2f}" for name, value in sorted(both.items(), key=lambda one: -one[1]))
    return (
        f"The mean of both sides, where place alone has 0.50: {listed}. That is what a method knows of the model's "
        f"choice beyond place; {best(both)} knows most of the methods."
    )


def _sentence(case: Case, shown: Mapping[str, Any]) -> str:
    """What the model and the methods at the top layer say of a case of figure 4."""
    probabilities = [shown["probability"][word] for word in case.pronouns]
    tops = {name: layers[-1] for name, layers in shown["relevance by layer"].items()}
    pointed = ", ".join(f"{name} points to {case.referents[int(np.argmax(pair))]}" for name, pair in tops.items())
    his, hers = (f"P({word}) = {share:.3g}" for word, share in zip(case.pronouns, probabilities, strict=True))
    probable = case.referents[int(np.argmax(probabilities))]
    return f'"{case.before} ... {case.after}": {his}, {hers}, so {probable}; {pointed or "no method was had"}.'
