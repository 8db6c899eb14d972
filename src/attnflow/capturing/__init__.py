"""Model and input in, `Trace` out: one forward pass, seen through the model's own attention kernel."""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack, get_args

import torch

from attnflow.capturing import checkpoints, each_layer, examples, generation, huggingface, structure
from attnflow.capturing.calls import Keep
from attnflow.capturing.inputs import arguments, module_of
from attnflow.capturing.naming import Labelled, Names
from attnflow.capturing.recorder import Recording, WeightsOf, record
from attnflow.capturing.replay import Pass
from attnflow.capturing.rules import RULES
from attnflow.capturing.structure import Mixers, Structure
from attnflow.capturing.target import Answer, Target, TargetScores, as_target, resolved
from attnflow.layers import Layer
from attnflow.trace import Entered, Trace


class CaptureSettings(TypedDict, total=False):
    """The settings of `capture`, as `capture_batch` says what they mean."""

    tokenizer: Any
    tokens: Sequence[str] | None
    target: Target | None
    layers: int | range | slice | None
    weights: str | WeightsOf | None
    generate: int | Mapping[str, Any] | None
    prove: bool
    mixers: Mixers
    tower: str | None
    rules: str | None
    keep: Keep | None
    at_each_layer: bool
    entered: bool


def capture(model: torch.nn.Module, inputs: Any, **settings: Unpack[CaptureSettings]) -> Trace:
    """Run a model once on one example, and keep what it attended to.

    The arguments, settings and errors are those of `capture_batch`, which takes several examples at once.

    Raises ValueError also for several.
    """
    traces = capture_batch(model, inputs, **settings)
    if len(traces) > 1:
        raise ValueError(
            f"the model was given {len(traces)} examples, and capture takes one: capture_batch returns a list of traces"
        )
    return traces[0]


