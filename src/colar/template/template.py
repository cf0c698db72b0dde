"""`Template`: how a problem becomes token ids, the same in training and at inference.

    question segment                          reasoning            answer segment
    [BOS] question text (Thinking speed: 2) ### [steps or latents] ### answer EOS
                                            `-- one token each --'

Every segment (and every reasoning step) is tokenised by itself and the ids are concatenated. So no token straddles a
border, and a step can be dropped or compressed without changing its neighbours. BOS is there where the tokenizer has
one. The template is saved with the checkpoint: a model is prompted as it was trained.

With `format: chat` the question segment is a chat in the tokenizer's own format (`chat.py`), and the token that ends a
turn takes the place of EOS:

    [turns before] user's turn with the question (Thinking speed: 2), generation prompt ### [...] ### answer END

A checkpoint that others trained (`colar import`) may have no BOS, white space at the ends of its layout, or a token of
its own that closes the reasoning: `Borders`.

Questions, steps and answers are text: a "<eos>" or a "###" in one of them is encoded without the control token of
that name (`control_tokens.py`). Templates of the first releases encode it as the control token, as their models were
trained.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from string import Formatter
from typing import Any, Literal, get_args

from transformers import AddedToken, PreTrainedTokenizerBase

from colar.checks import check_choice, check_holds
from colar.template.chat import ChatFormat, Turn
from colar.template.control_tokens import ControlTokens

Format = Literal["plain", "chat"]
CACHED = 50_000
"""Texts whose ids are cached: steps recur between rows, rows between epochs. When there are more, all are dropped."""
LONGEST_CACHED = 1000
"""Characters of a cached text."""


@dataclass(frozen=True)
class TemplateConfig:
    """The texts of the layout."""

    question: str = "{question} {speed}"
    """Text before the first separator; `{speed}` is filled by the method's prompt ("" for most)."""
    step_joiner: str = " "
    """Text before every reasoning step but the first."""
    separator: str = "###"
    """Opens and closes the reasoning; added to the tokenizer where it is not one token."""
    format: Format = "plain"
    """plain: the question as it is. chat: the turns and the question by the tokenizer's chat template."""

    def __post_init__(self) -> None:
        check_choice("template.format", self.format, get_args(Format))
        for name in ("question", "step_joiner", "separator"):
            value = getattr(self, name)
            check_holds(f"template.{name}", isinstance(value, str), value, "text")
        if "{question}" not in self.question or "{speed}" not in self.question:
            raise ValueError(
                f"template.question must contain {{question}} and {{speed}}, got {self.question!r}"
            )
        # `format` is what fills the layout later: other braces must fail here, not at the first row.
        try:
            self.question.format(question="", speed="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"template.question {self.question!r} has braces besides {{question}} and {{speed}}; "
                "write {{ and }} for braces that are text"
            ) from error
        if not self.separator.strip():
            raise ValueError("template.separator must not be empty")


@dataclass(frozen=True)
class Borders:
    """The borders of a layout that others trained. White space at the ends of its `question` is part of it."""

    closing: str
    """The token that closes the reasoning; `separator` opens it."""
    bos: bool
    """Begin with the tokenizer's BOS."""
    answer: str = ""
    """Text that answers begin with."""


class TemplateKind(IntEnum):
    """The kinds of template. Their number is "version" in template.json: a release of colar refuses those it lacks."""

    TEXT_SPELLS_CONTROLS = 1
    """Plain, of the first releases: a text that spells a control token becomes that token."""
    PLAIN = 2
    CHAT = 3
    BORDERS = 4
    """Plain, with `Borders`."""


