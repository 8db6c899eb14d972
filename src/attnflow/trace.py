"""What one forward pass attended to: `Trace`, and the two kinds of layer it is made of.

Positions are counted from 0, and so are layers: layer 0 is the one nearest the input. Negative layers count from
the top. Arrays are ordered (layer, head, query, key).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, SupportsIndex, TypeAlias, get_args

if TYPE_CHECKING:
    import torch

Role: TypeAlias = Literal["text", "special", "prefix", "patch"]
ROLES: tuple[Role, ...] = get_args(Role)

# Positions: one, several, the token at one, or None for all.
Query: TypeAlias = int | str | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class WeightsGradient:
    """The gradient of a target with respect to one layer's attention weights, kept as its two factors.

    The weighted values are W V, so dW = dO V^T per head, exactly, with no graph through the weights.
    Shapes: output (head, query, dim), the gradient dO with respect to the weighted values; v (head, key, dim).
    """

    output: torch.Tensor
    v: torch.Tensor

    def of(self, queries: slice | list[int]) -> torch.Tensor:
        """The gradient (head, query, key) for some queries, in float32 or better."""
        import torch

        precision = torch.promote_types(self.v.dtype, torch.float32)
        v = self.v.to(precision).repeat_interleave(self.output.shape[0] // self.v.shape[0], dim=0)
        return self.output[:, queries].to(precision) @ v.mT


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one attention call, kept instead of its weights: memory grows with n, not with n squared.

    The weights are softmax(scale * q k^T + mask), head by head, computed on the device of `q` when asked for.

    Shapes: q (head, query, dim); k (head, key, dim), where fewer key heads than query heads mean grouped-query
    attention; mask broadcastable to (head, query, key), True where attention is allowed if boolean, else added to
    the logits. `causal` lets query i see keys 0 to i. gradient: of the trace's target, if it has one.
    """

    name: str
    q: torch.Tensor
    k: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None
    causal: bool = False
    gradient: WeightsGradient | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, query, key)."""
        return self.q.shape[0], self.q.shape[1], self.k.shape[1]

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The attention weights (head, query, key) of some queries, in float32 or better; rows sum to 1."""
        import torch

        precision = torch.promote_types(self.q.dtype, torch.float32)
        k = self.k.to(precision).repeat_interleave(self.q.shape[0] // self.k.shape[0], dim=0)
        logits = (self.q[:, queries].to(precision) * self.scale) @ k.mT
        if self.mask is not None:
            mask = self.mask[:, queries] if self.mask.shape[1] > 1 else self.mask
            logits = logits.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
        if self.causal:
            query, key = (torch.arange(count, device=logits.device) for count in self.shape[1:])
            logits.masked_fill_(key > query[queries][:, None], float("-inf"))
        return logits.softmax(-1)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Ready attention weights (head, query, key) of one layer.

    captured: whether a model computed them before our eyes, so that rows that do not sum to 1 are its way (a sink that
    takes a share and is left out), and not a mistake in an array that somebody gave.
    """

    name: str
    weights: torch.Tensor
    captured: bool = False
    gradient: WeightsGradient | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, query, key)."""
        head, query, key = self.weights.shape
        return head, query, key

    @property
    def causal(self) -> bool:
        """Whether the layer is square, of more than one position, and never looks ahead."""
        _, queries, keys = self.shape
        return queries == keys > 1 and not bool(self.weights.triu(1).any())

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The attention weights (head, query, key) of some queries, as they were given."""
        return self.weights[:, queries]


@dataclass(frozen=True, eq=False)
class JointLayer:
    """A layer of an encoder-decoder in the joint graph of both streams: encoder positions first, then the decoder's.

    The positions that the layer does not concern are passed on as they are (each attends to itself alone), so that a
    product of joint layers, or a flow through them, is the one through encoder, cross-attention and decoder.

    layer: attention from positions starting at `queries_at` to positions starting at `keys_at`, of `size` in all.
    """

    layer: AttentionCall | AttentionWeights
    queries_at: int
    keys_at: int
    size: int

    @property
    def name(self) -> str:
        """The module's name."""
        return self.layer.name

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, query, key)."""
        return self.layer.shape[0], self.size, self.size

    causal: ClassVar[bool] = False

    def attention(self, queries: slice | list[int] = slice(None)) -> torch.Tensor:
        """The weights (head, query, key) of some queries; those outside the layer attend to themselves."""
        heads, inside, keys = self.layer.shape
        wanted = list(range(self.size))[queries] if isinstance(queries, slice) else queries
        own = [
            (row, query - self.queries_at) for row, query in enumerate(wanted) if 0 <= query - self.queries_at < inside
        ]
        attention = self.layer.attention([query for _, query in own])
        joint = attention.new_zeros(heads, len(wanted), self.size)
        joint[:, range(len(wanted)), wanted] = 1
        rows = [row for row, _ in own]
        joint[:, rows] = 0
        joint[:, rows, self.keys_at : self.keys_at + keys] = attention
        return joint


Layer: TypeAlias = AttentionCall | AttentionWeights | JointLayer


@dataclass(frozen=True, eq=False)
class Trace:
    """What one forward pass attended to, for one example with its padding removed.

    layers: layer 0 nearest the input. Each layer's keys are the queries of the layer below.
    tokens: a label for every input position; roles: what each is ("text", "special", "prefix", "patch").
    grid: (rows, columns) of the patches, which follow the prefix tokens; None for text.
    decoder_start: where the decoder's positions begin, if there are an encoder and a decoder in one joint graph.
    output: what the model returned, for the whole batch. model: facts for the recipe (class, versions).
    target: what gradients are of, and its score, if there are any.

    Raises ValueError if a layer does not fit the one below it, or labels do not fit the input.
    """

    layers: tuple[Layer, ...]
    tokens: tuple[str, ...]
    roles: tuple[Role, ...]
    grid: tuple[int, int] | None = None
    decoder_start: int | None = None
    output: Any = None
    model: Mapping[str, Any] = field(default_factory=dict[str, Any])
    target: Mapping[str, Any] | None = None

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
        for label, values in (("tokens", self.tokens), ("roles", self.roles)):
            if len(values) != inputs:
                raise ValueError(f"{len(values)} {label} were given for {inputs} input positions")
        unknown = set(self.roles) - set(ROLES)
        if unknown:
            raise ValueError(f"unknown roles {sorted(unknown)}; a role is one of {', '.join(ROLES)}")
        if self.grid is not None and self.grid[0] * self.grid[1] != self.roles.count("patch"):
            raise ValueError(f"a grid of {self.grid} does not hold {self.roles.count('patch')} patches")

    def __repr__(self) -> str:
        heads, queries, keys = self.layers[-1].shape
        place = f", grid {self.grid[0]}x{self.grid[1]}" if self.grid else ""
        return f"<Trace: {len(self.layers)} layers, {heads} heads, {queries} queries, {keys} keys{place}>"

    @property
    def readout(self) -> int | None:
        """The query whose output is explained unless another is asked for.

        The last position of a decoder, or where every layer is causal; the first where it is a special or prefix token
        ([CLS]); None where none of these holds, as in models that average their outputs.
        """
        if self.decoder_start is not None or all(layer.causal for layer in self.layers):
            return len(self.tokens) - 1
        return 0 if self.roles[0] in ("special", "prefix") else None

    @classmethod
    def from_arrays(
        cls,
        attention: Any,
        *,
        tokens: Sequence[str] | None = None,
        roles: Sequence[Role] | None = None,
        grid: tuple[int, int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Trace:
        """A trace from attention that somebody else computed.

        attention: one array (layer, head, query, key) or (layer, query, key), or a sequence with one array per
        layer: (head, query, key) or (query, key), not necessarily square. A batch axis of size 1 is dropped, so
        that the `attentions` of a Hugging Face model can be given as they are. numpy arrays or torch tensors.
        tokens: labels of the input positions ("0", "1", ... if absent). roles: "text" if absent.

        Raises ValueError for a wrong rank, a batch of several examples, or layers that do not fit together.
        """
        layers = layer_arrays(attention)
        labels = names or [f"layer {number}" for number in range(len(layers))]
        inputs = layers[0].shape[2] if layers else 0
        return cls(
            layers=tuple(AttentionWeights(name, layer) for name, layer in zip(labels, layers, strict=True)),
            tokens=tuple(tokens) if tokens is not None else tuple(str(position) for position in range(inputs)),
            roles=tuple(roles) if roles is not None else ("text",) * inputs,
            grid=grid,
        )


def layer_arrays(attention: Any) -> list[torch.Tensor]:
    """One tensor (head, query, key) per layer from any of the layouts that `Trace.from_arrays` takes."""
    import numpy as np
    import torch

    def tensor(array: Any) -> torch.Tensor:
        if not isinstance(array, torch.Tensor):
            array = np.asarray(array)
            if array.dtype.kind not in "fiu":
                raise ValueError(f"attention must be an array of numbers; one of type {array.dtype} was given")
            array = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
        array = array.detach()
        return array if array.is_floating_point() else array.double()

    if isinstance(attention, Mapping):
        raise ValueError(f"attention must be an array or a list of layers; a {type(attention).__name__} was given")
    stacked = hasattr(attention, "ndim")
    if stacked and attention.ndim not in (3, 4, 5):
        raise ValueError(
            f"attention of shape {tuple(attention.shape)} has {attention.ndim} axes; expected (layer, head, query, "
            "key), (layer, query, key), or a list with one array per layer"
        )
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


def query_positions(query: Query, labels: Sequence[str]) -> tuple[int, ...]:
    """The positions that `query` names among the query `labels`.

    An index (negative from the end), several, a label that occurs once ("[CLS]"), or None or "all" for every one.

    Raises ValueError for a position out of range, or a label that is absent or occurs more than once.
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
    wanted = [query] if isinstance(query, SupportsIndex) else list(query)
    if not wanted:
        raise ValueError("the list of queries is empty; give at least one position, or None for all")
    for position in wanted:
        if not -count <= position < count:
            raise ValueError(f"query {position} is out of range: there are {count} queries, 0 to {count - 1}")
    return tuple(int(position) % count for position in wanted)
