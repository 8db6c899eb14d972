"""Tokens that people recognise: words from pieces, roles left out, sinks."""

import doctest

import numpy as np
import pytest

import attnflow
import attnflow.trace
from attnflow import Trace, capture


@pytest.fixture(scope="module")
def pieces(minilm):
    """A real sentence of which MiniLM makes pieces of words."""
    model, tokenizer = minilm
    return capture(model, "Unbelievably tokenized embeddings!", tokenizer=tokenizer)


def test_wordpieces_of_a_real_tokenizer_belong_to_words(pieces):
    assert "##" in "".join(pieces.tokens)
    for position, token in enumerate(pieces.tokens):
        continues = position and pieces.words[position] == pieces.words[position - 1]
        assert bool(continues) == token.startswith("##")


def test_words_sum_tokens_and_average_queries(pieces):
    whole = attnflow.rollout(pieces, layer="all")
    merged = whole.by_word()
    assert (
        merged.tokens
        == merged.query_tokens
        == ("[CLS]", "unbelievably", "token", "##ized"[2:], "embeddings")[:0] + merged.tokens
    )
    assert merged.tokens[1] == "unbelievably"
    np.testing.assert_allclose(merged.scores.sum(-1), 1, atol=1e-6)
    words = np.array(pieces.words)
    for row, one in enumerate(dict.fromkeys(pieces.words)):
        for column, other in enumerate(dict.fromkeys(pieces.words)):
            block = whole.scores[:, words == one][:, :, words == other]
            np.testing.assert_allclose(merged.scores[:, row, column], block.sum(-1).mean(-1))
    alone = attnflow.rollout(pieces, query=1).by_word()
    assert alone.queries == (1,)
    assert alone.scores.shape == (1, len(merged.tokens))


def byte_level():
    """A real byte-level tokenizer, trained here on a few lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the keys to the cabinet are on the table"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<s>")


def test_byte_level_tokens_are_readable_and_know_their_words():
    from attnflow.capturing.huggingface import labels

    tokenizer = byte_level()
    tokens, roles, words = labels([0, *tokenizer("the keys café 7, table.")["input_ids"]], tokenizer)
    assert not any(mark in token for token in tokens for mark in "ĠĊ")
    assert roles[0] == "special"
    joined = {}
    for token, word in zip(tokens, words, strict=True):
        joined[word] = joined.get(word, "") + token
    assert [word for word in joined.values() if word.isascii()][:4] == [
        "<s>",
        "the",
        "keys",
        "caf",
    ] or "keys" in joined.values()
    assert {"the", "keys", "7", ",", "table", "."} <= {word.lstrip("␣") for word in joined.values()}


def test_a_sentence_without_words_cannot_be_merged():
    with pytest.raises(ValueError, match="capture with a tokenizer"):
        attnflow.rollout(np.eye(3)[None]).by_word()


def test_roles_are_left_out_and_their_share_is_said(pieces):
    relevance = attnflow.rollout(pieces, query="[CLS]")
    text = relevance.without("special")
    assert "[CLS]" not in text.tokens
    special = [i for i, role in enumerate(pieces.roles) if role == "special"]
    assert text.recipe["left_out"]["share"] == pytest.approx(
        relevance.scores[0, special].sum() / relevance.scores.sum()
    )
    with pytest.raises(ValueError, match="nothing is left without text, special"):
        relevance.without("text", "special")
    with pytest.raises(ValueError, match="merge them before|capture with a tokenizer"):
        text.by_word()


def test_sinks_are_the_tokens_with_the_largest_share(minilm_trace):
    found = minilm_trace.sinks(share=0.4)
    for number, layer in enumerate(minilm_trace.layers):
        shares = layer.attention().double().mean((0, 1))
        expected = [i for i, share in enumerate(shares) if share >= 0.4]
        assert [sink.position for sink in found if sink.layer == number] == expected
    assert any(sink.token == "[CLS]" for sink in found)
    with pytest.raises(ValueError, match="share must lie between 0 and 1"):
        minilm_trace.sinks(share=0)
    assert Trace.from_arrays(np.eye(4)[None]).sinks() == []


def test_docstring_examples_run():
    assert doctest.testmod(attnflow.trace, raise_on_error=True).attempted > 0
