"""Control tokens: EOS, BOS, the separator, chat markers; and `ChatFormat`, the chat template, which writes markers.

Text never becomes a control token, even if it spells one:

    text        2 <eos> ### Task
    ordinary    2| |<eos>| |###| Task                 how tokenizers read it: the answer ends, the reasoning closes
    as text     2| <|eos|>| |##|#| Task               the same text of other tokens

A text is encoded as usual first, and keeps these ids unless a control token is among them. Only then is it encoded
again, with special tokens as text (`split_special_tokens` of transformers). Control tokens that remain are declared
ordinary, or come from the vocabulary itself, as `###` does from merges: each is replaced by the fewest other tokens
that spell it.

A chat template puts texts around the contents of the turns:

    <|im_start|>system\\n{0}<|im_end|>\\n<|im_start|>user\\n{1}<|im_end|>\\n<|im_start|>assistant\\n[<think>\\n]
                        `- text        markers are control tokens                generation prompt  `- opening

It is rendered once for each sequence of roles, with marks in place of the contents, which are text. For contents that
spell no marker, stripped of outer white space, the ids are those of `apply_chat_template`, token for token.

A system message that the template rejects, or leaves out, is put in front of the next user's turn, separated by a
blank line. Earlier turns of an assistant lose their reasoning if the template has `</think>`, as in the templates of
reasoning models.
"""

import copy
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from colar import files

Turn = tuple[str, str]
"""A role and its text."""
Encode = Callable[[str], list[int]]

BYTE = "<0x{:02X}>"
"""A token of one byte, in the vocabularies of SentencePiece."""
SIGN = re.compile(r"[<\[|]")
"""A marker has one of these characters; other added tokens are words."""
DAY = date(2024, 7, 26)
"""Stands for today in templates that name it, so that a prompt does not depend on the day; Llama 3's default."""
TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""A call of transformers' date function, replaced in the template because the function itself cannot be replaced."""
OPEN, CLOSE = "<think>", "</think>"
MOST_TURNS = 64
"""Most turns of a chat whose rendering is cached."""
MOST_CHATS = 1000
"""Most renderings that are cached."""
CONTENT = re.compile("\ue000([0-9]+)\ue001")
"""The mark of a turn's content: private-use characters, which no template contains."""


