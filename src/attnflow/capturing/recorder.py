"""The recorder: sees every attention call of a forward pass without changing the model."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from attnflow.capturing.calls import Call, Kept, LeftOut, WeightedSum, from_multi_head, from_sdpa, given_weights
from attnflow.capturing.softmax import WeightsByHand
from attnflow.memory import check_memory

# What a module computed as attention weights (batch, head, query, key), if it did: of its name, itself and its output.
WeightsOf: TypeAlias = Callable[[str, torch.nn.Module, Any], torch.Tensor | None]

_ATTENTION_CLASS = re.compile("attention|attn", re.IGNORECASE)


@dataclass(eq=False)
class Recording:
    """What a forward pass did: its attention calls in order, and what tells whether they are all of them.

    patches: (batch, row, column) or (batch, frame, row, column) of the last convolution before the first call, which
    makes the patches of an image or a video, where frames that are convolved one by one belong to the batch; and how
    many convolutions there were up to it. batch: the number of examples. random_state: of torch, before the pass.
    """

    calls: list[Call] = field(default_factory=list[Call])
    unused_weights: list[tuple[str, tuple[int, ...]]] = field(default_factory=list[tuple[str, tuple[int, ...]]])
    ran: Counter[str] = field(default_factory=Counter[str])
    batch: int = 1
    patches: tuple[int, ...] | None = None
    convolutions: int = 0
    random_state: torch.Tensor | None = None


class Recorder(TorchFunctionMode):
    """Records `scaled_dot_product_attention`, `multi_head_attention_forward` and weights by hand while it is entered.

    Hooks tell which module is running; they are removed on leaving, also after an error. The calls themselves go
    through untouched, and what is kept of them are references to their arguments. With `weights_of`, only what it
    says is recorded. layers: the calls that are kept; of others only that they were made.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batch: int,
        *,
        gradients: bool = False,
        layers: slice = slice(None),
        weights_of: WeightsOf | None = None,
    ) -> None:
        super().__init__()
        self._batch, self._layers, self._weights_of = batch, layers, weights_of
        self._outputs: list[torch.Tensor] | None = [] if gradients else None
        self.recording = Recording(batch=batch, random_state=torch.get_rng_state())
        self._model = model
        self._by_hand = WeightsByHand(batch)
        self._running = [""]
        self._thread = threading.get_ident()
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Recorder:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter_module, name)))
            self._hooks.append(module.register_forward_hook(partial(self._leave_module, name)))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.recording.unused_weights = self._by_hand.unused()
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, name: str, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:  # another thread may run the same model, unwatched
            self._running.append(name)
            self.recording.ran[name] += 1

    def _leave_module(self, name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._running.pop()
        weights = self._weights_of(name, module, output) if self._weights_of else None
        if weights is not None:
            self._keep(given_weights(name, weights, self._batch), weights)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the call through, then keep its arguments if it is attention."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        module = self._running[-1]
        if func in (F.conv2d, F.conv3d) and not self.recording.calls:
            output = self._convolved(output, 2 if func is F.conv2d else 3)
        elif self._weights_of:
            pass
        elif func is F.scaled_dot_product_attention:
            self._keep(from_sdpa(module, output, *args, **kwargs), output)
        elif func is F.multi_head_attention_forward:
            self._keep(from_multi_head(module, output, *args, **kwargs), output[0])
        elif (weighted := self._by_hand.see(module, func, args, kwargs, output)) is not None:
            self._keep(weighted, output)
        return output

    def _convolved(self, output: torch.Tensor, axes: int) -> torch.Tensor:
        batch = output.shape[0] if output.ndim == axes + 2 else 1
        if batch % self.recording.batch == 0 or output.ndim != axes + 2:  # else it is of a table of positions (XCiT)
            self.recording.patches = (batch, *output.shape[-axes:])
            self.recording.convolutions += 1
        return output

    def _keep(self, call: Kept, output: torch.Tensor) -> None:
        if isinstance(call, WeightedSum) and not self.recording.calls:
            self._check_room(call)
        if self._outputs is None:
            self.recording.calls.append(replace(call, v=None))
        else:
            self.recording.calls.append(call)
            # Where no parameter takes part in gradients, the first call's output begins the graph.
            self._outputs.append(output if output.requires_grad else output.requires_grad_())
        self._leave_out(self._certainly_left_out())

    def _certainly_left_out(self) -> set[int]:
        """The calls made so far that the asked layers will not have among them, however many calls follow."""
        count, start, stop = len(self.recording.calls), self._layers.start or 0, self._layers.stop
        below = range(start if start >= 0 else count + start)
        above = range(stop, count) if stop is not None and stop >= 0 else range(0)
        return set(below) | set(above)

    def _leave_out(self, numbers: set[int]) -> None:
        calls = self.recording.calls
        for number in numbers & set(range(len(calls))):
            calls[number] = LeftOut(calls[number].module, calls[number].extent, calls[number].cross)

    def choose_layers(self) -> None:
        """Once all calls are made, let go of the rest that was not asked for.

        Raises ValueError if none is left.
        """
        count = len(self.recording.calls)
        if count and not range(count)[self._layers]:
            raise ValueError(
                f"layers={self._layers.start}:{self._layers.stop} names none of the {count} attention calls, 0 to "
                f"{count - 1}"
            )
        self._leave_out(set(range(count)) - set(range(count)[self._layers]))

    def _check_room(self, call: WeightedSum) -> None:
        """Refuse weights of all layers, which models that compute their own attention give, where they cannot fit."""
        kind = type(dict(self._model.named_modules())[call.module])
        layers = len(range(sum(type(module) is kind for module in self._model.modules()))[self._layers])
        check_memory(
            layers * call.weights.nbytes,
            f"keeping the attention weights of {layers} layers, each {tuple(call.weights.shape)},",
            "load the model with attn_implementation='sdpa', of which only queries and keys are kept, capture fewer "
            "examples at a time, or name the layers to keep: capture(..., layers=-1)",
            call.weights.device,
        )

    def backward(self, target: torch.Tensor) -> None:
        """Give every recorded call the gradient of a scalar with respect to what it returned."""
        assert self._outputs is not None
        gradients = torch.autograd.grad(target, self._outputs, allow_unused=True, materialize_grads=True)
        self.recording.calls = [
            call if isinstance(call, LeftOut) else call.with_gradient(gradient)
            for call, gradient in zip(self.recording.calls, gradients, strict=True)
        ]


def record(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Callable[[Any], torch.Tensor] | None = None,
    *,
    layers: slice = slice(None),
    weights_of: WeightsOf | None = None,
) -> tuple[Recording, Any]:
    """Run the model once; the recording and the model's output.

    target: makes a tensor of the model's output, whose sum is differentiated with respect to every call's output; the
    examples of a batch do not touch each other, so each call's gradient is that of its own example's target. Without
    one no gradients are computed. Parameters' gradients are left as they were. layers, weights_of: see `Recorder`.

    Raises ValueError if no attention call was seen, or not every one: names the module and the way out.
    """
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim), None)
    batch = len(first) if first is not None else 1
    with torch.set_grad_enabled(target is not None):
        gradients = target is not None
        with Recorder(model, batch, gradients=gradients, layers=layers, weights_of=weights_of) as recorder:
            output = model(*args, **kwargs)
        if weights_of is None:
            _check_complete(model, recorder.recording)
        elif not recorder.recording.calls:
            raise ValueError(f"weights= found no attention in any of the modules of {type(model).__name__} that ran")
        recorder.choose_layers()
        if target is not None:
            recorder.backward(target(output).sum())
    return recorder.recording, output


