"""Tokens as text, piece by piece: whole characters only, outer white space and stop strings left out.

tokens    ' 3'   '6'   '\\xe2\\x82'   '\\xac'   ' '   '.'       a character may be several tokens
pieces    '3'    '6'   ''           '€'      ''    ' .'      what is kept back comes with a later piece, or never
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from colar.prompts import Template

BROKEN = "\ufffd"
"""What a tokenizer writes for bytes that are no character (yet)."""


class TokenText:
    """Ids in, text out, as soon as it is certain."""

    def __init__(self, template: Template) -> None:
        self.tokenizer = template.tokenizer
        self.ids: list[int] = []
        self._start = 0
        """Tokens from here to `_said` are said already; they are decoded again, since a token's text may depend on
        its neighbour's."""
        self._said = 0

    def add(self, ids: Sequence[int]) -> str:
        """The new text."""
        self.ids += ids
        new = self._new()
        if new.endswith(BROKEN):
            return ""
        self._start, self._said = self._said, len(self.ids)
        return new

    def end(self) -> str:
        """What was kept back: bytes that have become no character."""
        new = self._new()
        self._start = self._said = len(self.ids)
        return new

    def _new(self) -> str:
        before = self._decode(self.ids[self._start : self._said])
        return self._decode(self.ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class AnswerText:
    """The text of an answer: `add` its tokens one by one until `stopped`, then `end` it.

    Without a stop string its pieces are, end to end, `Template.decode` of all tokens.
    """

    def __init__(self, template: Template, stop: Sequence[str] = ()) -> None:
        self.stop = stop
        self.stopped = False
        self._tokens = TokenText(template)
        self._begun = False
        self._kept = ""
        """Text that is not said yet: white space, or the beginning of a stop string."""

    def add(self, token_id: int) -> str:
        """What can be said now."""
        return self._say(self._tokens.add([token_id]), self._unsure)

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
