"""Words: the text that each token stands for, and which tokens are pieces of one word.

Both are told from ids and their tokenizer alone, in one of two ways. Where a tokenizer sets its pieces side by side
(byte-level, sentence-piece, bytes, characters), spaces are among the pieces: words are found in the text, by the same
rules whatever the tokenizer. Where it sets spaces between them, pieces say themselves that they continue a word ("##").
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

from attnflow.trace import Role

_SPACE, _WORD_END, _CONTINUES = "▁", "</w>", "##"

# How byte-level vocabularies write the bytes that are no visible Latin-1 character, in their order: space is Ġ. ByT5
# writes every byte as the Latin-1 character of the same number; the two agree wherever both have one.
_UNSEEN = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
_BYTES = {chr(one): bytes([one]) for one in range(256)} | {chr(256 + n): bytes([one]) for n, one in enumerate(_UNSEEN)}
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")

# Han and Hiragana are written without spaces: what tokenizers make one piece stays one, and no pieces are joined.
_UNSPACED = re.compile("[\u3007\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_MARKS = ("Mn", "Mc", "Me", "Cf")
_PARTS = (*_MARKS, "Cs")
_FLAG_LETTERS = range(0x1F1E6, 0x1F200)
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_THIN_SPACE = "\u200b"
_JOINER = "\u200d"  # what follows it is drawn as one with what stands before it


def read(ids: list[int], roles: Sequence[Role], tokenizer: Any) -> tuple[list[str], list[int]]:
    r"""A readable token for each id, and the number of the word that it belongs to.

    A byte that is no whole character is shown as Python writes it (\xd0), so that tokens joined can be read again.
    Special tokens are words of their own.
    """
    found = tokenizer.convert_ids_to_tokens(ids)
    pieces = [f"<{one}>" if piece is None else str(piece) for one, piece in zip(ids, found, strict=True)]
    side_by_side = _decoded(tokenizer, "a", "b") == "ab" or any(piece.startswith(_SPACE) for piece in pieces)
    given = getattr(tokenizer, "added_tokens_decoder", {})
    plain = [role != "text" or one in given for one, role in zip(ids, roles, strict=True)]
    parts = _bytes(pieces, plain, tokenizer) if side_by_side else []
    starts: list[bool] = []
    for role, run in groupby(roles):
        here = slice(len(starts), len(starts) + len(list(run)))
        if role != "text":
            inside = [True] * len(ids[here])
        elif side_by_side:
            inside = _starts(parts[here])
        else:
            inside = _unmarked(ids[here], pieces[here], tokenizer)
        starts += [True, *inside[1:]]
    tokens = pieces
    if side_by_side:
        shown = [_shown(part.decode("utf-8", "backslashreplace")) for part in parts]
        tokens = [piece if whole else text for piece, whole, text in zip(pieces, plain, shown, strict=True)]
    return tokens, [number - 1 for number in accumulate(starts, initial=0)][1:]


def _decoded(tokenizer: Any, *pieces: str) -> str:
    """What a tokenizer makes of pieces that it may not have; "" if it cannot say."""
    try:
        return str(tokenizer.convert_tokens_to_string(list(pieces)))
    except Exception:  # tokenizers of any make: what they raise is not known
        return ""


def _bytes(pieces: list[str], plain: list[bool], tokenizer: Any) -> list[bytes]:
    """The UTF-8 that each piece stands for, with its spaces; `plain` pieces stand for themselves."""
    of_bytes = _decoded(tokenizer, "Ð", "¿") == "п"
    parts: list[bytes] = []
    ended = False
    for piece, whole in zip(pieces, plain, strict=True):
        text = (" " if ended else "") + (piece if whole else piece.removesuffix(_WORD_END))
        ended = not whole and piece.endswith(_WORD_END)
        if of_bytes and not whole:
            parts.append(b"".join(_BYTES.get(one) or one.encode("utf-8", "surrogatepass") for one in text))
        elif not whole and (byte := _BYTE_PIECE.fullmatch(text)):
            parts.append(bytes.fromhex(byte[1]))
        else:
            parts.append((text if whole else text.replace(_SPACE, " ")).encode("utf-8", "surrogatepass"))
    return parts


def _shown(text: str) -> str:
    return text.strip() or text.replace(" ", "␣").replace("\n", "⏎")


def _starts(parts: list[bytes]) -> list[bool]:
    """Whether a word starts at the start of each part of a text. An empty part starts none."""
    text = b"".join(parts).decode("utf-8", "surrogateescape")
    lengths = [1 if "\udc80" <= one <= "\udcff" else len(one.encode()) for one in text]
    found = dict(zip(accumulate(lengths, initial=0), word_starts(text), strict=False))
    places = accumulate(map(len, parts), initial=0)
    return [bool(part) and found.get(place, False) for place, part in zip(places, parts, strict=False)]


def word_starts(text: str) -> list[bool]:
    """Whether a word starts at each character.

    Letters and digits join those before them, across the marks, joiners and formatting characters that are part of
    what they follow, much as in Unicode's rules for words (UAX 29); punctuation and symbols stand alone. Spaces belong
    to the word after them, other white space to none.
    """
    starts: list[bool] = []
    before, base, flags = "\n", "\n", 0  # base: the last character that is no mark; flags: flag letters up to it
    for one in text.replace(_THIN_SPACE, "\n"):
        kind = unicodedata.category(one)
        flag = ord(one) in _FLAG_LETTERS
        mark = kind in _MARKS or ord(one) in _SKIN_TONES
        if one.isspace() or before.isspace():
            starts.append(one.isspace() or unicodedata.category(before) != "Zs")
        elif mark or before == _JOINER or (flag and flags % 2):
            starts.append(False)
        else:
            alone = kind != "Lm" and (_UNSPACED.match(base) or _UNSPACED.match(one))
            starts.append(not (_goes_on(base) and _goes_on(one)) or bool(alone))
        if not mark or before.isspace():
            base, flags = one, flags + 1 if flag else 0
        before = one
    return starts


def _goes_on(one: str) -> bool:
    """Whether it is a letter or a digit, or what a text that was cut has of one: a mark, or bytes."""
    return one.isalnum() or unicodedata.category(one) in _PARTS


def _unmarked(ids: list[int], pieces: list[str], tokenizer: Any) -> list[bool]:
    """Whether a word starts at each piece, where spaces are not among the pieces.

    By the mark of WordPiece. Where there is none, by the tokenizer's own word ids, if the text that the ids stand for
    gives the same ids again; else each piece is a word.
    """
    marked = [piece.startswith(_CONTINUES) for piece in pieces]
    if not any(marked) and getattr(tokenizer, "is_fast", False) and tokenizer.backend_tokenizer.pre_tokenizer:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        again = tokenizer(text, add_special_tokens=False, verbose=False)
        if again["input_ids"] == ids:
            own = again.word_ids()
            return [number == 0 or own[number] != own[number - 1] for number in range(len(ids))]
    return [not mark for mark in marked]
