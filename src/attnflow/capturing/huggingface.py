"""Text: loading Hugging Face models and tokenizers, and naming tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attnflow.capturing import demo, words
from attnflow.trace import Role

_POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")


def load(name: str = demo.TEXT, device: str = "cpu", *, writes: bool = False) -> tuple[torch.nn.Module, Any]:
    """A text model in evaluation mode and its tokenizer, from a local folder, a hub name, or the packaged demo.

    writes: load it with the head that generates text.

    Raises ModuleNotFoundError if transformers or the demo package is missing, ValueError if there is no such model, or
    if it was not trained to write.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("text models need transformers: pip install 'attnflow[hf]'") from error
    source = str(demo.text_folder()) if name == demo.TEXT else name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        model: Any = _writer(source) if writes else transformers.AutoModel.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"cannot load a text model from {name!r}: {first_line(error)}; give a folder that save_pretrained wrote, "
            "or a name on the Hugging Face hub (which needs a connection)"
        ) from error
    model.config.name_or_path = name  # not the folder that the demo happens to be installed in
    return model.eval().to(device), tokenizer


def _writer(source: str) -> Any:
    """A causal language model, or an encoder-decoder; ValueError if its head has no trained weights."""
    import transformers

    joint = transformers.AutoConfig.from_pretrained(source).is_encoder_decoder
    kind: Any = transformers.AutoModelForSeq2SeqLM if joint else transformers.AutoModelForCausalLM
    model, facts = kind.from_pretrained(source, output_loading_info=True)
    refuse_missing(facts)
    return model


def refuse_missing(facts: Mapping[str, Any]) -> None:
    """Raise ValueError if a model that is to write was loaded with weights drawn at random, as loading info says."""
    if facts["missing_keys"]:
        raise ValueError(f"it was not trained to write: it has no weights for {sorted(facts['missing_keys'])[0]}")


def first_line(error: BaseException) -> str:
    """The first line of a message, without the full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")


def tokenize(text: str | list[str] | tuple[str, ...], model: torch.nn.Module, tokenizer: Any) -> dict[str, Any]:
    """Model inputs for a text, a pair (tuple) of texts, or a list of texts, padded, on the model's device.

    Raises ValueError without a tokenizer, or for an empty text.
    """
    if tokenizer is None:
        raise ValueError("text needs a tokenizer: capture(model, text, tokenizer=tokenizer)")
    if isinstance(text, tuple) and len(text) != 2:
        raise ValueError(f"a tuple of texts is a pair; {len(text)} were given: give a list for a batch")
    texts = [text] if isinstance(text, str) else list(text)
    empty = [number for number, one in enumerate(texts) if not one.strip()]
    if empty or not texts:
        raise ValueError("the text is empty" if len(texts) < 2 else f"text {empty[0]} is empty")
    for one in texts:
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise ValueError("the text is not valid UTF-8") from error
    parts = [[one] for one in text] if isinstance(text, tuple) else [texts]
    padding = len(parts[0]) > 1
    if padding and tokenizer.pad_token is None:
        raise ValueError("this tokenizer has no padding token: set tokenizer.pad_token, or give one text at a time")
    parameter = next(model.parameters(), None)
    # Truncation stays off so that a text that is too long is an error that says so.
    encoded = tokenizer(*parts, return_tensors="pt", padding=padding, truncation=False, verbose=False)
    return dict(encoded.to(parameter.device if parameter is not None else "cpu"))


def input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The token ids (batch, token) among a model's arguments, if it takes any."""
    candidate = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(candidate, torch.Tensor) and candidate.ndim == 2 and not candidate.is_floating_point():
        return candidate
    return None


def check_length(count: int, model: torch.nn.Module, tokenizer: Any) -> None:
    """Raise ValueError for no tokens, or more than the model's table of positions holds."""
    if count == 0:
        raise ValueError("the text is empty: it has no tokens")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.rsplit(".", 1)[-1] in _POSITION_TABLES:
            reserved = getattr(module, "offset", module.padding_idx + 1 if module.padding_idx is not None else 0)
            limit = module.num_embeddings - reserved
            if count > limit:
                raise ValueError(f"the text has {count} tokens and the model takes {limit}; shorten or split it")


def labels(ids: list[int], tokenizer: Any) -> tuple[list[str], list[Role], list[int] | None]:
    """Readable tokens, their roles, and the word that each belongs to; without a tokenizer the ids themselves.

    Tokens that stand for content ([MASK], an unknown word) are text, all other special tokens are special. Tokens and
    words as `words.read` has them: the text that stands for them, and its words.
    """
    if tokenizer is None:
        return [str(i) for i in ids], ["text" for _ in ids], None
    frame = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id}
    content = {tokenizer.mask_token_id, tokenizer.unk_token_id} - frame
    special = set(tokenizer.all_special_ids) - content
    roles: list[Role] = ["special" if i in special else "text" for i in ids]
    tokens, numbers = words.read(ids, roles, tokenizer)
    return tokens, roles, numbers
