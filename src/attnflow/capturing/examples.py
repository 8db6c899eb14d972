"""From a recorded batch to its examples: the stream of each call, and one example's calls without padding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from attnflow.capturing.calls import Call, FusedCall, Kept, LeftOut, WeightedSum
from attnflow.capturing.recorder import Recording
from attnflow.layers import HIDDEN, AttentionCall, AttentionWeights, JointLayer, Layer, WeightsGradient

Stream: TypeAlias = Literal["encoder", "decoder", "cross"]

# A weight on padding that is rounding, not attention.
_NEGLIGIBLE = 1e-6

_DECODER = re.compile(r"(^|\.)decoder\.")
_CROSS = re.compile(r"cross|encoder_attn|EncDec|multihead_attn", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Stack:
    """The calls of a batch that are kept, each with its stream, and which positions are no padding.

    encoder (batch, token): of the encoder, or of the only stream there is. decoder (batch, token), or None.
    pools: whether the last of the kept calls gathers a single stream by attention from probes of its own.
    """

    calls: list[tuple[Kept, Stream]]
    encoder: torch.Tensor
    decoder: torch.Tensor | None
    pools: bool

    def example(self, index: int) -> tuple[Layer, ...]:
        """The layers of one example among its kept positions, in forward order.

        With a decoder they are joint layers over the positions of both streams. Layers that share a mask tensor share
        the reduced mask too, so that memory grows with n, not with n squared.

        Raises ValueError for an example that is all padding, and for a call that lets a token attend to padding.
        """
        keep = {"encoder": self.encoder[index]}
        if self.decoder is not None:
            keep["decoder"] = self.decoder[index]
        if not all(bool(kept.any()) for kept in keep.values()):
            raise ValueError(f"example {index} holds nothing but padding")
        size = sum(int(kept.sum()) for kept in keep.values())
        masks: dict[Any, tuple[torch.Tensor | None, bool]] = {}
        layers: list[Layer] = []
        for call, stream in self.calls:
            queries = keep["encoder" if stream == "encoder" else "decoder"]
            if call.extent[1] != len(queries):  # the probes of a call that pools
                queries = torch.ones(call.extent[1], dtype=torch.bool)
            keys = keep["decoder" if stream == "decoder" else "encoder"]
            layer = call_layer(call, index, queries, keys, masks)
            if self.decoder is None:
                layers.append(layer)
            else:
                start = size - int(keep["decoder"].sum())
                places = {"encoder": (0, 0), "decoder": (start, start), "cross": (start, 0)}
                layers.append(JointLayer(layer, *places[stream], size))
        if self.pools:
            layers[-1] = replace(layers[-1], pools=True)
        return tuple(layers)


def stack(
    recording: Recording, model: torch.nn.Module, attention_mask: Any, decoder_attention_mask: Any
) -> Stack | None:
    """The calls of a recording as one stack of square layers, or as an encoder, a decoder and what joins them.

    None where they are of one tower that looks at an image, but not such a stack: see `placing`. Raises ValueError for
    several towers, and for other calls that are no stack.
    """
    calls = recording.calls
    (batch, queries, keys), last = calls[-2 if len(calls) > 1 else -1].extent, calls[-1].extent
    pools = last[::2] == (batch, keys) and last[1] != queries
    joint = getattr(getattr(model, "config", None), "is_encoder_decoder", False) or any(
        call.cross for call in calls[: -1 if pools else None]
    )
    streams: list[Stream] = _streams(calls) if joint else []
    if "cross" not in streams:  # an encoder or a decoder by itself
        streams = ["encoder" for _ in calls]
    parts: dict[Stream, list[Call]] = {}
    pools = pools and not joint
    for call, stream in list(zip(calls, streams, strict=True))[: -1 if pools else None]:
        parts.setdefault(stream, []).append(call)
    fits, towers = _fits(parts), _towers(calls)
    lists = any(isinstance(model.get_submodule(path), torch.nn.ModuleList | torch.nn.Sequential) for path in towers)
    if len(towers) > 1 and (len(parts) == 1 if fits else not lists):
        names = " and ".join(f"model.{path}" for path in towers)
        way_out = "" if lists else "; capture one of them with what it takes"
        raise misfit(model, calls, f"several towers, {names}, which are no single graph{way_out}")
    if not fits:
        if recording.patches is not None and len(parts) == 1:
            return None
        raise misfit(model, calls, "windows or pooling of an input without patches, which capture cannot place")
    encoder = _kept([*parts.get("encoder", []), *parts.get("cross", [])], attention_mask)
    decoder = None
    if "decoder" in parts:
        decoder = _kept(parts["decoder"], decoder_attention_mask)
    elif "cross" in parts:
        decoder = torch.ones(parts["cross"][0].extent[:2], dtype=torch.bool)
    kept: list[tuple[Kept, Stream]] = [
        (call, stream) for call, stream in zip(calls, streams, strict=True) if not isinstance(call, LeftOut)
    ]
    pools = pools and not isinstance(calls[-1], LeftOut)
    return Stack(kept, encoder, decoder, pools)


def _fits(parts: Mapping[Stream, list[Call]]) -> bool:
    """Whether the calls of each stream are of one size, square but for cross-attention, which joins the two sizes."""
    extents = {stream: {call.extent for call in calls} for stream, calls in parts.items()}
    if any(len(sizes) > 1 for sizes in extents.values()):
        return False
    (encoder,), (decoder,), (cross,) = (extents.get(stream, {None}) for stream in ("encoder", "decoder", "cross"))
    square = all(size is None or size[1] == size[2] for size in (encoder, decoder))
    if cross is None:
        return square and decoder is None
    batch, queries, keys = cross
    return square and decoder in (None, (batch, queries, queries)) and encoder in (None, (batch, keys, keys))


def misfit(model: torch.nn.Module, calls: Sequence[Call], reason: str) -> ValueError:
    """The error for calls that are no stack: their sizes, and why they cannot be placed."""
    shown = list(dict.fromkeys(f"{b} x {q} x {k}" for b, q, k in (call.extent for call in calls)))
    return ValueError(
        f"the attention calls of {type(model).__name__} are not one stack of square layers; (batch x query x key) is "
        f"{', '.join(shown[:4])}{', ...' if len(shown) > 4 else ''}: {reason}"
    )


def _towers(calls: Sequence[Call]) -> list[str]:
    """The modules that hold one list of layers each, as paths from the model.

    A list of layers is what stands before the first number of a call's name; the module is named no further than it
    takes to tell it from the others.
    """
    lists = dict.fromkeys(re.split(r"\d", call.module)[0] for call in calls if re.search(r"\d", call.module))
    paths = [path.split(".") for path in lists]
    shared = next((depth for depth, names in enumerate(zip(*paths, strict=False)) if len(set(names)) > 1), 0)
    return [".".join(path[: shared + 1]).rstrip(".") for path in paths]


def _streams(calls: list[Call]) -> list[Stream]:
    """The streams of an encoder-decoder's calls, or of a decoder that stands alone and is given what it attends to."""
    alone = not any(_DECODER.search(call.module) for call in calls)
    streams: list[Stream] = []
    for call in calls:
        if call.cross or _CROSS.search(call.module):
            streams.append("cross")
        else:
            streams.append("decoder" if alone or _DECODER.search(call.module) else "encoder")
    return streams