def _check_complete(model: torch.nn.Module, recording: Recording) -> None:
    callers = Counter(call.module for call in recording.calls)
    unseen = [name for name in _attention_modules(model, recording.ran) if not _covered(name, callers)]
    unseen += [name for name, calls in callers.items() if calls % recording.ran[name]]
    extents = {call.extent[1:] for call in recording.calls}
    own = [
        name
        for name, shape in recording.unused_weights
        if shape[-2:] in extents or (not extents and shape[-2] == shape[-1])
    ]
    if not (unseen or own) and recording.calls:
        return
    kind = type(model).__name__
    if unseen or own:
        where = ", ".join(dict.fromkeys(repr(name) for name in (own or unseen)[:3]))
        seen = f"{len(recording.calls)} other calls were seen" if recording.calls else "no call was seen"
        reason = f"attention in {where} of {kind} goes by a way that capture does not know ({seen})"
    else:
        reason = f"no attention was seen in {kind}: it calls no attention of torch, and multiplies nothing by a softmax"
    raise ValueError(f"{reason}; {_remedy(model)}")


def _attention_modules(model: torch.nn.Module, ran: Counter[str]) -> list[str]:
    """Modules that ran and whose class says that they are attention."""
    modules = model.named_modules()
    return [name for name, module in modules if ran[name] and _ATTENTION_CLASS.search(type(module).__name__)]


def _covered(name: str, callers: Counter[str]) -> bool:
    """Whether a call was made by this module, by one inside it, or by the one around it."""
    return any(
        caller == name or caller.startswith(f"{name}.") or not caller or name.startswith(f"{caller}.")
        for caller in callers
    )


def _remedy(model: torch.nn.Module) -> str:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    weights = (
        "say which modules output their weights with weights=, or take the weights that the model returns and give "
        "them to attnflow.Trace.from_arrays"
    )
    if implementation not in (None, "sdpa", "eager"):
        return f"it was loaded with attn_implementation={implementation!r}: call model.set_attn_implementation('sdpa')"
    return f"if it has Transformer layers of its own kind, {weights}"
