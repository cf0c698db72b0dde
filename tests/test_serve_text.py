"""Tokens as text piece by piece, stop strings, nearest tokens, efforts, and the errors of requests."""

from __future__ import annotations

import asyncio
import random
import re
import time

import pydantic
import pytest
import torch
from families import EXAMPLES, FAMILIES, tiny_lm
from sequential import made
from serving import DECODING, QUESTION, colar_model, sequential_model, serve_model

from colar.ask import Model
from colar.engine.completion import AnswerText, Event, TokenText
from colar.engine.engine import Engine
from colar.engine.request import Request
from colar.look import thought
from colar.methods import registry
from colar.serve.app import read_keys
from colar.serve.protocol import ChatRequest, first_mistake
from colar.serve.served_model import StepReader, begin, pieces

TEXTS = (
    *(example.question for example in EXAMPLES),
    "  12  ",
    "naïve €3 — 数学 🙂🙂 done",
    "a\n\n b \t",
    "",
    " ",
)


@pytest.fixture(scope="module")
def templates():
    return {family: tiny_lm(family).template for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(templates, family, text):
    template = templates[family]
    ids = template._cached_text_ids(text)
    answer = AnswerText(template)
    pieces = [answer.add(token_id) for token_id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + answer.end() == template.decode(ids) == text.strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_of_random_tokens_are_the_text(templates, family):
    """Broken characters, special tokens, anything that a random model says."""
    template = templates[family]
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(template.tokenizer)) for _ in range(rng.randrange(1, 12))]
        plain, answer = TokenText(template), AnswerText(template)
        text = "".join(plain.add([token_id]) for token_id in ids) + plain.end()
        said = "".join(answer.add(token_id) for token_id in ids) + answer.end()
        whole = template.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # Byte fallback writes a whole run of bytes anew when it ends in half a character: what was said is said.
        if family != "gemma3":
            assert text == whole
            assert said == template.decode(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_thoughts_that_are_tokens_are_read_together(templates, family):
    """A character may be the tokens of several thoughts."""
    template = templates[family]
    text = "naïve €3 — 数学 🙂🙂 done"
    reader = thought.ThoughtReader(template, registry.build("cot").Params())
    ids = template._cached_text_ids(text)
    assert not any(reader.wanted(token_id, {}) for token_id in ids)
    read = [reader.read(token_id, {}, []) for token_id in ids]
    assert [each["index"] for each in read] == list(range(len(ids)))
    assert not any("\ufffd" in each["text"] for each in read)
    assert ("".join(each["text"] for each in read) + reader.end()).strip() == text


@pytest.mark.parametrize("stop", [("END",), ("E",), ("ND", "EN"), (" E", "zz"), ("12",), ("nothing",)])
def test_stops_are_found_wherever_tokens_end(templates, stop):
    template = templates["llama"]
    text = "12 + 1 is E N 13 END of it"
    ids = template._cached_text_ids(text)
    answer = AnswerText(template, stop)
    said = ""
    for token_id in ids:
        said += answer.add(token_id)
        assert not any(each in said for each in stop)
        if answer.stopped:
            break
    said += answer.end()
    places = [place for place in map(text.find, stop) if place >= 0]
    assert answer.stopped == bool(places)
    # Of two stop strings the one that is complete first ends the answer.
    if len(places) <= 1:
        assert said == (text[: places[0]].rstrip() if places else text)


def latent_of(lm, embed, n):
    """A reader, and the event of a latent that it reads with n neighbours."""
    params = registry.make_params(registry.build("colar"), {})
    event = Event(Request("a", "1?", params), "thought", embed=embed)
    return thought.ThoughtReader(lm.template, params, n), event


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_tokens_are_those_of_retrieval(dtype):
    for family in FAMILIES:
        lm = tiny_lm(family)
        lm.to(dtype)
        torch.manual_seed(0)
        latents = torch.randn(5, lm.width)
        want = thought.vocabulary_of(lm).nearest(latents, 7)

        async def ask(lm=lm, latents=latents):
            step_reader = StepReader(lm, asyncio.to_thread)
            # All at once: they are computed together.
            return await asyncio.gather(
                *(step_reader.read(*latent_of(lm, each, 3 + i)) for i, each in enumerate(latents))
            )

        for i, read in enumerate(asyncio.run(ask())):
            near = read["neighbours"]
            assert [n["id"] for n in near] == [n.token_id for n in want[i][: 3 + i]]
            assert [n["cosine"] for n in near] == pytest.approx(
                [n.cosine for n in want[i][: 3 + i]], abs=1e-4
            )


@pytest.mark.parametrize("model", [colar_model, sequential_model])
def test_a_thought_is_made_of_the_info_that_is_copied(model):
    lm, method = model()
    request = Request("a", QUESTION, method.Params(), DECODING, keep_latents=True)
    [done] = Engine(lm, method, 1).generate([request])
    for token_id, info in zip(done.thought_ids, done.thought_info(), strict=True):
        [shown] = thought.infos_on_cpu([info])
        assert shown.keys() < info.keys()
        whole, part = (
            thought.ThoughtReader(lm.template, request.params).read(token_id, each, [])
            for each in (info, shown)
        )
        assert part == whole
    assert done.length
    assert [each.keys() for each in done.thought_info(thought.SHOWN)] == [shown.keys()] * done.length


def test_an_error_reaches_all_who_wait():
    lm = tiny_lm("llama")
    step_reader = StepReader(lm, asyncio.to_thread)

    async def ask():
        bad = [step_reader.read(*latent_of(lm, torch.zeros(3), 1)) for _ in range(2)]
        found = await asyncio.gather(*bad, return_exceptions=True)
        assert all(isinstance(each, RuntimeError) for each in found)
        # The next ones are answered.
        read = await step_reader.read(*latent_of(lm, torch.ones(lm.width), 4))
        assert len(read["neighbours"]) == 4

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        ([1, 2, 3, 5], [1, 2, 2, 3, 5]),
        ([1, 2, 5], [1, 1, 2, 2, 5]),
        ([1, 2], [1, 1, 1, 2, 2]),
        ([2], [2, 2, 2, 2, 2]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 3, 5, 7, 9]),
    ],
)
def test_efforts_lie_evenly_over_what_was_trained(values, expected):
    method = registry.build("colar", {"compression_factors": values})
    efforts = registry.efforts_of(method)
    assert list(efforts) == ["xhigh", "high", "medium", "low", "minimal"]
    assert [each["compression_factor"] for each in efforts.values()] == expected


