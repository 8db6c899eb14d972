"""From a recorded pass to its structure: dataflow, proof, places, remembered for as long as the model lives."""

from __future__ import annotations

import hashlib
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from attnflow.capturing import placing
from attnflow.capturing.dataflow import Dataflow, Misfit, common_path, dataflow, joined_streams, towers
from attnflow.capturing.labels import tensors_in
from attnflow.capturing.mixers import first_mixer
from attnflow.capturing.proof import Proof, assume, prove, sizes_of
from attnflow.capturing.recorder import Recording, Source, record
from attnflow.capturing.replay import Pass, version_of
from attnflow.layers import PlacedLayer

Mixers: TypeAlias = Literal["refuse", "allow"]


_MOST_KNOWN = 256  # structures of one model, the oldest of which are forgotten first
_NOT_POSITIONS = (
    "what they attend between are no positions of the input, but channels perhaps: when some tokens are changed, "
    "others change in the same call"
)


@dataclass(frozen=True, eq=False)
class Structure:
    """How the calls of a pass make up a graph: in order (proof), or placed patch by patch (held, source, batch).

    mixers: the module that moves information between positions beside the calls, if there is one.
    """

    flow: Dataflow
    proof: Proof | None
    held: tuple[placing.Held, ...] = ()
    source: Source | None = None
    batch: int = 1
    mixers: str | None = None
    notes: tuple[tuple[str, str], ...] = ()

    def placed(self, recording: Recording) -> list[placing.Placed]:
        """The examples of a pass whose calls are placed patch by patch; `placing.Unplaceable` where they cannot be.

        Frames of a video come in reading order, and patches that stand in an order of chance.
        """
        assert self.source is not None
        images, *axes = self.source.plane
        wide = [size for size in axes if size > 1]
        in_order = recording.drew or len(wide) > 2 or (images > self.batch and bool(wide))
        return placing.place(recording, self.held, self.source, self.batch, in_order=in_order)

    @property
    def facts(self) -> dict[str, str]:
        """What was proved, for the recipe."""
        holds = self.mixers is None
        if self.proof is not None and not self.proof.asked:
            isolation = places = "assumed (prove=False)"
        else:
            isolation = "proved" if holds else "does not hold"
            places = "asked of the model, patch by patch" if self.proof is None else "proved" if holds else "assumed"
        found = {"dataflow": "by labels", "isolation": isolation, "reproduction": "weights x values", "places": places}
        return found | ({} if self.mixers is None else {"mixers": self.mixers}) | dict(self.notes)


@dataclass(frozen=True, eq=False)
class Known:
    """A structure with what it was found on: the calls with what feeds them, and the values that places hang on."""

    calls: Any
    values: bytes | None
    structure: Structure


_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, Known]] = weakref.WeakKeyDictionary()


def known(model: torch.nn.Module, args: Any, kwargs: Any, tower: str | None) -> Known | None:
    """What was found out when a model was asked before about inputs of these shapes."""
    found = _known.get(model, {}).get(_shapes(model, (args, kwargs), tower))
    same = found is not None and (found.values is None or found.values == _values((args, kwargs)))
    return found if same else None


def recall(found: Known, model: torch.nn.Module, recording: Recording, mixers: Mixers) -> Structure | None:
    """What was found out before about such a pass, if the calls are fed as they were then. Raises as `find` does."""
    if found.calls != _calls(recording):
        return None
    flow, structure = dataflow(recording), found.structure
    own = {(mark.kind, mark.number): mark for mark in recording.marks if isinstance(mark, Source)}

    def now(source: Source | None) -> Source | None:  # with the token ids of this pass
        return source and own[source.kind, source.number]

    if structure.mixers is not None:
        _say_mixed(model, structure.mixers, mixers)
    proof = structure.proof
    if proof is not None:
        layouts = {stream: replace(layout, source=now(layout.source)) for stream, layout in proof.layouts.items()}
        proof = replace(proof, layouts=layouts, reads=_for_any_input(proof))
    return replace(structure, flow=flow, proof=proof, source=now(structure.source))


