"""The recorder: sees every attention call of a forward pass, and what feeds it, without changing the model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from attnflow.capturing.calls import (
    EVALUATE,
    Call,
    FusedCall,
    Keep,
    Kept,
    LeftOut,
    WeightedSum,
    check_reproduces,
    from_multi_head,
    from_sdpa,
    given_weights,
)
from attnflow.capturing.entrance import has_ids, lookups, signal_of
from attnflow.capturing.inputs import fresh
from attnflow.capturing.labels import Labels, replaced, tensors_in
from attnflow.capturing.rules import Rules
from attnflow.capturing.rules import gradients as gradients_of
from attnflow.capturing.softmax import DIFFERENCE, WeightsByHand
from attnflow.capturing.stream import Stream
from attnflow.capturing.surroundings import Follower
from attnflow.memory import check_memory

# What a module computed as attention weights (batch, head, query, key), if it did: of its name, itself and its output.
WeightsOf: TypeAlias = Callable[[str, torch.nn.Module, Any], torch.Tensor | None]

# How a source makes tokens.
Kind: TypeAlias = Literal["input", "embedding", "convolution", "linear", "module"]

_CONVOLUTIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_DROPOUTS = frozenset(
    {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
)
_RANDOM = frozenset({torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_, F.rrelu})

# How many random projections of a vector stand for it where two passes are compared.
PROJECTIONS = 4

_active = threading.local()


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor of one vector per token, from which attention is fed: tokens begin here.

    kind: an input of the model itself, or what an embedding, a convolution, a linear layer or, behind a convolution,
    any module returned. number: among those of its kind, in the order of the pass. plane: the axes of the tokens, such
    as (batch, token) or (batch, row, column). label: what it was made of. ids (plane): what an embedding looked up.
    """

    kind: Kind
    number: int
    plane: tuple[int, ...]
    module: str
    label: int
    ids: torch.Tensor | None = None


class Visit(NamedTuple):
    """One run of a module: where it began and ended among all that began, and the numbers of the calls in it."""

    module: str
    begin: int
    end: int
    calls: range


class Fed(NamedTuple):
    """What feeds a call: labels of its queries, keys, values and mask; its own bit; the visit of its module."""

    queries: int
    keys: int
    values: int
    mask: int
    bit: int
    visit: int


@dataclass(eq=False)
class Recording:
    """What a forward pass did: its attention calls in order, and what feeds each of them.

    marks: what each bit of a label stands for: a source, or the number of a call. outputs, digests: of every call, and
    tail: what modules returned after the last one, if the pass is to be compared with others. read: the label of what
    the model returned, or of the target's scores; returned: the labels of what it returned, tensor by tensor; live:
    that of all that went into it. constant: modules whose attention has values of no input. differences: the labels of
    tensors that were subtracted. random_state, drew: of torch, before the pass, and whether the pass drew any random
    number. dtype: of the first call. assumed: whether the calls are what the caller pointed at. tower: the module whose
    calls alone are explained. visits: every run of a module, in the order in which they ended. entered: with its
    gradient every tensor that the input entered as, if that was asked for. without_rule: functions that gradients went
    through and that no rule covers.
    """

    calls: list[Call] = field(default_factory=list[Call])
    fed: list[Fed] = field(default_factory=list[Fed])
    marks: list[Source | int | None] = field(default_factory=list["Source | int | None"])
    outputs: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    tail: list[tuple[str, torch.Tensor]] = field(default_factory=list[tuple[str, torch.Tensor]])
    digests: list[dict[str, torch.Tensor]] = field(default_factory=list[dict[str, torch.Tensor]])
    read: int = 0
    returned: list[int] = field(default_factory=list[int])
    live: int = 0
    constant: list[str] = field(default_factory=list[str])
    differences: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    random_state: torch.Tensor | None = None
    drew: bool = False
    dtype: torch.dtype = torch.float32
    assumed: bool = False
    tower: str | None = None
    without_rule: tuple[str, ...] = ()
    visits: list[Visit] = field(default_factory=list[Visit])
    entered: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list["tuple[torch.Tensor, torch.Tensor]"])

    def settle(self) -> None:
        """Forget the modules that made tokens, but for those whose output every call is still fed by.

        What they return then runs beside the calls all the way, as the tokens themselves do, and is no query or key.
        """
        every = modules = sum(
            1 << number for number, mark in enumerate(self.marks) if isinstance(mark, Source) and mark.kind == "module"
        )
        for fed in self.fed:
            if fed.queries & modules and fed.values & modules:
                modules &= fed.queries & fed.keys & fed.values
        strip = every & ~modules
        self.fed = [Fed(fed.queries & ~strip, fed.keys & ~strip, fed.values & ~strip, *fed[3:]) for fed in self.fed]

    @property
    def explained(self) -> list[int]:
        """The calls that are explained: those of one tower, or all, but for those that no output was made of."""
        return [number for number in range(len(self.calls)) if self._explained(number)]

    def _explained(self, number: int) -> bool:
        used = not self.live or bool(self.live & self.fed[number].bit)
        return used and (self.tower is None or within(self.calls[number].module, self.tower))

    def hides(self, number: int) -> bool:
        """Whether what no query of a call attends to may be padding, and is not what the model chose to leave out.

        That is so where the mask was made of no tokens; of weights by hand, where the model was given more than tokens.
        """
        if isinstance(self.calls[number], FusedCall):
            return not self.sources(self.fed[number].mask)
        inputs = sum(1 << place for place, mark in enumerate(self.marks) if mark is None)
        looked_up = [mark.label for mark in self.marks if isinstance(mark, Source) and mark.kind == "embedding"]
        return any(
            inputs >> place & 1 and not any(label >> place & 1 for label in looked_up)
            for place in range(len(self.marks))
        )

    def sources(self, label: int) -> list[Source]:
        """The sources in a label, in the order of the pass."""
        return [mark for number, mark in enumerate(self.marks) if label >> number & 1 and isinstance(mark, Source)]

    def reached(self, label: int) -> int:
        """A label with the labels of all that its calls were fed by, down to the inputs."""
        for fed in reversed(self.fed):
            if label & fed.bit:
                label |= fed.queries | fed.keys | fed.values
        return label

    def callers(self, label: int) -> list[int]:
        """The numbers of the explained calls in a label."""
        found = [mark for number, mark in enumerate(self.marks) if label >> number & 1 and isinstance(mark, int)]
        return [call for call in found if self._explained(call)]


