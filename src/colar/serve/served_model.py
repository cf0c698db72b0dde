"""A checkpoint that is served, and its answer to a request of the API.

    engine     thought   thought   stop   token   token   EOS   finished
    pieces     thought   thought          text    text          end

Whole answers and streams are made of the same pieces: thoughts and text as they come, and how each sample ended.

Shape suffix: D width.
"""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from colar import yaml_settings
from colar.engine.async_engine import AsyncEngine, EngineClosed
from colar.engine.completion import AnswerText, Event, not_finite
from colar.engine.engine import Engine, QueueFull
from colar.engine.request import Decoding, Request, TooLong, check_context
from colar.look.thought import NEIGHBOURS, ThoughtReader, infos_on_cpu, read_together, vocabulary_of
from colar.methods import registry
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.serve.protocol import ApiError, ChatRequest
from colar.serve.response import ChatResponse, Sample, SamplePiece

log = logging.getLogger("uvicorn.error")


class ServedModel:
    """One checkpoint under one name. `decoding` has a request's defaults; its limits are maxima, too."""

    def __init__(self, name: str, engine: Engine, decoding: Decoding) -> None:
        self.name = name
        self.lm = engine.lm
        self.method = engine.method
        self.decoding = decoding
        self.engine = AsyncEngine(engine)
        # In the engine's thread, because a second thread that computes would slow its steps (`async_engine.py`).
        self.step_reader = StepReader(self.lm, self.engine.run)
        self.created = int(time.time())
        self.efforts = {"none": {"thinking_token_budget": 0}, **registry.efforts_of(self.method)}

    def effort(self, effort: str) -> dict[str, Any]:
        """The fields that an effort stands for. ApiError 400 if this checkpoint does not have it."""
        if effort not in self.efforts:
            known = ", ".join(self.efforts)
            words = (
                f"reasoning_effort {effort!r}: model {self.name} (method {self.method.name}) takes {known}"
            )
            raise ApiError(400, words, "reasoning_effort")
        return dict(self.efforts[effort])

    def params(self, values: Mapping[str, Any]) -> tuple[Any, str | None]:
        """The method's values for a request, and a warning where they were not trained. ApiError 400 for wrong ones."""
        try:
            params = registry.make_params(self.method, values)
            return params, self.method.check_params(params)
        except ValueError as error:
            # The checks' messages contain the name of the field.
            named = [name for name in values if name in str(error)]
            raise ApiError(400, str(error), named[0] if named else None) from error

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "colar",
            "colar": {
                "method": self.method.name,
                "params": _params_card(self.method),
                "efforts": self.efforts,
                "max_latents": self.decoding.max_latents,
                "max_completion_length": self.decoding.max_completion_length,
            },
        }


def _params_card(method: Method) -> dict[str, Any]:
    """Each value that a request may choose: its default, the trained ones, and the docstring of its field."""
    choices = method.choices()
    about = {name: meaning for name, _, meaning in yaml_settings.keys(method.Params)}
    card = {}
    for name, default in dataclasses.asdict(registry.make_params(method, {})).items():
        offered = choices.get(name)
        # One value is no choice: it belongs to another method or head, or was not trained.
        if offered is not None and list(offered) == [default]:
            continue
        allowed = None if offered is None else sorted(offered)
        card[name] = {"default": default, "allowed": allowed, "about": about[name]}
    return card


# From the body to the engine's requests


def begin(served: ServedModel, body: ChatRequest) -> ChatResponse:
    """The response to a body, still empty. ApiError 400, with the field, for a request that the engine would reject."""
    values = served.effort(body.reasoning_effort) if body.reasoning_effort is not None else {}
    # The effort "none" is a limit on thoughts, and no value of the method.
    budget = values.pop("thinking_token_budget", None)
    if body.thinking_token_budget is not None:
        budget = body.thinking_token_budget
    params, warning = served.params({**values, **body.params})
    # A method that thinks in tokens shows these as its reasoning, so no embeddings need to be kept.
    latent = body.include_reasoning and served.method.thinks_in_latents
    request = Request(
        f"chatcmpl-{secrets.token_hex(12)}",
        body.question,
        params,
        _decoding(served.decoding, body, budget),
        # Without a seed, draws differ from request to request.
        # 53 bits, because JavaScript rounds larger numbers.
        secrets.randbits(53) if body.seed is None else body.seed,
        keep_latents=body.return_thoughts or latent,
        context=body.context,
    )
    ids = _prompt_ids(served, request)
    # The samples share the seed; `sample` makes their draws differ.
    samples = [Sample(dataclasses.replace(request, sample=index), ids) for index in range(body.n)]
    return ChatResponse(request.id, served.name, body, samples, len(ids), warning)


