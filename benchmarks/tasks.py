"""The jobs of the leaderboard: a model, examples, and what a method must get right on them. `TASKS` is their table."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from attnflow.capturing import demo, vision
from attnflow.faithfulness import loading
from attnflow.studies.segmentation import cls_norm
from attnflow.studies.sst2 import ADAPTER, classifier

VERB_ADAPTER = "verb_minilm_lora.safetensors"
TEXTS = ("deletion-gap", "signed-blank-out", "blank-out")

# A model, all examples, and further settings of `attnflow.evaluate`.
Job = tuple[nn.Module, list[Any], dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """One job. title and words: as the page has them. metrics: names in METRICS, the first orders the table.

    load: makes the job from the folder of data and one for what is trained. count: the examples taken, at equal
    distances. more: what is measured beside all methods and the baselines that take a few passes.
    """

    title: str
    words: str
    metrics: tuple[str, ...]
    load: Callable[[Path, Path], Job]
    count: int
    more: tuple[str, ...] = ()


def sst2(data: Path, _kept: Path) -> Job:
    """MiniLM with an adapter, and the development set of SST-2."""
    model, tokenizer = classifier(data / "adapters" / ADAPTER)
    return model, loading.texts(data / "sst2" / "dev.tsv"), {"tokenizer": tokenizer, "target": "predicted"}


class VerbNumber(nn.Module):
    """Logits (batch, 2) of a singular or a plural verb in the place of [MASK]."""

    def __init__(self, trained: Any, mask: int) -> None:
        super().__init__()
        self.bert: Any = trained.bert
        self.classifier: Any = trained.classifier
        self.mask = mask
        self.config = trained.config

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens."""
        return self.bert.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> torch.Tensor:
        """Of ids (batch, token), each with one [MASK]."""
        hidden = self.bert(input_ids=input_ids, **rest).last_hidden_state
        at_mask = hidden[torch.arange(len(hidden)), (input_ids == self.mask).int().argmax(-1)]
        return self.classifier(torch.tanh(self.bert.pooler.dense(at_mask)))


def verb_model(data: Path) -> tuple[nn.Module, dict[str, Any]]:
    """MiniLM that tells the number of a verb, and the settings that go with it."""
    trained, tokenizer = classifier(data / "adapters" / VERB_ADAPTER)
    model = VerbNumber(trained, tokenizer.mask_token_id).eval()
    return model, {"tokenizer": tokenizer, "target": "predicted"}


def verb_number(data: Path, _kept: Path) -> Job:
    """Sentences up to a verb, with one or two nouns of the other number between it and its subject."""
    model, settings = verb_model(data)
    lines = [
        line.split("\t")
        for name in ("numpred.test.1.gz", "numpred.test.2.gz")
        for line in gzip.decompress((data / "verb_number" / name).read_bytes()).decode().splitlines()
    ]
    # The data name rare words by their part of speech, in capitals; the model knows none of these.
    known = [(words, int(label == "VBP")) for label, words in lines if words == words.lower()]
    return model, [(f"{words} [MASK]", label) for words, label in known if 6 <= len(words.split()) <= 20], settings


def subject(data: Path, _kept: Path) -> Job:
    """Sentences such as "The sisters of Timothy [MASK]", with marks on the subject, the noun before the preposition."""
    model, settings = verb_model(data)
    with zipfile.ZipFile(data / "blimp" / "BLiMP.zip") as archive:
        lines = archive.read("data/distractor_agreement_relational_noun.jsonl").decode().splitlines()
    examples: list[Any] = []
    for line in map(json.loads, lines):
        words = line["one_prefix_prefix"].split()
        place = next(place for place, word in enumerate(words) if word in ("of", "about")) - 1
        text = f"{' '.join(words)} [MASK]"
        begin = len(" ".join(words[:place])) + (1 if place else 0)
        found = settings["tokenizer"](text, return_offsets_mapping=True)["offset_mapping"]
        marks = np.array([begin <= start < end <= begin + len(words[place]) for start, end in found])
        examples.append((text, None, marks))
    return model, examples, settings


def horses(data: Path, _kept: Path) -> Job:
    """Photographs of horses with their masks, seen by DINOv2-small."""
    loaded = vision.load(demo.IMAGE)
    masks = sorted((data / "weizmann_horses").glob("*_mask.png"))
    return loaded.model, [partial(horse, loaded, mask) for mask in masks], {"target": cls_norm}


def horse(loaded: vision.VisionModel, mask: Path) -> tuple[Any, ...]:
    """The pixels of a photograph, and its mask."""
    pixels = loaded.prepare(vision.open_image(mask.with_name(mask.name.replace("_mask.png", "_rgb.jpg"))))
    return pixels[0], None, np.asarray(vision.open_image(mask).convert("L")) > 127


