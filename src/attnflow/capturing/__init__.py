"""Model and input in, `Trace` out: one forward pass, seen through the model's own attention kernel."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch

from attnflow.capturing import examples, generation, huggingface, placing, vision
from attnflow.capturing.recorder import Recording, WeightsOf, record
from attnflow.capturing.target import Chosen, Target
from attnflow.trace import Grid, Role, Trace


def capture(
    model: torch.nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    tokens: Sequence[str] | None = None,
    target: Target | None = None,
    layers: int | range | slice | None = None,
    weights: str | WeightsOf | None = None,
    generate: int | Mapping[str, Any] | None = None,
) -> Trace | list[Trace]:
    """Run a model once and keep what it attended to: one trace per example, its padding removed.

    model: any torch module that attends through `scaled_dot_product_attention`, nn.MultiheadAttention, or a softmax of
    its own that it multiplies with values (Hugging Face, timm, torchvision, plain torch). It is left as it was:
    outputs, hooks, modes and configuration. A compiled model is captured from the original module.
    inputs: what the model takes: a mapping of keyword arguments (what a tokenizer or an image processor returns), one
    tensor, or a tuple of arguments; with a tokenizer also a text, or a list of texts. Padding is what `attention_mask`
    says, else the keys that no query may attend to.
    tokenizer: names the tokens and tells which are special. tokens: labels of one example's positions instead.

    target: with one, every layer keeps the gradient of its attention weights for that number of the output: a class or
    token id, one per example, "predicted", or a function of the model's output that returns one score per example.
    Logits (batch, token, vocabulary) are read at the last token. Parameters' gradients are left as they were.

    layers: keep these attention calls only, in the order of the forward pass: one (-1 is the last) or a range; the
    layers of the trace are then those, counted from 0, and its tokens the positions that enter the lowest.
    weights: for attention that capture cannot follow, which modules output their weights (batch, head, query, key): a
    pattern of their names ("layers.*.probs"), or a function of (name, module, output) that returns the weights
    or None. Then nothing else is taken for attention.
    generate: let the model write first, up to so many tokens (greedily) or as these settings of its `generate` say, and
    explain what it wrote: the trace is that of prompt and answer together, which with a cache of keys or without is one
    square graph, and its query "generated" the rows that wrote each token. One example at a time, without padding.

    An encoder-decoder gives one joint trace over the positions of both, the encoder's first: rollout and flow from a
    decoder's position reach down through cross-attention to the encoder's input. Text and an image in one stream give
    the text first. Windows, frames and merged patches (Swin, TimeSformer) are placed on the whole grid; for that the
    model runs some more times, see `placing`.

    Returns the trace for one example, and a list of traces for a batch of several.

    Raises ValueError if no attention or not all of it was seen (with the module and the way out), for a model in
    training mode, for a text that is empty or longer than the model takes, and for attention that is neither one stack
    of layers nor an encoder with its decoder (two towers), or not between inputs (channels, padded windows, patches
    mixed by convolutions).
    """
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        inner = getattr(model, "model", None)
        hint = "; give its .model" if isinstance(inner, torch.nn.Module) else ""
        raise ValueError(f"capture needs a torch.nn.Module; a {type(model).__name__} was given{hint}")
    model = getattr(model, "_orig_mod", model)  # torch.compile keeps the model that it was given
    if isinstance(inputs, str) or (isinstance(inputs, list) and all(isinstance(text, str) for text in inputs)):
        inputs = huggingface.tokenize(inputs, model, tokenizer)
    args, kwargs = _arguments(inputs)
    if generate is not None:
        written = generation.written(model, args, kwargs, generate)
        how: dict[str, Any] = {"tokenizer": tokenizer, "tokens": tokens, "target": target}
        how |= {"layers": layers, "weights": weights}
        answers = [_answer(capture(model, one, **how), start) for one, start in written]
        return answers[0] if len(answers) == 1 else answers
    ids = huggingface.input_ids(args, kwargs)
    if ids is not None:
        huggingface.check_length(ids.shape[1], model, tokenizer)
    chosen = None if target is None else Chosen(target, kwargs.get("attention_mask"))
    chosen_layers, weights_of = _slice(layers), _weights_of(weights)
    recording, output = record(model, args, kwargs, chosen, layers=chosen_layers, weights_of=weights_of)
    stack = examples.stack(recording, model, kwargs.get("attention_mask"), kwargs.get("decoder_attention_mask"))
    grid = cast("Grid | None", recording.patches and recording.patches[1:])
    labels = _Labels(model, tokenizer, ids, kwargs.get("decoder_input_ids"), grid, tokens)
    if stack is None or _is_in_another_order(stack, recording, ids):
        placed = placing.place(model, args, kwargs, recording)
        parts = [(one.layers, labels.of_placed(index, one)) for index, one in enumerate(placed)]
    else:
        parts = [(stack.example(index), labels.of(index, stack)) for index in range(len(stack.encoder))]
    facts = _model_facts(model)
    if layers is not None:
        numbers = range(len(recording.calls))[chosen_layers]
        facts["kept"] = f"layers {numbers[0]} to {numbers[-1]} of {len(recording.calls)}"
    traces = [
        Trace(own, *names, output, facts, chosen and chosen.facts(index)) for index, (own, names) in enumerate(parts)
    ]
    return traces[0] if len(traces) == 1 else traces


def _slice(layers: int | range | slice | None) -> slice:
    """Which calls to keep, as a slice without a step; ValueError for anything else."""
    if layers is None:
        return slice(None)
    if isinstance(layers, int):
        return slice(layers, layers + 1 or None)
    if isinstance(layers, range | slice) and layers.step in (None, 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        return slice(layers.start, layers.stop)
    raise ValueError(f"layers must lie next to each other: one, or a range in steps of 1; {layers!r} was given")


def _weights_of(weights: str | WeightsOf | None) -> WeightsOf | None:
    """The function that a pattern of names stands for."""
    if weights is None or callable(weights):
        return weights
    if not isinstance(weights, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"weights= takes a pattern of module names or a function; {weights!r} was given")

    def named(name: str, module: torch.nn.Module, output: Any) -> torch.Tensor | None:
        if not fnmatch.fnmatchcase(name, weights):
            return None
        if not isinstance(output, torch.Tensor):
            raise ValueError(
                f"{name!r} outputs a {type(output).__name__}, and weights= wants a tensor of attention weights: give a "
                "function of (name, module, output) that picks it"
            )
        return output

    return named


def _answer(trace: Trace | list[Trace], start: int) -> Trace:
    """The trace of one prompt with its answer, which begins `start` tokens into the stream that wrote it."""
    assert isinstance(trace, Trace)  # `generation.written` gives one example at a time
    return replace(trace, generated_from=(trace.decoder_start or 0) + start)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        return inputs, {}
    raise ValueError(
        f"inputs must be a mapping, a tensor or a tuple of arguments (or text, with a tokenizer); a "
        f"{type(inputs).__name__} was given"
    )


def _is_in_another_order(stack: examples.Stack, recording: Recording, ids: torch.Tensor | None) -> bool:
    """Whether patches need not follow the prefix tokens in order: beside text, or where frames are convolved alone."""
    if recording.patches is None or stack.decoder is not None:
        return False
    batch, count = stack.encoder.shape
    return recording.patches[0] != batch or (ids is not None and ids.shape[1] < count)


_Labelled: TypeAlias = tuple[tuple[str, ...], tuple[Role, ...], Grid | None, int | None, tuple[int, ...] | None]


@dataclass(frozen=True)
class _Labels:
    """What the input positions are called: words, patches, or plain numbers."""

    model: torch.nn.Module
    tokenizer: Any
    ids: torch.Tensor | None
    decoder_ids: torch.Tensor | None
    patch_grid: Grid | None
    tokens: Sequence[str] | None

    def of(self, index: int, stack: examples.Stack) -> _Labelled:
        """Tokens, roles, grid, the decoder's start and the words of one example."""
        tokens, roles, words, grid = self._stream(stack.encoder[index], self.ids, index, patches=True)
        start = None
        if stack.decoder is not None:
            start = len(tokens)
            more, more_roles, more_words, _ = self._stream(stack.decoder[index], self.decoder_ids, index, patches=False)
            tokens, roles = tokens + more, roles + more_roles
            words = words + [max(words) + 1 + word for word in more_words] if words and more_words else None
        return self._named(tokens, index), tuple(roles), grid, start, None if words is None else tuple(words)

    def of_placed(self, index: int, placed: placing.Placed) -> _Labelled:
        """The same of an example whose patches were placed: text, prefix tokens, patches."""
        ids = self.ids[index].tolist() if self.ids is not None else []
        if len(ids) > len(placed.kept):
            raise ValueError(
                f"the model was given {len(ids)} token ids, but has {len(placed.kept)} positions beside the patches"
            )
        text = [i for i, kept in zip(ids, placed.kept.tolist(), strict=False) if kept]
        tokens, roles, words = huggingface.labels(text, self.tokenizer)
        prefix = vision.prefix_labels(self.model, int(placed.kept[len(ids) :].sum()))
        tokens += [*prefix, *map(vision.place_label, placed.places)]
        count = len(prefix) + len(placed.places)
        more: list[Role] = ["prefix" if number < len(prefix) else "patch" for number in range(count)]
        if words:
            words += range(max(words) + 1, max(words) + 1 + count)
        return self._named(tokens, index), (*roles, *more), placed.grid, None, tuple(words) if words else None

    def _named(self, tokens: list[str], index: int) -> tuple[str, ...]:
        """The labels of one example, or those that were given instead."""
        if self.tokens is None:
            return tuple(tokens)
        if len(self.tokens) != len(tokens):
            raise ValueError(f"{len(self.tokens)} tokens were given for the {len(tokens)} positions of example {index}")
        return tuple(self.tokens)

    def _stream(
        self, keep: torch.Tensor, ids: torch.Tensor | None, index: int, *, patches: bool
    ) -> tuple[list[str], list[Role], list[int] | None, Grid | None]:
        kept = int(keep.sum())
        if ids is not None and ids.shape[1] == len(keep):
            return *huggingface.labels(ids[index][keep.to(ids.device)].tolist(), self.tokenizer), None
        if self.tokens is None and ids is not None:
            raise ValueError(
                f"the model attends over {len(keep)} positions, but was given {ids.shape[1]} token ids; if it adds "
                "some of its own, name all of them with tokens="
            )
        if patches and ids is None and self.patch_grid is not None:
            return *vision.labels(self.model, self.patch_grid, kept), None, self.patch_grid
        return [str(position) for position in range(kept)], ["text" for _ in range(kept)], None, None


def _model_facts(model: torch.nn.Module) -> dict[str, Any]:
    """What the recipe says of the model: its class, the name it was loaded by, and the versions that ran it."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    facts: dict[str, Any] = {"class": type(model).__name__}
    if name:
        facts["name"] = str(name)
    versions = {"torch": str(torch.__version__)}
    for package in ("transformers", "timm", "torchvision"):
        if package in sys.modules and type(model).__module__.startswith(package):
            versions[package] = str(sys.modules[package].__version__)
    return facts | {"versions": versions}