def _prompt_ids(served: ServedModel, request: Request) -> tuple[int, ...]:
    """The token ids of the question's prompt. ApiError 400 where the model could not answer it."""
    if not request.question.strip():
        raise ApiError(400, "the question is empty", "messages")
    try:
        check_context(request.context, served.lm.template.chat is not None)
        return served.engine.check(request)
    except ValueError as error:
        # Without the id of the request, which the client did not give.
        named = f"request {request.id}"
        words = str(error).removeprefix(f"{named}: ").replace(named, "the request")
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        raise ApiError(400, words, "messages", code) from error


def _decoding(default: Decoding, body: ChatRequest, budget: int | None) -> Decoding:
    """The server's decoding with a request's values; limits are the lower of both."""
    changes: dict[str, Any] = {}
    if body.temperature is not None:
        # Latents are drawn as the tokens are, unless the request says otherwise.
        changes["temperature"] = changes["latent_temperature"] = body.temperature
    if body.latent_temperature is not None:
        changes["latent_temperature"] = body.latent_temperature
    if body.top_p is not None:
        changes["top_p"] = body.top_p
    if budget is not None:
        changes["max_latents"] = min(budget, default.max_latents)
    # OpenAI's new and old name of one limit.
    if most := body.max_completion_tokens or body.max_tokens:
        changes["max_completion_length"] = min(most, default.max_completion_length)
    try:
        return dataclasses.replace(default, **changes)
    except ValueError as error:
        # `Decoding` begins each of its messages with the name of the field.
        raise ApiError(400, str(error), str(error).split()[0]) from error


# From the engine's events to pieces


async def pieces(served: ServedModel, response: ChatResponse) -> AsyncGenerator[SamplePiece, None]:
    """The pieces of all samples as they come. ApiError if one fails.

    Closing the generator, or cancelling its caller, cancels the engine's requests.
    """
    # Unbounded, because the engine must not wait for a client; the limits of the requests bound its size.
    queue: asyncio.Queue[SamplePiece | ApiError] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_run(served, response.body, sample, queue.put_nowait))
        for sample in response.samples
    ]
    try:
        left = len(tasks)
        while left:
            piece = await queue.get()
            if isinstance(piece, ApiError):
                raise piece
            left -= piece.last
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    served: ServedModel, body: ChatRequest, sample: Sample, put: Callable[[SamplePiece | ApiError], None]
) -> None:
    """Put the pieces of one sample, or the error that ends them."""
    try:
        await _answer(served, body, sample, put)
    except QueueFull as error:
        words = f"the queue is full: {error}; try again later"
        put(ApiError(429, words, code="queue_full", type="rate_limit_error", headers={"Retry-After": "1"}))
    except EngineClosed:
        # The engine's own error was printed when it stopped.
        words = f"the engine of model {served.name} has stopped"
        put(ApiError(503, words, code="engine_stopped", type="server_error"))
    except Exception:
        log.exception("request %s failed", sample.request.id)
        words = "the model failed to answer this request"
        put(ApiError(500, words, code="engine_error", type="server_error"))


