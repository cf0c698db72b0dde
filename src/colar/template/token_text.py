"""Tokens of the engine's events as text, for `serve` and `ask.py`: a character may be several tokens."""

from collections.abc import Sequence
from typing import Any

from colar.template.template import Template

BROKEN = "\ufffd"
"""A tokenizer's text for bytes that are no character (yet)."""


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

    tokens    ' 3'   '6'   '\\xe2\\x82'   '\\xac'   ' '   '.'
    pieces    '3'    '6'   ''           '€'      ''    ' .'      what is held back comes with a later piece, or never

    Without a stop string its pieces are, end to end, `Template.decode` of all tokens.
    """

    def __init__(self, template: Template, stop: Sequence[str] = ()) -> None:
        self.stop = stop
        self.stopped = False
        self._tokens = TokenText(template)
        self._held_back = ""
        """Text that is not sent yet: white space, or what may be the beginning of a stop string."""
        self._begun = False

    def add(self, token_id: int) -> str:
        """The text that can be sent now."""
        new = self._tokens.add([token_id])
        return self._send(new, max(map(len, self.stop), default=1) - 1)

    def end(self) -> str:
        """The rest; nothing where a stop string has ended the answer."""
        return "" if self.stopped else self._send(self._tokens.end(), 0)

    def _send(self, new: str, keep: int) -> str:
        """The text but for its last `keep` characters and the white space in front of these."""
        text = self._held_back + new
        # `Template.decode` strips the whole answer: its front is stripped until something is sent.
        if not self._begun:
            text = text.lstrip()
        places = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        self.stopped = bool(places)
        end = min(places) if places else max(0, len(text) - keep)
        sent = text[:end].rstrip()
        self._held_back = text[len(sent) :]
        self._begun = self._begun or bool(sent)
        return sent
