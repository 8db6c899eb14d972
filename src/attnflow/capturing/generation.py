"""Generation: what a model writes, as inputs of one more forward pass over prompt and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnflow.capturing import huggingface

# What belongs to a prompt of tokens alone, and what a model makes anew for prompt and answer when it is not given.
_OF_THE_PROMPT = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


def written(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: int | Mapping[str, Any]
) -> list[tuple[dict[str, Any], int]]:
    """For each example of a batch the inputs that hold prompt and answer, without padding, and where the answer begins.

    settings: how many tokens at most, chosen greedily, or what the model's `generate` takes. An answer ends with its
    first end-of-sequence token; where it begins is counted among the tokens of the prompt, or of the decoder. With a
    cache of keys or without, a causal model attends to the same keys with the same weights as in one pass over the
    whole, so that the pass is what generation did.

    Raises ValueError for a model that cannot generate, for several answers to one prompt, or an empty one.
    """
    if not callable(getattr(model, "generate", None)):
        raise ValueError(
            f"{type(model).__name__} cannot generate; load it with its head, for instance with AutoModelForCausalLM"
        )
    ids = huggingface.input_ids(args, kwargs)
    joint = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if ids is None and not joint:
        raise ValueError("generation needs input_ids: give a text with its tokenizer, or what the tokenizer returns")
    given = dict(kwargs) if ids is None else {**kwargs, "input_ids": ids}
    chosen = {"max_new_tokens": settings, "do_sample": False} if isinstance(settings, int) else dict(settings)
    with torch.no_grad():
        sequences: Any = model.generate(**given, **chosen)  # pyright: ignore[reportCallIssue]
    sequences = getattr(sequences, "sequences", sequences)
    batch = len(next(value for value in given.values() if isinstance(value, torch.Tensor)))
    if len(sequences) != batch:
        raise ValueError(f"generate gave {len(sequences)} answers to {batch} prompts; ask for one each")
    end = _end_ids(model, chosen)
    return [_example(index, given, sequences[index], joint=joint, end=end) for index in range(batch)]


def _example(
    index: int, given: dict[str, Any], sequence: torch.Tensor, *, joint: bool, end: set[int]
) -> tuple[dict[str, Any], int]:
    tensors = {name: value[index : index + 1] for name, value in given.items() if isinstance(value, torch.Tensor)}
    prompt = given | tensors
    ids, mask = prompt.get("input_ids"), prompt.get("attention_mask")
    extra = {name: value for name, value in prompt.items() if ids is None or name not in _OF_THE_PROMPT}
    own = ids if ids is None or mask is None or mask.shape != ids.shape else ids[:, mask[0] != 0]
    started = prompt.get("decoder_input_ids", sequence[None, :1]) if joint else ids
    assert started is not None  # only an encoder-decoder comes without ids
    answer = _until_end(sequence[started.shape[1] :], end)
    if not len(answer):
        raise ValueError(f"the model wrote nothing for example {index}: its answer is empty")
    if not joint:
        assert own is not None
        return extra | {"input_ids": torch.cat([own[0], answer])[None]}, own.shape[1]
    whole = torch.cat([started[0], answer])[None]
    encoder = {} if own is None else {"input_ids": own}
    return {**extra, **encoder, "decoder_input_ids": whole}, started.shape[1]


def _until_end(answer: torch.Tensor, end: set[int]) -> torch.Tensor:
    """The answer up to its first end-of-sequence token, that one included."""
    ends = [place for place, token in enumerate(answer.tolist()) if token in end]
    return answer[: ends[0] + 1] if ends else answer


def _end_ids(model: torch.nn.Module, settings: Mapping[str, Any]) -> set[int]:
    own: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found: Any = settings.get("eos_token_id", own)
    return set() if found is None else {found} if isinstance(found, int) else set(found)
