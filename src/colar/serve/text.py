"""An answer's tokens and a chain's thoughts as text.

tokens    ' 3'   '6'   '\\xe2\\x82'   '\\xac'   ' '   '.'       a character may be several tokens
pieces    '3'    '6'   ''           '€'      ''    ' .'      what is kept back comes with a later piece, or never

Thoughts are read as `look/thought.py` has them.

Shape suffixes: K embeddings, V vocabulary, D width.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from colar.engine.request import Event
from colar.look.thought import MOST_TOKENS, NEIGHBOURS, chosen_tokens, group_size, thought_object
from colar.model.latent_lm import LatentLM
from colar.template.template import Template

BROKEN = "\ufffd"
"""A tokenizer's text for bytes that are no character (yet)."""
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte, in the vocabularies of SentencePiece."""
BYTE_LEVEL = {character: byte for byte, character in bytes_to_unicode().items()}


# Tokens


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


# Thoughts


@dataclass(frozen=True)
class Near:
    """One embedding's nearest tokens, best first, and its cosines with tokens that were requested."""

    ids: list[int]
    cosines: list[float]
    requested: list[float]


Wanted = tuple[Tensor, int, list[int]]
"""An embedding (D,), how many nearest tokens, and the tokens whose cosines are requested."""


class Nearest:
    """The tokens nearest to embeddings by cosine, as `look/thought.py` has them, for many callers at once.

    One embedding costs as much as an LM head. All thoughts of one step are therefore computed together. `run` computes
    in another thread; the model's embeddings must not change.
    """

    def __init__(self, lm: LatentLM, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self.lm = lm
        self.run = run
        self._norms_V: Tensor | None = None
        self._wanted: list[Wanted] = []
        self._task: asyncio.Task[list[Near]] | None = None

    async def near(self, embed_D: Tensor, k: int, ids: list[int]) -> Near:
        """The `k` nearest tokens of an embedding, and its cosine with each of `ids`."""
        # A task begins after all callers that are ready now, which are those of the same step.
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        task, place = self._task, len(self._wanted)
        self._wanted.append((embed_D, k, ids))
        # Shielded: one caller may leave, the others still wait.
        return (await asyncio.shield(task))[place]

    async def _work(self) -> list[Near]:
        wanted, self._wanted, self._task = self._wanted, [], None
        found: list[Near] = await self.run(partial(self._find, wanted))
        return found

    @torch.no_grad()
    def _find(self, wanted: Sequence[Wanted]) -> list[Near]:
        vocabulary_VD = self.lm.vocabulary()
        if self._norms_V is None:
            norms_V = torch.linalg.vector_norm(vocabulary_VD, dim=-1, dtype=torch.float32)
            self._norms_V = norms_V.clamp(min=1e-12)
        latents_KD = torch.stack([embed_D.float() for embed_D, _, _ in wanted])
        latents_KD = torch.nn.functional.normalize(latents_KD, dim=-1)
        # Lengths are divided out afterwards: a normalised copy of the vocabulary would need as much memory again.
        cosines_KV = (latents_KD.to(vocabulary_VD.dtype) @ vocabulary_VD.T).float() / self._norms_V
        most = max(k for _, k, _ in wanted)
        best = cosines_KV.topk(min(most, cosines_KV.shape[1]), dim=-1)
        found = []
        for row, (_, k, ids) in enumerate(wanted):
            nearest, cosines = best.indices[row, :k].tolist(), best.values[row, :k].tolist()
            found.append(Near(nearest, cosines, cosines_KV[row, ids].tolist()))
        return found


class ThoughtReader:
    """Reads the thoughts of one answer, in their order. `detailed`: as THOUGHTs too, not as text alone."""

    def __init__(self, lm: LatentLM, nearest: Nearest, params: Any, detailed: bool) -> None:
        self.lm = lm
        self.nearest = nearest
        self.detailed = detailed
        self.size = min(group_size(params), MOST_TOKENS)
        self.count = 0
        self._text = TokenText(lm.template)

    async def read(self, event: Event) -> tuple[str, dict[str, Any] | None]:
        """The text of the next thought, and the THOUGHT if details are wanted."""
        template = self.lm.template
        ids, _ = chosen_tokens(event.token_id, event.info, template.closing_id)
        near = None
        # Chosen tokens are their own text: without details their cosines are not needed.
        if event.embed is not None and (self.detailed or not ids):
            k = max(NEIGHBOURS, self.size) if self.detailed else self.size
            near = await self.nearest.near(event.embed, k, ids)
        if ids:
            text = self._text.add(ids)
        else:
            assert near is not None, "latents that are read are kept"
            # One by one: nearest tokens have no order in which they could be decoded as a text.
            text = "".join(map(template.token, near.ids[: self.size]))
        index = self.count
        self.count += 1
        if not self.detailed or near is None:
            return text, None
        pairs = list(zip(near.ids, near.cosines, strict=True))
        cosines = dict(zip(ids, near.requested, strict=True))
        thought = thought_object(template, index, event.token_id, event.info, pairs, self.size, cosines)
        # A character may be several tokens, of several thoughts.
        return text, {**thought, "text": text}

    def end(self) -> str:
        """The rest of the last tokens: bytes that have become no character."""
        return self._text.end()
