"""Where the input of a model is numbers that can be varied: what its tokens are looked up as, or the signal itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from attnflow.trace import Trace

Inputs: TypeAlias = Mapping[str, Any] | torch.Tensor


class Place(NamedTuple):
    """Which of the trace's tokens one lookup of a pass returns, and whether as (token, example, width)."""

    start: int
    stop: int
    tokens_first: bool

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """(example, token, width) as the lookup has it, and the other way round."""
        return x.transpose(0, 1) if self.tokens_first else x


class Entrance(NamedTuple):
    """values: (1, token, width), encoder before decoder, or a signal. run: the model as a function of several such."""

    values: torch.Tensor
    run: Callable[[torch.Tensor], Any]


def entrance(trace: Trace, model: torch.nn.Module, inputs: Inputs) -> Entrance:
    """Where the one example of a trace enters a model.

    A signal, such as pixels, enters as it is: a tensor, or the only one among the inputs that holds no integers. Token
    ids enter as what the model's embedding returns. The rest of the inputs is repeated for as many cases as are given.

    Raises ValueError for inputs of several kinds, those that are not the tokens of the trace, and in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients are not to be had inside torch.inference_mode(): call this outside of it")
    named = {"": inputs} if isinstance(inputs, torch.Tensor) else inputs
    if not has_ids(named):
        signal = signal_of(named)

        def of_signal(values: torch.Tensor) -> Any:
            return _called(model, {**_repeated(named, len(values)), signal: values})

        return Entrance(named[signal].detach().clone(), of_signal)
    found = looked_up(model, inputs)
    places = arranged(trace, found)

    def run(values: torch.Tensor) -> Any:
        own = iter(places)

        def other(output: torch.Tensor) -> torch.Tensor:
            place = next(own)
            return output if place is None else place.turned(values[:, place.start : place.stop])

        with _seen(model, other):
            return _called(model, _repeated(named, len(values)))

    return Entrance(joined(places, found), run)


def looked_up(model: torch.nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """What the embedding of a model returns in one pass, lookup by lookup."""
    found: list[torch.Tensor] = []

    def keep(output: torch.Tensor) -> torch.Tensor:
        found.append(output.detach().clone())
        return output

    with torch.no_grad(), _seen(model, keep):
        _called(model, {"": inputs} if isinstance(inputs, torch.Tensor) else inputs)
    return found


def arranged(trace: Trace, found: Sequence[torch.Tensor]) -> list[Place | None]:
    """For each lookup of a pass the tokens of the trace that it returns, None for none.

    One lookup holds all tokens, or that of an encoder and that of its decoder follow each other.

    Raises ValueError where they are not the tokens of the trace.
    """
    count, start = len(trace.tokens), trace.decoder_start
    first = [x.ndim == 3 and x.shape[1] == 1 < x.shape[0] for x in found]
    sizes = [x.shape[0 if turned else 1] if x.ndim == 3 else 0 for x, turned in zip(found, first, strict=True)]
    text = "patch" not in trace.roles
    if text and count in sizes:
        return [Place(0, count, turned) if size == count else None for size, turned in zip(sizes, first, strict=True)]
    if text and start is not None and sizes == [start, count - start]:
        return [Place(0, start, first[0]), Place(start, count, first[1])]
    patches = f"patches {trace.grid}" if trace.grid else "no patches"
    raise ValueError(
        f"an input of {' and '.join(map(str, sizes))} tokens does not fit the trace, which has {count} tokens and "
        f"{patches}; give the one example that was captured, of one kind: text, or pixels alone"
    )


def joined(places: Sequence[Place | None], tensors: Sequence[torch.Tensor], *, add: bool = False) -> torch.Tensor:
    """(1, token, width) from what lookups returned; with add the sum where several hold a token, as of gradients."""
    kept = [(place, place.turned(x)) for place, x in zip(places, tensors, strict=True) if place is not None]
    result = kept[0][1].new_zeros(1, max(place.stop for place, _ in kept), kept[0][1].shape[-1])
    for place, x in kept:
        result[:, place.start : place.stop] = x + (result[:, place.start : place.stop] if add else 0)
    return result


def has_ids(named: Mapping[Any, Any]) -> bool:
    """Whether inputs are token ids, by name or as a bare tensor."""
    bare = [x for name, x in named.items() if name in ("", 0) and isinstance(x, torch.Tensor)]
    return "input_ids" in named or any(not x.is_floating_point() for x in bare)


def lookups(model: Any) -> list[torch.nn.Module]:
    """The modules that look tokens up: a model's embedding, and others that share its table.

    Raises ValueError for a model without one.
    """
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = next((module for module in model.modules() if isinstance(module, torch.nn.Embedding)), None)
    if embedding is None:
        raise ValueError(f"{type(model).__name__} has no embedding of tokens that a gradient could be taken to")
    weight = getattr(embedding, "weight", None)
    alike = [one for one in model.modules() if one is embedding or getattr(one, "weight", embedding) is weight]
    return [one for one in alike if isinstance(one, torch.nn.Embedding) or one is embedding]


@contextmanager
def _seen(model: torch.nn.Module, other: Callable[[torch.Tensor], torch.Tensor]) -> Generator[None]:
    """Every lookup of a model returns another tensor than it would."""
    thread = threading.get_ident()  # another thread may run the same model on an input of its own

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return other(output) if threading.get_ident() == thread else output

    hooks = [one.register_forward_hook(hook) for one in lookups(model)]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def signal_of(named: Mapping[Any, Any]) -> Any:
    """The name of the only input that holds no integers; ValueError for several, and for none."""
    signals = [name for name, x in named.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if len(signals) != 1:
        raise ValueError(
            "a gradient is taken to one input, token ids or a signal such as pixels; the inputs are "
            f"{', '.join(map(str, named))}: give the one example that was captured, as one of these"
        )
    return signals[0]


def _repeated(named: Mapping[str, Any], count: int) -> dict[str, Any]:
    return {
        name: x.expand(count, *x.shape[1:]) if isinstance(x, torch.Tensor) and len(x) == 1 else x
        for name, x in named.items()
    }


def _called(model: torch.nn.Module, named: Mapping[str, Any]) -> Any:
    return model(named[""]) if "" in named else model(**named)
