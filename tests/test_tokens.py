"""Tokens that people recognise: words from pieces, roles left out, sinks."""

import doctest

import numpy as np
import pytest

import attnflow
import attnflow.trace
from attnflow import Trace, capture
from attnflow.capturing.huggingface import labels


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


# Words of many scripts: each text with the words that every tokenizer must give, whatever its pieces are.
TEXTS = {
    "latin": ("the keys to the cabinet", ["the", "keys", "to", "the", "cabinet"]),
    "cyrillic": ("привет, мир", ["привет", ",", "мир"]),
    "accents": ("naïve café", ["naïve", "café"]),
    "accents apart": ("nai\u0308ve cafe\u0301", ["nai\u0308ve", "cafe\u0301"]),
    "devanagari": ("नमस्ते दुनिया", ["नमस्ते", "दुनिया"]),
    "thai": ("สวัสดี ชาวโลก", ["สวัสดี", "ชาวโลก"]),
    "arabic": ("مرحبا بالعالم", ["مرحبا", "بالعالم"]),
    "persian": ("می\u200cخواهم", ["می\u200cخواهم"]),
    "hebrew": ("שָׁלוֹם עולם", ["שָׁלוֹם", "עולם"]),
    "korean": ("안녕 세계", ["안녕", "세계"]),
    "katakana": ("コーヒー タワー", ["コーヒー", "タワー"]),
    "emoji": ("ok 👩\u200d👩\u200d👧 👍🏽 !", ["ok", "👩\u200d👩\u200d👧", "👍🏽", "!"]),
    "flags": (
        "🏴\U000e0067\U000e0062\U000e007f 🇫🇷 1\ufe0f\u20e3",
        ["🏴\U000e0067\U000e0062\U000e007f", "🇫🇷", "1\ufe0f\u20e3"],
    ),
    "numbers": ("3.14 2024 x2", ["3", ".", "14", "2024", "x2"]),
    "punctuation": ("well (no) yes", ["well", "(", "no", ")", "yes"]),
    "lone mark": ("a  b", ["a", "b"]),
}
ALONE = {
    "chinese": "我喜欢 喝咖啡",
    "japanese": "私はコーヒーが好き",
    "code": "def f(x):\n\treturn x+1\n",
    "hashes": "## a #b",
}


def _fast(model, pre, decoder, trainer, **names):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    english = ["the keys to the cabinet are on the table", "well no yes 2024"]
    tokenizer.train_from_iterator([*english * 9, *(text for text, _ in TEXTS.values()), *ALONE.values()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _byte_level(size, *, llama=False):
    """GPT-2's kind, or Llama 3's, which splits text by another pattern; a small vocabulary breaks most characters."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if llama:
        pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        split = pre_tokenizers.Split(pattern, "isolated")
        pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = {"special_tokens": ["<s>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=size, **names)
    return _fast(models.BPE(), pre, decoders.ByteLevel(), trainer, bos_token="<s>")


def _unigram(size):
    from tokenizers import decoders, models, pre_tokenizers, trainers

    names = {"special_tokens": ["<unk>", "</s>"], "unk_token": "<unk>", "show_progress": False}
    trainer = trainers.UnigramTrainer(vocab_size=size, **names)
    names = {"unk_token": "<unk>", "eos_token": "</s>"}
    return _fast(models.Unigram(), pre_tokenizers.Metaspace(), decoders.Metaspace(), trainer, **names)


def _byte_fallback():
    """Llama 2's kind: what is not in the vocabulary is written byte by byte, as <0xD0>."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE(byte_fallback=True, unk_token="<unk>")
    special = ["<unk>", *(f"<0x{one:02X}>" for one in range(256))]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    names = {
        "special_tokens": special,
        "initial_alphabet": letters,
        "limit_alphabet": len(letters),
        "show_progress": False,
    }
    trainer = trainers.BpeTrainer(vocab_size=330, **names)
    tokenizer = _fast(model, pre_tokenizers.Metaspace(), decoders.Sequence(steps), trainer)
    return _without_byte_names(tokenizer)


def _without_byte_names(tokenizer):
    """The same with the names of bytes as ordinary pieces, as Llama has them; a trainer takes them only as special."""
    import json

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = json.loads(tokenizer.backend_tokenizer.to_str())
    file["added_tokens"] = file["added_tokens"][:1]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(file)), unk_token="<unk>")


