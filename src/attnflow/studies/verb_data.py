"""The sentences of the verb-number study, and how few of them are made to teach syntax."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from attnflow.studies.record import checksums, required

PUBLISHED = "https://github.com/TalLinzen/rnn_agreement (numpred.val and numpred.test.1 to .5; numpred.train if wanted)"
UNKNOWN, CLS = "<unk>", "<cls>"
RARE = 2  # words seen less often are unknown
LONGEST = 24  # words; longer sentences are few and take long
# What may begin the words between a subject and its verb.
PREPOSITIONS = ("of", "in", "for", "with", "on", "at", "by", "from", "to", "between", "about", "under", "during", "as")
OPENERS = frozenset((*PREPOSITIONS, "through", "near", "within", "among", "that", "which", "who", ","))
ARTICLES = frozenset(("the", "a", "an"))


T = TypeVar("T")


class Sentence(NamedTuple):
    """The words up to the verb, and whether the verb is plural."""

    words: tuple[str, ...]
    plural: bool


@dataclass(frozen=True)
class VerbData:
    """Sentences for training, and others for testing: no test sentence is trained on.

    natural: text as it comes. attracted: sentences with attractors, nouns between subject and verb that all are of
    the other number. test: natural ones; test_attracted: by the number of attractors.
    files: name to SHA-256. split: how the test sentences were chosen.
    """

    natural: Sequence[Sentence]
    attracted: Sequence[Sentence]
    test: Sequence[Sentence]
    test_attracted: Mapping[int, Sequence[Sentence]]
    files: Mapping[str, str]
    split: Mapping[str, int]

    def held_out(self) -> frozenset[tuple[str, ...]]:
        """The words of every test sentence."""
        return frozenset(one.words for some in (self.test, *self.test_attracted.values()) for one in some)

    def vocabulary(self) -> tuple[str, ...]:
        """UNKNOWN, CLS, then every word that is not rare in training, in the order of the files."""
        counts = Counter(word for pool in (self.natural, self.attracted) for words, _ in pool for word in words)
        return (UNKNOWN, CLS, *(word for word, count in counts.items() if count >= RARE))


def read(folder: Path, *, seed: int, examples: int = 2000, attracted: int = 500) -> VerbData:
    """The preambles of Linzen et al. 2016 in a folder or its verb_number, as files of "VBZ or VBP, tab, words".

    Held out: `examples` of numpred.val, drawn from the seed, and `attracted` of each numpred.test.N (at most half of
    it). numpred.train is trained on if it is there. Files may end in .gz.

    Raises FileNotFoundError for a file that is absent, with where it is published.
    """
    folder = folder / "verb_number" if (folder / "verb_number").is_dir() else folder
    names = ["numpred.val", *(f"numpred.test.{number}" for number in range(1, 6))]
    files = required(folder, *(_name(folder, name) for name in names), published=PUBLISHED)
    rng = np.random.default_rng(seed)
    natural = _sentences(files[0])
    test = [natural[place] for place in rng.permutation(len(natural))[:examples]]
    test_attracted: dict[int, list[Sentence]] = {}
    pool: list[Sentence] = []
    for number, file in enumerate(files[1:], start=1):
        sentences = _sentences(file)
        order = rng.permutation(len(sentences))
        count = min(attracted, len(sentences) // 2)
        test_attracted[number] = [sentences[place] for place in order[:count]]
        pool += [sentences[place] for place in order[count:]]
    train = folder / _name(folder, "numpred.train")
    if train.exists():
        files.append(train)
        natural += _sentences(train)
    held_out = {one.words for some in (test, *test_attracted.values()) for one in some}
    return VerbData(
        natural=[one for one in natural if one.words not in held_out],
        attracted=[one for one in pool if one.words not in held_out],
        test=test,
        test_attracted=test_attracted,
        files=checksums(files),
        split={"seed": seed, "natural": examples, "attracted": attracted},
    )


def training_sentences(data: VerbData, rng: np.random.Generator) -> Iterator[Sentence]:
    """Sentences to train on, without end: natural ones, those with attractors, and three kinds made of the latter.

    Where nearly all sentences have attractors, a model learns "the opposite of the last noun". So, as far as function
    words tell: the subject stands alone, without the words that follow it; a noun phrase that follows it stands alone,
    of the other number, as attractors are; and a subject is followed by the words that follow any other, whose
    nouns are of either number.
    """
    attracted = [one for one in data.attracted if len(one.words) <= LONGEST]
    halves = [(one, place) for one in attracted if (place := _opener(one.words))]
    subjects = [Sentence(one.words[:place], one.plural) for one, place in halves]
    rests = [one.words[place:] for one, place in halves]
    phrases = [
        Sentence(rest[1 : 1 + (_opener(rest[1:]) or len(rest))], not one.plural)
        for (one, _), rest in zip(halves, rests, strict=True)
        if rest[0] in PREPOSITIONS and len(rest) > 1
    ]
    pairs = zip(_endless(subjects, rng), _endless(rests, rng), strict=False)
    kinds = (
        (0.4, _endless(data.natural, rng)),
        (0.2, _endless(attracted, rng)),
        (0.1, _endless(subjects, rng)),
        (0.1, _endless(phrases, rng)),
        (0.2, (Sentence(subject.words + rest, subject.plural) for subject, rest in pairs)),
    )
    shares = [share for share, _ in kinds]
    held_out = data.held_out()
    while True:
        for kind in rng.choice(len(kinds), size=1000, p=shares):
            one = next(kinds[kind][1])
            if one.words not in held_out and len(one.words) <= LONGEST:
                yield one


def _opener(words: Sequence[str]) -> int:
    """Where what follows the subject begins, or 0 where that cannot be told."""
    place = next((place for place, word in enumerate(words) if word in OPENERS), 0)
    return 0 if place == 1 and words[0] in ARTICLES else place


def _endless(items: Sequence[T], rng: np.random.Generator) -> Iterator[T]:
    """Every item in a random order, again and again."""
    while True:
        yield from (items[place] for place in rng.permutation(len(items)))


def _name(folder: Path, name: str) -> str:
    return f"{name}.gz" if (folder / f"{name}.gz").exists() else name


def _sentences(file: Path) -> list[Sentence]:
    text = (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).decode()
    pairs = (line.split("\t") for line in text.splitlines() if line)
    return [Sentence(tuple(words.split()), label == "VBP") for label, words in pairs]
