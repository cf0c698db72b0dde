"""`colar.load`: a checkpoint as an object that answers questions.

model = colar.load("runs/mine")
answer = model.ask("Tom has 5 toys and finds 12 more. How many?", compression_factor=2)
answer.answer, answer.thoughts
"""

import functools
import html
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import torch

from colar.checks import check_holds
from colar.engine.completion import AnswerText, Completion, not_finite
from colar.engine.engine import Engine
from colar.engine.request import Request, check_context, decoding_of
from colar.look import thought
from colar.methods import pretrained, registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.ops.noise import seed_from


@dataclass(frozen=True)
class Answer:
    """An answer, and the thoughts that led to it."""

    question: str
    answer: str
    thoughts: tuple[str, ...]
    """Each thought as text: the tokens that it was chosen as, or else those nearest to it."""
    truncated: bool
    """True if a limit ended the thinking or the answer."""
    seconds: float
    """The request's share of wall-clock time."""
    completion: Completion = field(repr=False)
    """The engine's result for the request."""

    def __str__(self) -> str:
        return self.answer

    def _repr_html_(self) -> str:
        thoughts = " ".join(
            f"<code style='border:1px solid #8884;border-radius:4px;padding:0 4px'>{html.escape(text)}</code>"
            for text in self.thoughts
        )
        return f"<p>{html.escape(self.question)}</p><p>{thoughts}</p><p><b>{html.escape(self.answer)}</b></p>"


@dataclass(frozen=True)
class Piece:
    """A part of an answer that is being written: one thought, or the next characters of the answer."""

    kind: Literal["thought", "answer"]
    text: str


class Model:
    """A model with its method and an engine. Not thread-safe. The weights must not change."""

    def __init__(self, lm: LatentLM, method: Method, batch_size: int | None = None) -> None:
        self.lm = lm.eval()
        self.method = method
        self.engine = Engine(lm, method, batch_size)

    @functools.cached_property
    def _vocabulary(self) -> thought.EmbeddingIndex:
        return thought.vocabulary_of(self.lm)

    def __repr__(self) -> str:
        speed = "".join(f", {name} {value:g}" for name, value in self.method.default_params.items())
        return f"Model({self.lm.name}, method {self.method.name}{speed})"

    @overload
    def ask(self, question: str, **options: Any) -> Answer: ...
    @overload
    def ask(self, question: Sequence[str], **options: Any) -> list[Answer]: ...

    def ask(self, question: str | Sequence[str], **options: Any) -> Answer | list[Answer]:
        """Answer a question, or each of a list, which are computed together.

        `options` are the method's per-request values (`compression_factor=2`; without any, the checkpoint's own speed),
        and `decoding` ("greedy" | "sampled"), `seed`, `max_latents`, `max_completion_length`, and `context`, the turns
        of a chat before each question: `[("system", "Be brief."), ...]`. Warns of a speed that was not trained.
        ValueError for a value that the method does not have, turns that the template has no place for, or a question
        that does not fit the model's context.
        """
        questions = [question] if isinstance(question, str) else list(question)
        check_holds("question", bool(questions), question, "a text, or a list of at least one")
        requests = []
        for number, text in enumerate(questions):
            requests.append(self._request(text, number, **options))
        answers = []
        for completion in self.engine.generate(requests):
            completion.require_answer()
            thoughts = thought.read_thoughts(self.lm, completion, 0, self._vocabulary)
            answer = Answer(
                question=completion.request.question,
                answer=completion.text,
                thoughts=tuple(read["text"] for read in thoughts),
                truncated=completion.truncated,
                seconds=completion.seconds,
                completion=completion,
            )
            answers.append(answer)
        return answers[0] if isinstance(question, str) else answers

    def stream(self, question: str, **options: Any) -> Iterator[Piece]:
        """Yield the thoughts and the answer of one question as they come. Arguments are those of `ask`."""
        answer = AnswerText(self.lm.template)
        request = self._request(question, 0, **options)
        reader = thought.ThoughtReader(self.lm.template, request.params)
        for event in self.engine.stream([request]):
            if event.kind == "thought":
                n = reader.wanted(event.token_id, event.info)
                assert event.embed is not None
                near = self._vocabulary.nearest(event.embed[None], n)[0] if n else []
                yield Piece("thought", reader.read(event.token_id, event.info, near)["text"])
                continue
            if incomplete := reader.end():
                yield Piece("thought", incomplete)
            if event.kind == "token" and event.token_id != self.lm.template.eos_id:
                if text := answer.add(event.token_id):
                    yield Piece("answer", text)
            elif event.reason == "error":
                raise not_finite(request)
        if rest := answer.end():
            yield Piece("answer", rest)

    def _request(
        self,
        question: str,
        number: int,
        *,
        decoding: str = "greedy",
        seed: int = 0,
        max_latents: int | None = None,
        max_completion_length: int | None = None,
        context: Sequence[tuple[str, str]] = (),
        **params: Any,
    ) -> Request:
        check_holds("question", isinstance(question, str) and bool(question.strip()), question, "a text")
        check_context(context, self.lm.template.chat is not None)
        limits = {"max_latents": max_latents, "max_completion_length": max_completion_length}
        values = registry.make_params(self.method, params)
        if warning := self.method.check_params(values):
            warnings.warn(warning, stacklevel=3)  # at the caller of `ask` or `stream`
        return Request(
            id=f"question {number + 1}",
            question=question,
            params=values,
            decoding=decoding_of(self.method, decoding, **limits),
            seed=seed_from(seed, f"question {number + 1}"),
            keep_latents=True,
            context=tuple((role, text) for role, text in context),
        )


def load(
    path_or_id: str | Path,
    *,
    dtype: str | None = None,
    backbone: str | None = None,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
    weights: str | None = None,
) -> Model:
    """Load a checkpoint, a run's folder or a Hub id, to ask it questions.

    `dtype` is that of the weights (by default bfloat16 on a GPU, float32 on a CPU), `backbone` the folder or Hub id of
    an adapter's backbone if it is not the one that its checkpoint names, `device` by default the GPU if there is one.
    `batch_size` is the number of requests computed together (by default 256 on a CUDA GPU, else 32). `weights` int8 or
    int4 quantises linear layers (needs torchao, int8 on a CPU excepted). ValueError if there is no checkpoint.
    """
    return Model(*pretrained.load_for_inference(path_or_id, dtype, backbone, device, weights), batch_size)
