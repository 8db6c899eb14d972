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
from attnflow.faithfulness.results import Row, Summary
from attnflow.faithfulness.score import text_score
from attnflow.studies.contest import (
    STUDIED,
    Floats,
    Progress,
    baselines,
    means,
    methods,
    ranked,
    summaries,
    table,
    topmost,
    traced,
)
from attnflow.studies.record import Record, Standing, checksums, required, standings
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


CONDITIONS = tuple(Condition(*one) for one in product(REFERENCES, (MAX, CLS), (IN, OUT)))
PAPERS = Condition("gradient-sum", MAX, IN)
LEAGUE = (
    PAPERS,
    *(Condition("blank-out", readout, OUT) for readout in (MAX, CLS)),
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


def study(
    data: Path, *, model: str | None = None, small: bool = False, seed: int = 0, progress: Progress | None = None
) -> Record:
    """Correlate every method at every layer with gradients and blank-out (UNK, probability) of the correct class.

    model: a text classifier in a folder or on the hub, whose classes are 0 negative and 1 positive.

    Raises FileNotFoundError without the sentences, or without both adapter and model.
    """
    (file,) = required(data / "sst2", "test.tsv", published=PUBLISHED)
    examples = loading.texts(file)[: SMALL if small else None]
    if model is None:
        used = [file, *required(data / "adapters", ADAPTER, published=INSTEAD)]
        loaded, tokenizer = classifier(used[1])
    else:
        used = [file]
        loaded, tokenizer = load_model(model, task="text-classification")
    rows: dict[Condition, list[Row]] = {condition: [] for condition in CONDITIONS}
    failed: dict[str, str] = {}
    saturated: list[Sequence[float]] = []
    correct, sum_of_norm = 0, 0.0
    for number, (text, label) in enumerate(examples):
        if label is None:
            raise ValueError(f"{file}: sentence {number + 1} has no label behind a tab")
        sentence = _sentence(loaded, tokenizer, text, label, seed, failed)
        correct += sentence.correct
        sum_of_norm = max(sum_of_norm, sentence.sum_of_norm)
        saturated.append(sentence.saturated)
        for condition in CONDITIONS:
            rows[condition] += _rows(number, sentence, condition)
        if progress:
            progress(number + 1, len(examples))
    measured = {condition: summaries(found, seed) for condition, found in rows.items()}
    accuracy = correct / len(examples)
    share = np.round(np.mean(saturated, axis=0), 4).tolist()
    return Record(
        study="sst2",
        settings={
            "model": Path(model).name if model else f"{demo.TEXT} with {ADAPTER}",
            "sentences": len(examples),
            "target": "the correct class: its logit for gradients, its probability for blank-out (UNK)",
            "references": "absolute values",
            "correlation": "Spearman, average ranks",
            "seed": seed,
        },
        data=checksums(used),
        tables={
            "accuracy": round(accuracy, 4),
            "paper": PAPER,
            "gradient sum over norm, the largest": sum_of_norm,
            "saturated share of flow from [CLS] by layer": share,
            **{str(condition): table(entries)[condition.metric] for condition, entries in measured.items()},
        }
        | ({"failed": failed} if failed else {}),
        standings=[one for condition in LEAGUE for one in _standings(condition, measured[condition])],
        words=_words(measured, accuracy, share, sum_of_norm),
    )


def _sentence(
    model: torch.nn.Module, tokenizer: Any, text: str, label: int, seed: int, failed: dict[str, str]
) -> Sentence:
    inputs = huggingface.tokenize(text, model, tokenizer)
    trace = traced(model, inputs, label, tokenizer)
    score = text_score(model, inputs, trace.roles, label, tokenizer=tokenizer, special=True)
    known = baselines(trace, model, inputs, target=label, seed=seed)
    known["gradient-x-input"] = np.abs(known["gradient-x-input"])
    known["blank-out"] = np.abs(blank_out(score, len(trace.tokens)))
    relevances = list[tuple[str, int | None, Mapping[str, Floats]]]()
    saturated: list[float] = []
    for name, relevance in methods(trace, query=None, layer="all", failed=failed):
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


def _rows(number: int, sentence: Sentence, condition: Condition) -> Iterator[Row]:
    roles = sentence.trace.roles
    kept = [place for place, role in enumerate(roles) if condition.tokens == IN or role == "text"]
    reference = sentence.references[condition.reference][kept]
    for name, layer, scores in sentence.relevances:
        if name != condition.reference:
            value = correlation(scores[condition.readout][kept], reference)
            yield Row(number, name, layer, condition.metric, value)


def _standings(condition: Condition, entries: list[Summary]) -> list[Standing]:
    return standings(f"correlation with {condition}", topmost(entries, condition.metric))


def _words(
    measured: Mapping[Condition, list[Summary]], accuracy: float, saturated: list[float], sum_of_norm: float
) -> list[str]:
    """The findings, each from the numbers."""
    tables = {condition: table(entries)[condition.metric] for condition, entries in measured.items()}

    def shown(method: str) -> str:
        layers = tables[PAPERS][method]
        return " ".join([method, *(f"{layers[layer]['mean']:.2f}" for layer in PAPER["raw"] if layer in layers)])

    def top(condition: Condition) -> list[Summary]:
        return topmost(measured[condition], condition.metric)

    blanked = Condition("blank-out", CLS, OUT)
    rival = means(top(blanked))
    known = {name: mean for name, mean in rival.items() if name in STUDIED}
    best = max(known, key=lambda name: known[name])
    by_max = means(top(blanked._replace(readout=MAX)))
    with_special = means(top(blanked._replace(tokens=IN)))
    paper = "; ".join(f"{name} {' '.join(f'{mean:.2f}' for mean in row.values())}" for name, row in PAPER.items())
    return [
        f"The classifier is right on {accuracy:.1%} of the sentences.",
        f"As the paper's script reads it ({PAPERS}), layers 0, 2, 4, 5: "
        f"{'; '.join(shown(name) for name in STUDIED if name in tables[PAPERS])}. The paper, on DistilBERT: {paper}.",
        f"The sum of the gradient over the embedding is at most {sum_of_norm:.0e} of its norm"
        + (
            ": LayerNorm, the first that an embedding meets in BERT as in the paper's DistilBERT, takes off the mean "
            "of what it sees, so that by algebra the sum is 0, and what correlates with it here, as in table 3 if its "
            "script summed, is rounding."
            if sum_of_norm < ROUNDING
            else "."
        ),
        *(f"Top layer, correlation with {condition}: {ranked(top(condition))}." for condition in LEAGUE),
        "What special tokens do, from [CLS] against blank-out at the top layer, in and out: "
        f"{'; '.join(f'{name} {with_special[name]:.2f} and {mean:.2f}' for name, mean in known.items())}.",
        f"Of the flows from [CLS], {', '.join(f'{share:.0%}' for share in saturated)} are saturated at layers 0 to "
        f"{len(saturated) - 1}.",
        "What the read-out does, against blank-out at the top layer without special tokens, [CLS] and max: "
        f"{'; '.join(f'{name} {mean:.2f} and {by_max[name]:.2f}' for name, mean in known.items())}.",
        f"For what a text classifier read its class off, {best} from [CLS] at the top layer is the default of these "
        f"methods: {known[best]:.2f} with blank-out, where the norm of the gradient has {rival['gradient-norm']:.2f} "
        f"and the first layer alone {rival['first-layer']:.2f}.",
    ]
