"""Table 3 of Abnar & Zuidema 2020 on the whole test set of SST-2: does relevance agree with gradients and blank-out?

The classifier is the packaged MiniLM with the adapter at hand merged in, or any other text classifier. Every method is
compared with four references, from two read-outs, with special tokens and without: the paper's table leaves open which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from attnflow.capturing import demo, huggingface
from attnflow.capturing.models import load_model
from attnflow.faithfulness import loading
from attnflow.faithfulness.metrics import blank_out, correlation
from attnflow.faithfulness.results import Row
from attnflow.faithfulness.score import text_score
from attnflow.studies import ModelOptions, Progress
from attnflow.studies.comparison import (
    STUDIED,
    Failures,
    Floats,
    baselines,
    best,
    means,
    methods,
    number,
    ranked,
    summaries,
    table,
    topmost,
    traced,
)
from attnflow.studies.record import Record, checksums, required, scored
from attnflow.trace import Trace

PUBLISHED = "https://github.com/clairett/pytorch-sentiment-classification (data/SST2)"
ADAPTER = "sst2_minilm_lora.safetensors"
INSTEAD = (
    "no address, since it was made for this project; give --model a classifier of SST-2 instead, such as "
    "https://huggingface.co/distilbert/distilbert-base-uncased-finetuned-sst-2-english"
)
REFERENCES = ("gradient-sum", "gradient-norm", "gradient-x-input", "blank-out")
MAX, CLS = "max over positions", "from [CLS]"
IN, OUT = "special tokens in", "special tokens out"
SMALL = 12
# A sum of a gradient that is less than this share of its norm is rounding.
ROUNDING = 1e-4
# Table 3 by our number of the layer, the mean over 100 sentences; the deviations are about .2.
PAPER = {
    "raw": {"0": 0.12, "2": 0.09, "4": 0.08, "5": 0.09},
    "rollout": {"0": 0.11, "2": 0.12, "4": 0.13, "5": 0.13},
    "flow": {"0": 0.11, "2": 0.11, "4": 0.12, "5": 0.14},
}


class Condition(NamedTuple):
    """What relevance is compared with, from which output positions, over which tokens."""

    reference: str
    readout: str
    tokens: str

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def metric(self) -> str:
        """The row of METRICS that this is."""
        return "blank-out" if self.reference == "blank-out" else "gradient"

    @property
    def task(self) -> str:
        """The task of the leaderboard that this is."""
        return f"correlation with {self}"


CONDITIONS = tuple(Condition(*one) for one in product(REFERENCES, (MAX, CLS), (IN, OUT)))
PAPERS = Condition("gradient-sum", MAX, IN)
BLANKED = Condition("blank-out", CLS, OUT)
# The conditions of the leaderboard.
RANKED = (
    PAPERS,
    BLANKED._replace(readout=MAX),
    BLANKED,
    Condition("gradient-norm", CLS, OUT),
)


class Sentence(NamedTuple):
    """One sentence as the conditions see it.

    references (token,): sizes, so never negative. relevances: by method or baseline, each layer's (token,) by
    read-out; baselines have the layer None. correct: whether the model classified it rightly. sum_of_norm: the largest
    share, over the tokens, that the sum of the gradient is of its norm.
    """

    trace: Trace
    references: Mapping[str, Floats]
    relevances: Sequence[tuple[str, int | None, Mapping[str, Floats]]]
    saturated: Sequence[float]
    correct: bool
    sum_of_norm: float


def classifier(adapter: Path) -> tuple[torch.nn.Module, Any]:
    """MiniLM as a classifier (0 negative, 1 positive) and its tokenizer: an adapter of rank 8, scale 2, merged in."""
    import transformers
    from safetensors.torch import load_file

    folder = demo.text_folder()
    config: Any = transformers.AutoConfig.from_pretrained(folder, num_labels=2)
    model = transformers.BertForSequenceClassification(config)
    model.bert.load_state_dict(transformers.AutoModel.from_pretrained(folder).state_dict())
    weights, changes = model.state_dict(), load_file(adapter)
    for name, change in changes.items():
        place, _, part = name.rpartition(".")
        if part == "A":
            weights[f"{place}.weight"] += 2 * changes[f"{place}.B"].float() @ change.float()
        elif part != "B":
            weights[name] = change.float()
    model.load_state_dict(weights)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


class Loaded(NamedTuple):
    """A classifier, sentences with their classes, and the files that were read."""

    options: ModelOptions
    model: torch.nn.Module
    tokenizer: Any
    examples: list[tuple[str, int]]
    files: list[Path]


def load(data: Path, options: ModelOptions, progress: Progress) -> Loaded:
    """The test set of SST-2 and a text classifier, whose classes are 0 negative and 1 positive.

    Raises FileNotFoundError without the sentences, or without both adapter and model; ValueError for a sentence without
    a label.
    """
    (file,) = required(data / "sst2", "test.tsv", published=PUBLISHED)
    examples: list[tuple[str, int]] = []
    for text, label in loading.texts(file)[: SMALL if options.small else None]:
        if label is None:
            raise ValueError(f"{file}: sentence {len(examples) + 1} has no label behind a tab")
        examples.append((text, label))
    if options.model is None:
        used = [file, *required(data / "adapters", ADAPTER, published=INSTEAD)]
        return Loaded(options, *classifier(used[1]), examples, used)
    return Loaded(options, *load_model(options.model, task="text-classification"), examples, [file])


def measure(loaded: Loaded, progress: Progress) -> Record:
    """Correlate every method at every layer with gradients and blank-out (UNK, probability) of the correct class."""
    options, examples = loaded.options, loaded.examples
    rows: dict[Condition, list[Row]] = {condition: [] for condition in CONDITIONS}
    failures = Failures()
    saturated: list[Sequence[float]] = []
    correct, sum_of_norm = 0, 0.0
    for place, (text, label) in enumerate(examples):
        sentence = _sentence(loaded, text, label, failures)
        correct += sentence.correct
        sum_of_norm = max(sum_of_norm, sentence.sum_of_norm)
        if sentence.saturated:
            saturated.append(sentence.saturated)
        for condition in CONDITIONS:
            rows[condition] += _rows(place, sentence, condition)
        progress("sentences", place + 1, len(examples))
    measured = {condition: summaries(found, options.seed) for condition, found in rows.items()}
    return Record(
        study="sst2",
        settings={
            "model": Path(options.model).name if options.model else f"{demo.TEXT} with {ADAPTER}",
            "sentences": len(examples),
            "target": "the correct class: its logit for gradients, its probability for blank-out (UNK)",
            "references": "absolute values",
            "correlation": "Spearman, average ranks",
            "seed": options.seed,
        },
        data=checksums(loaded.files),
        tables={
            "accuracy": round(correct / len(examples), 4),
            "paper": PAPER,
            "gradient sum over norm, the largest": sum_of_norm,
            "saturated share of flow from [CLS] by layer": (
                np.round(np.mean(saturated, axis=0), 4).tolist() if saturated else []
            ),
            **{str(condition): table(entries)[condition.metric] for condition, entries in measured.items()},
            **failures.table,
        },
        scores=[
            one
            for condition in RANKED
            for one in scored(condition.task, topmost(measured[condition], condition.metric))
        ],
    )


def sentences(record: Record) -> list[str]:
    """What the numbers say, one sentence each."""
    sum_of_norm = record.tables["gradient sum over norm, the largest"]
    saturated = record.tables["saturated share of flow from [CLS] by layer"]
    paper = "; ".join(f"{name} {' '.join(f'{mean:.2f}' for mean in row.values())}" for name, row in PAPER.items())
    rival = means(record.of(BLANKED.task))
    by_max = means(record.of(BLANKED._replace(readout=MAX).task))
    with_special = record.tables[str(BLANKED._replace(tokens=IN))]
    top = {name: list(layers.values())[-1]["mean"] for name, layers in with_special.items()}
    known = [name for name in STUDIED if name in with_special]
    found = best(rival)
    return [
        f"The classifier is right on {record.tables['accuracy']:.1%} of the sentences.",
        f"As the paper's script reads it ({PAPERS}), layers 0, 2, 4, 5: "
        f"{'; '.join(_by_layer(record.tables[str(PAPERS)], name) for name in known)}. The paper, on DistilBERT: "
        f"{paper}.",
        f"The sum of the gradient over the embedding is at most {sum_of_norm:.0e} of its norm"
        + (
            ": LayerNorm, the first that an embedding meets in BERT as in the paper's DistilBERT, takes off the mean "
            "of what it sees, so that by algebra the sum is 0, and what correlates with it here, as in table 3 if its "
            "script summed, is rounding."
            if sum_of_norm < ROUNDING
            else "."
        ),
        *(f"Top layer, {condition.task}: {ranked(record.of(condition.task))}." for condition in RANKED),
        "What special tokens do, from [CLS] against blank-out at the top layer, in and out: "
        f"{_pairs(known, top, rival)}.",
        *(
            [
                f"Of the flows from [CLS], {', '.join(f'{share:.0%}' for share in saturated)} are saturated at layers "
                f"0 to {len(saturated) - 1}."
            ]
            if saturated
            else []
        ),
        "What the read-out does, against blank-out at the top layer without special tokens, [CLS] and max: "
        f"{_pairs(known, rival, by_max)}.",
        f"For what a text classifier read its class off, {found} from [CLS] at the top layer is the default of these "
        f"methods: {number(rival[found], '.2f')} with blank-out, where the norm of the gradient has "
        f"{number(rival['gradient-norm'], '.2f')} and the first layer alone {number(rival['first-layer'], '.2f')}.",
    ]


def _pairs(methods: Sequence[str], one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Each method with its two numbers."""
    return "; ".join(f"{name} {number(one[name], '.2f')} and {number(other[name], '.2f')}" for name in methods)


