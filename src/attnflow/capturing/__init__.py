"""Model and input in, `Trace` out: one forward pass, seen through the model's own attention kernel."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnflow.capturing import examples, huggingface, vision
from attnflow.capturing.recorder import record
from attnflow.capturing.target import Chosen, Target
from attnflow.trace import Role, Trace


def capture(
    model: torch.nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    tokens: Sequence[str] | None = None,
    target: Target | None = None,
) -> Trace | list[Trace]:
    """Run a model once and keep what it attended to: one trace per example, its padding removed.

    model: any torch module that attends through `scaled_dot_product_attention`, nn.MultiheadAttention, or a softmax of
    its own that it multiplies with values (Hugging Face, timm, torchvision, plain torch). It is left as it was:
    outputs, hooks, modes and configuration.
    inputs: what the model takes: a mapping of keyword arguments (what a tokenizer or an image processor returns), one
    tensor, or a tuple of arguments; with a tokenizer also a text, or a list of texts. Padding is what `attention_mask`
    says, else the keys that no query may attend to.
    tokenizer: names the tokens and tells which are special. tokens: labels of one example's positions instead.

    target: with one, every layer keeps the gradient of its attention weights for that number of the output: a class or
    token id, one per example, "predicted", or a function of the model's output that returns one score per example.
    Logits (batch, token, vocabulary) are read at the last token. Parameters' gradients are left as they were.

    Returns the trace for one example, and a list of traces for a batch of several.

    Raises ValueError if no attention or not all of it was seen (with the module and the way out), for a model in
    training mode, for a text that is empty or longer than the model takes, and for attention that is not one stack of
    square layers: windows, cross-attention, two towers.
    """
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        inner = getattr(model, "model", None)
        hint = "; give its .model" if isinstance(inner, torch.nn.Module) else ""
        raise ValueError(f"capture needs a torch.nn.Module; a {type(model).__name__} was given{hint}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} has an encoder, a decoder and cross-attention between them, which capture does "
            "not place yet; capture its encoder alone: capture(model.get_encoder(), ...)"
        )
    if isinstance(inputs, str) or (isinstance(inputs, list) and all(isinstance(text, str) for text in inputs)):
        inputs = huggingface.tokenize(inputs, model, tokenizer)
    args, kwargs = _arguments(inputs)
    ids = huggingface.input_ids(args, kwargs)
    if ids is not None:
        huggingface.check_length(ids.shape[1], model, tokenizer)
    chosen = None if target is None else Chosen(target, kwargs.get("attention_mask"))
    recording, output = record(model, args, kwargs, chosen)
    _, count = examples.one_stack(recording, model)
    keep = examples.kept(recording, kwargs.get("attention_mask"))
    labels = _Labels(model, tokenizer, ids, recording.patch_grid, tokens, count)
    facts = _model_facts(model)
    traces = [
        Trace(layers, *labels.of(index, keep[index]), output, facts, chosen and chosen.facts(index))
        for index, layers in enumerate(examples.split(recording, keep))
    ]
    return traces[0] if len(traces) == 1 else traces


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


@dataclass(frozen=True)
class _Labels:
    """What the input positions are called: words, patches, or plain numbers."""

    model: torch.nn.Module
    tokenizer: Any
    ids: torch.Tensor | None
    patch_grid: tuple[int, int] | None
    tokens: Sequence[str] | None
    count: int

    def of(self, index: int, keep: torch.Tensor) -> tuple[tuple[str, ...], tuple[Role, ...], tuple[int, int] | None]:
        """Tokens, roles and grid of one example."""
        kept = int(keep.sum())
        roles: Sequence[Role] = ("text",) * kept
        grid = None
        if self.tokens is None and self.ids is not None and self.ids.shape[1] != self.count:
            raise ValueError(
                f"the model attends over {self.count} positions, but was given {self.ids.shape[1]} token ids; if it "
                "adds some of its own, name all of them with tokens="
            )
        if self.ids is not None and self.ids.shape[1] == self.count:
            tokens, roles = huggingface.labels(self.ids[index][keep.to(self.ids.device)].tolist(), self.tokenizer)
        elif self.patch_grid is not None:
            tokens, roles, grid = *vision.labels(self.model, self.patch_grid, kept), self.patch_grid
        else:
            tokens = [str(position) for position in range(kept)]
        if self.tokens is not None:
            if len(self.tokens) != kept:
                raise ValueError(f"{len(self.tokens)} tokens were given for the {kept} positions of example {index}")
            tokens = self.tokens
        return tuple(tokens), tuple(roles), grid


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