@pytest.mark.parametrize("name", registry.METHODS)
def test_what_a_method_offers_it_takes(name):
    method = registry.build(name)
    for param, values in method.choices().items():
        assert list(values) == sorted(values, reverse=param == "ratio")
        for value in values:
            registry.make_params(method, {param: value})
    for effort, values in registry.efforts_of(method).items():
        assert effort in registry.EFFORTS
        assert method.check_params(registry.make_params(method, values)) is None


@pytest.mark.parametrize(
    ("factors", "default"),
    [([1, 2, 5], {"compression_factor": 2, "confidence_threshold": 0.8}), ([1, 3], {}), ([1], {})],
)
def test_values_mean_the_same_to_the_server_and_to_ask(factors, default):
    """A checkpoint's default speed holds where no value is given; any value replaces it as a whole."""
    lm, method = made("llama", compression_factors=factors, confidence_thresholds=[0, 0.5])
    method.default_params = default
    served = serve_model("sequential", (lm, method))
    model = Model(lm, method)
    asked = [{}, {"compression_factor": 1}, {"confidence_threshold": 0.5}]
    bodies = [(values, values) for values in asked]
    bodies += [
        (values, {"reasoning_effort": effort}) for effort, values in registry.efforts_of(method).items()
    ]
    for values, fields in bodies:
        body = ChatRequest(model="x", messages=[{"role": "user", "content": QUESTION}], **fields)
        request = begin(served, body).samples[0].request
        answer = model.ask(QUESTION, max_latents=1, max_completion_length=1, **values)
        assert request.params == answer.completion.request.params
        speed = (request.params.compression_factor, request.params.confidence_threshold)
        if not values:
            assert speed == ((2, 0.8) if default else (factors[0], 0))
        elif "compression_factor" in values:
            assert speed == (values["compression_factor"], 0)
    params = served.card()["colar"]["params"]
    assert params["confidence_threshold"]["default"] == default.get("confidence_threshold", 0)


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
PART = {"type": "text", "text": "x", "colour": 1}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content", "only text parts are supported"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "must be a text, or a list of text parts"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content.0", "Input should be"),
        ({"messages": [{"role": "user", "content": [PART]}]}, "messages.0.content.0.colour", "unknown field"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type", "missing"),
        ({"messages": [{"role": "user", "content": "x"}], "stop": 3}, "stop", "must be a text, or a list of texts"),
    ],
)  # fmt: skip
def test_mistakes_inside_a_field_have_its_place(fields, param, words):
    """And no names of what the fields are checked with."""
    with pytest.raises(pydantic.ValidationError) as raised:
        ChatRequest.model_validate(fields)
    # FastAPI puts the place of the body in front.
    mistakes = [{**each, "loc": ("body", *each["loc"])} for each in raised.value.errors()]
    found = first_mistake(mistakes)
    assert (found.status, found.param) == (400, param)
    assert words in str(found)
    assert not re.search(r"list\[|Value error|\.str", str(found))


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("# ours\n\none\n two \n")
    assert read_keys(str(path)) == ["one", "two"]
    # Notepad's byte order mark is no part of the first key.
    path.write_bytes(b"\xef\xbb\xbfone\r\n")
    assert read_keys(str(path)) == ["one"]
    path.write_text("one\n", encoding="utf-16")
    with pytest.raises(ValueError, match="keys: not UTF-8 text: .*; save it as UTF-8"):
        read_keys(str(path))
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="has no API key"):
        read_keys(str(path))
    monkeypatch.delenv("COLAR_API_KEYS", raising=False)
    assert read_keys(None) == []
    monkeypatch.setenv("COLAR_API_KEYS", "a b")
    assert read_keys(None) == ["a", "b"]
    for empty in ("", " "):
        monkeypatch.setenv("COLAR_API_KEYS", empty)
        with pytest.raises(ValueError, match="COLAR_API_KEYS has no API key"):
            read_keys(None)


def test_times_are_the_engines_not_the_readers():
    """A reader that is late by more than a whole answer changes neither time."""
    served = serve_model("colar", colar_model())
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    response = begin(served, ChatRequest.model_validate(body))

    async def late():
        async for _ in pieces(served, response):
            await asyncio.sleep(0.5)
        await served.engine.close()

    began = time.perf_counter()
    asyncio.run(late())
    took = 1000 * (time.perf_counter() - began)
    [sample] = response.samples
    details = response.details(sample)
    assert sample.n_thoughts + sample.n_tokens >= 2
    assert 0 < details["thinking_ms"] + details["answer_ms"] < took - 500