@dataclass(frozen=True, eq=False)
class Attending:
    """A call that attends, before it is made: its labels, and what makes a `Kept` of it.

    in_tuple: whether it returns more than the weighted values.
    """

    queries: int
    keys: int
    values: int
    make: Callable[[], Kept]
    mask: int = 0
    in_tuple: bool = False

    @property
    def labels(self) -> tuple[int, int, int, int]:
        """Of queries, keys, values and mask."""
        return self.queries, self.keys, self.values, self.mask


class Recorder(TorchFunctionMode):
    """Records `scaled_dot_product_attention`, `multi_head_attention_forward` and weights by hand while it is entered.

    Hooks tell which module is running; they are removed on leaving, also after an error. The calls themselves go
    through untouched, and what is kept of them are references to their arguments, or with `copies` copies, for models
    that write into them later. With `weights_of`, only what it says is recorded. layers: the calls that are kept; of
    others only that they were made; tower: the module whose calls alone are kept and explained. compared: whether what
    is needed to compare the pass with another is kept. keep: what else of every call, its values or its block.
    entered: whether gradients are taken to what the input enters as, too (`entrance`). stream: the rules that see what
    enters every block, if that was asked for.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        gradients: bool = False,
        layers: slice = slice(None),
        weights_of: WeightsOf | None = None,
        compared: bool = False,
        copies: bool = False,
        tower: str | None = None,
        keep: Keep | None = None,
        stream: Stream | None = None,
        entered: bool = False,
    ) -> None:
        super().__init__()
        self._entered: list[torch.Tensor] | None = [] if entered else None
        self._lookups: list[torch.nn.Module] = []
        self._layers, self._weights_of, self._compared, self._copies = layers, weights_of, compared, copies
        self._outputs: list[torch.Tensor] | None = [] if gradients else None
        self._buffers = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
        self._copied: dict[Any, torch.Tensor] = {}
        self._watched: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._model = model
        self._labels = Labels()
        self._values = gradients or keep is not None
        self._keeps_values = keep in ("values", "block")
        self._stream = stream
        self.by_hand = WeightsByHand(self._labels)
        self._running, self._visits, self._visited = [""], [0], 0
        self._calls_before: list[int] = []
        self._seen: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self._thread = threading.get_ident()
        self._hooks: list[RemovableHandle] = []
        self._over = False
        self.unwatched: str | None = None
        self.recording = Recording(random_state=torch.get_rng_state(), assumed=weights_of is not None, tower=tower)
        self._follower = Follower(self._labels, self.recording) if keep == "block" else None
        self._depths: list[int] = []
        self._latest = 0  # the bit of the last call so far that is explained

    def __enter__(self) -> Recorder:
        if getattr(_active, "recorder", None) is not None:
            raise ValueError("capture was called inside a forward pass that is itself being captured; call it outside")
        _active.recorder = self
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(
                    module.register_forward_pre_hook(partial(self._enter_module, name), with_kwargs=True)
                )
                self._hooks.append(module.register_forward_hook(partial(self._leave_module, name), with_kwargs=True))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _active.recorder = None
        for hook in self._hooks:
            hook.remove()

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give every input tensor a label of its own; the inputs that the model is to get."""
        named = dict(enumerate(args)) | kwargs
        if self._entered is not None and has_ids(named):
            self._lookups = lookups(self._model)
        elif self._entered is not None:
            signal = named[signal_of(named)]
            self._entered = [signal.detach().clone().requires_grad_()]
            args, kwargs = replaced((args, kwargs), {signal: self._entered[0]})
        for x in dict.fromkeys(tensors_in((args, kwargs))):
            tokens = x.is_floating_point() and x.ndim in (2, 3)
            source = Source("input", self._seen["input"], tuple(x.shape[:-1]), "", 0) if tokens else None
            self._seen["input"] += 1
            self._labels.mark_input(x, self._mark(source))
            if source is not None and self._stream is not None:
                self._stream.begin(x.requires_grad_())
        return args, kwargs

    def _mark(self, what: Source | int | None) -> int:
        self.recording.marks.append(what)
        return 1 << (len(self.recording.marks) - 1)

    def finish(self, output: Any) -> None:
        """Say that the pass is over: what follows is the target, in which nothing attends. Notes what was read."""
        self.recording.returned = [self._labels.of(x) for x in tensors_in(output)]
        self.recording.read = self._labels.of_all(output)
        if self._follower is not None and not self._over:
            self._follower.returned(output)
        if not self._over:
            self.recording.live = 0 if self.recording.assumed else self.recording.reached(self.recording.read)
        self._over = True

    def _enter_module(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        if threading.get_ident() == self._thread:  # another thread may run the same model, unwatched
            self._running.append(name)
            self._visited += 1
            self._visits.append(self._visited)
            self._calls_before.append(len(self.recording.calls))

    def _leave_module(self, name: str, module: torch.nn.Module, args: Any, *kwargs_and_output: Any) -> Any:
        # While another thread removes its hooks from a module, torch may call this one without keyword arguments.
        *kwargs, output = kwargs_and_output
        if threading.get_ident() != self._thread:
            return None
        self._running.pop()
        calls = range(self._calls_before.pop(), len(self.recording.calls))
        self.recording.visits.append(Visit(name, self._visits.pop(), self._visited, calls))
        with torch._C.DisableTorchFunction():  # pyright: ignore
            return self._left(name, module, args, kwargs, output)

    def _left(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Look at what a module returned: weights that were asked for, a lost label, tokens made of a signal or ids.

        Returns what the model gets instead, or None.
        """
        weights = self._weights_of(name, module, output) if self._weights_of else None
        if weights is not None:
            before = self.recording.fed[-1].bit if self.recording.fed else self._labels.of_all(args)
            self._keep(given_weights(name, weights), weights, (before, before, before, 0))
        unlabelled = [x for x in tensors_in(output) if x.is_floating_point() and not self._labels.of(x)]
        if unlabelled and (label := self._labels.of_all(args) | self._labels.of_all(kwargs)):
            self._labels.set(unlabelled, label)
        if self._compared and self._latest:
            found = [x for x in tensors_in(output) if x.is_floating_point() and x.ndim == 3]
            found = [x for x in found if self._labels.of(x) & self._latest]
            # As many vectors as numbers in each: weights of attention, which a module returns beside its output.
            self.recording.tail += [(name, x) for x in found if x.shape[1] != x.shape[2]]
        if isinstance(output, torch.Tensor) and output.ndim > 1:
            label = self._labels.of(output)
            kinds = {source.kind for source in self.recording.sources(label)}
            if "convolution" in kinds and "embedding" not in kinds and not self.recording.callers(label):
                return self._source("module", tuple(output.shape[:-1]), output)
        if module in self._lookups and self._entered is not None:
            self._entered.append(output if output.requires_grad else output.requires_grad_())
            output = output.clone()  # which the model may write into
            self._labels.set(output, self._labels.of(self._entered[-1]))
            return output
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the call through, then keep its arguments if it is attention, or pass labels on if it is not."""
        kwargs = kwargs or {}
        attending = None if self._over or self._weights_of else self._attending(func, args, kwargs)
        if attending is not None:
            return self._attend(attending, func, args, kwargs)
        output = func(*args, **kwargs) if self._follower is None else self._follower.call(func, args, kwargs)
        label = self._labels.pass_on(func, args, kwargs, output)
        if not self._over:
            self._refuse_chance(func, args, kwargs)
        if label and not self._over:
            output = self._begin(func, args, kwargs, output)
            if func in DIFFERENCE:
                self._note_difference(*args[:2])
        if not self._over:
            self.by_hand.follow(self._running[-1], func, args, kwargs, output)
        return output

    def _note_difference(self, one: Any, other: Any = None) -> None:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
            self.recording.differences.append((self._labels.of(one), self._labels.of(other)))

    def _attending(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attending | None:
        """The call that is about to attend, if it is one, between tensors that come from inputs."""
        if func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward:
            names = ("query", "key", "value")
            given = [kwargs[name] if name in kwargs else args[place] for place, name in enumerate(names)]
            labels = [self._labels.of(x) for x in given]
            module = self._running[-1]
            refuse_functorch(module, given[2])
            if not labels[2]:
                self.recording.constant.append(module)
                return None
            fused = func is F.scaled_dot_product_attention
            make = from_sdpa if fused else from_multi_head
            rest = {name: value for name, value in kwargs.items() if name not in names}
            mask = self._labels.of_all(args[3:4] if fused else ()) | self._labels.of_all(rest)
            return Attending(*labels, lambda: make(module, *args, **kwargs), mask, in_tuple=not fused)  # pyright: ignore
        weighing = self.by_hand.weighing(func, args, kwargs)
        return weighing and Attending(weighing.queries, weighing.keys, weighing.values, weighing.make)

    def _attend(self, attending: Attending, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that attends, and keep it; what the model gets as its output."""
        if self._stream is not None:
            self._stream.call()
        call, output = attending.make(), func(*args, **kwargs)
        main = output[0] if attending.in_tuple else output
        check_reproduces(call, main)
        if self._compared:
            self.recording.outputs.append(main.detach().clone())
        kept = self._keep(call, main, attending.labels)
        number = len(self.recording.calls) - 1
        if self._follower is not None and not isinstance(self.recording.calls[number], LeftOut):
            self._follower.start(number, call, kept, self.recording.fed[number])
        return (kept, *output[1:]) if attending.in_tuple else kept

    def _begin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Mark an output in which tokens begin: looked up, made of a signal by a convolution, of pixels by a layer."""
        x: Any = args[0] if args else kwargs.get("input")
        if func is F.embedding:
            label = self._labels.of(x)
            if label and not self.recording.callers(label):
                return self._source("embedding", tuple(x.shape), output, x)
        elif (axes := _CONVOLUTIONS.get(func)) is not None:
            label = self._labels.of(x)
            signal = all(source.kind != "embedding" for source in self.recording.sources(label))
            if label and signal and not self.recording.callers(label):
                batch = output.shape[0] if output.ndim == axes + 2 else 1
                return self._source("convolution", (batch, *output.shape[-axes:]), output)
        elif func is F.linear and output.ndim > 2:
            label = self._labels.of(x)
            if label and not self.recording.sources(label) and not self.recording.callers(label):
                return self._source("linear", tuple(output.shape[:-1]), output)
        return output

    def _source(self, kind: Kind, plane: tuple[int, ...], output: Any, ids: torch.Tensor | None = None) -> Any:
        label = self._labels.of(output)
        source = Source(kind, self._seen[kind], plane, self._running[-1], label, ids)
        self._seen[kind] += 1
        changed = self._changed(source, output)
        self._labels.set(changed, label | self._mark(source))
        return changed

    def _changed(self, source: Source, output: torch.Tensor) -> torch.Tensor:
        """What the model gets in the place of a source's output."""
        return output if self._stream is None else self._stream.begin(output)

    def _refuse_chance(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError for what a module does at random, or differently, because it is in training mode."""
        if func in _DROPOUTS:
            p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            happens = training and p > 0
        else:
            depends = func in _RANDOM or func is F.batch_norm
            happens = depends and self._model.get_submodule(self._running[-1]).training
        if happens:
            raise ValueError(f"{self._running[-1] or 'the model'} drops or normalises as in training mode; {EVALUATE}")

    def _keep(self, call: Kept, output: torch.Tensor, labels: tuple[int, int, int, int]) -> torch.Tensor:
        """Keep a call, and give its output the label of the call alone; what the model gets as the output."""
        refuse_functorch(call.module, output)
        recording = self.recording
        if not recording.calls:
            recording.dtype = output.dtype
            if isinstance(call, WeightedSum) and not recording.assumed:
                self._check_room(call)
        if self._compared:
            recording.digests.append(
                {name: digest(x) for name in ("q", "k", "v") if (x := getattr(call, name, None)) is not None}
            )
        call = replace(self._own(call), keeps_values=self._keeps_values)
        recording.calls.append(call if self._values else replace(call, v=None))
        if self._outputs is not None:
            if not torch.is_grad_enabled():
                self.unwatched = self.unwatched or call.module
            # Where no parameter takes part in gradients, the first call's output begins the graph.
            self._outputs.append(output if output.requires_grad else output.requires_grad_())
            self._watch(output)
            output = output.clone() if self._copies else output
        bit = self._mark(len(recording.calls) - 1)
        self._depths.append(self._depth(call.module, labels))
        recording.fed.append(Fed(*labels, bit, self._visits[-1]))
        if self._depths[-1] >= 0:
            recording.tail.clear()
            self._latest = bit
        self._labels.set(output, bit)
        self._leave_out(self._certainly_left_out())
        return output

    def _own(self, call: Kept) -> Kept:
        """The call with tensors that the model cannot overwrite, or that are watched for it."""
        names = ("q", "k", "mask", "v") if isinstance(call, FusedCall) else ("weights", "v")
        copies: dict[str, torch.Tensor] = {}
        for name in names if self._values else names[:-1]:
            if (x := getattr(call, name)) is None:
                continue
            if self._copies or x.untyped_storage().data_ptr() in self._buffers:
                copies[name] = self._copy(x)
            else:
                self._watch(x)
        return replace(call, **copies)

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, the same for all calls that keep the same state of it."""
        version = -1 if x.is_inference() else x._version  # pyright: ignore[reportPrivateUsage]
        state = (x.data_ptr(), x.shape, x.stride(), x.dtype, version)
        if version < 0 or state not in self._copied:
            self._copied[state] = x.clone()
        return self._copied[state]

    def _watch(self, x: torch.Tensor) -> None:
        self._watched.append((weakref.ref(x), -1 if x.is_inference() else x._version))  # pyright: ignore[reportPrivateUsage]

    def overwritten(self) -> bool:
        """Whether the model wrote into something that was kept, or may have done so unseen."""
        watched = [(x, version) for ref, version in self._watched if (x := ref()) is not None]
        return any(version < 0 or x._version != version for x, version in watched)  # pyright: ignore[reportPrivateUsage]

    def _depth(self, module: str, labels: tuple[int, ...]) -> int:
        """The layer of a call: that of the call before if both read the same; -1 for what is not explained."""
        if self.recording.tower is not None and not within(module, self.recording.tower):
            return -1
        before = [number for number, depth in enumerate(self._depths) if depth >= 0]
        if not before:
            return 0
        alike = self.recording.fed[before[-1]][:3] == labels[:3]
        return self._depths[before[-1]] + (0 if alike else 1)

    def _certainly_left_out(self) -> set[int]:
        """The calls made so far that the asked layers will not have among them, however many calls follow."""
        count, start, stop = max(self._depths) + 1, self._layers.start or 0, self._layers.stop
        below = range(start if start >= 0 else count + start)
        above = range(stop, count) if stop is not None and stop >= 0 else range(0)
        return self._of_depths({-1, *below, *above})

    def _of_depths(self, depths: set[int]) -> set[int]:
        return {number for number, depth in enumerate(self._depths) if depth in depths}

    def _leave_out(self, numbers: set[int]) -> None:
        calls = self.recording.calls
        for number in numbers & set(range(len(calls))):
            calls[number] = LeftOut(calls[number].module, calls[number].extent)
        if self._follower is not None:
            self._follower.forget(numbers)

    def choose_layers(self) -> None:
        """Once all calls are made, let go of the rest that was not asked for.

        Raises ValueError if none is left.
        """
        count = max(self._depths) + 1
        if not range(count)[self._layers]:
            raise ValueError(
                f"layers={self._layers.start}:{self._layers.stop} names none of the {count} layers of attention, 0 to "
                f"{count - 1}"
            )
        self._leave_out(self._of_depths(set(range(count)) - set(range(count)[self._layers])))

    def find_blocks(self) -> None:
        """Give every call that is kept and explained the block around it, if that was asked for.

        Raises ValueError that names the step that was not found, and the module.
        """
        calls = self.recording.calls
        for number in self.recording.explained if self._follower is not None else ():
            call = calls[number]
            if not isinstance(call, LeftOut):
                assert self._follower is not None
                calls[number] = replace(call, around=self._follower.found(number))

    def _check_room(self, call: WeightedSum) -> None:
        """Refuse weights of all layers, which models that compute their own attention give, where they cannot fit."""
        kind = type(self._model.get_submodule(call.module))
        layers = len(range(sum(type(module) is kind for module in self._model.modules()))[self._layers])
        check_memory(
            layers * call.weights.nbytes,
            f"keeping the attention weights of {layers} layers, each {tuple(call.weights.shape)},",
            "load the model with attn_implementation='sdpa', of which only queries and keys are kept, capture fewer "
            "examples at a time, or name the layers to keep: capture(..., layers=-1)",
            call.weights.device,
        )

    def backward(self, target: torch.Tensor) -> None:
        """Give every recorded call the gradient of a scalar with respect to what it returned.

        Raises ValueError where the target was made of a call and no gradient reaches it.
        """
        assert self._outputs is not None
        recording = self.recording
        entered, passages = self._entered or [], None
        if self._stream is not None and target.requires_grad:
            numbers = recording.explained
            passages = self._stream.passages(target, numbers, [recording.calls[number].module for number in numbers])
        wanted = [*self._outputs, *entered, *(passages.wanted if passages is not None else ())]
        found: Any = [None] * len(wanted)
        if target.requires_grad:
            found = gradients_of(target, wanted)
        gradients = found[: len(self._outputs)]
        streams = found[len(self._outputs) + len(entered) :]
        recording.entered = [
            (x.detach(), torch.zeros_like(x) if gradient is None else gradient)
            for x, gradient in zip(entered, found[len(self._outputs) :], strict=False)
        ]
        below = recording.reached(recording.read)
        for call, gradient, fed in zip(recording.calls, gradients, recording.fed, strict=True):
            if gradient is None and below & fed.bit:
                where = (
                    f"{self.unwatched} runs with gradients switched off (no_grad, inference_mode or reentrant "
                    "checkpointing)"
                    if self.unwatched is not None
                    else "something between them has no gradient (a detached tensor, numbers rounded to int8)"
                )
                raise ValueError(
                    f"no gradient of the target reaches the attention of {call.module or 'the model'}, though the "
                    f"target was computed from it: {where}; let gradients through, or capture without target="
                )
        recording.calls = [
            call
            if isinstance(call, LeftOut)
            else call.with_gradient(torch.zeros_like(output) if gradient is None else gradient)
            for call, gradient, output in zip(recording.calls, gradients, self._outputs, strict=True)
        ]
        if passages is not None:
            for number, carried in zip(recording.explained, passages.carried(streams), strict=True):
                call = recording.calls[number]
                if not isinstance(call, LeftOut):
                    recording.calls[number] = replace(call, carried=carried)


def refuse_functorch(module: str, x: torch.Tensor) -> None:
    """Raise ValueError for a tensor that exists only inside a transformation of torch.func."""
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        raise ValueError(
            f"{module or 'the model'} attends inside torch.func (vmap, grad): its tensors cannot be kept; capture the "
            "model that is mapped over its inputs"
        )


def within(module: str, tower: str) -> bool:
    """Whether a module lies in a tower, which is named by its path or by the last names of it."""
    return f".{tower}." in f".{module}."


def digest(x: torch.Tensor) -> torch.Tensor:
    """(..., PROJECTIONS + 1): a few random projections of each vector along the last axis, and its length."""
    generator = torch.Generator().manual_seed(x.shape[-1])
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    directions = torch.randn(x.shape[-1], PROJECTIONS, generator=generator).to(x)
    return torch.cat([x @ directions, x.norm(dim=-1, keepdim=True)], -1)


def record(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Callable[[Any], torch.Tensor] | None = None,
    *,
    layers: slice = slice(None),
    weights_of: WeightsOf | None = None,
    compared: bool = False,
    copies: bool = False,
    tower: str | None = None,
    rules: str | None = None,
    keep: Keep | None = None,
    entered: bool = False,
) -> tuple[Recording, Any]:
    """Run the model once; the recording and the model's output.

    target: gives the scores (example,) of the model's output whose sum is differentiated with respect to what every
    call returned; each call then keeps the gradient of its own example's target. Without one no gradients are computed.
    Parameters' gradients are left as they were. rules: a set of `RULES`, by which gradients are taken. layers,
    weights_of, compared, copies, tower, keep, entered: see `Recorder`. A model that writes into what was kept runs
    once more, and copies are kept.

    Raises ValueError if no attention call was seen, where the graph of gradients is cut, and where a block that was
    asked for is not found.
    """
    if target is not None and any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} was made inside torch.inference_mode(), so that it has no gradients; make it "
            "outside, or capture without target="
        )
    state = torch.get_rng_state()
    settings: dict[str, Any] = {"layers": layers, "weights_of": weights_of, "compared": compared, "tower": tower}
    settings |= {"keep": keep, "entered": entered}
    mode = None if rules is None else Stream(rules) if keep == "relevance" else Rules(rules)
    stream = mode if isinstance(mode, Stream) else None
    recorder = Recorder(model, gradients=target is not None, copies=copies, stream=stream, **settings)
    settings["rules"] = rules
    with torch.inference_mode(False), torch.set_grad_enabled(target is not None), eagerly():
        own_args, own_kwargs = fresh(args), fresh(kwargs)
        if stream is not None:
            own_args, own_kwargs = stream.given(own_args), stream.given(own_kwargs)
        with nullcontext() if mode is None else mode.of(model), recorder:
            own_args, own_kwargs = recorder.given(own_args, own_kwargs)
            output = model(*own_args, **own_kwargs)
            recorder.finish(output)
            scores = None if target is None else mode.scores(target, output) if mode else target(output)
            if scores is not None:
                recorder.finish(scores)
        recorder.recording.without_rule = () if mode is None else tuple(sorted(mode.without_rule))
        if not recorder.recording.explained:
            raise ValueError(_nothing_seen(model, recorder.recording))
        recorder.recording.settle()
        recorder.recording.constant += recorder.by_hand.constant
        recorder.recording.tail = [(name, digest(x)) for name, x in recorder.recording.tail]
        recorder.recording.drew = not state.equal(torch.get_rng_state())
        recorder.choose_layers()
        if recorder.overwritten() and not copies:
            torch.set_rng_state(state)
            return record(model, args, kwargs, target, copies=True, **settings)
        recorder.find_blocks()
        if scores is not None:
            recorder.backward(scores.sum())
    return recorder.recording, output


def eagerly() -> AbstractContextManager[Any]:
    """Run compiled parts of a model as they were written, so that they are seen (torch 2.6 and newer)."""
    stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")


def _nothing_seen(model: torch.nn.Module, recording: Recording) -> str:
    kind = type(model).__name__
    names = ", ".join(sorted({call.module or "the model" for call in recording.calls})[:4])
    if names and recording.tower is not None:
        return f"no attention was seen in tower={recording.tower!r} of {kind}; it was in {names}"
    if names:
        return f"what {kind} returns is made of none of its attention, which was seen in {names}; return what it gives"
    if recording.assumed:
        return f"weights= found no attention in any of the modules of {kind} that ran"
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        return (
            f"no attention was seen in {kind}: {scripted[0] or 'the model'} is a scripted module, and nothing inside "
            "it can be seen; capture the module that it was made from"
        )
    if recording.constant:
        return (
            f"no attention between inputs was seen in {kind}: the values of {recording.constant[0] or 'its attention'} "
            "come from no input tensor of the model (made from numpy, or from parameters alone)"
        )
    return (
        f"no attention was seen in {kind}: it calls no attention of torch, and multiplies nothing by a softmax; if it "
        "has Transformer layers of its own kind, name the modules that output their weights with weights=, or give the "
        "weights that it returns to attnflow.Trace.from_arrays"
    )