class Template:
    """Text to ids and back for one tokenizer.

    `separator_added` says that the separator is a new token whose embedding row has to be trained. Building a template
    may add that token to the tokenizer. `text_spells_controls` is for checkpoints that were trained so: `TemplateKind`.
    ValueError where the tokenizer has no EOS, or no chat template for the format `chat`.
    """

    def __init__(
        self,
        config: TemplateConfig,
        tokenizer: PreTrainedTokenizerBase,
        borders: Borders | None = None,
        text_spells_controls: bool = False,
    ) -> None:
        self.config = config
        self.borders = borders
        self.tokenizer = tokenizer
        self.n_known: int | None = None
        """Tokens that the model has weights for, added ones left out; None until the model is known."""
        self._cached: dict[str, array[int]] = {}
        self._ids_of_tokens: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._ids_matching: dict[str, tuple[int, ...]] = {}
        _whole_texts(tokenizer)
        self._control: ControlTokens | None = None

        # The separator must be one token: the LM head chooses it in one step to stop thinking.
        ids = self._raw_ids(config.separator)
        self.separator_added = len(ids) != 1 or ids[0] == tokenizer.unk_token_id
        if self.separator_added:
            # Not special: a decoded text shows it, as it does where the tokenizer has it of its own.
            tokenizer.add_tokens([AddedToken(config.separator, normalized=False, special=False)])
            ids = self._raw_ids(config.separator)
        if not ids:
            raise ValueError(f"the tokenizer makes no token of the separator {config.separator!r}")
        self.separator_id: int = ids[-1]
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token: answers could not end")
        self.bos_id: int | None = tokenizer.bos_token_id
        self.closing_id = self.separator_id
        """Closes the reasoning."""
        if borders is not None:
            (self.closing_id,) = self.token_ids((borders.closing,), "template.closing")
            self.bos_id = self.bos_id if borders.bos else None
        self.eos_id: int = tokenizer.eos_token_id
        self._question_controls = self._joiner_controls = 0
        if not text_spells_controls:
            self._spell_no_control()
        self.chat: ChatFormat | None = None
        if config.format == "chat":
            assert self._control is not None
            if self._question_controls:
                raise ValueError(
                    f"template.question {config.question!r} has control tokens, which the chat template writes: leave "
                    "them out, or set template.format: plain"
                )
            self.chat = ChatFormat(tokenizer, self._control, self._raw_ids, self._text_ids)
            if self.chat.end_id is not None:
                self.eos_id = self.chat.end_id

    def _spell_no_control(self) -> None:
        """Encode texts without control tokens from here on. ValueError where the tokenizer cannot write the tokens
        that open and close the reasoning in others: the first text that contains one would fail."""
        border_ids = {self.separator_id, self.closing_id}
        control = ControlTokens(self.tokenizer, border_ids)
        for token_id in border_ids - self.tokenizer.added_tokens_decoder.keys():
            control.others(token_id)
        # A layout may have chat markers: these are the only control tokens.
        self._question_controls = control.count(
            self._raw_ids(self.config.question.format(question="", speed=""))
        )
        self._joiner_controls = control.count(self._raw_ids(self.config.step_joiner))
        self._control = control

    @property
    def kind(self) -> TemplateKind:
        """The kind that template.json names."""
        if self.borders is not None:
            return TemplateKind.BORDERS
        if self.chat is not None:
            return TemplateKind.CHAT
        return TemplateKind.TEXT_SPELLS_CONTROLS if self._control is None else TemplateKind.PLAIN

    def question(
        self, question: str, speed: str = "", cached: bool = True, context: Sequence[Turn] = ()
    ) -> list[int]:
        """Ids up to and including the opening separator.

        With `cached` a text that comes again is tokenised once, as a training row's is in every epoch. `context` are
        the turns before the question. In the plain format their texts stand before it, without the roles, a blank line
        behind each.
        """
        if self.chat is None and context:
            question = "\n\n".join([*(turn.strip() for _, turn in context if turn.strip()), question.strip()])
        text = self.config.question.format(question=question.strip(), speed=speed)
        text = text if self.borders else text.strip()
        if self.chat is not None:
            ids = self.chat.encode([*context, ("user", text)])
            self.require_known(ids)
            return [*ids, self.separator_id]
        bos = [] if self.bos_id is None else [self.bos_id]
        if self._question_controls:
            ids = self._layout_ids(text, question.strip(), speed)
        else:
            ids = self._cached_text_ids(text) if cached else self._text_ids(text)
        return [*bos, *ids, self.separator_id]

    def steps(self, steps: tuple[str, ...]) -> list[list[int]]:
        """Ids of each reasoning step. ValueError where a step has the token that closes the reasoning: the joiner
        contains it, or the step does where texts spell control tokens."""
        segments = []
        for i, step in enumerate(steps):
            # The joiner belongs to the step after it, so that a step that is dropped takes its joiner along.
            if i and self._joiner_controls:
                ids = self._raw_ids(self.config.step_joiner) + self._cached_text_ids(step)
            else:
                ids = self._cached_text_ids(self.config.step_joiner + step if i else step)
            if self.closing_id in ids:
                closing = self.borders.closing if self.borders else self.config.separator
                raise ValueError(f"the separator {closing!r} occurs in the reasoning step {step!r}")
            segments.append(ids)
        return segments

    def answer(self, answer: str) -> list[int]:
        """Ids from the closing separator to EOS, both included."""
        before = self.borders.answer if self.borders else ""
        return [self.closing_id, *self._cached_text_ids(before + answer.strip()), self.eos_id]

    def decode(self, ids: list[int]) -> str:
        """The text of generated ids, outer white space stripped.

        Special tokens are left out: none that was generated passes for text. The separator is shown, because "1###2"
        without it would be another number.
        """
        # Tidying spaces would change an answer: "1 , 2" would come back as "1, 2".
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).strip()

    def token(self, token_id: int) -> str:
        """One token as a person reads it."""
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))

    def token_ids(self, tokens: tuple[str, ...], key: str) -> tuple[int, ...]:
        """The ids of single tokens, as the vocabulary spells them. ValueError names the key that asked for one that
        there is not."""
        if tokens not in self._ids_of_tokens:
            vocabulary = self.tokenizer.get_vocab()
            for token in tokens:
                if token not in vocabulary:
                    raise ValueError(f"{key}: this tokenizer has no token {token!r}")
            # A whole vocabulary is copied to look: once, not at every thought.
            self._ids_of_tokens[tokens] = tuple(vocabulary[token] for token in tokens)
        return self._ids_of_tokens[tokens]

    def ids_matching(self, pattern: str) -> tuple[int, ...]:
        """The ids of all tokens that match a regular expression whole, as the vocabulary spells them but for a space
        before them; ascending."""
        if pattern not in self._ids_matching:
            vocabulary = self.tokenizer.get_vocab()
            ids = [i for token, i in vocabulary.items() if re.fullmatch(pattern, token.lstrip("Ġ▁ "))]
            # A whole vocabulary is searched: once, not for every row.
            self._ids_matching[pattern] = tuple(sorted(ids))
        return self._ids_matching[pattern]

    def to_json(self) -> dict[str, Any]:
        """The layout, and the ids by which `from_json` knows its tokenizer again."""
        texts = asdict(self.config)
        chat = {}
        if self.chat is None:
            # As earlier versions wrote it, which read it still.
            del texts["format"]
        else:
            chat = {"chat_digest": self.chat.digest}
        borders = {} if self.borders is None else {"borders": asdict(self.borders)}
        return {
            "version": int(self.kind),
            **texts,
            **chat,
            **borders,
            "separator_id": self.separator_id,
            "separator_added": self.separator_added,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
        }

    @staticmethod
    def is_chat(saved: dict[str, Any]) -> bool:
        """True if the saved template has a place for a system message and earlier turns."""
        return bool(saved.get("version") == TemplateKind.CHAT)

    @classmethod
    def from_json(cls, saved: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Template:
        """The saved template. ValueError when it is of a newer version or does not fit `tokenizer`."""
        if saved.get("version") not in list(TemplateKind):
            known = ", ".join(map(str, TemplateKind))
            raise ValueError(
                f"template version {saved.get('version')!r} is not one of {known}, which this colar reads"
            )
        kind = TemplateKind(saved["version"])
        texts = {key: saved[key] for key in ("question", "step_joiner", "separator")}
        config = TemplateConfig(**texts, format="chat" if kind is TemplateKind.CHAT else "plain")
        borders = None
        if kind is TemplateKind.BORDERS:
            held: Any = saved.get("borders")
            is_complete = isinstance(held, dict) and held.keys() == {"closing", "bos", "answer"}
            check_holds("template.borders", is_complete, held, "closing, bos and answer")
            borders = Borders(**held)
        template = cls(config, tokenizer, borders, kind is TemplateKind.TEXT_SPELLS_CONTROLS)
        if template.chat is not None and template.chat.digest != saved.get("chat_digest"):
            raise ValueError(
                f"the checkpoint was trained with another chat template (digest {saved.get('chat_digest')}) than its "
                f"tokenizer has (digest {template.chat.digest}): put chat_template.jinja back as it was saved"
            )
        if saved.get("number_tokens") is not None:
            raise ValueError(
                f"trained with model.number_tokens {saved['number_tokens']!r}, an option that this version no longer "
                "has; load it with the version that trained it, or train again without"
            )
        # Ids that moved would be read without an error and mean other tokens.
        for key in ("separator_id", "bos_id", "eos_id"):
            if getattr(template, key) != saved.get(key):
                raise ValueError(
                    f"the checkpoint was trained with {key} = {saved.get(key)!r}, but its tokenizer gives "
                    f"{getattr(template, key)} (separator {template.config.separator!r}): "
                    "the tokenizer files do not belong to this checkpoint"
                )
        # The saved tokenizer has the added token already, so `cls` took it for one of its own.
        template.separator_added = saved["separator_added"]
        return template

    # Encoders, each on top of the one before it
    #
    #     _raw_ids            as the tokenizer does: names of control tokens become these tokens    layouts, markers
    #     _text_ids           without control tokens, even if the text spells one                   requests, chats
    #     _cached_text_ids    the same, once for each text                                          training rows
    #     _layout_ids         a question whose layout has control tokens of its own, for instance chat markers

    def _raw_ids(self, text: str) -> list[int]:
        """Ids as the tokenizer makes them: the name of a control token becomes that token."""
        if not text:
            return []
        # The same ids without the batching around them: three times as fast.
        if self.tokenizer.is_fast:
            return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text_ids(self, text: str) -> list[int]:
        """Ids of a text without control tokens, even if it spells one. ValueError for a token that the model lacks."""
        ids = self._raw_ids(text)
        if self._control is not None and self._control.among(ids, text):
            ids = self._control.encode(text)
        self.require_known(ids)
        return ids

    def _cached_text_ids(self, text: str) -> list[int]:
        """`_text_ids` of a text that may come again."""
        cached = self._cached.get(text)
        if cached is not None:
            return cached.tolist()
        ids = self._text_ids(text)
        if len(text) <= LONGEST_CACHED:
            if len(self._cached) >= CACHED:
                self._cached.clear()
            self._cached[text] = array("i", ids)
        return ids

    def _layout_ids(self, text: str, question: str, speed: str) -> list[int]:
        """Ids of a question `text` (layout, question and speed) whose layout has control tokens of its own."""
        assert self._control is not None
        ids = self._raw_ids(text)
        if self._control.count(ids) == self._question_controls:
            self.require_known(ids)
            return ids
        # The question spells some too: the layout's markers are encoded by themselves, and all between them as text.
        # By turns: text, a literal with markers, text, ...
        pieces = [""]
        for literal, field, _, _ in Formatter().parse(self.config.question):
            if self._control.among(self._raw_ids(literal), literal):
                pieces += [literal, ""]
            else:
                pieces[-1] += literal
            pieces[-1] += {"question": question, "speed": speed}.get(field or "", "")
        if self.borders is None:
            # As `question` strips the text. A literal with markers is never empty.
            first, last = (0 if pieces[0].strip() else 1), (-1 if pieces[-1].strip() else -2)
            if len(pieces) > 1:
                pieces[0], pieces[-1] = pieces[0].lstrip(), pieces[-1].rstrip()
                pieces[first], pieces[last] = pieces[first].lstrip(), pieces[last].rstrip()
        ids = []
        for place, piece in enumerate(pieces):
            ids += self._raw_ids(piece) if place % 2 else self._cached_text_ids(piece)
        return ids

    def require_known(self, ids: list[int]) -> None:
        """ValueError for a token that the model has no weights for: on a CUDA device it would end the process."""
        if self.n_known is None or max(ids, default=0) < self.n_known:
            return
        for token_id in ids:
            added = self.separator_added and token_id == self.separator_id
            if token_id >= self.n_known and not added:
                raise ValueError(
                    f"the token {self.token(token_id)!r} has id {token_id}, and the model's embedding only "
                    f"{self.n_known} rows: the model cannot read it"
                )


def _whole_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Have a fast tokenizer cut nothing off and fill nothing up.

    A call that truncates or pads leaves that in the tokenizer, and `save_pretrained` in its file.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
