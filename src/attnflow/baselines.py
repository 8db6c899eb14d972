"""What every method must beat: random scores, gradients, and what blanking out each token changes.

They need the model and the input, where the methods need a trace alone; the trace names the tokens. The gradients are
with respect to the input embeddings of a text, and to the pixels of each patch of an image, whose prefix tokens have
none and score 0. `BASELINES` is their table.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from attnflow.answer import Relevance
from attnflow.capturing.each_layer import streams
from attnflow.capturing.entrance import Inputs, arranged, entrance, has_ids, joined, looked_up, lookups
from attnflow.capturing.rules import LRP, RULES, Rules, gradients
from attnflow.capturing.target import Target, TargetScores, as_target, resolved
from attnflow.trace import Trace

# An error of completeness above which a warning says what was not covered.
INCOMPLETE = 1e-3

PathFrom: TypeAlias = int | Literal["zeros", "blur"]


def random(
    trace: Trace, model: torch.nn.Module, inputs: Inputs, *, target: Target = "predicted", seed: int = 0
) -> Relevance:
    """Uniform scores in [0, 1), drawn from the seed and the input itself: the same for it in any order of the data.

    The model and the target play no part; they are taken so that all baselines are called alike.
    """
    identity = int.from_bytes(digest(inputs)[:16], "little")
    scores = np.random.default_rng([seed, identity]).random(len(trace.tokens))
    return _relevance("random", scores, trace, {"seed": seed}, {})


def gradient_norm(trace: Trace, model: torch.nn.Module, inputs: Inputs, *, target: Target = "predicted") -> Relevance:
    """The Euclidean norm of the gradient of the target with respect to each token's embedding; never negative.

    inputs: what the model takes for the one example of the trace, on its device: a mapping with `input_ids` and no
    padding, or pixels (1, channel, height, width). target: as `attnflow.capture` takes it; of a class, its logit.
    """
    return _gradient(
        "gradient-norm", lambda gradient, _: gradient.square().sum(-1).sqrt(), trace, model, inputs, target
    )


def gradient_sum(trace: Trace, model: torch.nn.Module, inputs: Inputs, *, target: Target = "predicted") -> Relevance:
    """The absolute value of the gradient's sum over the embedding, which is what the code of Abnar & Zuidema takes.

    Where an embedding reaches the model through LayerNorm alone, as in BERT and GPT-2, the sum is 0 by algebra, since
    LayerNorm takes the mean off what it sees: what is left is rounding (the studies verb-number and sst2 measure it).
    """
    return _gradient("gradient-sum", lambda gradient, _: gradient.sum(-1).abs(), trace, model, inputs, target)


def gradient_x_input(
    trace: Trace,
    model: torch.nn.Module,
    inputs: Inputs,
    *,
    target: Target = "predicted",
    rules: str | None = None,
) -> Relevance:
    """The gradient times the embedding, summed; positive where the token speaks for the target, negative against.

    rules: a set of `RULES`, under which it is relevance as layer-wise relevance propagation has it: of a token, how
    much of the target's score came from it. What came from no input (biases, learned positions) is the `bias_share` of
    the recipe's checks, as a share of the score; with it the tokens add up to the score but for the
    `completeness_error`, relative to the score or the largest token. Under "cp-lrp" that is rounding; the other sets
    leak by construction. An error above 1e-3 of "cp-lrp" means that a function was not covered, and a warning names it.
    """
    return _gradient(
        rules or "gradient-x-input", lambda gradient, x: (gradient * x).sum(-1), trace, model, inputs, target, rules
    )


def integrated_gradients(
    trace: Trace,
    model: torch.nn.Module,
    inputs: Inputs,
    *,
    target: Target = "predicted",
    steps: int = 50,
    path_from: PathFrom = "zeros",
) -> Relevance:
    """Integrated gradients (Sundararajan et al. 2017) along the straight path to the input, by Captum; signed.

    path_from: where the path begins. "zeros" is an embedding or image of zeros; "blur" the image itself, blurred by a
    Gaussian as wide as a patch is high; a number the id of a token, such as the tokenizer's unk_token_id or
    mask_token_id, in the place of all that are not special. The scores add up to the change of the target from there to
    the input, but for an error that is the `convergence_delta` of the recipe's checks.

    Raises ModuleNotFoundError without Captum, ValueError for a beginning that the input cannot have.
    """
    try:
        from captum.attr import IntegratedGradients
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("integrated gradients need Captum: pip install 'attnflow[captum]'") from error
    values, run = entrance(trace, model, inputs)
    start = _beginning(path_from, values, trace, model, inputs)
    chosen = TargetScores(resolved(target, model))
    with torch.no_grad():
        chosen(run(values))
    fixed = chosen.settled.of(0)  # the class predicted for the input stays the target all along the path

    def forward(path: torch.Tensor) -> torch.Tensor:
        return TargetScores(fixed)(run(path))

    attribution, delta = IntegratedGradients(forward).attribute(
        values, start, n_steps=steps, internal_batch_size=16, return_convergence_delta=True
    )
    scores = _per_token(trace, attribution).sum(-1)
    settings = {"target": chosen.facts(0)["target"], "steps": steps, "path_from": path_from}
    return _relevance("integrated-gradients", scores, trace, settings, {"convergence_delta": float(delta.sum())})


def grad_cam(
    trace: Trace,
    model: torch.nn.Module,
    inputs: Inputs,
    *,
    target: Target = "predicted",
    layer: int | Literal["all"] = -1,
) -> Relevance:
    """Grad-CAM (Selvaraju et al. 2017) of what enters a layer of a vision Transformer: (sum over c of a_c x_c)+.

    x (patch, c) is the stream that enters the layer, before any norm; a_c the mean over patches of the gradient of the
    target with respect to it. Prefix tokens have no place in the image and score 0. layer: negative from the top; layer
    0, which is entered by no block's stream, cannot be had. Not scaled. Cost: two passes.

    Raises ValueError for an input without patches, and for a model not made of blocks (as capture's at_each_layer).
    """
    places = [place for place, role in enumerate(trace.roles) if role == "patch"]
    if not places:
        raise ValueError("grad-cam makes a map of patches, and the input has none; use gradient-x-input")
    chosen = TargetScores(resolved(target, model))
    found, output = streams(model, inputs)
    if not isinstance(layer, int) or not -len(found) <= layer < len(found) or layer % len(found) == 0:
        raise ValueError(f"layer {layer!r} is entered by no block's stream: give one from 1 to {len(found) - 1}")
    stream = found[layer % len(found) - 1]
    if stream.shape[:2] != (1, len(trace.tokens)):
        raise ValueError(f"a stream of {tuple(stream.shape)} does not hold the {len(trace.tokens)} tokens of the trace")
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(chosen(output).sum(), stream)
    x, gradient = (one.detach()[0, places].cpu().double() for one in (stream, gradient))
    scores = torch.zeros(len(trace.tokens), dtype=torch.float64)
    scores[places] = (x @ gradient.mean(0)).clamp_min(0)
    settings = {"target": chosen.facts(0)["target"], "layer": layer % len(found)}
    return _relevance("grad-cam", scores, trace, settings, {}, chosen.facts(0))


def hidden_token_attribution(
    trace: Trace, model: torch.nn.Module, inputs: Inputs, *, target: Target = "predicted", query: int | None = None
) -> Relevance:
    """Hidden Token Attribution (Brunner et al. 2020): how far a hidden vector moves with each token, as shares.

    |d e / d x_i| over the sum of these, e the stream that the last block returns at `query` (unless told otherwise the
    read-out), x_i the embedding or the pixels of token i, |.| the Euclidean norm of all entries of the Jacobian. The
    target has no part. Cost: a backward pass for each number of e.

    Raises ValueError for a query that is no one position, and for a model not made of blocks.
    """
    query = trace.readout if query is None else query  # pyright: ignore[reportAssignmentType]
    if isinstance(query, bool) or not isinstance(query, int) or not -len(trace.tokens) <= query < len(trace.tokens):
        raise ValueError(f"hidden-token-attribution explains one position; query={query!r} was given or read out")
    values, run = entrance(trace, model, inputs)
    values.requires_grad_()
    found, _ = streams(model, inputs, lambda: run(values))
    squares = torch.zeros(len(trace.tokens), dtype=torch.float64)
    for number in found[-1][0, query]:
        (gradient,) = torch.autograd.grad(number, values, retain_graph=True)
        squares += _per_token(trace, gradient).square().sum(-1)
    sizes = squares.sqrt()
    scores = sizes / sizes.sum().clamp_min(1e-300)
    place = query % len(trace.tokens)
    answer = _relevance("hidden-token-attribution", scores, trace, {"query": place}, {})
    return replace(answer, queries=(place,), query_tokens=(trace.tokens[place],), rows="query")


def occlusion(trace: Trace, changes: NDArray[np.float64], positions: tuple[int, ...]) -> Relevance:
    """What removing each token alone takes from the target's score; negative where the score rises.

    changes (removed,): what `faithfulness.metrics.blank_out` returns for the tokens at `positions`, in the units of its
    score function and with that function's blank. Tokens that may not be removed score 0.
    """
    scores = np.zeros(len(trace.tokens))
    scores[list(positions)] = changes
    return _relevance("occlusion", scores, trace, {"removed": list(positions)}, {})


@dataclass(frozen=True)
class Baseline:
    """One row of the table.

    needs: whether the function takes the model and its "inputs", or "changes" of a score. entered: whether it needs no
    pass of its own with a trace that was captured with entered=True. targeted: whether a target has a part in it.
    """

    function: Callable[..., Relevance]
    needs: Literal["inputs", "changes"]
    source: str
    entered: bool = False
    targeted: bool = True

    @property
    def takes(self) -> frozenset[str]:
        """The settings that the function takes by name, beside the target."""
        parameters = signature(self.function).parameters.values()
        return frozenset(one.name for one in parameters if one.kind is one.KEYWORD_ONLY) - {"target", "rules"}


BASELINES: dict[str, Baseline] = {
    "random": Baseline(random, "inputs", "uniform numbers"),
    "gradient-norm": Baseline(gradient_norm, "inputs", "Simonyan et al. 2014; norm over the embedding", entered=True),
    "gradient-sum": Baseline(gradient_sum, "inputs", "Abnar & Zuidema 2020, their code", entered=True),
    "gradient-x-input": Baseline(gradient_x_input, "inputs", "Shrikumar et al. 2016", entered=True),
    **{name: Baseline(partial(gradient_x_input, rules=name), "inputs", row.source) for name, row in RULES.items()},
    "lrp": Baseline(partial(gradient_x_input, rules=LRP), "inputs", RULES[LRP].source),
    "integrated-gradients": Baseline(integrated_gradients, "inputs", "Sundararajan et al. 2017"),
    "grad-cam": Baseline(grad_cam, "inputs", "Selvaraju et al. 2017, of what enters the last layer"),
    "hidden-token-attribution": Baseline(hidden_token_attribution, "inputs", "Brunner et al. 2020", targeted=False),
    "occlusion": Baseline(occlusion, "changes", "Zeiler & Fergus 2014; Li et al. 2016"),
}


def blurred(pixels: torch.Tensor, sigma: int) -> torch.Tensor:
    """A Gaussian blur cut off at three deviations, the border repeated outward."""
    radius = 3 * sigma
    offsets = torch.arange(-radius, radius + 1, device=pixels.device, dtype=pixels.dtype)
    kernel = torch.exp(-0.5 * (offsets / sigma) ** 2)
    kernel = kernel / kernel.sum()
    padded = torch.nn.functional.pad(pixels, (radius,) * 4, mode="replicate").flatten(0, 1)[:, None]
    blurred = torch.conv2d(torch.conv2d(padded, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))
    return blurred.view_as(pixels)


def digest(inputs: Inputs) -> bytes:
    """The SHA-256 of a model's input: names, types, shapes and bytes of its tensors."""
    tensors = {"": inputs} if isinstance(inputs, torch.Tensor) else inputs
    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        result.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return result.digest()


def _gradient(
    method: str,
    reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    trace: Trace,
    model: torch.nn.Module,
    inputs: Inputs,
    target: Target,
    rules: str | None = None,
) -> Relevance:
    """One number per token from the gradient at the embeddings: reduce takes (token, dim) twice.

    A trace that was captured with entered=True and the same target holds that gradient, and the model is not asked.
    """
    known = trace.entered
    if rules is None and known is not None and known.values and as_target(resolved(target, model)) in known.targets:
        values, gradient = known.values[0], known.gradients[0]
        if has_ids({"": inputs} if isinstance(inputs, torch.Tensor) else inputs):
            places = arranged(trace, known.values)
            values, gradient = joined(places, known.values), joined(places, known.gradients, add=True)
        scores = reduce(_per_token(trace, gradient), _per_token(trace, values))
        facts = trace.target or {}
        return _relevance(method, scores, trace, {"target": facts["target"]}, {}, facts)
    values, run = entrance(trace, model, inputs)
    chosen = TargetScores(resolved(target, model))
    mode = None if rules is None else Rules(rules)
    with torch.enable_grad():
        values = values.requires_grad_()
        with nullcontext() if mode is None else mode.of(model):
            output = run(values)
            score = (chosen(output) if mode is None else mode.scores(chosen, output)).sum()
        # autograd.grad asks for these gradients alone, so that parameters' .grad stay as they are.
        constants = [] if mode is None else mode.constants
        found: list[torch.Tensor | None] = [*gradients(score, [values, *constants])]
    gradient, *others = found
    if gradient is None:
        raise ValueError("the target does not depend on the input, so that there is no gradient to explain it by")
    scores = reduce(_per_token(trace, gradient), _per_token(trace, values.detach()))
    checks = {} if mode is None else _completeness(mode, score.detach(), scores, values, gradient, others)
    return _relevance(method, scores, trace, {"target": chosen.facts(0)["target"]}, checks, chosen.facts(0))


def _completeness(
    mode: Rules,
    score: torch.Tensor,
    scores: torch.Tensor,
    values: torch.Tensor,
    gradient: torch.Tensor,
    others: Sequence[torch.Tensor | None],
) -> dict[str, Any]:
    """How near tokens and biases come to adding up to the score; see `gradient_x_input`."""
    total, tokens = float(score), float((values.detach().double() * gradient.double()).sum())
    pairs = zip(mode.constants, others, strict=True)
    biases = sum(float((x.detach().double() * one.double()).sum()) for x, one in pairs if one is not None)
    error = abs(tokens + biases - total) / max(abs(total), float(scores.abs().max()), 1e-30)
    rounding = {torch.bfloat16: 100, torch.float16: 10}.get(values.dtype, 1)
    if (mode.rule.adds_up or mode.without_rule) and error > rounding * INCOMPLETE:
        functions = ", ".join(sorted(mode.without_rule)) or "none (a number put in by a mask or a padding?)"
        warnings.warn(f"relevance misses {error:.1%} of the score; functions without a rule: {functions}", stacklevel=5)
    facts = {"completeness_error": error, "bias_share": biases / total if total else math.nan}
    return facts | ({"without_rule": sorted(mode.without_rule)} if mode.without_rule else {})


def _beginning(
    path_from: PathFrom, values: torch.Tensor, trace: Trace, model: torch.nn.Module, inputs: Inputs
) -> torch.Tensor:
    """What the path of integrated gradients begins at, of the shape of `values`."""
    if path_from == "zeros":
        return torch.zeros_like(values)
    if path_from == "blur" and values.ndim == 4 and trace.grid is not None:
        return blurred(values, values.shape[2] // trace.grid[-2])
    ids: Any = inputs if isinstance(inputs, torch.Tensor) else inputs.get("input_ids")
    if not isinstance(path_from, int) or values.ndim != 3 or ids is None:
        raise ValueError(
            f"path_from={path_from!r} is no beginning for an input of shape {tuple(values.shape)}: give 'zeros', for "
            "an image 'blur', for a text the id of a token such as tokenizer.unk_token_id"
        )
    words = getattr(lookups(model)[0], "num_embeddings", path_from + 1)
    if not 0 <= path_from < words:
        raise ValueError(f"path_from={path_from} is no token: the model knows those from 0 to {words - 1}")
    if trace.decoder_start is not None:
        raise ValueError(f"path_from={path_from} is for one text, and there are an encoder's and a decoder's: 'zeros'")
    ordinary = torch.tensor([role != "special" for role in trace.roles], device=ids.device)
    blank = ids.masked_fill(ordinary, path_from)
    found = looked_up(model, blank if isinstance(inputs, torch.Tensor) else {**inputs, "input_ids": blank})
    return joined(arranged(trace, found), found)


def _per_token(trace: Trace, values: torch.Tensor) -> torch.Tensor:
    """Embeddings (1, token, dim), or pixels (1, channel, height, width), as (token, dim) in double precision."""
    values = values.detach().cpu().double()
    if values.ndim == 3 and values.shape[1] == len(trace.tokens):
        return values[0]
    if trace.grid is None or values.ndim != 4 or values.shape[2] % trace.grid[0] or values.shape[3] % trace.grid[1]:
        raise ValueError(
            f"an input of shape {tuple(values.shape)} does not fit the trace, which has {len(trace.tokens)} tokens and "
            f"{f'patches {trace.grid}' if trace.grid else 'no patches'}; give the one example that was captured"
        )
    patch = values.shape[2] // trace.grid[0], values.shape[3] // trace.grid[1]
    patches = torch.nn.functional.unfold(values, patch, stride=patch)[0].mT
    result = torch.zeros(len(trace.tokens), patches.shape[1], dtype=torch.float64)
    result[[place for place, role in enumerate(trace.roles) if role == "patch"]] = patches
    return result


def _relevance(
    method: str,
    scores: NDArray[np.float64] | torch.Tensor,
    trace: Trace,
    settings: Mapping[str, Any],
    checks: Mapping[str, Any],
    target: Mapping[str, Any] | None = None,
) -> Relevance:
    """Scores (token,) as one row, of the target as a whole; of the layer that the settings name, if they do."""
    return Relevance(
        scores=np.asarray(scores, dtype=np.float64)[None],
        tokens=trace.tokens,
        roles=trace.roles,
        queries=(0,),
        query_tokens=("target",),
        layers=(settings.get("layer", len(trace.layers) - 1),),
        grid=trace.grid,
        words=trace.words,
        recipe=trace.recipe(method, dict(settings), dict(checks), target=target, parts=trace.parts),
        rows="target",
    )