def _for_any_input(proof: Proof) -> tuple[tuple[int, ...], ...] | None:
    """What an output is read from, if it is the first position of every example, or all: else the input may decide."""
    reads = proof.reads
    whole = {tuple(range(layout.size)) for layout in proof.layouts.values()}
    return reads if reads is not None and set(reads) <= {(0,), *whole} and len(set(reads)) == 1 else None


def find(run: Pass, *, asks: bool, mixers: Mixers) -> Structure:
    """The structure of a pass, asked of the model or, without `asks`, assumed where sizes leave a choice.

    Raises ValueError with the reason where the calls make up no graph, and where something
    beside them moves information between positions, which `mixers="allow"` turns into a warning.
    """
    model, args, kwargs, recording = run
    try:
        flow = dataflow(recording)
        _refuse_towers(model, recording, flow)
        structure = _structure(run, flow, asks=asks, mixers=mixers)
    except (Misfit, placing.Unplaceable) as error:
        raise ValueError(_no_graph(model, recording, str(error))) from None
    structure = replace(structure, notes=tuple(_notes(recording)))
    if asks and not recording.drew:
        patches = structure.held or any(
            layout.source is not None and layout.source.kind in ("convolution", "linear", "module")
            for layout in (structure.proof.layouts.values() if structure.proof else ())
        )
        values = _values((args, kwargs)) if patches else None
        of_model = _known.setdefault(model, {})
        while len(of_model) >= _MOST_KNOWN:
            of_model.pop(next(iter(of_model)))
        of_model[_shapes(model, (args, kwargs), recording.tower)] = Known(_calls(recording), values, structure)
    return structure


def _notes(recording: Recording) -> Iterator[tuple[str, str]]:
    """What else a reader of the trace should know: calls that are not in it, and masks that tokens decide."""
    chosen = recording.explained
    names = [call.module for number, call in enumerate(recording.calls) if number not in chosen]
    if names and recording.tower is None:
        yield "unused", f"no output was made of {', '.join(dict.fromkeys(names))}"
    if recording.constant:
        yield "constant", f"between learned tokens alone: {', '.join(dict.fromkeys(recording.constant))}"
    masked = [recording.calls[number].module for number in chosen if recording.sources(recording.fed[number].mask)]
    if masked:
        yield "masks", f"made of tokens: {', '.join(dict.fromkeys(masked))}"


def _structure(run: Pass, flow: Dataflow, *, asks: bool, mixers: Mixers) -> Structure:
    model, _, kwargs, recording = run
    padding = {stream: mask == 0 for stream, mask in masks_of(flow, kwargs).items() if isinstance(mask, torch.Tensor)}
    likely = assume(recording, flow)
    reason = _unfit(recording, flow) if likely is None else _NOT_POSITIONS
    if not asks:
        if likely is None:
            raise Misfit(
                f"{reason}; where they stand can only be asked of the model: leave prove=False and weights= out"
            )
        return Structure(flow, likely)
    for modules in (False, True):
        proof = prove(run, flow, padding, modules=modules)
        if proof is not None:
            if proof.mixers is None:
                return Structure(flow, proof)
            _say_mixed(model, proof.mixers, mixers)
            return Structure(flow, proof, mixers=proof.mixers or type(model).__name__)
        source = _signal(flow)
        if source is not None and not modules:
            try:
                structure = _placed(run, flow, source)
            except placing.Unplaceable as error:
                reason = str(error)
            else:
                texts = [other for other in flow.streams[flow.joint[0]].sources if _is_text(other)]
                if (name := placing.first_mixed(run, structure.held, source, texts)) is not None:
                    _say_mixed(model, name, mixers)
                    structure = replace(structure, mixers=name or type(model).__name__)
                return structure
    name = None if likely is None else first_mixer(run, flow, likely)
    if likely is None or name is None:
        raise Misfit(reason)
    _say_mixed(model, name, mixers)
    return Structure(flow, replace(likely, asked=True), mixers=name or type(model).__name__)