def pasted_digits(_data: Path, kept: Path) -> Job:
    """A digit in one quarter of a canvas; in the others digits of scikit-learn whose patches are shuffled.

    Only the whole digit says the class, so that where the answer lies is known. The model is a small ViT that is
    trained here, on digits that are in no example.
    """
    import transformers
    from safetensors.torch import load_model, save_model
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    digits = torch.tensor(found.images / 16, dtype=torch.float32)
    classes = torch.tensor(found.target)
    config: Any = transformers.ViTConfig(
        image_size=16, patch_size=2, num_channels=1, hidden_size=96, num_hidden_layers=4, num_attention_heads=6,
        intermediate_size=192, num_labels=10,  # pyright: ignore[reportCallIssue]
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    file = kept / "pasted-digits.safetensors"
    if file.exists():
        load_model(model, file)
    else:
        train(model, digits[:1400], classes[:1400])
        save_model(model, str(file))
    model.eval()
    canvases, labels, masks = pasted(digits[1400:], classes[1400:], 397, torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = model(canvases).logits.argmax(-1) == labels
    print(f"pasted digits: {right.float().mean():.1%} of the test canvases are classified right")
    examples = zip(canvases, labels.tolist(), masks.numpy(), strict=True)
    return model, [one for one, well in zip(examples, right, strict=True) if well], {"target": "predicted"}


def pasted(
    digits: torch.Tensor, classes: torch.Tensor, count: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Canvases (example, 1, 16, 16), the classes of their digits, and where these are (example, 16, 16)."""
    chosen = torch.randint(len(digits), (count, 4), generator=random)
    quarters = digits[chosen].unflatten(-1, (4, 2)).unflatten(-3, (4, 2)).transpose(-3, -2).flatten(2, 3)
    orders = torch.rand(count, 4, 16, generator=random).argsort(-1)
    whole = torch.randint(4, (count,), generator=random)
    orders[torch.arange(count), whole] = torch.arange(16)
    shuffled = torch.take_along_dim(quarters, orders[..., None, None], 2)
    quarters = shuffled.unflatten(2, (4, 4)).transpose(-3, -2).flatten(-2).flatten(2, 3)
    canvases = quarters.unflatten(1, (2, 2)).transpose(2, 3).flatten(-2).flatten(1, 2)
    marked = torch.zeros(count, 4, 8, 8, dtype=torch.bool)
    marked[torch.arange(count), whole] = True
    masks = marked.unflatten(1, (2, 2)).transpose(2, 3).flatten(-2).flatten(1, 2)
    return canvases[:, None], classes[chosen[torch.arange(count), whole]], masks


def train(model: nn.Module, digits: torch.Tensor, classes: torch.Tensor, steps: int = 1500) -> None:
    """AdamW on fresh canvases, the rate rising to its highest and falling to 0."""
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for step in range(steps):
        canvases, labels, _ = pasted(digits, classes, 64, random)
        loss = F.cross_entropy(model(canvases).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
        if step % 100 == 0:
            print(f"pasted digits: step {step} of {steps}, loss {loss:.3f}", flush=True)


TASKS: dict[str, Task] = {
    "sst2": Task(
        "Words that change a text classifier's class",
        "MiniLM with an SST-2 adapter, sentences of the development set, the class predicted.",
        TEXTS,
        sst2,
        150,
        ("occlusion",),
    ),
    "verb-number": Task(
        "Words that change the number of a verb",
        "MiniLM with an adapter that tells a singular from a plural verb at [MASK], sentences of Linzen et al. 2016 "
        "with one or two nouns of the other number on the way, the class predicted.",
        TEXTS,
        verb_number,
        60,
        ("occlusion",),
    ),
    "subject": Task(
        "Does relevance point to the subject of a verb",
        'The same model on sentences of BLiMP such as "The sisters of Timothy [MASK]", whose subject is known.',
        ("token-auc", "token-pointing"),
        subject,
        60,
        ("occlusion",),
    ),
    "horses": Task(
        "Does relevance lie on the object",
        "DINOv2-small fine-tuned for saliency, photographs of horses with masks, the norm of [CLS].",
        ("pixel-auc",),
        horses,
        30,
    ),
    "pasted-digits": Task(
        "A digit among shuffled digits, where the answer is known",
        "A ViT of four layers that is trained to name the one whole digit of a canvas, canvases of digits that it has "
        "not seen and names right.",
        ("deletion-gap", "pixel-auc"),
        pasted_digits,
        60,
        ("occlusion",),
    ),
}
