"""Generation: what a model writes, as inputs of one more forward pass over prompt and answer."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from attnflow.capturing import checkpoints, huggingface

# What belongs to a prompt of tokens alone, and what a model makes anew for prompt and answer when it is not given.
_OF_THE_PROMPT = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def written(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: int | Mapping[str, Any]
) -> list[tuple[dict[str, Any], int]]:
    """For each example of a batch the inputs that hold prompt and answer, without padding, and where the answer begins.

    settings: how many tokens at most, chosen greedily, or what the model's `generate` takes. An answer ends with its
    first end-of-sequence token; where it begins is counted among the tokens of the prompt, or of the decoder. With a
    cache of keys or without, a causal model attends to the same keys with the same weights as in one pass over the
    whole, so that the pass is what generation did.

    Raises ValueError for a model that cannot generate, for several answers to one prompt, or an empty one; and for
    prompts that are padded on the right or without a mask, and answers without what began them (Whisper), since the
    pass would not be what generation did.
    """
    if not callable(getattr(model, "generate", None)):
        raise ValueError(
            f"{type(model).__name__} cannot generate; load it with its head, for instance with AutoModelForCausalLM"
        )
    ids = huggingface.input_ids(args, kwargs)
    joint = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if ids is None and not joint:
        raise ValueError("generation needs input_ids: give a text with its tokenizer, or what the tokenizer returns")
    first = {getattr(model, "main_input_name", "input_ids"): args[0]} if args else {}
    given = {**kwargs, **first} if ids is None else {**kwargs, "input_ids": ids}
    chosen = _settings(settings)
    if ids is not None:
        _check_padding(model, ids, given.get("attention_mask"), joint=joint)
    sequences, kinds = _generated(model, given, chosen)
    batch = len(next(value for value in given.values() if isinstance(value, torch.Tensor)))
    if len(sequences) != batch:
        raise ValueError(f"generate gave {len(sequences)} answers to {batch} prompts; ask for one each")
    end = _end_ids(model, chosen)
    if joint and "decoder_input_ids" not in given:
        _check_beginning(model, sequences)
    examples = [_example(index, given, sequences[index], batch, joint=joint, end=end) for index in range(batch)]
    if joint:
        return examples
    return [
        (inputs | _kinds_of(index, kinds, given, inputs["input_ids"].shape[1], batch), start)
        for index, (inputs, start) in enumerate(examples)
    ]


def _generated(
    model: Any, given: dict[str, Any], chosen: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the model wrote, and the kinds of tokens (text, image) that it was told of in all steps, put together.

    A model may give its answer another kind than its prompt, and let no token of the prompt attend to it.
    """
    kinds: dict[str, torch.Tensor] = {}

    def note(_module: torch.nn.Module, _args: Any, step: dict[str, Any]) -> None:
        for name, told in step.items():
            if name.endswith("token_type_ids") and isinstance(told, torch.Tensor):
                before = kinds.get(name, told[:, :0])
                kinds[name] = told if told.shape[1] > before.shape[1] else torch.cat([before, told], dim=1)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            sequences = model.generate(**given, **chosen)
            sequences = getattr(sequences, "sequences", sequences)
            prompt = given.get("input_ids")
            if kinds and prompt is not None and sequences.shape[1] == prompt.shape[1] + 1:  # nothing written was read
                kinds.clear()
                model.generate(**given, **{**chosen, "max_new_tokens": 2, "min_new_tokens": 2})
    except IndexError as error:
        raise ValueError(
            f"{type(model).__name__} cannot write so far: it ran past its table of positions or tokens "
            f"({checkpoints.first_line(error)}); ask for fewer tokens, or shorten the prompt"
        ) from error
    finally:
        hook.remove()
    return sequences, kinds


def _kinds_of(
    index: int, kinds: Mapping[str, torch.Tensor], given: dict[str, Any], size: int, batch: int
) -> dict[str, torch.Tensor]:
    """The kinds of one example's tokens, those of its padding left out; the last token is of the kind before it."""
    mask, found = given.get("attention_mask"), dict[str, torch.Tensor]()
    for name, told in kinds.items():
        row = told[index * len(told) // batch]
        if mask is not None and mask.shape == given["input_ids"].shape:
            count = mask.shape[1]
            row = torch.cat([row[:count][mask[index] != 0], row[count:]])
        found[name] = torch.cat([row, row[-1:].expand(max(0, size - len(row)))])[None, :size]
    return found


def _example(
    index: int, given: dict[str, Any], sequence: torch.Tensor, batch: int, *, joint: bool, end: set[int]
) -> tuple[dict[str, Any], int]:
    whole_batch = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    # Of a single example all is its own, also what has no axis of examples, such as the patches of one image.
    tensors = {name: value[index : index + 1] if batch > 1 else value for name, value in whole_batch.items()}
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


def _settings(settings: int | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(settings, Mapping):
        return dict(settings)
    try:
        count = 0 if isinstance(settings, bool) else operator.index(settings)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(
            f"generate= takes a number of tokens from 1 on, or a mapping of what generate takes; {settings!r} was given"
        )
    return {"max_new_tokens": count, "do_sample": False}


def _check_padding(model: torch.nn.Module, ids: torch.Tensor, mask: Any, *, joint: bool) -> None:
    pad = getattr(getattr(model, "generation_config", None), "pad_token_id", None)
    if mask is None and pad is not None and len(ids) > 1 and bool((ids == pad).any()):
        raise ValueError("the prompts hold padding and no attention_mask: give the mask that the tokenizer returns")
    if not joint and isinstance(mask, torch.Tensor) and mask.ndim == 2 and not bool(mask[:, -1].all()):
        raise ValueError("prompts must be padded on the left to be written on: set tokenizer.padding_side = 'left'")


def _check_beginning(model: torch.nn.Module, sequences: torch.Tensor) -> None:
    """Refuse answers of an encoder-decoder without the token that its decoder begins with."""
    config: Any = model.generation_config
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    if start is not None and bool((sequences[:, 0] != start).any()):
        raise ValueError(
            f"the generate of {type(model).__name__} leaves out what its answers began with: call it yourself, and "
            "capture with all that its decoder was given and wrote as decoder_input_ids"
        )


def _until_end(answer: torch.Tensor, end: set[int]) -> torch.Tensor:
    """The answer up to its first end-of-sequence token, that one included."""
    ends = [place for place, token in enumerate(answer.tolist()) if token in end]
    return answer[: ends[0] + 1] if ends else answer


def _end_ids(model: torch.nn.Module, settings: Mapping[str, Any]) -> set[int]:
    own: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found: Any = settings.get("eos_token_id", own)
    return set() if found is None else set(torch.as_tensor(found).flatten().tolist())
