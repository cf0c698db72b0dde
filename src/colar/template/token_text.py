"""Tokens as text, as they come: a character may be several tokens.

tokens    ' 3'   '6'   '\\xe2\\x82'   '\\xac'   ' '   '.'
pieces    '3'    '6'   ''           '€'      ''    ' .'      what is kept back comes with a later piece, or never
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from colar.template.template import Template

BROKEN = "\ufffd"
"""A tokenizer's text for bytes that are no character (yet)."""
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, in the vocabularies of SentencePiece."""
BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(template: Template, token_id: int) -> bytes:
    """A token's part of a text, in UTF-8; part of a character for some. Empty for special tokens."""
    # Behind another token: at the beginning of a text some tokenizers leave out a token's space.
    before = _decode(template.tokenizer, [template.separator_id])
    text = _decode(template.tokenizer, [template.separator_id, token_id])[len(before) :]
    if BROKEN not in text:
        return text.encode()
    piece = str(template.tokenizer.convert_ids_to_tokens(token_id))
    fallback = FALLBACK.fullmatch(piece)
    if fallback:
        return bytes.fromhex(fallback[1])
    if all(char in BYTE_LEVEL for char in piece):
        return bytes(BYTE_LEVEL[char] for char in piece)
    return text.encode()


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TokenText:
    """Token ids in, text out, as soon as the characters are complete."""

    def __init__(self, template: Template) -> None:
        self.tokenizer = template.tokenizer
        self.ids: list[int] = []
        self._start = 0
        """Tokens from here to `_sent` are sent already. They are decoded again, because a token's text may depend on
        its neighbour's."""
        self._sent = 0

    def add(self, ids: Sequence[int]) -> str:
        """The new text."""
        self.ids += ids
        new = self._new()
        if new.endswith(BROKEN):
            return ""
        self._start, self._sent = self._sent, len(self.ids)
        return new

    def end(self) -> str:
        """The rest: bytes that have become no character."""
        new = self._new()
        self._start = self._sent = len(self.ids)
        return new

    def _new(self) -> str:
        before = _decode(self.tokenizer, self.ids[self._start : self._sent])
        return _decode(self.tokenizer, self.ids[self._start :])[len(before) :]


class AnswerText:
    """The text of an answer: `add` its tokens one by one until `stopped`, then `end` it.

    Without a stop string its pieces are, end to end, `Template.decode` of all tokens.
    """

    def __init__(self, template: Template, stop: Sequence[str] = ()) -> None:
        self.stop = stop
        self.stopped = False
        self.length = 0
        """Characters of all tokens without the white space in front: where the next token begins in the text."""
        self._tokens = TokenText(template)
        self._kept = ""
        """Text that is not sent yet: white space, or what may be the beginning of a stop string."""
        self._begun = False

    def add(self, token_id: int) -> str:
        """The text that can be sent now."""
        new = self._tokens.add([token_id])
        self.length += len(new if self.length else new.lstrip())
        return self._send(new, max(map(len, self.stop), default=1) - 1)

    def end(self) -> str:
        """The rest; nothing where a stop string has ended the answer."""
        return "" if self.stopped else self._send(self._tokens.end(), 0)

    def _send(self, new: str, keep: int) -> str:
        """The text but for its last `keep` characters and the white space in front of these."""
        text = self._kept + new
        # `Template.decode` strips the whole answer: its front is stripped until something is sent.
        if not self._begun:
            text = text.lstrip()
        places = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        self.stopped = bool(places)
        end = min(places) if places else max(0, len(text) - keep)
        sent = text[:end].rstrip()
        self._kept = text[len(sent) :]
        self._begun = self._begun or bool(sent)
        return sent
