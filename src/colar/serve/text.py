"""Tokens as text, piece by piece: whole characters only, outer white space and stop strings left out.

tokens    ' 3'   '6'   '\\xe2\\x82'   '\\xac'   ' '   '.'       a character may be several tokens
pieces    '3'    '6'   ''           '€'      ''    ' .'      what is kept back comes with a later piece, or never
offsets   0      1     2            2        3     4         a token begins where its character does
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from colar.template.template import Template

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no character (yet)."""
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, in the vocabularies of SentencePiece."""


def _byte_level() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    table = {chr(byte): byte for byte in visible}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_LEVEL = _byte_level()


def token_bytes(template: Template, token_id: int) -> bytes:
    """What a token adds to a text, in UTF-8; part of a character where it is that. Special tokens add nothing."""
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
    """Ids in, text out, as soon as it is certain."""

    def __init__(self, template: Template) -> None:
        self.tokenizer = template.tokenizer
        self.ids: list[int] = []
        self.pending = ""
        """Whole characters of the tokens that are kept back, since the last one of them ends inside a character."""
        self._start = 0
        """Tokens from here to `_said` are said already; they are decoded again, since a token's text may depend on
        its neighbour's."""
        self._said = 0

    def add(self, ids: Sequence[int]) -> str:
        """The new text."""
        self.ids += ids
        new = self._new()
        if new.endswith(BROKEN):
            self.pending = new.rstrip(BROKEN)
            return ""
        self.pending = ""
        self._start, self._said = self._said, len(self.ids)
        return new

    def end(self) -> str:
        """What was kept back: bytes that have become no character."""
        new = self._new()
        self._start = self._said = len(self.ids)
        return new

    def _new(self) -> str:
        before = _decode(self.tokenizer, self.ids[self._start : self._said])
        return _decode(self.tokenizer, self.ids[self._start :])[len(before) :]


class AnswerText:
    """The text of an answer: `add` its tokens one by one until `stopped`, then `end` it.

    Without a stop string its pieces are, end to end, `Template.decode` of all tokens.
    """

    def __init__(self, template: Template, stop: Sequence[str] = ()) -> None:
        self.stop = stop
        self.stopped = False
        self._tokens = TokenText(template)
        self._begun = False
        self._length = 0
        """Characters of all tokens, as in `offset`."""
        self._kept = ""
        """Text that is not said yet: white space, or the beginning of a stop string."""

    def add(self, token_id: int) -> str:
        """What can be said now."""
        new = self._tokens.add([token_id])
        self._length += len(self._counted(new))
        return self._say(new, self._unsure)

    @property
    def offset(self) -> int:
        """The place in the text where the next token begins, or the character does of which it is a part."""
        return self._length + len(self._counted(self._tokens.pending))

    def _counted(self, new: str) -> str:
        """The new characters without the white space in front of the answer, which is stripped."""
        return new if self._length else new.lstrip()

    def end(self) -> str:
        """What is left. Nothing, where a stop string has ended the answer."""
        return "" if self.stopped else self._say(self._tokens.end(), lambda text: 0)

    def _say(self, new: str, unsure: Callable[[str], int]) -> str:
        text = self._kept + new
        # `Template.decode` strips the whole answer: its front is stripped until something is said.
        if not self._begun:
            text = text.lstrip()
        at = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if at:
            self.stopped = True
            said = text[: min(at)].rstrip()
            self._kept = ""
        else:
            # White space at the end is kept back: it is said with the text behind it, or never.
            sure = text[: len(text) - unsure(text)]
            said = sure.rstrip()
            self._kept = text[len(said) :]
        self._begun = self._begun or bool(said)
        return said

    def _unsure(self, text: str) -> int:
        """How many of the last characters may begin a stop string."""
        most = 0
        for stop in self.stop:
            for n in range(min(len(stop) - 1, len(text)), most, -1):
                if text.endswith(stop[:n]):
                    most = n
                    break
        return most
