"""Text: loading Hugging Face models and tokenizers, and naming tokens."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from attnflow.capturing import checkpoints, demo, words
from attnflow.trace import Role

TextTask: TypeAlias = Literal["text", "text-generation", "text-classification", "fill-mask"]

# What a model of each task is called, what it was trained to do, and the class of transformers that makes it.
_TASKS: dict[TextTask, tuple[str, str | None, str]] = {
    "text": ("a text model", None, "AutoModel"),
    "text-generation": ("a text model", "write", "AutoModelForCausalLM"),
    "text-classification": ("a text classifier", "classify", "AutoModelForSequenceClassification"),
    "fill-mask": ("a masked language model", "fill in masks", "AutoModelForMaskedLM"),
}
_ADVICE = "give a folder that save_pretrained wrote, or a name on the Hugging Face hub (which needs a connection)"
_POSITION_TABLES = ("position_embeddings", "wpe", "embed_positions")


class TextModel(NamedTuple):
    """A text model and its tokenizer."""

    model: torch.nn.Module
    tokenizer: Any


def load(name: str = demo.TEXT, device: str = "cpu", *, task: TextTask = "text") -> TextModel:
    """A text model in evaluation mode and its tokenizer, from a local folder, a hub name, or the packaged demo.

    task: "text" without a head, or with the head that generates, classifies, or fills masks.

    Raises ModuleNotFoundError if transformers or the demo package is missing, ValueError if there is no such model, if
    it is not whole, or if it was not trained for its task.
    """
    need_transformers("text models")
    import transformers

    what, head, kind = _TASKS[task]
    source = str(demo.text_folder()) if name == demo.TEXT else name
    with checkpoints.opening(source, what, _ADVICE) as options:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        if task == "text-generation" and transformers.AutoConfig.from_pretrained(source, **options).is_encoder_decoder:
            kind = "AutoModelForSeq2SeqLM"
        model = checkpoints.pretrained(kind, source, options, head=head)
    model.config.name_or_path = name  # not the folder that the demo happens to be installed in
    return TextModel(model.to(device), tokenizer)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, from a local folder or a hub name; errors as in `load`."""
    need_transformers("text models")
    import transformers

    with checkpoints.opening(name, "a tokenizer", _ADVICE) as options:
        return transformers.AutoTokenizer.from_pretrained(name, **options)


def trained_task(name: str | None) -> TextTask:
    """The task that a checkpoint was trained for, as its configuration says; "text" where that names no head."""
    if name is None:
        return "text"
    need_transformers("text models")
    import transformers

    with checkpoints.opening(name, "a text model", _ADVICE) as options:
        config = transformers.AutoConfig.from_pretrained(name, **options)
    trained = (config.architectures or [""])[0]
    heads: list[tuple[str, TextTask]] = [
        ("ForSequenceClassification", "text-classification"),
        ("ForMaskedLM", "fill-mask"),
        ("ForCausalLM", "text-generation"),
        ("LMHeadModel", "text-generation"),
        ("ForConditionalGeneration", "text-generation"),
    ]
    for head, task in heads:
        if trained.endswith(head):
            return task
    return "text"


def need_transformers(what: str) -> None:
    """Raise ModuleNotFoundError, with what to install, if transformers is missing."""
    try:
        import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} need transformers: pip install 'attnflow[hf]'") from error


def tokenize(text: str | list[str] | tuple[str, ...], model: torch.nn.Module, tokenizer: Any) -> dict[str, Any]:
    """Model inputs for a text, a pair (tuple) of texts, or a list of texts, padded, on the model's device.

    Raises ValueError without a tokenizer, for an empty text, and where tokenizer and model do not belong together.
    Warns where the tokenizer does not know most of the text.
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
    check_known(encoded["input_ids"], tokenizer)
    check_ids(encoded["input_ids"], model, tokenizer)
    return dict(encoded.to(parameter.device if parameter is not None else "cpu"))


def input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The token ids (batch, token) among a model's arguments, if it takes any."""
    candidate = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(candidate, torch.Tensor) and candidate.ndim == 2 and not candidate.is_floating_point():
        return candidate
    return None


def check_known(ids: torch.Tensor, tokenizer: Any) -> None:
    """Refuse a text of which a tokenizer without a vocabulary knows less than half; warn where one with it does."""
    unknown, frame = tokenizer.unk_token_id, set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    text = [i for i in ids.flatten().tolist() if i not in frame]
    count = text.count(unknown)
    if 2 * count <= len(text):
        return
    lost = f"{count} of {len(text)} tokens are unknown to the tokenizer ({tokenizer.unk_token})"
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(
            f"{lost}, which has no vocabulary: its file (tokenizer.json, vocab.txt or the like) is missing from the "
            "model's folder"
        )
    warnings.warn(f"{lost}: it was made for other texts, and all of these are one to the model", stacklevel=4)


def check_ids(ids: torch.Tensor, model: torch.nn.Module, tokenizer: Any) -> None:
    """Raise ValueError for ids of no tokens, of more than the table of positions holds, or beyond that of tokens.

    What stands for an image may lie beyond the table of tokens: a model that has images replaces it.
    """
    count = ids.shape[-1]
    if count == 0:
        raise ValueError("the text is empty: it has no tokens")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.rsplit(".", 1)[-1] in _POSITION_TABLES:
            reserved = getattr(module, "offset", module.padding_idx + 1 if module.padding_idx is not None else 0)
            limit = module.num_embeddings - reserved
            if count > limit:
                raise ValueError(f"the text has {count} tokens and the model takes {limit}; shorten or split it")
    if hasattr(getattr(model, "config", None), "vision_config"):
        return
    try:
        known: Any = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # a model of several parts
        return
    if not isinstance(known, torch.nn.Embedding):
        return
    outside = ids[(ids < 0) | (ids >= known.num_embeddings)]
    if len(outside):
        one = int(outside[0])
        token = "" if tokenizer is None else f" ({tokenizer.convert_ids_to_tokens(one)!r})"
        raise ValueError(
            f"the token id {one}{token} is out of range: the model has {known.num_embeddings} tokens, 0 to "
            f"{known.num_embeddings - 1}; give the tokenizer that the model was trained with"
        )


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