def _say_mixed(model: torch.nn.Module, name: str, mixers: Mixers) -> None:
    """Raise ValueError for a module that moves information between positions, or warn of it if that is allowed."""
    said = (
        f"{name or type(model).__name__} moves information between positions, and is no attention that capture sees: "
        "when some tokens are changed and all recorded calls return what they did, others change there too"
    )
    if mixers == "refuse":
        raise ValueError(
            f"{said}; {_remedy(model)}, or explain the recorded attention alone with mixers='allow', which the recipe "
            "says"
        )
    warnings.warn(f"{said}; what follows explains the recorded attention alone", stacklevel=5)


def _placed(run: Pass, flow: Dataflow, source: Source) -> Structure:
    recording, held = run.recording, tuple(placing.ask(run, source))
    structure = Structure(flow, None, held, source, _batch(flow, source, run.args, run.kwargs))
    if structure.batch > 1 and not _are_apart(structure, recording):  # images that stand in one sequence
        structure = replace(structure, batch=1)
    if any(isinstance(layer, PlacedLayer) and len(layer.parts) > 1 for layer in structure.placed(recording)[0].layers):
        placing.check_copies(run, held)
    return structure


def _are_apart(structure: Structure, recording: Recording) -> bool:
    """Whether the examples of a batch can be placed each by itself."""
    try:
        structure.placed(recording)
    except placing.Mixed:
        return False
    return True


def _batch(flow: Dataflow, source: Source, args: Any, kwargs: Any) -> int:
    """How many examples there are where frames may be convolved one by one: as the tokens or the first input say."""
    texts = [other.plane[0] for other in flow.streams[0].sources if _is_text(other)]
    first = next((x for x in tensors_in((args, kwargs)) if x.ndim), None)
    images = math.prod(source.plane[:1])
    sizes = [*texts, *([] if first is None else [len(first)]), images]
    return next(size for size in sizes if images % size == 0)


def _signal(flow: Dataflow) -> Source | None:
    """The patches of the only stream there is: its last convolution in space, or the first layer over its pixels."""
    first, *others = flow.joint
    if others:
        return None
    sources = flow.streams[first].sources
    convolved = [source for source in sources if source.kind == "convolution" and len(source.plane) > 2]
    linear = [source for source in sources if source.kind == "linear" and len(source.plane) > 1]
    return convolved[-1] if convolved else linear[0] if linear else None


def _is_text(source: Source) -> bool:
    return source.kind == "embedding" and len(source.plane) == 2


def masks_of(flow: Dataflow, inputs: Mapping[str, Any]) -> dict[int, Any]:
    """What the inputs say of padding, by stream: `attention_mask` and its kin, as Hugging Face names them."""
    if len(flow.joint) == 1:
        return {flow.joint[0]: inputs.get("attention_mask")}
    first, *_, last = flow.joint
    given = not flow.streams[first].groups  # states that another model made
    own, other = ("attention_mask", "encoder_attention_mask") if given else ("decoder_attention_mask", "attention_mask")
    return {first: inputs.get(other), last: inputs.get(own)}


def _refuse_towers(model: torch.nn.Module, recording: Recording, flow: Dataflow) -> None:
    """Raise Misfit for several towers, which are no single graph."""
    sets = towers(recording, flow)
    made_of = any(stream.made_of for stream in flow.streams)
    if len(sets) < 2 and not made_of:
        return
    if len({tuple(dict.fromkeys(names)) for names in sets}) < len(sets):
        raise Misfit(
            f"{len(sets)} passes through {common_path(sets[0]) or type(model).__name__}, which are no single graph; "
            "capture that module with one input at a time"
        )
    paths = distinct_paths(sets)
    names = " and ".join(f"model.{path}" for path in paths)
    raise Misfit(
        f"several towers, {names}, which are no single graph; explain one of them with tower={paths[-1]!r}, or capture "
        "one of them with what it takes"
    )


