"""What one forward pass attended to: `Trace`.

Positions are counted from 0, and so are layers: layer 0 is the one nearest the input. Negative layers count from
the top. Arrays are ordered (layer, head, query, key).
"""

from __future__ import annotations

import math
import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsIndex, TypeAlias, get_args

from attnflow.layers import AttentionWeights, Layer

if TYPE_CHECKING:
    import torch

Role: TypeAlias = Literal["text", "special", "prefix", "patch"]
ROLES: tuple[Role, ...] = get_args(Role)

# How many patches there are along each axis: (rows, columns), or (frames, rows, columns) of a video.
Grid: TypeAlias = tuple[int, int] | tuple[int, int, int]

# Positions: one, several, the token at one, the rows that wrote the answer, or None for all.
Query: TypeAlias = int | str | Sequence[int] | None
GENERATED = "generated"


class Sink(NamedTuple):
    """A token with the share of all attention of a layer that it receives."""

    layer: int
    position: int
    token: str
    share: float


class Entered(NamedTuple):
    """What one example entered a model as, without padding, with the gradients of the target, tensor by tensor.

    targets: the target as it was asked for, and as it settled.
    """

    values: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]
    targets: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """What one forward pass attended to, for one example with its padding removed.

    layers: layer 0 nearest the input. Each layer's keys are the queries of the layer below.
    tokens: a label for every input position; roles: what each is ("text", "special", "prefix", "patch").
    grid: (rows, columns) of the patches, (frames, rows, columns) in a video, in that order after the other tokens; None
    for text.
    words: the number of the word that each position belongs to, for text whose tokens are pieces of words; or None.
    decoder_start: where the decoder's positions begin, if there are an encoder and a decoder in one joint graph.
    generated_from: where what the model wrote itself begins; what stands before is what it was given.
    reads: the positions of the last layer that a pooled output (a row per example) is computed from, where known.
    output: what the model returned, for the whole batch. model: facts for the recipe (class, versions).
    target: what gradients are of, and its score, if there are any.
    entered: its gradients with respect to the input itself, if they were asked for.

    Raises ValueError if a layer does not fit the one below it, or labels do not fit the input.
    """

    layers: tuple[Layer, ...]
    tokens: tuple[str, ...]
    roles: tuple[Role, ...]
    grid: Grid | None = None
    decoder_start: int | None = None
    words: tuple[int, ...] | None = None
    output: Any = None
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    target: Mapping[str, Any] | None = None
    generated_from: int | None = None
    reads: tuple[int, ...] | None = None
    entered: Entered | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a trace needs at least one layer of attention; none was given")
        for number, layer in enumerate(self.layers):
            if 0 in layer.shape:
                raise ValueError(f"layer {number} is empty: (head, query, key) is {layer.shape}")
        for number, (below, above) in enumerate(zip(self.layers, self.layers[1:], strict=False), start=1):
            if above.shape[2] != below.shape[1]:
                raise ValueError(
                    f"layer {number} attends to {above.shape[2]} keys, but layer {number - 1} below it has "
                    f"{below.shape[1]} queries; give the layers in order, the one nearest the input first"
                )
        inputs = self.layers[0].shape[2]
        for label, values in (("tokens", self.tokens), ("roles", self.roles), ("words", self.words)):
            if values is not None and len(values) != inputs:
                raise ValueError(f"{len(values)} {label} were given for {inputs} input positions")
        unknown = set(self.roles) - set(ROLES)
        if unknown:
            raise ValueError(f"unknown roles {sorted(unknown)}; a role is one of {', '.join(ROLES)}")
        if self.grid is not None and math.prod(self.grid) != self.roles.count("patch"):
            raise ValueError(f"a grid of {self.grid} does not hold {self.roles.count('patch')} patches")

    def __repr__(self) -> str:
        heads, queries, keys = self.layers[-1].shape
        place = f", grid {'x'.join(map(str, self.grid))}" if self.grid else ""
        return f"<Trace: {len(self.layers)} layers, {heads} heads, {queries} queries, {keys} keys{place}>"

    @property
    def readout(self) -> int | str | tuple[int, ...] | None:
        """The query whose output is explained unless another is asked for.

        Where the model wrote tokens itself, the rows that wrote them ("generated"). Else what a pooled output is read
        from, where that is known: one position, or several (`reads`). Else the first probe of a
        model that pools by attention; the last position of a decoder, or where every layer is causal; the first where
        it is a special or prefix token ([CLS]); None where none of these holds.
        """
        if self.generated_from is not None:
            return GENERATED
        if self.layers[-1].pools:
            return 0
        if self.reads is not None:
            return self.reads[0] if len(self.reads) == 1 else self.reads
        if self.decoder_start is not None or all(layer.causal for layer in self.layers):
            return len(self.tokens) - 1
        return 0 if self.roles[0] in ("special", "prefix") else None

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Positions by what they are of: every position in one group, groups in the order of the input.

        "encoder" and "decoder" where there are both; "text" and "image" (or "video") where both are in one stream, with
        the special tokens of the one and the prefix tokens of the other; else one group for each role.

        >>> Trace.from_arrays([[[1.0, 0.0], [0.5, 0.5]]], roles=["prefix", "patch"]).groups
        {'prefix': (0,), 'patch': (1,)}
        """
        names: Sequence[str] = self.roles
        if self.decoder_start is not None:
            names = ["decoder" if position >= self.decoder_start else "encoder" for position in range(len(self.roles))]
        elif "patch" in self.roles and not {"text", "special"}.isdisjoint(self.roles):
            seen = "video" if self.grid and len(self.grid) == 3 else "image"
            names = [seen if role in ("prefix", "patch") else "text" for role in self.roles]
        return {
            group: tuple(position for position, name in enumerate(names) if name == group)
            for group in dict.fromkeys(names)
        }

    @property
    def parts(self) -> dict[str, int] | None:
        """Where the decoder and what the model wrote begin among the tokens; None where there is neither."""
        begin = {"decoder": self.decoder_start, "written": self.generated_from}
        return {name: start for name, start in begin.items() if start is not None} or None

    def recipe(
        self, method: str, settings: Mapping[str, Any], checks: Mapping[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """What is needed to make scores of this trace again: method, settings, model, versions, checks.

        more: further entries, but for those that are None.
        """
        model = {name: fact for name, fact in self.model.items() if name != "versions"}
        versions = {**_versions(), **self.model.get("versions", {})}
        return {
            "method": method,
            "settings": settings,
            "model": {**model, "layers": len(self.layers), "heads": self.layers[0].shape[0]},
            "versions": versions,
            "checks": {} if checks is None else dict(checks),
            **{name: fact for name, fact in more.items() if fact is not None},
        }

    def sinks(self, share: float = 0.3) -> list[Sink]:
        """The tokens that receive at least `share` of a layer's attention, mean over heads and queries; layer 0 first.

        Among n tokens an even share would be 1/n. First tokens and separators often hold most of it without saying
        much (attention sinks, Xiao et al. 2024); `Relevance.without` leaves them out of an answer.

        Raises ValueError for a share that is not between 0 and 1.

        >>> Trace.from_arrays([[[0.9, 0.1], [0.7, 0.3]]]).sinks(share=0.5)
        [Sink(layer=0, position=0, token='0', share=0.8)]
        """
        if not 0 < share <= 1:
            raise ValueError(f"share must lie between 0 and 1; it is {share}")
        found: list[Sink] = []
        for number, layer in enumerate(self.layers):
            heads, queries, keys = layer.shape
            received = [0.0] * keys
            for query in range(queries):
                given = layer.attention([query]).sum((0, 1)).tolist()
                received = [total + one / (heads * queries) for total, one in zip(received, given, strict=True)]
            found += [Sink(number, i, self.tokens[i], one) for i, one in enumerate(received) if one >= share]
        return found

    @classmethod
    def from_arrays(
        cls,
        attention: Any,
        *,
        tokens: Sequence[Any] | None = None,
        roles: Sequence[Role] | None = None,
        grid: Grid | None = None,
        names: Sequence[str] | None = None,
        edges: bool = False,
    ) -> Trace:
        """A trace from attention that somebody else computed.

        attention: one array (layer, head, query, key) or (layer, query, key), or a sequence with one array per
        layer: (head, query, key) or (query, key), not necessarily square. A batch axis of size 1, before the layers or
        before the heads, is dropped, so that the `attentions` of a Hugging Face model can be given as they are. numpy
        arrays or torch tensors.
        tokens: labels of the input positions, strings or numbers ("0", "1", ... if absent). roles: "text" if absent.
        edges: the arrays are the edges of a graph, whose rows may sum to anything; with residual=0 they stay as they
        are.

        Raises ValueError for a wrong rank, a batch of several examples, layers that do not fit together, and for what
        is no attention: negative weights (logits), rows that do not sum to 1 where columns do (transposed). Warns of a
        layer most of whose rows sum to something else.
        """
        layers = layer_arrays(attention)
        labels = names or [f"layer {number}" for number in range(len(layers))]
        inputs = layers[0].shape[2] if layers else 0
        trace = cls(
            layers=tuple(AttentionWeights(name, layer) for name, layer in zip(labels, layers, strict=True)),
            tokens=token_labels(range(inputs) if tokens is None else tokens),
            roles=tuple(roles) if roles is not None else ("text",) * inputs,
            grid=grid,
        )
        if not edges:
            for number, layer in enumerate(layers):
                _check_weights(number, layer)
        return trace


@cache
def _versions() -> dict[str, str]:
    """What made an answer, beside the model's own packages; finding them takes as long as a short text's rollout."""
    return {package: version(package) for package in ("attnflow", "numpy")} | {"python": platform.python_version()}


def layer_arrays(attention: Any) -> list[torch.Tensor]:
    """One tensor (head, query, key) per layer from any of the layouts that `Trace.from_arrays` takes."""
    import numpy as np
    import torch

    def tensor(array: Any) -> torch.Tensor:
        if not isinstance(array, torch.Tensor):
            array = np.asarray(array)
            array = array.astype(np.float64) if array.dtype == np.longdouble else array
            if array.dtype.kind not in "biufc":
                raise ValueError(f"attention must be an array of numbers; one of type {array.dtype} was given")
            array = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
        array = array.detach()
        if array.is_complex() or array.dtype == torch.bool:
            kind = str(array.dtype).removeprefix("torch.")
            raise ValueError(f"attention must be an array of numbers; one of type {kind} was given")
        return array if array.is_floating_point() else array.double()

    stacked = hasattr(attention, "ndim")
    if not stacked and (isinstance(attention, Mapping | str) or not hasattr(attention, "__iter__")):
        raise ValueError(f"attention must be an array or a list of layers; a {type(attention).__name__} was given")
    if stacked and attention.ndim not in (3, 4, 5):
        raise ValueError(
            f"attention of shape {tuple(attention.shape)} has {attention.ndim} axes; expected (layer, head, query, "
            "key), (layer, query, key), or a list with one array per layer"
        )
    if stacked and attention.ndim == 5 and attention.shape[0] == 1:
        attention = attention[0]
    layers = [tensor(layer) for layer in attention]
    for number, layer in enumerate(layers):
        if layer.ndim == 4 and layer.shape[0] != 1:
            raise ValueError(
                f"layer {number} has shape {tuple(layer.shape)}: a batch of {layer.shape[0]} examples; "
                "choose one, for instance [layer[0] for layer in attention]"
            )
        if layer.ndim not in (2, 3, 4):
            raise ValueError(
                f"layer {number} has shape {tuple(layer.shape)}; expected (head, query, key) or (query, key)"
            )
        layers[number] = layer[0] if layer.ndim == 4 else layer[None] if layer.ndim == 2 else layer
    return layers


def _check_weights(number: int, layer: torch.Tensor) -> None:
    """Refuse a layer (head, query, key) that holds no attention weights, and warn where most rows do not sum to 1."""
    import torch

    low = layer.amin() if layer.numel() else 0
    if low < 0:
        head, query, key = (layer == low).nonzero()[0].tolist()
        raise ValueError(
            f"attention must be finite and not negative; layer {number}, head {head}, query {query}, key {key} is "
            f"{float(low):.6g}: are these logits? give them after the softmax"
        )
    precision = torch.promote_types(layer.dtype, torch.float32)
    rows, columns = layer.sum(-1, dtype=precision), layer.sum(-2, dtype=precision)
    if not bool(rows.isfinite().all()) or _share_of_ones(rows) >= 0.5:
        return  # what is not finite is refused where it is used, with its place
    if layer.shape[1] > 1 and _share_of_ones(columns) > 0.95:
        raise ValueError(
            f"layer {number} has rows that do not sum to 1 and columns that do: is it transposed? attention is "
            "(query, key), what one query attends to in a row"
        )
    warnings.warn(
        f"the rows of layer {number} sum to {float(rows.mean()):.4g} on average, and those of attention sum to 1: are "
        "these scores before the softmax? With residual=0 they are taken as the edges of the graph, as they are",
        stacklevel=3,
    )


def _share_of_ones(sums: torch.Tensor) -> float:
    return float(((sums - 1).abs() < 0.05).double().mean()) if sums.numel() else 1.0


def token_labels(tokens: Any) -> tuple[str, ...]:
    """Labels of positions from strings, bytes (UTF-8) or numbers.

    Raises ValueError for one string, or for what is no sequence of them.
    """
    if isinstance(tokens, str | bytes | Mapping) or not isinstance(tokens, Iterable):
        raise ValueError(f"tokens must be a sequence of labels, one for each position; {tokens!r:.60} was given")
    values: list[Any] = list(tokens)
    values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in values]
    for place, value in enumerate(values):
        if not isinstance(value, str | bytes | int | float):
            raise ValueError(f"token {place} is a {type(value).__name__}; expected a string or a number")
    return tuple(
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value) for value in values
    )


def is_index(value: Any) -> bool:
    """Whether a value is an integer of Python, numpy or torch, and no bool, which Python takes for 0 or 1."""
    kind = str(getattr(value, "dtype", type(value).__name__))
    return isinstance(value, SupportsIndex) and not kind.endswith("bool")


def query_positions(query: Query, labels: Sequence[str]) -> tuple[int, ...]:
    """The positions that `query` names among the query `labels`.

    An index (negative from the end), several, a label that occurs once ("[CLS]"), or None or "all" for every one.

    Raises ValueError for a position out of range, a bool, or a label that is absent or occurs more than once.
    """
    count = len(labels)
    if query is None or (isinstance(query, str) and query == "all" and "all" not in labels):
        return tuple(range(count))
    if isinstance(query, str):
        found = [position for position, label in enumerate(labels) if label == query]
        if len(found) == 1:
            return (found[0],)
        if found:
            raise ValueError(f"the token {query!r} occurs at {found}: give one of these positions as the query")
        shown = " ".join(labels[:20]) + (" ..." if count > 20 else "")
        raise ValueError(f"no token is {query!r}; the tokens are: {shown}")
    single = isinstance(query, SupportsIndex) and not hasattr(query, "__len__")
    wanted: list[Any] = [query] if single else list(query) if isinstance(query, Iterable) else [None]
    if not all(map(is_index, wanted)):
        raise ValueError(f"a query is a position, several positions or a token; {query!r} was given")
    if not wanted:
        raise ValueError("the list of queries is empty; give at least one position, or None for all")
    for position in wanted:
        if not -count <= position < count:
            raise ValueError(f"query {position} is out of range: there are {count} queries, 0 to {count - 1}")
    return tuple(int(position) % count for position in wanted)
