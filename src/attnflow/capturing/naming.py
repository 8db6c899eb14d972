"""What the positions of a trace are called: words, patches, or plain numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attnflow.capturing import huggingface, placing, vision
from attnflow.capturing.dataflow import Stream
from attnflow.capturing.examples import Stack
from attnflow.trace import Grid, Role, token_labels


class Labelled(NamedTuple):
    """Tokens, roles, grid, where the decoder starts, and words, as `Trace` has them."""

    tokens: tuple[str, ...]
    roles: tuple[Role, ...]
    grid: Grid | None
    decoder_start: int | None
    words: tuple[int, ...] | None


@dataclass(frozen=True)
class Names:
    """Names the positions of a model's input. tokens: labels of one example that were given instead."""

    model: torch.nn.Module
    tokenizer: Any
    tokens: Sequence[str] | None

    def of(self, index: int, stack: Stack) -> Labelled:
        """Of one example whose calls are in order."""
        tokens, roles = list[str](), list[Role]()
        words: list[int] | None = []
        grid, start = None, None
        for number, kept in stack.kept.items():
            start = len(tokens) if tokens and not stack.flow.mutual else None
            more, more_roles, more_words, own_grid = self._stream(number, stack, kept[index], index)
            tokens, roles, grid = tokens + more, roles + more_roles, grid or own_grid
            if words is not None and more_words is not None:
                words = words + [(max(words) + 1 if words else 0) + word for word in more_words]
            else:
                words = None
        return Labelled(self._named(tokens, index), tuple(roles), grid, start, None if words is None else tuple(words))

    def of_placed(self, index: int, placed: placing.Placed, stream: Stream) -> Labelled:
        """Of one example whose patches were placed: text, prefix tokens, patches."""
        found = ids_of(stream, None)
        ids = found[index].tolist() if found is not None else []
        if placed.loose is not None and len(ids) > len(placed.kept):  # ids that stand for patches have a place as well
            text, beside = [ids[token] for token in placed.loose], 0
        else:
            text = [i for i, kept in zip(ids, placed.kept.tolist(), strict=False) if kept]
            beside = int(placed.kept[len(ids) :].sum())
        tokens, roles, words = huggingface.labels(text, self.tokenizer)
        prefix = vision.prefix_labels(self.model, beside)
        others = iter([*zip(tokens, roles, strict=True), *((name, "prefix") for name in prefix)])
        named: list[tuple[str, Any]] = [
            next(others) if place is None else (vision.place_label(place), "patch") for place in placed.places
        ]
        own_words: list[int] | None = None
        if words:
            word, more = iter(words), itertools.count(max(words) + 1)
            own_words = [next(more) if role in ("prefix", "patch") else next(word) for _, role in named]
        return Labelled(
            self._named([name for name, _ in named], index),
            tuple(role for _, role in named),
            placed.grid,
            None,
            None if own_words is None else tuple(own_words),
        )

    def _named(self, tokens: list[str], index: int) -> tuple[str, ...]:
        """The labels of one example, or those that were given instead."""
        if self.tokens is None:
            return tuple(tokens)
        given = token_labels(self.tokens)
        if len(given) != len(tokens):
            raise ValueError(f"{len(given)} tokens were given for the {len(tokens)} positions of example {index}")
        return given

    def _stream(
        self, number: int, stack: Stack, keep: torch.Tensor, index: int
    ) -> tuple[list[str], list[Role], list[int] | None, Grid | None]:
        layout = stack.proof.layouts[number]
        if layout.past:
            past = int(keep[: layout.past].sum())
            now = replace(layout, size=layout.size - layout.past, prefix=layout.prefix - layout.past, past=0)
            proof = replace(stack.proof, layouts={**stack.proof.layouts, number: now})
            rest = self._stream(number, replace(stack, proof=proof), keep[layout.past :], index)
            before: list[Role] = ["prefix"] * past
            return [f"[PAST{place}]" for place in range(1, past + 1)] + rest[0], before + rest[1], None, rest[3]
        kept, source = int(keep.sum()), layout.source
        if source is not None and source.kind == "embedding":
            ids = ids_of(stack.flow.streams[number], source.plane)
            assert ids is not None
            ids = ids if layout.batch_axis is None or layout.batch_axis == 0 else ids.T
            if not layout.prefix:
                own = ids.reshape(layout.batch, -1)[index][keep.to(ids.device)].tolist()
                return *huggingface.labels(own, self.tokenizer), None
            if self.tokens is None:
                raise ValueError(
                    f"the model attends over {layout.size} positions, but was given {layout.size - layout.prefix} "
                    "token ids; if it adds some of its own, name all of them with tokens="
                )
        if source is not None and source.kind == "convolution" and len(source.plane) in (3, 4) and keep.all():
            grid: Any = source.plane[1:]
            return *vision.labels(self.model, grid, kept), None, grid
        return [str(position) for position in range(kept)], ["text" for _ in range(kept)], None, None


def ids_of(stream: Stream, plane: tuple[int, ...] | None) -> torch.Tensor | None:
    """The token ids of a stream: what its first embedding looked up, of those over some plane, or any.

    Types and positions of tokens are looked up after the tokens themselves.
    """
    own = (source.ids for source in stream.sources if source.ids is not None and plane in (None, source.plane))
    return next(own, None)
