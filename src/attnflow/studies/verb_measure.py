"""What the verb-number study measures: every method's scores for a sentence, and what they are compared with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from attnflow.capturing import capture_batch
from attnflow.faithfulness.results import Evaluation, Row, Summary
from attnflow.methods import rollout
from attnflow.studies.comparison import STUDIED, Failures, methods
from attnflow.studies.verb_data import Sentence
from attnflow.studies.verb_training import Trained
from attnflow.trace import Trace

Floats: TypeAlias = NDArray[np.float64]
Scorer: TypeAlias = tuple[str, int | None]  # a method and its layer, or a baseline, which has none
Side: TypeAlias = Literal["CLS inside", "CLS outside"]

BLANK_OUT = "blank-out"
# Of p(singular) - p(plural), unless another is named. The sum over the embedding is what the official code takes. Here
# it is rounding noise: GPT-2's blocks see an embedding through LayerNorm alone, which takes off the mean, so that one
# number added to all of it changes nothing, and the gradient sums to 0.
GRADIENTS = ("norm", "norm, of the logit", "|gradient x input|", "|sum|")
REFERENCES = (BLANK_OUT, *GRADIENTS)
COLUMN_SUM = "first-layer"
SIDES: tuple[Side, ...] = ("CLS inside", "CLS outside")
BATCH = 16  # sentences; with every word blanked out in turn, at most some 40,000 tokens


@dataclass(frozen=True, eq=False)
class Measured:
    """One sentence of `count` words, and whether the model is right about it.

    scores (scorer, token) of the `scorers`, references (reference, token) of REFERENCES; the last token is CLS.
    """

    count: int
    right: bool
    scorers: tuple[Scorer, ...]
    scores: Floats
    references: Floats


def measure(
    trained: Trained,
    sentences: Sequence[Sentence],
    seed: int,
    failures: Failures,
    progress: Callable[[int, int], object],
) -> Iterator[Measured]:
    """Every sentence, shorter ones first. seed: of the random scores. progress: sentences done, and in all."""
    by_length: dict[int, list[Sentence]] = defaultdict(list)
    for one in sentences:
        by_length[len(one.words)].append(one)
    rng = np.random.default_rng(seed)
    done = 0
    for count in sorted(by_length):
        for start in range(0, len(by_length[count]), BATCH):
            some = by_length[count][start : start + BATCH]
            ids = trained.ids([one.words for one in some])
            plural = torch.tensor([int(one.plural) for one in some])
            changes = blank_out(trained, ids, plural)
            slopes = gradients(trained, ids)
            right = (trained(ids).argmax(-1) == plural).tolist()
            for place, trace in enumerate(capture_batch(trained.model, ids, target="predicted")):
                references = np.concatenate([changes[place][None], slopes[place]])
                rows = scores(trace, failures)
                rows["gradient-norm", None] = references[REFERENCES.index(GRADIENTS[0])]
                rows["random", None] = rng.random(count + 1)
                yield Measured(count, right[place], tuple(rows), np.stack(list(rows.values())), references)
            done += len(some)
            progress(done, len(sentences))


def scores(trace: Trace, failures: Failures) -> dict[Scorer, Floats]:
    """The scores (token,) of CLS by every method at every layer, and by what needs the trace alone.

    The column sum is the attention that a token receives in the first layer from all tokens alike. A method that fails
    has NaN, and is counted.
    """
    unknown = np.full(len(trace.tokens), np.nan)
    rows: dict[Scorer, Floats] = {(name, layer): unknown for name in STUDIED for layer in range(len(trace.layers))}
    for name, found in methods(trace, query=-1, layer="all", failures=failures):
        rows |= {(name, layer): row for layer, (row,) in zip(found.layers, found.every_layer, strict=True)}
    rows[COLUMN_SUM, None] = rollout(trace, layer=0).scores.sum(0)
    rows["position", None] = np.arange(len(trace.tokens), dtype=np.float64)
    return rows


def blank_out(trained: Trained, ids: torch.Tensor, labels: torch.Tensor) -> Floats:
    """|change of the label's probability| when each token alone, CLS too, is unknown: (sentence, token)."""
    sentences, tokens = ids.shape
    cases = ids[:, None].repeat(1, tokens + 1, 1)
    cases[:, range(1, tokens + 1), range(tokens)] = 0
    chances = trained(cases.flatten(0, 1)).double().softmax(-1).view(sentences, tokens + 1, 2)
    chosen = chances[range(sentences), :, labels]
    return (chosen[:, :1] - chosen[:, 1:]).abs().numpy()


def gradients(trained: Trained, ids: torch.Tensor) -> Floats:
    """The gradients of GRADIENTS, (sentence, gradient, token).

    Of the difference of the two logits, whose gradient is a multiple of that of p(singular) - p(plural) and of either
    probability, so that it ranks the words alike, but not rounded off where the model is sure.
    """
    words = trained.model.embedding(ids).detach().requires_grad_()
    logits = trained.model.of_embeddings(words)
    (difference,) = torch.autograd.grad((logits[:, 0] - logits[:, 1]).sum(), words, retain_graph=True)
    (logit,) = torch.autograd.grad(logits.amax(-1).sum(), words)
    products = (difference * words.detach()).sum(-1).abs()
    rows = [difference.norm(dim=-1), logit.norm(dim=-1), products, difference.sum(-1).abs()]
    return torch.stack(rows, 1).double().numpy()


def correlations(scores: Floats, references: Floats) -> Floats:
    """Spearman's rank correlations (score, reference) of rows (.., token); NaN for rows that are constant.

    What `faithfulness.metrics.correlation` gives pair by pair, for all pairs at once.
    """
    return _standard(scores) @ _standard(references).T


def agreement(measured: Sequence[Measured], side: Side) -> Floats:
    """Rank correlations (sentence, scorer, reference) over all tokens, or over all but CLS."""
    stop = None if side == "CLS inside" else -1
    return np.stack([correlations(one.scores[:, :stop], one.references[:, :stop]) for one in measured])


def summaries(values: Floats, scorers: Sequence[Scorer], reference: str, seed: int) -> list[Summary]:
    """Mean, deviation and bootstrap interval over the sentences of values (sentence, scorer)."""
    metric = "blank-out" if reference == BLANK_OUT else "gradient"
    rows = tuple(
        Row(example, *scorer, metric, float(value))
        for example, line in enumerate(values)
        for scorer, value in zip(scorers, line, strict=True)
    )
    return Evaluation(rows, (), {"seed": seed}).summary()


def known_mean(values: Floats, axis: int | tuple[int, ...] = 0) -> Floats:
    """The mean of what is not NaN along axes; NaN where all is."""
    known = ~np.isnan(values)
    count, total = known.sum(axis), np.where(known, values, 0.0).sum(axis)
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count > 0)


def _standard(rows: Floats) -> Floats:
    """The ranks of each row, less their mean, as a vector of length 1."""
    ranks = stats.rankdata(rows, axis=-1)
    ranks -= ranks.mean(-1, keepdims=True)
    length = np.linalg.norm(ranks, axis=-1, keepdims=True)
    return np.divide(ranks, length, out=np.full_like(ranks, np.nan), where=length > 0)