def _end_marked():
    """CLIP's kind: bytes, and "</w>" at the end of a word."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    pattern = Regex(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+")
    split = pre_tokenizers.Split(pattern, "removed", invert=True)
    pre = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = {"initial_alphabet": alphabet, "end_of_word_suffix": "</w>", "show_progress": False}
    model = models.BPE(end_of_word_suffix="</w>")
    return _fast(model, pre, decoders.ByteLevel(), trainers.BpeTrainer(vocab_size=600, **names))


def _bytes():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def _characters():
    from transformers import CanineTokenizer

    return CanineTokenizer()


KINDS = {
    "byte-level": lambda: _byte_level(280),
    "byte-level, larger": lambda: _byte_level(480),
    "byte-level, split as in Llama 3": lambda: _byte_level(330, llama=True),
    "unigram": lambda: _unigram(130),
    "unigram, larger": lambda: _unigram(300),
    "byte fallback": _byte_fallback,
    "bytes": _bytes,
    "characters": _characters,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def ids_of(text, tokenizer):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def merged(ids, tokenizer):
    """The labels of the words, as users come to them: by `Relevance.by_word`."""
    tokens, roles, words = labels(ids, tokenizer)
    scores = np.ones((1, len(ids)))
    settings = {"queries": (0,), "query_tokens": (tokens[0],), "layers": (0,)}
    return list(
        attnflow.Relevance(scores, tuple(tokens), tuple(roles), words=tuple(words), **settings).by_word().tokens
    )


def solid(text):
    """The text without white space, and without the signs that stand for it."""
    return "".join(one for one in text if not one.isspace() and one not in "␣⏎")


@pytest.mark.parametrize("script", TEXTS)
def test_words_are_those_of_the_text_whatever_the_pieces(tokenizer, script):
    text, words = TEXTS[script]
    found = merged(ids_of(text, tokenizer), tokenizer)
    assert [word for word in found if solid(word)] == words


@pytest.mark.parametrize(
    "text", [*ALONE.values(), "🇫🇷🇩🇪 e\u0301", "a\u00a0b\u3000c", " ".join(text for text, _ in TEXTS.values())]
)
def test_merged_words_cover_the_text(tokenizer, text):
    found = merged(ids_of(text, tokenizer), tokenizer)
    if "<unk>" not in "".join(found):
        assert solid("".join(found)) == solid(text)
    assert not any("\ufffd" in word or "\\x" in word for word in found)


def test_any_text_is_covered_by_its_words(tokenizer):
    from hypothesis import given, settings
    from hypothesis import strategies as st

    known = "".join(text for text, _ in TEXTS.values()) + "".join(ALONE.values())

    @settings(max_examples=60, deadline=None)
    @given(st.text(st.sampled_from(known + "'-_#/"), min_size=1, max_size=30), st.data())
    def covered(text, data):
        ids = ids_of(text, tokenizer)
        if not ids:
            return
        found = merged(ids, tokenizer)
        if "<unk>" not in "".join(found):
            assert solid("".join(found)) == solid(text)
        # Where a text is cut, words before the character that was cut are what they were.
        cut = data.draw(st.integers(0, len(ids) - 1))
        words = labels(ids[:cut], tokenizer)[2][:-3]
        assert words == labels(ids, tokenizer)[2][: len(words)]
        assert "\ufffd" not in "".join(merged(ids[cut:], tokenizer))

    covered()


def test_any_bytes_are_read_as_the_words_of_their_text():
    """ByT5 can write every text."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    tokenizer = _bytes()

    @settings(max_examples=200, deadline=None)
    @given(st.text(min_size=1, max_size=20))
    def covered(text):
        found = merged(ids_of(text, tokenizer), tokenizer)
        if not any(name in text for name in ("\\x", "<", "�")):
            assert solid("".join(found)) == solid(text)

    covered()


def test_han_and_hiragana_stay_apart_where_the_tokenizer_splits_them():
    tokenizer = _bytes()
    assert merged(ids_of("我喜欢", tokenizer), tokenizer) == ["我", "喜", "欢"]
    assert merged(ids_of("人々のコーヒー", tokenizer), tokenizer) == ["人々", "の", "コーヒー"]
    assert merged(ids_of("🇫🇷🇩🇪 👍🏽!", tokenizer), tokenizer) == ["🇫🇷", "🇩🇪", "👍🏽", "!"]
    assert merged(ids_of("ภาษา\u200bไทย", tokenizer), tokenizer) == ["ภาษา", "\u200b", "ไทย"]


def test_line_breaks_and_tabs_are_words_of_their_own():
    tokenizer = _bytes()
    assert merged(ids_of("a:\n\n\tb", tokenizer), tokenizer) == ["a", ":", "⏎", "⏎", "\t", "b"]


def test_parts_of_characters_are_shown_as_bytes_and_whole_characters_as_text():
    for tokenizer in (_bytes(), _byte_level(257)):
        tokens, _, words = labels(ids_of("да a", tokenizer), tokenizer)
        assert tokens[:4] == ["\\xd0", "\\xb4", "\\xd0", "\\xb0"]
        assert words[:4] == [0, 0, 0, 0]
    tokenizer = _byte_fallback()
    tokens, _, _ = labels(ids_of("ꙮ", tokenizer), tokenizer)
    assert tokens == ["␣", "\\xea", "\\x99", "\\xae"]


def test_a_text_cut_within_a_character_keeps_its_words():
    tokenizer = _bytes()
    ids = ids_of("привет मस्ते", tokenizer)
    assert merged(ids[1:], tokenizer) == ["\\xbfривет", "मस्ते"]
    assert merged(ids[:-1], tokenizer) == ["привет", "मस्त\\xe0\\xa5"]
    virama = ids_of("मस", tokenizer)
    assert merged(ids_of("मस्ते", tokenizer)[len(virama) :], tokenizer) == ["्ते"]