async def _answer(
    served: ServedModel, body: ChatRequest, sample: Sample, put: Callable[[SamplePiece], None]
) -> None:
    template = served.lm.template

    def begun() -> tuple[ThoughtReader, AnswerText]:
        reader = ThoughtReader(template, sample.request.params, NEIGHBOURS * body.return_thoughts)
        return reader, AnswerText(template, body.stop)

    reader, answer, thinks, stopped = *begun(), True, False
    async with contextlib.aclosing(served.engine.stream(sample.request, sample.prompt_ids)) as events:
        async for event in events:
            if event.kind == "restarted":
                # What a client has received cannot be taken back.
                if body.stream and sample.last_event:
                    raise MemoryError("memory ran out after the answer had begun")
                sample.restart()
                reader, answer, thinks, stopped = *begun(), True, False
                continue
            sample.last_event = event.at
            if event.kind == "thought":
                put(await _thought(served, body, sample, reader, event))
                continue
            stopped = stopped or event.kind == "stop"
            # The thinking is over: bytes that are no character yet will not become one.
            if thinks and (incomplete := reader.end()):
                put(sample.add(reasoning=incomplete))
            thinks = False
            if event.kind == "token":
                put(_token(sample, answer, event, template.eos_id))
                # Leaving this loop cancels the engine's request, so there is no "finished" event.
                if answer.stopped:
                    sample.finish = "stop"
                    sample.cut = not stopped
                    break
            elif event.kind == "finished":
                if event.reason == "error":
                    raise not_finite(sample.request)
                sample.finish, sample.cut = event.reason, event.truncated
    put(sample.add(answer.end(), last=True))


async def _thought(
    served: ServedModel, body: ChatRequest, sample: Sample, reader: ThoughtReader, event: Event
) -> SamplePiece:
    """The piece of a thought; empty if thoughts are not shown."""
    sample.n_thoughts += 1
    sample.forward_passes += 1
    if not body.include_reasoning and not body.return_thoughts:
        return sample.add()
    thought = await served.step_reader.read(reader, event)
    return sample.add(reasoning=thought["text"], thought=thought if body.return_thoughts else None)


def _token(sample: Sample, answer: AnswerText, event: Event, eos_id: int) -> SamplePiece:
    """The piece of an answer's token; its text may be held back."""
    # EOS counts too: each token is the result of one pass, the first that of the separator's.
    sample.forward_passes += 1
    if sample.answer_began is None:
        sample.answer_began = event.at
    if event.token_id == eos_id:
        return sample.add()
    sample.n_tokens += 1
    return sample.add(answer.add(event.token_id))


class StepReader:
    """Reads thoughts as tokens, those of all requests in a step together.

    A product with the vocabulary costs as much as an LM head, and reading values synchronises with a GPU. Both are
    therefore done once for a step, in the engine's thread by `run`; the model's embeddings must not change.
    """

    def __init__(self, lm: LatentLM, run: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self.vocabulary = vocabulary_of(lm)
        self.on_cpu = lm.device.type == "cpu"
        self.run = run
        self._step: list[tuple[ThoughtReader, Event]] = []
        self._task: asyncio.Task[list[dict[str, Any]]] | None = None

    async def read(self, reader: ThoughtReader, event: Event) -> dict[str, Any]:
        """The THOUGHT (`look/thought.py`) of an event, the next one of its answer."""
        if event.embed is None or (self.on_cpu and not reader.wanted(event.token_id, event.info)):
            # Nothing to compute, and nothing to synchronise: no need to wait for the engine's step. A request that
            # keeps no embeddings thinks in tokens, which are their own text.
            return reader.read(event.token_id, event.info, [])
        # A task starts after all callers that are ready now have run: those of the same step.
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        task, place = self._task, len(self._step)
        self._step.append((reader, event))
        # Shielded, because one caller may leave while the others still wait.
        return (await asyncio.shield(task))[place]

    async def _work(self) -> list[dict[str, Any]]:
        step, self._step, self._task = self._step, [], None
        thoughts: list[dict[str, Any]] = await self.run(partial(self._read, step))
        return thoughts

    def _read(self, step: Sequence[tuple[ThoughtReader, Event]]) -> list[dict[str, Any]]:
        infos = infos_on_cpu([event.info for _, event in step])
        thoughts = []
        for (reader, event), info in zip(step, infos, strict=True):
            assert event.embed is not None, "latents that are read are kept"
            thoughts.append((reader, event.token_id, event.embed, info))
        return read_together(thoughts, self.vocabulary)
