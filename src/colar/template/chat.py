"""`ChatFormat`: the tokenizer's chat template, as texts around the contents of the turns.

    <|im_start|>system\\n{0}<|im_end|>\\n<|im_start|>user\\n{1}<|im_end|>\\n<|im_start|>assistant\\n[<think>\\n]
                        `- text        markers are control tokens                generation prompt  `- opening

The template is rendered once for each sequence of roles, with marks in place of the contents, which are text: what
spells a marker stays text. For all other contents, stripped of outer white space, the ids are those of
`apply_chat_template`, token for token.

A system message that the template rejects, or leaves out, stands in front of the next user's turn, a blank line
between. Earlier turns of an assistant lose their reasoning where the template has `</think>`, as reasoning models'
templates do it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from colar import files
from colar.template.control_tokens import ControlTokens

Turn = tuple[str, str]
"""A role and its text."""
Encode = Callable[[str], list[int]]

DAY = date(2024, 7, 26)
"""Stands for today in templates that name it, so that a prompt does not depend on the day; Llama 3's default."""
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""Transformers' function for it, with a format: it accepts no function in place of its own."""
OPEN, CLOSE = "<think>", "</think>"
MARK = re.compile("\ue000([0-9]+)\ue001")
"""Of the content of a turn: private-use characters, which no template contains."""


@dataclass(frozen=True)
class Skeleton:
    """A rendered chat: `pieces` are texts of the template (str) and places of turns (int)."""

    pieces: tuple[str | int, ...]
    controls: list[int]
    """The control tokens of the template's own texts."""
    folded: bool
    """True if system messages stand in the users' turns."""


class ChatFormat:
    """Ids of turns in the format of a tokenizer. ValueError where it has no chat template.

    `raw_ids` encodes a text whose control tokens count, `text_ids` of one whose control tokens are text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens, raw_ids: Encode, text_ids: Encode
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "template.format: chat needs a tokenizer with a chat template, and this one has none: use plain, or "
                "an instruct model"
            )
        self._tokenizer: Any = tokenizer
        self._control = control
        self._raw_ids = raw_ids
        self._text_ids = text_ids
        template = str(tokenizer.get_chat_template())
        self.digest = files.digest([template])
        """Of the template's text, by which a checkpoint knows it again."""
        self._template = TODAY.sub(lambda call: repr(DAY.strftime(call[2])), template)
        if "strftime_now(" in self._template:
            raise ValueError(
                "the tokenizer's chat template writes today's date in a format that is no text of its own: use "
                "template.format: plain, or another chat template"
            )
        self._skeletons: dict[tuple[str, ...], Skeleton] = {}
        self._drops_reasoning = CLOSE in template
        self.opening_ids: list[int] = []
        """`<think>` and a line break, where the template has them and the generation prompt does not."""
        last = self._skeleton(("user",)).pieces[-1]
        if OPEN in template and CLOSE in template and OPEN not in str(last):
            self.opening_ids = raw_ids(f"{OPEN}\n")
        self.end_id = self._end()

    def encode(self, turns: Sequence[Turn]) -> list[int]:
        """Ids of the turns, of which the last is the user's, with the generation prompt and the opening."""
        skeleton = self._skeleton(tuple(role for role, _ in turns))
        if skeleton.folded:
            turns = _folded(turns)
        contents = [self._content(role, text) for role, text in turns]
        # Of the template's texts the control tokens count, of the contents none.
        pieces = [
            (contents[piece], False) if isinstance(piece, int) else (piece, True) for piece in skeleton.pieces
        ]
        ids = self._raw_ids("".join(text for text, _ in pieces))
        if self._control.of(ids) != skeleton.controls:
            ids = self._control.encode_within(pieces, self._text_ids)
        return [*ids, *self.opening_ids]

    def _content(self, role: str, text: str) -> str:
        if role == "assistant" and self._drops_reasoning:
            text = text.rpartition(CLOSE)[2]
        return text.strip()

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton:
        """The rendered chat of these roles, cached. ValueError where the template rejects them."""
        if roles not in self._skeletons:
            pieces, refusal = self._render(roles)
            folded = bool(refusal) and "system" in roles
            if folded:
                pieces, refusal = self._render(tuple(role for role, _ in _folded([(r, "") for r in roles])))
            if refusal:
                raise ValueError(
                    f"the tokenizer's chat template rejects the turns {', '.join(roles)}: {refusal}; "
                    "bring them into its order, or use template.format: plain"
                )
            filled = "".join("x" if isinstance(piece, int) else piece for piece in pieces)
            self._skeletons[roles] = Skeleton(pieces, self._control.of(self._raw_ids(filled)), folded)
        return self._skeletons[roles]

    def _render(self, roles: tuple[str, ...], prompt: bool = True) -> tuple[tuple[str | int, ...], str]:
        """The pieces, and why the template rejects the roles ("" where it does not)."""
        turns = [{"role": role, "content": f"\ue000{place}\ue001"} for place, role in enumerate(roles)]
        try:
            text = self._tokenizer.apply_chat_template(
                turns,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=prompt,
                enable_thinking=True,
            )
        except (TemplateError, TypeError) as error:
            return (), " ".join(str(error).split())
        split = MARK.split(text)
        pieces = tuple(int(part) if i % 2 else part for i, part in enumerate(split))
        missing = [role for place, role in enumerate(roles) if place not in pieces]
        return pieces, f"it leaves out the turn of the {missing[0]}" if missing else ""

    def _end(self) -> int | None:
        """The control token behind an assistant's answer; None where the template writes none."""
        pieces, refusal = self._render(("user", "assistant"), prompt=False)
        ends = [] if refusal else self._control.of(self._raw_ids(str(pieces[-1])))
        return ends[0] if ends else None


def _folded(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with each system message in front of the user's turn that follows it."""
    folded: list[Turn] = []
    waiting: list[str] = []
    for role, text in turns:
        if role == "system":
            waiting.append(text.strip())
            continue
        if role == "user":
            text = "\n\n".join([*waiting, text.strip()])
            waiting = []
        folded.append((role, text))
    return folded