def _kept(calls: Sequence[Call], attention_mask: Any) -> torch.Tensor:
    """(batch, key), True where a key is no padding: as the mask says, or else where some query may attend to it."""
    batch, _, count = calls[0].extent
    if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == (batch, count):
        return attention_mask != 0
    kept = [call for call in calls if not isinstance(call, LeftOut)]
    visible = torch.full((batch, count), not kept)
    for call in kept:
        visible |= seen_keys(call)
    return visible


def seen_keys(call: Kept) -> torch.Tensor:
    """(batch, key) or (1, 1), True where some query may attend to a key."""
    if isinstance(call, WeightedSum):
        return (call.weights != 0).any(1).any(1).cpu()
    return torch.ones(1, 1, dtype=torch.bool) if call.mask is None else _allowed(call.mask).any(1).any(1).cpu()


def call_layer(
    call: Kept,
    index: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    masks: dict[Any, tuple[torch.Tensor | None, bool]],
) -> AttentionCall | AttentionWeights:
    """One call of one example among its kept queries and keys."""
    device = call.weights.device if isinstance(call, WeightedSum) else call.q.device
    queries, keys = queries.to(device), keys.to(device)
    gradient = None
    if call.gradient is not None and call.v is not None:
        gradient = WeightsGradient(_rows(call.gradient, index, queries), _rows(call.v, index, keys))
    if isinstance(call, WeightedSum):
        weights = _rows(call.weights, index, queries)
        if (weights[..., ~keys] > _NEGLIGIBLE).any():
            raise ValueError(f"{call.module} attends to padding: it gives weight to what the mask hides")
        return AttentionWeights(call.module, weights[..., keys], captured=True, gradient=gradient)
    shared = call.causal if call.mask is None else (call.mask.data_ptr(), call.mask.shape, call.mask.stride())
    if shared not in masks:
        masks[shared] = _reduced_mask(call, index, queries, keys)
    q, k = _rows(call.q, index, queries), _rows(call.k, index, keys)
    return AttentionCall(call.module, q, k, call.scale, *masks[shared], gradient)


def _rows(x: torch.Tensor, index: int, keep: torch.Tensor) -> torch.Tensor:
    """(head, token, dim) of one example among its kept tokens."""
    return x[index] if keep.all() else x[index][:, keep]


def _reduced_mask(
    call: FusedCall, index: int, queries: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor | None, bool]:
    """(mask, causal) among the kept positions; a mask that hides nothing, or just the future, becomes None."""
    if call.mask is None:
        if not keys.all() and not (call.causal and keys.long().diff().le(0).all()):
            raise ValueError(f"{call.module} attends to padding: the model was given no mask that hides it")
        return None, call.causal
    mask = call.mask.expand(call.q.shape[0], -1, -1, -1)[index]
    if mask.shape[1] > 1:
        mask = mask[:, queries]
    if _allowed(mask)[..., ~keys].any():
        raise ValueError(f"{call.module} attends to padding: its mask shows what the inputs' mask hides")
    mask = mask[..., keys]
    allowed = _allowed(mask)
    rows, count = mask.shape[1:]
    past = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()
    causal = rows == count > 1 and not bool((allowed & ~past).any())
    if mask.dtype != torch.bool:
        if bool((allowed & (mask != 0)).any()):
            return mask, causal
        mask = allowed
    hides_nothing_more = mask.all() or (causal and bool((mask == past).all()))
    return (None if hides_nothing_more else mask), causal


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > HIDDEN