def reader(model: torch.nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """The tower that reads what the others make of their part of the inputs, as `capture(..., tower=...)` takes it.

    A language model beside a vision tower, for instance. None where the model is one graph. The model runs once.

    Raises ValueError where no tower reads another, and as `capture` does for a model whose calls it cannot follow.
    """
    recording, _ = record(model, (), dict(inputs))
    try:
        flow = dataflow(recording)
    except Misfit as error:
        raise ValueError(_no_graph(model, recording, str(error))) from None
    joined = joined_streams(flow)
    paths = distinct_paths(towers(recording, flow))
    if len(paths) < 2:
        return None
    fed = [set().union(*(flow.streams[number].made_of for number in own)) - own for own in joined]
    last = [path for path, own, by in zip(paths, joined, fed, strict=True) if by and not any(own & of for of in fed)]
    if len(last) != 1:
        raise ValueError(
            f"{type(model).__name__} has the towers {' and '.join(paths)}, of which not one reads all the others; "
            "capture one of them with what it takes"
        )
    return last[0]


def distinct_paths(sets: list[list[str]]) -> list[str]:
    """The modules that hold each of some sets of modules, no further than it takes to tell them from each other."""
    paths = [common_path(names).split(".") for names in sets]
    shared = next((depth for depth, names in enumerate(zip(*paths, strict=False)) if len(set(names)) > 1), 0)
    return [".".join(path[: shared + 1]) for path in paths]


def _unfit(recording: Recording, flow: Dataflow) -> str:
    """Why no tokens of the input are the positions of the calls."""
    if sizes_of(recording, flow) is None:
        return "they have more tokens in some places than in others, and no patches by which they could be placed"
    planes = [
        f"{source.module or 'the input'} {tuple(source.plane)}"
        for number in flow.joint
        for source in flow.streams[number].sources
    ]
    if not planes:
        return "their tokens come from no embedding, convolution or input of one vector per token"
    return f"their tokens are not those that the model was given ({', '.join(planes[:4])})"


def _no_graph(model: torch.nn.Module, recording: Recording, reason: str) -> str:
    shown = list(dict.fromkeys(" x ".join(map(str, call.extent)) for call in recording.calls))
    return (
        f"the attention calls of {type(model).__name__} are no graph that can be explained; (outer x outer x query x "
        f"key) is {', '.join(shown[:4])}{', ...' if len(shown) > 4 else ''}: {reason}"
    )


def _remedy(model: torch.nn.Module) -> str:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation not in (None, "sdpa", "eager"):
        return (
            f"the model was loaded with attn_implementation={implementation!r}: call "
            "model.set_attn_implementation('sdpa')"
        )
    return "if it is attention, name the modules that output its weights with weights="


def _shapes(model: torch.nn.Module, values: Any, tower: str | None) -> Any:
    """What must be alike for a structure to be recalled: the model's modules, and the inputs but for their numbers."""
    modules = tuple((id(module), module.training) for module in model.modules())
    weights = tuple((x.data_ptr(), version_of(x)) for x in (*model.parameters(), *model.buffers()))
    return hash((modules, weights)), tower, _described(values)


def _described(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return tuple(values.shape), str(values.dtype), str(values.device)
    if isinstance(values, Mapping):
        return tuple((name, _described(value)) for name, value in values.items())
    if isinstance(values, tuple | list):
        return tuple(_described(value) for value in values)
    return repr(values)


def _values(values: Any) -> bytes:
    """The numbers of all input tensors but the largest, on which the places of patches may hang (masks, noise)."""
    found = sorted(tensors_in(values), key=lambda x: -x.numel())[1:]
    digest = hashlib.sha256()
    for x in found:
        digest.update(x.detach().float().cpu().numpy().tobytes())
    return digest.digest()


def _calls(recording: Recording) -> Any:
    pairs = zip(recording.calls, recording.fed, strict=True)
    return recording.tower, [(call.module, call.extent, fed[:5]) for call, fed in pairs]
