"""`Template`: the layout of a problem as token ids, the same in training and at inference.

    question segment                          reasoning            answer segment
    [BOS] question text (Thinking speed: 2) ### [steps or latents] ### answer EOS
                                            `-- one token each --'

Every segment (and every reasoning step) is tokenised in isolation and the ids are concatenated, so that no token
straddles a border, and a step can be dropped or compressed without changing its neighbours. BOS is added if the
tokenizer has one. The template is saved with the checkpoint, so that a model is prompted as it was trained.

With `format: chat` the question segment is a chat by the tokenizer's chat template, and the token that ends a turn
takes the place of EOS:

    [turns before] user's turn with the question (Thinking speed: 2), generation prompt ### [...] ### answer END

Questions, steps and answers are text: a "<eos>" or a "###" in one of them is encoded without the control token of
that name (`control_tokens.py`, which also renders the chat).
"""

import itertools
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from transformers import PreTrainedTokenizerBase

from colar.checks import check_choice, check_holds
from colar.template.control_tokens import ChatFormat, ControlTokens, Turn

Format = Literal["plain", "chat"]
VERSIONS: dict[Format, int] = {"plain": 2, "chat": 3}
"""The "version" in template.json: a release of colar rejects those that it does not know."""
CACHED = 50_000
"""Most texts whose ids are cached: steps recur between rows, rows between epochs. A full cache is cleared."""
LONGEST_CACHED = 1000
"""Most characters of a cached text, or of a cached question with the turns before it."""
SEPARATORS = ("###", "##", "####", "***", "---", "~~~", "|||", "§", "¶")
"""Tried in this order if `template.separator` is not set. Steps of a chain hardly ever begin with one of these."""


@dataclass(frozen=True)
class TemplateConfig:
    """The texts of the layout."""

    question: str = "{question} {speed}"
    """Text before the first separator; `{speed}` is filled by `Method.speed_text` ("" for most)."""
    step_joiner: str = " "
    """Text before every reasoning step but the first."""
    separator: str | None = None
    """Opens and closes the reasoning: one token of the tokenizer. None: ###, or a like mark where that is not one."""
    format: Format = "plain"
    """plain: the question as it is. chat: the turns and the question by the tokenizer's chat template."""

    def __post_init__(self) -> None:
        check_choice("template.format", self.format, get_args(Format))
        for name in ("question", "step_joiner", "separator"):
            value = getattr(self, name)
            is_text = isinstance(value, str) or (name == "separator" and value is None)
            check_holds(f"template.{name}", is_text, value, "text")
        if "{question}" not in self.question or "{speed}" not in self.question:
            raise ValueError(
                f"template.question must contain {{question}} and {{speed}}, got {self.question!r}"
            )
        # `str.format` fills the layout later, so other braces must fail here, not at the first row.
        try:
            self.question.format(question="", speed="")
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"template.question {self.question!r} has braces besides {{question}} and {{speed}}; "
                "write {{ and }} for braces that are text"
            ) from error
        if self.separator is not None and not self.separator.strip():
            raise ValueError("template.separator must not be empty")