def capture_batch(
    model: torch.nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    tokens: Sequence[str] | None = None,
    target: Target | None = None,
    layers: int | range | slice | None = None,
    weights: str | WeightsOf | None = None,
    generate: int | Mapping[str, Any] | None = None,
    prove: bool = True,
    mixers: Mixers = "refuse",
    tower: str | None = None,
    rules: str | None = None,
    keep: Keep | None = None,
    at_each_layer: bool = False,
    entered: bool = False,
) -> list[Trace]:
    """Run a model once and keep what it attended to: one trace per example, its padding removed.

    model: any torch module that attends through `scaled_dot_product_attention`, nn.MultiheadAttention, or a softmax of
    its own that it multiplies with values (Hugging Face, timm, torchvision, plain torch). It is left as it was:
    outputs, hooks, modes and configuration. A compiled model is captured from the original module.
    inputs: what the model takes: a mapping of keyword arguments (what a tokenizer or an image processor returns), one
    tensor, or a tuple of arguments; with a tokenizer also a text, or a list of texts. Padding is what `attention_mask`
    says, else the keys that no query may attend to.
    tokenizer: names the tokens and tells which are special. tokens: labels of one example's positions instead.

    target: with one, every layer keeps the gradient of its attention weights for that number of the output: a class or
    token id, the name of a class, a list of one per example, "predicted", a pair (a, b) for a rather than b; a value of
    `capturing.target` (Contrast, Token, Answer, Similarity, Direction); with generate= "answer", for the
    log-probability of what the model wrote; or a function of the model's output that returns one score per example.
    Logits (batch, token, vocabulary) are read at the last token. Parameters' gradients are left as they were.

    rules: how gradients are taken: by a set of `attnflow.RULES`, under which gradients times what they are of add up
    to the score; needs a target.

    layers: keep these attention calls only, in the order of the forward pass: one (-1 is the last) or a range; the
    layers of the trace are then those, counted from 0, and its tokens the positions that enter the lowest.
    weights: for attention that capture cannot follow, which modules output their weights (batch, head, query, key): a
    pattern of their names ("layers.*.probs"), or a function of (name, module, output) that returns the weights
    or None. Then nothing else is taken for attention.
    generate: let the model write first, up to so many tokens (greedily) or as these settings of its `generate` say, and
    explain what it wrote: the trace is that of prompt and answer together, which with a cache of keys or without is one
    square graph, and its query "generated" the rows that wrote each token. One example at a time, without padding.

    prove: at the first capture of a model object on inputs of some shapes, ask the model where its tokens stand and
    whether anything but the recorded attention moves information between positions, by two further passes (up to eleven
    of 32 positions or fewer, and more for patches that stand in no plain order), in which hooks of your own run too;
    `trace.model["proofs"]` says what was found.
    mixers: "refuse" such models with an error that names the module, or "allow" them with a warning.
    tower: of a model with several towers explain the attention inside one module, named by its path or the last names
    of it ("language_model"). All of the model runs, and image tokens stand at the patches that they were made of.

    keep: "block" keeps, beside the weights, what some edges look at (`attnflow.EDGES`): the values, and the block
    around each call, which is its output projection, the stream that it is added to, and the norm behind the addition,
    if one is there. It is found by following the attention's output through the pass, and checked on the numbers.
    "values" keeps the values alone. "relevance" keeps, with a target under rules and of one example, what enters and
    leaves every block, token by token, and what biases took; it needs a model with one stream. Without keep a pass
    costs nothing more.

    at_each_layer: with a target, keep for each layer also the gradient of the score that its own output gives, in the
    place of the last block's output (what LeGrad looks at); where no such place is found, an error says why.

    entered: with a target, keep also its gradient with respect to what each example enters as, the embedding of its
    tokens or its pixels, from the same backward pass: gradient baselines then need no pass of their own.

    An encoder-decoder gives one joint trace over the positions of both, the encoder's first: rollout and flow from a
    decoder's position reach down through cross-attention to the encoder's input. Text and an image in one stream give
    the text first. Windows, frames and merged patches (Swin, TimeSformer) are placed on the whole grid; for that the
    model runs some more times, see `placing`.

    Raises ValueError if no attention was seen, for a model in training mode, for a text that is empty or longer than
    the model takes, where something else mixes positions, where no gradient of the target reaches the attention, and
    for attention that makes up no graph: several towers, branches, differential attention, attention that is not
    between positions of the input (channels, padded windows, patches mixed by convolutions). With keep="block" also
    where the model does something else with what attention returned: the error names the step and the module.
    """
    if keep not in (None, *get_args(Keep)):
        raise ValueError(f"keep={keep!r} is unknown; give 'values', 'block', 'relevance' or None")
    if keep is not None and weights is not None:
        raise ValueError("keep= needs attention that capture sees itself; leave out weights=, or keep=")
    if mixers not in get_args(Mixers):
        raise ValueError(f"mixers={mixers!r} is unknown; give 'refuse' or 'allow'")
    model, bound = module_of(model)
    args, kwargs = arguments(model, inputs, tokenizer)
    kwargs = {**bound, **kwargs}
    if generate is not None:
        written = generation.written(model, args, kwargs, generate)
        same: CaptureSettings = {"tokenizer": tokenizer, "tokens": tokens, "target": target, "layers": layers}
        same |= {"weights": weights, "prove": prove, "mixers": mixers, "tower": tower, "rules": rules, "keep": keep}
        same |= {"at_each_layer": at_each_layer, "entered": entered}
        return [_answer(model, one, start, same) for one, start in written]
    ids = huggingface.input_ids(args, kwargs)
    if ids is not None:
        huggingface.check_ids(ids, model, tokenizer)
    if target is not None:
        target = resolved(target, model, kwargs.get("decoder_input_ids", ids))
    if rules is not None and target is None:
        raise ValueError(f"rules={rules!r} say how gradients of a target are taken, and there is none: give target=")
    if at_each_layer and (target is None or weights is not None):
        raise ValueError("at_each_layer=True keeps gradients of a target: give target=, and leave out weights=")
    if entered and (target is None or rules is not None):
        raise ValueError("entered=True keeps the plain gradient of a target: give target=, and leave out rules=")
    if rules is not None and rules not in RULES:
        raise ValueError(f"rules {rules!r} are unknown; choose one of {', '.join(RULES)}")
    if keep == "relevance" and rules is None:
        raise ValueError("keep='relevance' is relevance under rules: give target= and rules='cp-lrp'")
    chosen = None if target is None else TargetScores(target, kwargs.get("attention_mask"))
    how: dict[str, Any] = {"layers": _slice(layers), "weights_of": _weights_of(weights), "tower": tower, "rules": rules}
    how |= {"keep": keep, "entered": entered}
    asks = prove and weights is None
    known = structure.known(model, args, kwargs, tower) if asks else None
    recording, output = record(model, args, kwargs, chosen, compared=asks and known is None, **how)
    found = None if known is None else structure.recall(known, model, recording, mixers)
    if found is None:
        if known is not None:  # another structure on inputs of the same shapes
            recording, output = record(model, args, kwargs, chosen, compared=True, **how)
        found = structure.find(Pass(model, args, kwargs, recording), asks=asks, mixers=mixers)
    if at_each_layer:
        assert chosen is not None  # refused above
        each_layer.add_gradients(Pass(model, args, kwargs, recording), found.flow, chosen, rules)
    facts = _model_facts(model) | {"proofs": found.facts}
    if layers is not None:
        numbers = range(len(found.flow.steps))[how["layers"]]
        facts["kept"] = f"layers {numbers[0]} to {numbers[-1]} of {len(found.flow.steps)}"
    names = Names(model, tokenizer, tokens)
    by_rules: dict[str, Any] = {} if rules is None else {"rules": rules}
    if recording.without_rule:
        by_rules["without_rule"] = list(recording.without_rule)
        warnings.warn(
            f"rules={rules!r} have none for {', '.join(recording.without_rule)}: gradients went through as they are",
            stacklevel=2,
        )
    traces = [
        Trace(own, *labelled, output, facts, chosen and chosen.facts(index) | by_rules, reads=reads)
        for index, (own, labelled, reads) in enumerate(_examples(recording, found, kwargs, names))
    ]
    if chosen is not None and len(chosen.scores) != len(traces):
        raise ValueError(
            f"a target must give one score per example, a tensor (example,); it gave {len(chosen.scores)} of "
            f"{len(traces)} examples"
        )
    if not entered:
        return traces
    assert target is not None  # refused above
    assert chosen is not None
    kept = _kept_positions(recording, found, kwargs)
    asked_for, settled = as_target(target), chosen.settled
    own = list[Trace]()
    for index, trace in enumerate(traces):
        tensors = [tuple(examples.entered(x, index, len(traces), kept) for x in pair) for pair in recording.entered]
        values, gradients = zip(*tensors, strict=True) if tensors else ((), ())
        targets = (asked_for.of(index), settled.of(index))
        own.append(replace(trace, entered=Entered(values, gradients, targets)))
    return own


