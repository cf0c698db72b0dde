"""Control tokens: EOS, BOS, the separator, chat markers. Text never becomes one of them, even if it spells one.

    text        2 <eos> ### Task
    ordinary    2| |<eos>| |###| Task                 how tokenizers read it: the answer ends, the reasoning closes
    as text     2| <|eos|>| |##|#| Task               the same text of other tokens

A text is encoded as always first, and this is what it gets unless a control token is among its ids. Only then it is
encoded again, with special tokens as text (`split_special_tokens` of transformers). What is left is declared ordinary,
or comes from the vocabulary itself, as `###` does from merges: the fewest other tokens of the same text replace it.
"""

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

BYTE = "<0x{:02X}>"
"""A token of one byte, in the vocabularies of SentencePiece."""
MARKS = re.compile(r"[<\[|]")
"""A marker has one of these; other added tokens are words."""


class ControlTokens:
    """The control tokens of a tokenizer, one of which is the separator.

    They are the special tokens, by name or by declaration, and the added tokens that only a chat template should
    write: those that stand in it and look like a marker. All other added tokens are words, and text. So is a special
    token of one character, such as "!" for padding, unless it is BOS, EOS or the separator.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator_id: int) -> None:
        self._tokenizer: Any = tokenizer
        self._needed = {tokenizer.bos_token_id, tokenizer.eos_token_id, separator_id} - {None}
        """Ids that colar itself writes: no text may contain them, even one that cannot be spelled otherwise."""
        named = {
            token_id
            for token, token_id in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
            if len(token) > 1
        }
        template = str(tokenizer.chat_template or "")
        for token_id, token in tokenizer.added_tokens_decoder.items():
            marker = MARKS.search(token.content) and token.content in template
            if marker or (token.special and len(token.content) > 1):
                named.add(token_id)
        self.ids = frozenset(named | self._needed)
        names = {str(tokenizer.convert_ids_to_tokens(token_id)): token_id for token_id in self.ids}
        self._ids_of_names = names
        self._names = re.compile("(" + "|".join(map(re.escape, sorted(names, key=len, reverse=True))) + ")")
        self._unknown_id: int | None = tokenizer.unk_token_id
        self._unknown = str(tokenizer.unk_token)
        self._backend: Any = None

    def of(self, ids: list[int]) -> list[int]:
        """The control tokens among some ids, in their order."""
        return [token_id for token_id in ids if token_id in self.ids]

    def among(self, ids: list[int], text: str) -> bool:
        """True if control tokens are among the ids of `text`."""
        # Nearly all texts end here: this has to be fast.
        if self.ids.isdisjoint(ids):
            return False
        # The unknown token stands for characters that the tokenizer lacks, unless the text spells it.
        if self._unknown_id is None or self._unknown_id in self._needed:
            return True
        return self.ids.intersection(ids) != {self._unknown_id} or self._unknown in text

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without control tokens. ValueError where the tokenizer cannot write it without one."""
        ids = []
        spells_unknown = self._unknown in text
        for token_id in self._as_text(text):
            is_text = token_id not in self.ids or (token_id == self._unknown_id and not spells_unknown)
            ids += [token_id] if is_text else self.others(token_id)
        return ids

    def encode_within(
        self, pieces: Iterable[tuple[str, bool]], text_ids: Callable[[str], list[int]]
    ) -> list[int]:
        """Ids of texts end to end, each with True where the names of control tokens in it are these tokens, as a
        layout's are: all between two of them is encoded by `text_ids`."""
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
        """The fewest tokens that make the text of a control token. ValueError where there are none."""
        token = str(self._tokenizer.convert_ids_to_tokens(token_id))
        # The shortest way to each place in the token, from those to the places before it.
        ways: list[list[int] | None] = [[]]
        for end in range(1, len(token) + 1):
            shortest: list[int] | None = None
            for start in range(end):
                way = ways[start]
                ids = None if way is None else self._ids_of(token[start:end])
                if (
                    way is not None
                    and ids is not None
                    and (shortest is None or len(way + ids) < len(shortest))
                ):
                    shortest = way + ids
            ways.append(shortest)
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

    def _ids_of(self, piece: str) -> list[int] | None:
        """The token of this name that is none of the control tokens, or the bytes of one character."""
        token_id = self._known(piece)
        if token_id is not None:
            return [token_id]
        if len(piece) > 1:
            return None
        ids = [self._known(BYTE.format(byte)) for byte in piece.encode()]
        return None if None in ids else [one for one in ids if one is not None]

    def _known(self, token: str) -> int | None:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        # Tokenizers give the unknown token's id for a token that there is not.
        if (
            token_id is None
            or token_id in self.ids
            or self._tokenizer.convert_ids_to_tokens(token_id) != token
        ):
            return None
        return int(token_id)

    def _as_text(self, text: str) -> list[int]:
        """Ids with special tokens read as text; added tokens that are declared ordinary are among them."""
        if not self._tokenizer.is_fast:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
            return list(encoded["input_ids"])
        if self._backend is None:
            # A copy: others read markers by the tokenizer at the same time.
            self._backend = copy.deepcopy(self._tokenizer.backend_tokenizer)
            self._backend.encode_special_tokens = True
        return list(self._backend.encode(text, add_special_tokens=False).ids)
