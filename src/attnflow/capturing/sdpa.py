"""The recorder: sees every attention call of a forward pass without changing the model."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

# A mask is added to logits; exp(-1e4) is 0 in every precision, and -65504 is what half precision models use.
HIDDEN = -1e4

_ATTENTION_CLASS = re.compile("attention|attn", re.IGNORECASE)
_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One attention call of a batch.

    Shapes: q (batch, head, query, dim); k, v (batch, head, key, dim); mask broadcastable to (batch, head, query, key),
    True where attention is allowed if boolean, else added to the logits.
    """

    module: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    mask: torch.Tensor | None
    causal: bool

    @property
    def extent(self) -> tuple[int, int, int]:
        """(batch, query, key)."""
        return self.q.shape[0], self.q.shape[2], self.k.shape[2]


@dataclass(eq=False)
class Recording:
    """What a forward pass did: its attention calls in order, and what tells whether they are all of them."""

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    softmaxes: list[tuple[str, tuple[int, ...]]] = field(default_factory=list[tuple[str, tuple[int, ...]]])
    ran: Counter[str] = field(default_factory=Counter[str])
    patch_grid: tuple[int, int] | None = None


class Recorder(TorchFunctionMode):
    """Records `scaled_dot_product_attention` and `multi_head_attention_forward` while it is entered.

    Hooks tell which module is running; they are removed on leaving, also after an error. The calls themselves go
    through untouched, and what is kept of them are references to their arguments.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self._model = model
        self._running = [""]
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Recorder:
        for name, module in self._model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._enter_module, name)))
            self._hooks.append(module.register_forward_hook(self._leave_module))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, name: str, module: torch.nn.Module, args: Any) -> None:
        self._running.append(name)
        self.recording.ran[name] += 1

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let the call through, then keep its arguments if it is attention."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        module = self._running[-1]
        if func is F.scaled_dot_product_attention:
            self.recording.calls.append(_from_sdpa(module, *args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self.recording.calls.append(_from_multi_head(module, *args, **kwargs))
        elif func in _SOFTMAX:
            self.recording.softmaxes.append((module, tuple(output.shape)))
        elif func is F.conv2d and not self.recording.calls:
            self.recording.patch_grid = (output.shape[-2], output.shape[-1])
        return output


def _from_sdpa(
    module: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> RecordedCall:
    """The call as torch documents it; without a head axis, or without a batch axis, those axes have size 1."""
    _refuse_dropout(module, dropout_p)
    if query.ndim not in (2, 3, 4):
        raise ValueError(
            f"{module}: attention over tensors of shape {tuple(query.shape)}; expected (batch, head, token, dim)"
        )
    q, k, v = (_four_axes(x.detach()) for x in (query, key, value))
    if attn_mask is not None:
        attn_mask = _four_axes(attn_mask.detach(), head_axis=query.ndim == 4)
    return RecordedCall(module, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, attn_mask, causal=is_causal)


def _four_axes(x: torch.Tensor, *, head_axis: bool = False) -> torch.Tensor:
    """(token, dim), (batch, token, dim) or, if it has a head axis, (head, token, dim), as (batch, head, token, dim)."""
    if x.ndim == 3:
        return x[None] if head_axis else x[:, None]
    return x if x.ndim == 4 else x[None, None]


def _from_multi_head(
    module: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: torch.Tensor | None,
    in_proj_bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> RecordedCall:
    """The call inside nn.MultiheadAttention: tokens first (token, batch, dim), before the input projections.

    `is_causal` is only a hint that `attn_mask` is causal, so the mask alone decides.
    """
    _refuse_dropout(module, dropout_p if training else 0.0)
    if bias_k is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise ValueError(
            f"{module}: nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys attends to keys that are "
            "no tokens, which the attention graph has no place for"
        )
    if query is not key and not torch.equal(query, key):
        raise ValueError(f"{module} is cross-attention (keys are not queries), which capture does not place yet")
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None  # torch's own contract for this call
        weights = in_proj_weight.chunk(3)
    biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)

    def heads(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x = F.linear(x if x.ndim == 3 else x[:, None], weight, bias).detach()
        return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)

    q, k, v = (
        heads(x, weight, bias)  # pyright: ignore[reportArgumentType]
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask = _multi_head_mask(attn_mask, key_padding_mask, batch=q.shape[0], heads=num_heads)
    return RecordedCall(module, q, k, v, q.shape[-1] ** -0.5, mask, causal=False)


def _multi_head_mask(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, *, batch: int, heads: int
) -> torch.Tensor | None:
    """nn.MultiheadAttention's two masks, where True means hidden, as one where True means allowed (or one to add)."""
    masks: list[torch.Tensor] = []
    if attn_mask is not None:
        masks.append(attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads)))
    if key_padding_mask is not None:
        masks.append(key_padding_mask.reshape(batch, 1, 1, -1))
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~torch.stack(torch.broadcast_tensors(*masks)).any(0)
    added = [mask.float().masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask for mask in masks]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _refuse_dropout(module: str, dropout: float) -> None:
    if dropout > 0:
        raise ValueError(
            f"{module} drops attention weights at random (dropout {dropout:g}): the model is in training mode; call "
            "model.eval() first"
        )


def record(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Recording, Any]:
    """Run the model once without gradients; the recording and the model's output.

    Raises ValueError if no attention call was seen, or not every one: names the module and the way out.
    """
    with torch.no_grad(), Recorder(model) as recorder:
        output = model(*args, **kwargs)
    _check_complete(model, recorder.recording)
    return recorder.recording, output


def _check_complete(model: torch.nn.Module, recording: Recording) -> None:
    callers = Counter(call.module for call in recording.calls)
    unseen = [name for name in _attention_modules(model, recording.ran) if not _covered(name, callers)]
    unseen += [name for name, calls in callers.items() if calls % recording.ran[name or ""]]
    extents = {call.extent[1:] for call in recording.calls}
    own = [
        name
        for name, shape in recording.softmaxes
        if len(shape) > 2 and (shape[-2:] in extents or (not extents and shape[-2] == shape[-1]))
    ]
    if not (unseen or own) and recording.calls:
        return
    kind = type(model).__name__
    if unseen or own:
        where = ", ".join(dict.fromkeys(repr(name) for name in (own or unseen)[:3]))
        seen = f"{len(recording.calls)} other calls were seen" if recording.calls else "no call was seen"
        reason = f"attention in {where} of {kind} does not go through scaled_dot_product_attention ({seen})"
    else:
        reason = f"no attention was seen in {kind}: it made no call of scaled_dot_product_attention"
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
    weights = "take the weights the model returns and give them to attnflow.Trace.from_arrays"
    if implementation is not None and implementation != "sdpa":
        return (
            f"the model was loaded with attn_implementation={implementation!r}: call "
            f"model.set_attn_implementation('sdpa') if the family has it, or {weights} (output_attentions=True)"
        )
    if implementation is not None:
        return f"{weights} (output_attentions=True)"
    return f"if it has Transformer layers of its own kind, {weights}"