def _kept_positions(recording: Recording, found: Structure, kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
    """For each joint stream (example, position), True for no padding; nothing where patches are placed."""
    if found.proof is None:
        return {}
    given = structure.masks_of(found.flow, kwargs)
    return examples.kept_positions(recording, found.flow, found.proof, given)


def _examples(
    recording: Recording, found: Structure, kwargs: dict[str, Any], names: Names
) -> list[tuple[tuple[Layer, ...], Labelled, tuple[int, ...] | None]]:
    """For each example its layers, what its positions are called, and the positions that the output is read from."""
    if found.proof is None:
        stream = found.flow.streams[found.flow.joint[0]]
        placed = enumerate(found.placed(recording))
        return [(one.layers, names.of_placed(index, one, stream), None) for index, one in placed]
    kept = _kept_positions(recording, found, kwargs)
    stack = examples.Stack(recording, found.flow, found.proof, kept)
    batch = len(next(iter(kept.values())))
    return [(stack.example(index), names.of(index, stack), stack.reads(index)) for index in range(batch)]


def _slice(layers: int | range | slice | None) -> slice:
    """Which calls to keep, as a slice without a step; ValueError for anything else."""
    if layers is None:
        return slice(None)
    if isinstance(layers, int) and not isinstance(layers, bool):
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


def _answer(model: torch.nn.Module, inputs: dict[str, Any], start: int, settings: CaptureSettings) -> Trace:
    """The trace of one prompt with its answer, which begins `start` tokens into the stream that wrote it."""
    if settings.get("target") == "answer":
        ids: Any = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        settings = {**settings, "target": Answer(ids[0, start:].tolist())}
    trace = capture(model, inputs, **settings)
    return replace(trace, generated_from=(trace.decoder_start or 0) + start)


def _model_facts(model: torch.nn.Module) -> dict[str, Any]:
    """What the recipe says of the model: its class, the name it was loaded by, and the versions that ran it."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    facts: dict[str, Any] = {"class": type(model).__name__}
    if name:
        facts["name"] = str(name)
    if said := checkpoints.notes(model):
        facts["notes"] = list(said)
    versions = {"torch": str(torch.__version__)}
    for package in ("transformers", "timm", "torchvision"):
        if package in sys.modules and type(model).__module__.startswith(package):
            versions[package] = str(sys.modules[package].__version__)
    return facts | {"versions": versions}