def _by_layer(found: Mapping[str, Any], method: str) -> str:
    """A method with its means at the layers that the paper's table has."""
    layers = found[method]
    return " ".join([method, *(number(layers[one]["mean"], ".2f") for one in PAPER["raw"] if one in layers)])


def _sentence(loaded: Loaded, text: str, label: int, failures: Failures) -> Sentence:
    model, tokenizer = loaded.model, loaded.tokenizer
    inputs = huggingface.tokenize(text, model, tokenizer)
    trace = traced(model, inputs, label, tokenizer)
    score = text_score(model, inputs, trace.roles, label, tokenizer=tokenizer, special=True)
    known = baselines(trace, model, inputs, target=label, seed=loaded.options.seed)
    known["gradient-x-input"] = np.abs(known["gradient-x-input"])
    known["blank-out"] = np.abs(blank_out(score, len(trace.tokens)))
    relevances = list[tuple[str, int | None, Mapping[str, Floats]]]()
    saturated: list[float] = []
    for name, relevance in methods(trace, query=None, layer="all", failures=failures):
        for layer, scores in zip(relevance.layers, relevance.every_layer, strict=True):
            relevances.append((name, layer, {MAX: scores.max(axis=0), CLS: scores[0]}))
        if name == "flow":
            saturated = [one["saturated_by_query"][0] for one in relevance.recipe["checks"]["layers"]]
    relevances += [(name, None, {MAX: scores, CLS: scores}) for name, scores in known.items()]
    return Sentence(
        trace,
        {name: known[name] for name in REFERENCES},
        relevances,
        saturated,
        int(trace.output.logits.argmax()) == label,
        float((known["gradient-sum"] / known["gradient-norm"]).max()),
    )


def _rows(example: int, sentence: Sentence, condition: Condition) -> Iterator[Row]:
    roles = sentence.trace.roles
    kept = [place for place, role in enumerate(roles) if condition.tokens == IN or role == "text"]
    reference = sentence.references[condition.reference][kept]
    for name, layer, scores in sentence.relevances:
        if name != condition.reference:
            value = correlation(scores[condition.readout][kept], reference)
            yield Row(example, name, layer, condition.metric, value)
