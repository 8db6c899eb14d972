"""Training the model of the verb-number study, and its checkpoints."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save

from attnflow.files import write_whole
from attnflow.studies.verb_data import Sentence, VerbData, training_sentences
from attnflow.studies.verb_model import VerbNumberModel

SORTED_TOGETHER = 50  # batches whose sentences are put together by length


@dataclass(frozen=True)
class Recipe:
    """How a model is trained: `steps` batches of about `batch` sentences; rate rises to its highest and falls to 0."""

    seed: int
    causal: bool
    steps: int
    batch: int = 64
    rate: float = 1.5e-3
    decay: float = 0.05
    dropout: float = 0.1


@dataclass(frozen=True, eq=False)
class Trained:
    """A model in evaluation mode, the words that it knows, and the minutes of processor time that it took."""

    model: VerbNumberModel
    vocabulary: tuple[str, ...]
    minutes: float

    def ids(self, sentences: Sequence[Sequence[str]]) -> torch.Tensor:
        """Ids (sentence, token) of sentences of one length, CLS last."""
        return _ids(sentences, self._numbers)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (sentence, 2) of singular and plural, without gradients."""
        return self.model(ids)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.vocabulary)}


def train(data: VerbData, recipe: Recipe, progress: Callable[[int, int], object]) -> Trained:
    """A model trained from scratch; progress is called with the steps done, and in all."""
    torch.manual_seed(recipe.seed)
    vocabulary = data.vocabulary()
    numbers = {word: number for number, word in enumerate(vocabulary)}
    model = VerbNumberModel(len(vocabulary), dropout=recipe.dropout, causal=recipe.causal)
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=recipe.steps + 1, pct_start=0.1)
    start = time.process_time()
    batches = _batches(training_sentences(data, np.random.default_rng(recipe.seed)), recipe.batch)
    for step, batch in enumerate(islice(batches, recipe.steps), start=1):
        ids = _ids([words for words, _ in batch], numbers)
        loss = F.cross_entropy(model(ids), torch.tensor([int(plural) for _, plural in batch]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step, recipe.steps)
    return Trained(model.eval(), vocabulary, (time.process_time() - start) / 60)


def save_checkpoint(trained: Trained, recipe: Recipe, data: VerbData, path: Path) -> None:
    """Write a .safetensors file, whole or not at all, with its words and how it was made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = _facts(recipe, data) | {"vocabulary": " ".join(trained.vocabulary), "minutes": str(trained.minutes)}
    write_whole(path, lambda file: file.write(save(trained.model.state_dict(), facts)))


def load_checkpoint(path: Path, recipe: Recipe, data: VerbData) -> Trained:
    """Read what `save_checkpoint` wrote.

    Raises ValueError for a model that was made otherwise, or from other data.
    """
    with safe_open(path, "pt") as file:
        facts = file.metadata() or {}
    wanted = _facts(recipe, data)
    differing = [name for name, value in wanted.items() if facts.get(name) != value]
    if differing:
        raise ValueError(f"{path} holds a model made with another {differing[0]}; give another folder, or delete it")
    vocabulary = tuple(facts["vocabulary"].split())
    model = VerbNumberModel(len(vocabulary), causal=recipe.causal)
    model.load_state_dict(load_file(path))
    return Trained(model.eval(), vocabulary, float(facts["minutes"]))


def _facts(recipe: Recipe, data: VerbData) -> dict[str, str]:
    return {"recipe": json.dumps(asdict(recipe)), "data": json.dumps([data.files, data.split])}


def _ids(sentences: Sequence[Sequence[str]], numbers: dict[str, int]) -> torch.Tensor:
    return torch.tensor([[*(numbers.get(word, 0) for word in words), 1] for words in sentences])


def _batches(sentences: Iterator[Sentence], size: int) -> Iterator[list[Sentence]]:
    """Batches of sentences of one length, which need no padding; about `size` each, fewer of rare lengths."""
    while True:
        by_length: dict[int, list[Sentence]] = defaultdict(list)
        for one in islice(sentences, size * SORTED_TOGETHER):
            by_length[len(one.words)].append(one)
        batches = [
            some[place::count]
            for some in by_length.values()
            for count in [max(1, round(len(some) / size))]
            for place in range(count)
        ]
        for place in torch.randperm(len(batches)).tolist():
            yield batches[place]