def test_a_lone_mark_of_a_word_belongs_to_the_word_after_it():
    tokenizer = _unigram(130)
    mark = tokenizer.convert_tokens_to_ids("▁")
    ids = [mark, *ids_of("q", tokenizer)[-1:], mark, tokenizer.eos_token_id, mark]
    tokens, roles, words = labels(ids, tokenizer)
    assert (tokens[0], words) == ("␣", [0, 0, 1, 2, 3])
    assert roles[3] == "special"
    assert merged(ids, tokenizer) == [tokens[1], "␣", "</s>", "␣"]


def test_special_and_added_tokens_are_shown_as_they_are():
    tokenizer = _byte_level(300)
    tokenizer.add_tokens(["<tool>", "Ðé"])
    ids = [0, *ids_of("keys<tool>keysÐé", tokenizer), 0, 0]
    found = merged(ids, tokenizer)
    assert (found[0], found[-2:]) == ("<s>", ["<s>", "<s>"])
    assert found[1:3] == ["keys", "<tool>"]
    assert "Ðé" in labels(ids, tokenizer)[0]


def test_an_empty_piece_and_an_unknown_id_break_nothing():
    from types import SimpleNamespace

    pieces = ["na", "", "ï", "ve", None, ""]
    known = {f"{name}_token_id": None for name in ("bos", "eos", "sep", "cls", "mask", "unk")}
    tokenizer = SimpleNamespace(
        **known,
        all_special_ids=[],
        convert_ids_to_tokens=lambda ids: [pieces[i] for i in ids],
        convert_tokens_to_string="".join,
    )
    tokens, _, words = labels(list(range(6)), tokenizer)
    assert tokens == ["na", "", "ï", "ve", "<4>", ""]
    assert words[:4] == [0, 0, 0, 0]
    assert merged(list(range(4)), tokenizer) == ["naïve"]
    assert labels([], tokenizer) == ([], [], [])


def test_wordpieces_go_by_their_mark(minilm):
    tokenizer = minilm[1]
    ids = tokenizer("Unbelievably, naïve don't 我喜 [UNK] привет 12345")["input_ids"]
    words = ["unbelievably", ",", "naive", "don", "'", "t", "我", "[UNK]", "[UNK]", "привет", "12345"]
    assert merged(ids, tokenizer) == ["[CLS]", *words, "[SEP]"]
    assert merged(ids_of("## #a", tokenizer), tokenizer) == ["#", "#", "#", "a"]


def test_words_of_a_tokenizer_with_end_marks():
    tokenizer = _end_marked()
    ids = ids_of("привет the cabinets, naïve", tokenizer)
    assert not any("</w>" in token for token in labels(ids, tokenizer)[0])
    assert merged(ids, tokenizer) == ["привет", "the", "cabinets", ",", "naïve"]


def test_words_without_a_known_mark_are_the_tokenizers_own():
    from tokenizers import decoders, models, pre_tokenizers, trainers

    names = {"special_tokens": ["[UNK]"], "continuing_subword_prefix": "@@", "show_progress": False}
    model = models.WordPiece(unk_token="[UNK]", continuing_subword_prefix="@@")
    trainer = trainers.WordPieceTrainer(vocab_size=200, **names)
    decoder = decoders.WordPiece(prefix="@@", cleanup=False)
    tokenizer = _fast(model, pre_tokenizers.BertPreTokenizer(), decoder, trainer, unk_token="[UNK]")
    ids = ids_of("the cabinets keys", tokenizer)
    assert len(ids) > 3
    own = tokenizer("the cabinets keys").word_ids()
    assert labels(ids, tokenizer)[2] == own
    # Cut within a word, the ids do not come back from their text, and each is a word.
    inside = own.index(1) + 1
    assert labels(ids[inside:], tokenizer)[2] == list(range(len(ids) - inside))


@pytest.mark.parametrize("size", [300, 480])
def test_english_words_agree_with_the_tokenizers_own(size):
    tokenizer = _byte_level(size)
    encoded = tokenizer("the keys to the cabinets are on a table (no) x y")
    assert labels(encoded["input_ids"], tokenizer)[2] == encoded.word_ids()


def test_labels_of_a_long_text_take_no_time(tokenizer):
    import time

    ids = (ids_of("привет, the keys नमस्ते ", tokenizer) * 999)[:4096]
    start = time.perf_counter()
    labels(ids, tokenizer)
    assert time.perf_counter() - start < 0.5


def test_a_saved_relevance_is_merged_without_its_tokenizer(tmp_path):
    tokenizer = _bytes()
    tokens, roles, words = labels(ids_of("да, нет", tokenizer), tokenizer)
    settings = {"queries": (0,), "query_tokens": (tokens[0],), "layers": (0,)}
    relevance = attnflow.Relevance(
        np.ones((1, len(tokens))), tuple(tokens), tuple(roles), words=tuple(words), **settings
    )
    assert attnflow.Relevance.load(relevance.save(tmp_path / "da.json")).by_word().tokens == ("да", ",", "нет")