class Template:
    """Conversion between text and ids for one tokenizer.

    Its `config` always names the separator, even if the given one does not. ValueError if the tokenizer has no EOS,
    no chat template for the format `chat`, no token for the separator, or no way to write the separator as text.
    """

    def __init__(self, config: TemplateConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.n_known: int | None = None
        """Tokens that the model has weights for; None until the model is known."""
        self._cached: dict[tuple[str, ...], array[int]] = {}
        self._looked_up: dict[str | tuple[str, ...], tuple[int, ...]] = {}
        """Ids by tokens or by pattern, cached because a lookup copies the whole vocabulary."""
        self._texts: dict[int, str] = {}
        """Texts of single tokens; the server needs several of them for each thought."""
        # A call's truncation and padding persist in a fast tokenizer, and `save_pretrained` writes them to its file.
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()

        separator, self.separator_id = self._separator(config.separator)
        self.config = config = replace(config, separator=separator)
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token: answers could not end")
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int = tokenizer.eos_token_id

        self._control = ControlTokens(tokenizer, self.separator_id)
        # ValueError now rather than at the first text with the separator, if that cannot be written in other tokens.
        if self.separator_id not in tokenizer.added_tokens_decoder:
            self._control.others(self.separator_id)
        for name in ("question", "step_joiner"):
            text = getattr(config, name)
            if self._control.among(self._raw_ids(text), text):
                raise ValueError(
                    f"template.{name} {text!r} has control tokens: leave them out, and set template.format: chat for "
                    "the markers of the tokenizer's chat template"
                )
        self.chat: ChatFormat | None = None
        if config.format == "chat":
            self.chat = ChatFormat(tokenizer, self._control, self._raw_ids, self._text_ids)
            if self.chat.end_id is not None:
                self.eos_id = self.chat.end_id

    def question(
        self, question: str, speed: str = "", cached: bool = True, context: Sequence[Turn] = ()
    ) -> list[int]:
        """Ids up to and including the opening separator.

        With `cached` a question that recurs, such as a training row's in every epoch, is tokenised once. `context`
        holds the turns before the question. In the plain format their texts precede it, without the roles, each
        followed by a blank line.
        """
        question = question.strip()
        if self.chat is None:
            question = "\n\n".join([*(turn.strip() for _, turn in context if turn.strip()), question])
            context = ()
        if not cached:
            return self._question_ids(question, speed, context)
        texts = (*itertools.chain.from_iterable(context), question, speed)
        return self._from_cache(texts, lambda: self._question_ids(question, speed, context))

    def _question_ids(self, question: str, speed: str, context: Sequence[Turn]) -> list[int]:
        text = self.config.question.format(question=question, speed=speed).strip()
        if self.chat is not None:
            ids = self.chat.encode([*context, ("user", text)])
            self.require_known(ids)
            return [*ids, self.separator_id]
        bos = [] if self.bos_id is None else [self.bos_id]
        return [*bos, *self._text_ids(text), self.separator_id]

    def steps(self, steps: tuple[str, ...]) -> list[list[int]]:
        """Ids of each reasoning step."""
        # The joiner belongs to the step after it, so that a step that is dropped takes its joiner along.
        return [
            self._cached_text_ids(self.config.step_joiner + step if i else step)
            for i, step in enumerate(steps)
        ]

    def answer(self, answer: str) -> list[int]:
        """Ids from the closing separator to EOS, both included."""
        return [self.separator_id, *self._cached_text_ids(answer.strip()), self.eos_id]

    def decode(self, ids: list[int]) -> str:
        """The text of generated ids, outer white space stripped.

        Special tokens are left out, so that a generated one does not pass for text. The separator is shown, because
        "1###2" without it would be another number.
        """
        # Tidying spaces would change an answer: "1 , 2" would come back as "1, 2".
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text).strip()

    def token(self, token_id: int) -> str:
        """The readable text of one token."""
        if token_id not in self._texts:
            # Behind another token, because some decoders drop the space that a text begins with (Llama 2, Phi-3).
            before, text = (
                str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
                for ids in ([self.separator_id], [self.separator_id, token_id])
            )
            self._texts[token_id] = text.removeprefix(before)
        return self._texts[token_id]

    def token_ids(self, tokens: tuple[str, ...], key: str) -> tuple[int, ...]:
        """The ids of single tokens, as the vocabulary spells them. ValueError names the key that requested a token
        that is not in it."""
        if tokens not in self._looked_up:
            vocabulary = self.tokenizer.get_vocab()
            for token in tokens:
                if token not in vocabulary:
                    raise ValueError(f"{key}: this tokenizer has no token {token!r}")
            self._looked_up[tokens] = tuple(vocabulary[token] for token in tokens)
        return self._looked_up[tokens]

    def ids_matching(self, pattern: str) -> tuple[int, ...]:
        """The ascending ids of all tokens that a regular expression matches in full, as the vocabulary spells them
        without the mark of a leading space."""
        if pattern not in self._looked_up:
            vocabulary = self.tokenizer.get_vocab()
            ids = [i for token, i in vocabulary.items() if re.fullmatch(pattern, token.lstrip("Ġ▁ "))]
            self._looked_up[pattern] = tuple(sorted(ids))
        return self._looked_up[pattern]

    def to_json(self) -> dict[str, Any]:
        """The layout, and the ids by which `from_json` checks the tokenizer."""
        layout = asdict(self.config)
        if self.chat is None:
            # The version implies it.
            del layout["format"]
        else:
            layout["chat_digest"] = self.chat.digest
        return {
            "version": VERSIONS[self.config.format],
            **layout,
            "separator_id": self.separator_id,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
        }

    @staticmethod
    def is_chat(saved: Any) -> bool:
        """True if the saved template has a place for a system message and earlier turns."""
        return isinstance(saved, dict) and saved.get("version") == VERSIONS["chat"]

    @classmethod
    def from_json(cls, saved: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> "Template":
        """The saved template. ValueError if it is of another version or does not fit `tokenizer`."""
        formats = {version: format for format, version in VERSIONS.items()}
        if saved.get("version") not in list(formats):
            known = ", ".join(map(str, formats))
            raise ValueError(
                f"template version {saved.get('version')!r} is not one of {known}, which this colar reads"
            )
        texts = {key: saved[key] for key in ("question", "step_joiner", "separator")}
        template = cls(TemplateConfig(**texts, format=formats[saved["version"]]), tokenizer)
        if template.chat is not None and template.chat.digest != saved.get("chat_digest"):
            raise ValueError(
                f"the checkpoint was trained with another chat template (digest {saved.get('chat_digest')}) than its "
                f"tokenizer has (digest {template.chat.digest}): put chat_template.jinja back as it was saved"
            )
        # Rows begin as in training: a GGUF file's tokenizer may have a BOS where the Hub's has none (Qwen2.5).
        bos_id = saved["bos_id"]
        if bos_id is None or (template.bos_id is None and bos_id in range(len(tokenizer))):
            template.bos_id = bos_id
        # Ids that have changed would cause no error, but mean other tokens.
        for key in ("separator_id", "bos_id", "eos_id"):
            if getattr(template, key) != saved.get(key):
                raise ValueError(
                    f"the checkpoint was trained with {key} = {saved.get(key)!r}, but its tokenizer gives "
                    f"{getattr(template, key)} (separator {template.config.separator!r}): "
                    "the tokenizer files do not belong to this checkpoint"
                )
        return template

    def _separator(self, named: str | None) -> tuple[str, int]:
        """The separator and its id: the one that is named, or else the first of `SEPARATORS` that is one token.

        It must be one token, because the LM head chooses it in one step to stop thinking; and no special one, which
        `decode` would leave out of an answer.
        """
        fitting = {}
        for text in SEPARATORS if named is None else (named, *SEPARATORS):
            ids = self._raw_ids(text)
            if len(ids) == 1 and ids[0] not in self.tokenizer.all_special_ids:
                fitting[text] = ids[0]
        if fitting and (named is None or named in fitting):
            return next(iter(fitting.items()))
        fault = "is not one token of this tokenizer"
        if named in self.tokenizer.all_special_tokens:
            fault = "is a special token, which the text of an answer leaves out"
        wrong = f"none of {' '.join(SEPARATORS)} is one token of this tokenizer"
        such_as = f", such as {' '.join(fitting)}" if fitting else ""
        raise ValueError(
            f"{wrong if named is None else f'template.separator {named!r} {fault}'}: set template.separator to a text "
            f"that is{such_as}"
        )

    # Encoders, each on top of the one before it
    #
    #     _raw_ids            as the tokenizer does: names of control tokens become these tokens    chat markers
    #     _text_ids           without control tokens, even if the text spells one                   requests, chats
    #     _cached_text_ids    the same, once for each text                                          training rows

    def _raw_ids(self, text: str) -> list[int]:
        """Ids as the tokenizer makes them: the name of a control token becomes that token."""
        if not text:
            return []
        # The same ids without transformers' batching around it: three times as fast.
        if self.tokenizer.is_fast:
            return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text_ids(self, text: str) -> list[int]:
        """Ids of a text without control tokens, even if it spells one. ValueError for a token that the model lacks."""
        ids = self._raw_ids(text)
        if self._control.among(ids, text):
            ids = self._control.encode(text)
        self.require_known(ids)
        return ids

    def _cached_text_ids(self, text: str) -> list[int]:
        """`_text_ids` of a text that may recur, cached."""
        return self._from_cache((text,), lambda: self._text_ids(text))

    def _from_cache(self, texts: tuple[str, ...], encode: Callable[[], list[int]]) -> list[int]:
        cached = self._cached.get(texts)
        if cached is not None:
            return cached.tolist()
        ids = encode()
        if sum(map(len, texts)) <= LONGEST_CACHED:
            if len(self._cached) >= CACHED:
                self._cached.clear()
            self._cached[texts] = array("i", ids)
        return ids

    def limit_to(self, n_known: int) -> None:
        """Reject texts with ids from `n_known` on, for which the model has no weights.

        ValueError if BOS, separator or EOS is such an id.
        """
        self.n_known = n_known
        bos = [] if self.bos_id is None else [self.bos_id]
        self.require_known([*bos, self.separator_id, self.eos_id])

    def require_known(self, ids: list[int]) -> None:
        """Raise ValueError for a token without weights in the model: on a CUDA device it would end the process."""
        if self.n_known is None or max(ids, default=0) < self.n_known:
            return
        token_id = next(token_id for token_id in ids if token_id >= self.n_known)
        raise ValueError(
            f"the token {self.token(token_id)!r} has id {token_id}, and the model's embedding only "
            f"{self.n_known} rows: the model cannot read it"
        )