class ControlTokens:
    """The control tokens of a tokenizer, one of which is the separator.

    They are the special tokens, by name or by declaration, and the added tokens that only a chat template should
    write: those that occur in it and look like a marker. All other added tokens count as text, and so does a special
    token of one character, such as "!" for padding, unless it is BOS, EOS or the separator.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator_id: int) -> None:
        self._tokenizer: Any = tokenizer
        self._needed = {tokenizer.bos_token_id, tokenizer.eos_token_id, separator_id} - {None}
        """Ids that colar itself writes: no text may contain them, even if it cannot be spelled in other tokens."""
        named = {
            token_id
            for token, token_id in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
            if len(token) > 1
        }
        template = str(tokenizer.chat_template or "")
        for token_id, token in tokenizer.added_tokens_decoder.items():
            marker = SIGN.search(token.content) and token.content in template
            if marker or (token.special and len(token.content) > 1):
                named.add(token_id)
        self.ids = frozenset(named | self._needed)
        names = {str(tokenizer.convert_ids_to_tokens(token_id)): token_id for token_id in self.ids}
        self._ids_of_names = names
        self._names = re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
        self._unknown_id: int | None = tokenizer.unk_token_id
        self._unknown = str(tokenizer.unk_token)

    def of(self, ids: list[int]) -> list[int]:
        """The control tokens among some ids, in their order."""
        return [token_id for token_id in ids if token_id in self.ids]

    def among(self, ids: list[int], text: str) -> bool:
        """True if control tokens are among the ids of `text`."""
        # Nearly all texts return here, so this check has to be fast.
        if self.ids.isdisjoint(ids):
            return False
        # The unknown token stands for characters that the tokenizer lacks, unless the text spells it.
        if self._unknown_id is None or self._unknown_id in self._needed:
            return True
        return self.ids.intersection(ids) != {self._unknown_id} or self._unknown in text

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without control tokens. ValueError if the tokenizer cannot write it without one."""
        ids = []
        spells_unknown = self._unknown in text
        others = functools.cache(self.others)
        for token_id in self._as_text(text):
            is_text = token_id not in self.ids or (token_id == self._unknown_id and not spells_unknown)
            ids += [token_id] if is_text else others(token_id)
        return ids

    def encode_within(self, pieces: Iterable[tuple[str, bool]], text_ids: Encode) -> list[int]:
        """Ids of (text, is_layout) pieces, end to end. In a layout's pieces the names of control tokens become these
        tokens; all text between two of them is encoded by `text_ids`."""
        ids: list[int] = []
        text = ""
        for piece, is_layout in pieces:
            for part in self._names.split(piece) if is_layout else [piece]:
                if is_layout and part in self._ids_of_names:
                    ids += [*text_ids(text), self._ids_of_names[part]]
                    text = ""
                else:
                    text += part
        return [*ids, *text_ids(text)]

    def others(self, token_id: int) -> list[int]:
        """The fewest other tokens that spell a control token. If there are none: the token itself unless colar
        writes it, else the unknown token, else ValueError."""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        # The shortest spelling of each prefix of the token, from those of the shorter prefixes.
        ways: list[list[int] | None] = [[]]
        for end in range(1, len(token) + 1):
            found = []
            for start, way in enumerate(ways):
                ids = self._ids_of(token[start:end])
                if way is not None and ids:
                    found.append(way + ids)
            ways.append(min(found, key=len, default=None))
        if ways[-1] is not None:
            return ways[-1]
        if token_id not in self._needed:
            return [token_id]
        if self._unknown_id is not None and self._unknown_id not in self._needed:
            return [self._unknown_id]
        raise ValueError(
            f"this tokenizer can write {token!r} as a control token only, but texts may contain it: "
            "set template.separator to another token where it is the separator, or use another tokenizer"
        )

    def _ids_of(self, piece: str) -> list[int]:
        """The token of this name if it is no control token, else the tokens of a single character; or []."""
        token_id = self._known(piece)
        if token_id is not None:
            return [token_id]
        if len(piece) > 1:
            return []
        ids = [self._known(BYTE.format(byte)) for byte in piece.encode()]
        if None not in ids:
            return [one for one in ids if one is not None]
        # A byte-level vocabulary spells bytes differently: its own pre-tokenizer converts them.
        spelled = self._as_text(piece)
        return spelled if self.ids.isdisjoint(spelled) else []

    def _known(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id in self.ids:
            return None
        # Tokenizers give the unknown token's id for a token that they lack.
        return token_id if self._tokenizer.convert_ids_to_tokens(token_id) == token else None

    def _as_text(self, text: str) -> list[int]:
        """Ids with special tokens read as text; added tokens that are declared ordinary are among them."""
        if not self._tokenizer.is_fast:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
            return list(encoded["input_ids"])
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @functools.cached_property
    def _backend(self) -> Any:
        """A copy that reads special tokens as text; others encode markers by the tokenizer at the same time."""
        backend = copy.deepcopy(self._tokenizer.backend_tokenizer)
        backend.encode_special_tokens = True
        return backend


@dataclass(frozen=True)
class Skeleton:
    """A rendered chat: `pieces` are texts of the template (str) and places of turns (int)."""

    pieces: tuple[str | int, ...]
    controls: list[int]
    """The control tokens of the template's own texts."""
    folded: bool
    """True if system messages are put into the users' turns."""


class ChatFormat:
    """Encoder of turns in the chat format of a tokenizer. ValueError if it has no chat template.

    `raw_ids` encodes a text whose control tokens count, `text_ids` one whose control tokens are text.
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
        """Digest of the template's text, by which a checkpoint detects a different template."""
        self._template = TODAY.sub(lambda call: repr(DAY.strftime(call[2])), template)
        if "strftime_now(" in self._template:
            raise ValueError(
                "the tokenizer's chat template writes today's date in a format that is no text of its own: use "
                "template.format: plain, or another chat template"
            )
        self._skeletons: dict[tuple[str, ...], Skeleton] = {}
        self._drops_reasoning = CLOSE in template
        self.opening_ids: list[int] = []
        """`<think>` and a line break, if the template has them and the generation prompt does not."""
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
        # Control tokens count in the template's texts, but not in the contents.
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
        """The rendered chat of these roles, cached. ValueError if the template rejects them."""
        skeleton = self._skeletons.get(roles)
        if skeleton is None:
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
            skeleton = Skeleton(pieces, self._control.of(self._raw_ids(filled)), folded)
            # A server's clients choose the roles, so neither long chats are kept, nor ever more of them.
            if len(roles) <= MOST_TURNS:
                if len(self._skeletons) >= MOST_CHATS:
                    self._skeletons.clear()
                self._skeletons[roles] = skeleton
        # Not read from the cache, which another thread of a server may have cleared.
        return skeleton

    def _render(self, roles: tuple[str, ...], prompt: bool = True) -> tuple[tuple[str | int, ...], str]:
        """The pieces, and the reason why the template rejects the roles ("" if it does not)."""
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
        split = CONTENT.split(text)
        pieces = tuple(int(part) if i % 2 else part for i, part in enumerate(split))
        there = set(pieces)
        missing = [role for place, role in enumerate(roles) if place not in there]
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
