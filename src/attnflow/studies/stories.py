"""The smallest fluent language model: stories260K of llama2.c (5 layers, 8 heads, width 64, 512 tokens)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

PUBLISHED = "https://huggingface.co/karpathy/tinyllamas (stories260K: stories260K.bin, tok512.bin)"
FILES = ("stories260K.bin", "tok512.bin")
_UNKNOWN, _BEGIN, _END = 0, 1, 2


def load(folder: Path) -> tuple[torch.nn.Module, Any]:
    """The causal language model in evaluation mode and its tokenizer, from the files of llama2.c."""
    from transformers import LlamaConfig, LlamaForCausalLM

    content = (folder / FILES[0]).read_bytes()
    width, hidden, layers, heads, key_heads, vocabulary, length = struct.unpack("7i", content[:28])
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=_BEGIN,
        eos_token_id=_END,
    )
    model: Any = LlamaForCausalLM(config)
    numbers = torch.from_numpy(np.frombuffer(content, dtype="<f4", offset=28).copy())
    model.load_state_dict(dict(_weights(numbers, config)))
    model.config.name_or_path = "stories260K"
    return model.eval(), _tokenizer((folder / FILES[1]).read_bytes(), vocabulary)


def _weights(numbers: torch.Tensor, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the file in its order: one kind after the other, each of all layers."""
    width, hidden, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    size = width // heads
    place = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        place += int(np.prod(shape))
        return numbers[place - int(np.prod(shape)) : place].reshape(shape)

    yield "model.embed_tokens.weight", (embedding := take(config.vocab_size, width))
    yield "lm_head.weight", embedding
    kinds = (
        ("input_layernorm", (width,)),
        ("self_attn.q_proj", (heads * size, width)),
        ("self_attn.k_proj", (key_heads * size, width)),
        ("self_attn.v_proj", (key_heads * size, width)),
        ("self_attn.o_proj", (width, heads * size)),
        ("post_attention_layernorm", (width,)),
        ("mlp.gate_proj", (hidden, width)),
        ("mlp.down_proj", (width, hidden)),
        ("mlp.up_proj", (hidden, width)),
    )
    for name, shape in kinds:
        for layer, tensor in enumerate(take(layers, *shape)):
            rotary = name.endswith(("q_proj", "k_proj"))
            yield f"model.layers.{layer}.{name}.weight", _halves(tensor, size) if rotary else tensor
    yield "model.norm.weight", take(width)


def _halves(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rotary pairs next to each other, as llama2.c has them, moved to the two halves of each head."""
    return weight.view(-1, size // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(content: bytes, vocabulary: int) -> Any:
    """Byte-pair encoding in the order of the pieces' scores, with single bytes for what has no piece."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces: list[str] = []
    scores: list[float] = []
    place = 4  # behind the length of the longest piece
    for _ in range(vocabulary):
        score, length = struct.unpack_from("fi", content, place)
        piece = content[place + 8 : place + 8 + length].decode("utf-8", "replace")
        place += 8 + length
        pieces.append(piece)
        scores.append(score)
    names = [f"<0x{number - 3:02X}>" if 3 <= number < 259 else piece for number, piece in enumerate(pieces)]
    names[:3] = ["<unk>", "<s>", "</s>"]
    names = [name.replace(" ", "▁") for name in names]
    ids = {name: number for number, name in enumerate(names)}
    merges = [
        (names[number][:cut], names[number][cut:])
        for number in sorted(range(259, vocabulary), key=lambda number: -scores[number])
        for cut in range(1, len(names[number]))
        if names[number][:cut] in ids and names[number][cut:] in ids
    ]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", _BEGIN)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
