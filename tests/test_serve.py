"""The server against its engine, through the real `openai` client: the same answers, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from families import EXAMPLES, liven, tiny_lm
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from serving import (
    DECODING,
    QUESTION,
    Slow,
    colar_model,
    cot_model,
    running,
    sequential_model,
    serve_model,
    until,
)

from colar.engine.completion import Event
from colar.engine.engine import Engine
from colar.engine.request import Decoding, Request
from colar.look.thought import read_thoughts
from colar.methods import pretrained, registry
from colar.serve.protocol import ChatRequest

MODELS = {"colar": colar_model, "sequential": sequential_model, "cot": cot_model}


@pytest.fixture(scope="module")
def live():
    served = [serve_model(name, make()) for name, make in MODELS.items()]
    # A token that the model has no row for, as Gemma 3's image token.
    served[-1].lm.tokenizer.add_tokens(["<image>"])
    with running(*served) as found:
        yield found


@pytest.fixture(scope="module")
def client(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)


def user(text=QUESTION):
    return [{"role": "user", "content": text}]


def chat(client, model="colar", question=QUESTION, **fields):
    extra = {
        name: fields.pop(name)
        for name in list(fields)
        if name not in ("n", "stop", "seed", "temperature", "top_p", "stream", "stream_options")
    }
    return client.chat.completions.create(model=model, messages=user(question), extra_body=extra, **fields)


def expected(live, model, question=QUESTION, sample=0, decoding=DECODING, seed=0, **values):
    """What the engine says, alone."""
    served = live.served[model]
    params = registry.make_params(served.method, values)
    request = Request("x", question, params, decoding, seed, sample=sample, keep_latents=True)
    (found,) = Engine(served.lm, served.method, 4).generate([request])
    return found


SAMPLED = Decoding(0.8, 0.9, 0.8, max_latents=8, max_completion_length=8)
CASES = [
    ("colar", {"compression_factor": 1}),
    ("colar", {"compression_factor": 2}),
    ("colar", {"compression_factor": 5}),
    ("sequential", {"compression_factor": 1.5}),
    ("sequential", {"compression_factor": 3, "confidence_threshold": 0.5}),
    ("cot", {}),
]


# The same answers


@pytest.mark.parametrize("place", range(2 * len(EXAMPLES)))
def test_answers_are_the_engines(live, client, one_thread, place):
    """Every speed with two questions, and every question at two speeds."""
    model, values = CASES[place % len(CASES)]
    example = EXAMPLES[(place + place // len(CASES)) % len(EXAMPLES)]
    for seed, decoding, fields in ((0, DECODING, {}), (7, SAMPLED, {"temperature": 0.8, "top_p": 0.9})):
        want = expected(live, model, example.question, decoding=decoding, seed=seed, **values)
        got = chat(
            client,
            model,
            example.question,
            seed=seed,
            return_thoughts=True,
            **fields,
            **values,
        )
        choice, own = got.choices[0], got.choices[0].message.colar
        assert choice.message.content == want.text
        assert choice.finish_reason == want.reason
        assert own["finish"] == ("length" if want.truncated else "stop")
        assert own["forward_passes"] == want.forward_passes
        assert own["seed"] == seed
        assert [thought["index"] for thought in own["thoughts"]] == list(range(want.length))
        assert got.usage.completion_tokens_details.reasoning_tokens == want.length
        assert got.usage.completion_tokens == want.length + len(want.token_ids)
        assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


@pytest.mark.parametrize(("model", "values"), CASES)
def test_a_stream_says_what_an_answer_of_one_piece_says(client, model, values):
    for fields in ({}, {"temperature": 1.0, "seed": 3}):
        whole = chat(client, model, return_thoughts=True, **fields, **values)
        content, reasoning, thoughts, last = "", "", [], None
        stream = chat(
            client,
            model,
            stream=True,
            stream_options={"include_usage": True},
            return_thoughts=True,
            **fields,
            **values,
        )
        chunks = list(stream)
        for chunk in chunks:
            for choice in chunk.choices:
                delta = choice.delta
                content += delta.content or ""
                reasoning += getattr(delta, "reasoning", "")
                assert getattr(delta, "reasoning", "") == getattr(delta, "reasoning_content", "")
                own = getattr(delta, "colar", {})
                thoughts += own.get("thoughts", [])
                details = own
                last = choice.finish_reason or last
        message = whole.choices[0].message
        assert chunks[0].choices[0].delta.role == "assistant"
        assert (content, reasoning, last) == (
            message.content,
            message.reasoning,
            whole.choices[0].finish_reason,
        )
        same_thoughts(thoughts, message.colar["thoughts"])
        assert chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage
        assert all(chunk.usage is None for chunk in chunks[:-1])
        # Each thought comes once: the last delta has the other details.
        assert details.keys() == message.colar.keys() - {"thoughts"}
        assert details["forward_passes"] == message.colar["forward_passes"]
        assert not hasattr(chunks[-1], "colar")
        assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("model", MODELS)
def test_accumulated_deltas_are_the_whole_answer(client, model):
    """By the official client's own accumulation, for each of several samples."""
    body = {"model": model, "messages": user(), "n": 2, "seed": 3, "temperature": 1.0}
    more = {"extra_body": {"return_thoughts": True}}
    with client.chat.completions.stream(**body, **more) as stream:
        # `get_final_completion` rejects answers that a limit has cut.
        found = stream.until_done().current_completion_snapshot
    whole = client.chat.completions.create(**body, **more)
    assert sum(len(choice.message.colar["thoughts"]) for choice in whole.choices) > 2
    for one, other in zip(found.choices, whole.choices, strict=True):
        mine, theirs = one.message, other.message
        assert (mine.content or "", mine.reasoning) == (theirs.content, theirs.reasoning)
        same_thoughts(mine.colar["thoughts"], theirs.colar["thoughts"])
        assert mine.colar.keys() == theirs.colar.keys()
        assert mine.colar["forward_passes"] == theirs.colar["forward_passes"]


def test_each_chunk_has_the_usage_so_far(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chat(client, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] <= counts[-1] == last.usage.completion_tokens
    # vLLM's is about the usage that was asked for.
    options = {"continuous_usage_stats": True}
    assert all(chunk.usage is None for chunk in chat(client, stream=True, stream_options=options))


def same_thoughts(found, expected):
    """But for the last digits of cosines: how many are computed together decides those."""
    for mine, theirs in zip(found, expected, strict=True):
        assert [set(each) for each in (mine, theirs)] == [set(mine)] * 2
        for key in ("tokens", "neighbours"):
            for one, other in zip(mine[key], theirs[key], strict=True):
                assert one["id"] == other["id"]
                assert one["cosine"] == pytest.approx(other["cosine"], abs=1e-4)
        assert {**mine, "tokens": 0, "neighbours": 0} == {**theirs, "tokens": 0, "neighbours": 0}


def test_only_the_engines_worker_computes(live):
    served = live.served["colar"]
    assert served.step_reader.run == served.engine.run


def test_samples_are_those_of_the_engine(live, client):
    fields = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "compression_factor": 2}
    got = chat(client, n=3, **fields)
    want = [
        expected(live, "colar", sample=i, decoding=SAMPLED, seed=5, compression_factor=2) for i in range(3)
    ]
    assert [choice.message.content for choice in got.choices] == [each.text for each in want]
    assert [choice.index for choice in got.choices] == [0, 1, 2]
    lengths = [each.length for each in want]
    assert got.usage.completion_tokens_details.reasoning_tokens == sum(lengths)
    texts = ["", "", ""]
    ended = []
    for chunk in chat(client, n=3, stream=True, **fields):
        for choice in chunk.choices:
            assert choice.index not in ended
            texts[choice.index] += choice.delta.content or ""
            ended += [choice.index] if choice.finish_reason else []
    assert texts == [each.text for each in want]
    assert sorted(ended) == [0, 1, 2]


def test_draws_without_a_seed_differ_and_name_theirs(client):
    found = [chat(client, temperature=1.5, return_thoughts=True).choices[0].message for _ in range(4)]
    seeds = [message.colar["seed"] for message in found]
    assert len(set(seeds)) == 4
    again = chat(client, temperature=1.5, seed=seeds[0], return_thoughts=True).choices[0].message
    assert (again.content, again.reasoning) == (found[0].content, found[0].reasoning)


# Thoughts


def test_a_latents_thought_is_what_retrieval_reads(live, client):
    want = expected(live, "colar", compression_factor=2)
    thoughts = read_thoughts(live.served["colar"].lm, want)
    got = chat(client, compression_factor=2, return_thoughts=True).choices[0].message
    assert len(thoughts) > 1
    for thought, expected_one in zip(got.colar["thoughts"], thoughts, strict=True):
        assert (thought["kind"], thought["ordered"]) == ("latent", False)
        assert thought.keys() == expected_one.keys()
        assert thought["text"] == expected_one["text"]
        # Of two tokens: the two nearest.
        for name, n in (("neighbours", 10), ("tokens", 2)):
            found, wanted = thought[name], expected_one[name]
            assert [each["id"] for each in found] == [each["id"] for each in wanted]
            assert len(found) == n
            assert [e["cosine"] for e in found] == pytest.approx([e["cosine"] for e in wanted], abs=1e-4)
        for name in ("sigma", "stop_probability"):
            assert thought[name] == pytest.approx(expected_one[name], rel=1e-4)
    assert got.reasoning == got.reasoning_content == "".join(t["text"] for t in got.colar["thoughts"])


def test_a_latent_of_any_factor_is_read_as_few_tokens():
    """Their texts are made on the event loop, where other requests wait."""
    lm = liven(tiny_lm("llama"))
    method = registry.build("colar", {"stop": "argmax", "compression_factors": [1, 60]})
    pretrained.attach(lm, method, seed=1)
    method.prepare(lm, EXAMPLES)
    with running(serve_model("wide", (lm, method))) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
        for example in EXAMPLES:
            message = (
                chat(client, "wide", example.question, compression_factor=60, return_thoughts=True)
                .choices[0]
                .message
            )
            if message.colar["thoughts"]:
                break
    assert {len(thought["tokens"]) for thought in message.colar["thoughts"]} == {32}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("temperatures", [(1e-6, 1), (1e-6, 1e-6), (2, 1e-6), (100, 100), (0, 100), (100, 0)])
def test_extreme_temperatures_are_answered(client, model, temperatures):
    temperature, latent_temperature = temperatures
    for question in (QUESTION, EXAMPLES[0].question):
        got = chat(
            client,
            model,
            question,
            temperature=temperature,
            latent_temperature=latent_temperature,
            return_thoughts=True,
            seed=1,
        )
        assert got.choices[0].finish_reason in ("stop", "length")


def test_a_sequential_thought_has_its_tokens_in_order(live, client):
    want = expected(live, "sequential", compression_factor=3)
    separator = live.served["sequential"].lm.template.separator_id
    got = chat(client, "sequential", compression_factor=3, return_thoughts=True).choices[0].message
    assert want.length > 0
    for thought, info in zip(got.colar["thoughts"], want.thought_info(), strict=True):
        ids = [i for i in info["group_ids"].tolist() if i >= 0 and i != separator]
        assert thought["ordered"]
        assert [each["id"] for each in thought["tokens"]] == ids
        logprobs = info["group_logps"].tolist()[: len(ids)]
        assert [each["logprob"] for each in thought["tokens"]] == pytest.approx(logprobs, rel=1e-4, abs=1e-6)
        assert len(thought["neighbours"]) == 10
        assert thought["sigma"] is None


def thinker(live, model):
    """A question about which the model thinks several times."""
    for example in EXAMPLES:
        want = expected(live, model, example.question)
        if want.length > 1:
            return example.question, want
    raise AssertionError("no question is thought about")


def test_a_tokens_thought_is_the_token(live, client):
    lm = live.served["cot"].lm
    question, want = thinker(live, "cot")
    got = chat(client, "cot", question, return_thoughts=True).choices[0].message
    for thought, token_id in zip(got.colar["thoughts"], want.thought_ids, strict=True):
        assert thought["kind"] == "token"
        (token,) = thought["tokens"]
        assert token["id"] == token_id
        assert token["cosine"] == pytest.approx(1, abs=1e-5)
        assert thought["neighbours"][0]["id"] == token_id
    assert got.reasoning == lm.tokenizer.decode(want.thought_ids, skip_special_tokens=True)


def test_reasoning_can_be_hidden_and_details_are_asked_for(client):
    plain = chat(client).choices[0].message
    assert plain.reasoning
    assert not hasattr(plain, "colar")
    hidden = chat(client, include_reasoning=False)
    assert not hasattr(hidden.choices[0].message, "reasoning")
    assert hidden.choices[0].message.content == plain.content
    # Hidden, and counted all the same.
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 0
    for chunk in chat(client, include_reasoning=False, stream=True):
        for choice in chunk.choices:
            assert not hasattr(choice.delta, "reasoning")
            assert not hasattr(choice.delta, "colar")


# Efforts, limits, stops


@pytest.mark.parametrize("model", MODELS)
def test_thoughts_that_are_read_on_a_gpu_are_those_of_a_cpu(live, client, monkeypatch, model):
    """A GPU's thoughts are read together, in the engine's thread: requests with embeddings and without, in one step."""
    kinds = ({}, {"include_reasoning": False}, {"return_thoughts": True}, {})

    def answers():
        with ThreadPoolExecutor(len(kinds)) as pool:
            messages = [
                each.choices[0].message for each in pool.map(lambda f: chat(client, model, **f), kinds)
            ]
        return [(message.content, getattr(message, "reasoning", None)) for message in messages]

    on_cpu = answers()
    assert on_cpu[0] == on_cpu[2] == on_cpu[3]
    monkeypatch.setattr(live.served[model].step_reader, "on_cpu", False)
    assert answers() == on_cpu


def test_efforts_are_trained_factors(live, client):
    card = client.models.retrieve("sequential").colar
    assert card["efforts"] == {
        "none": {"thinking_token_budget": 0},
        "xhigh": {"compression_factor": 1},
        "high": {"compression_factor": 2},
        "medium": {"compression_factor": 2},
        "low": {"compression_factor": 3},
        "minimal": {"compression_factor": 5},
    }
    for effort, values in card["efforts"].items():
        if effort != "none":
            want = expected(live, "sequential", **values)
            got = chat(client, "sequential", reasoning_effort=effort, return_thoughts=True)
            assert got.choices[0].message.content == want.text
            assert got.usage.completion_tokens_details.reasoning_tokens == want.length
            assert got.choices[0].message.colar["params"].items() >= values.items()
    none = chat(client, "sequential", reasoning_effort="none")
    assert none.usage.completion_tokens_details.reasoning_tokens == 0
    assert none.choices[0].message.reasoning == ""


def test_exact_values_go_before_an_effort(live, client):
    want = expected(live, "colar", compression_factor=5)
    got = chat(client, reasoning_effort="xhigh", compression_factor=5, return_thoughts=True)
    assert got.choices[0].message.content == want.text
    assert got.choices[0].message.colar["params"]["compression_factor"] == 5


def test_models_are_described(client):
    cards = {model.id: model.colar for model in client.models.list().data}
    assert list(cards) == list(MODELS)
    assert cards["colar"]["method"] == "colar"
    assert cards["colar"]["params"]["compression_factor"]["allowed"] == [1, 2, 3, 4, 5]
    assert "confidence_threshold" not in cards["colar"]["params"]
    assert cards["sequential"]["params"]["confidence_threshold"]["allowed"] == [0, 0.5]
    assert cards["sequential"]["params"]["compression_factor"]["about"].startswith("c: the reasoning tokens")
    assert cards["cot"]["params"] == {}
    assert cards["cot"]["efforts"] == {"none": {"thinking_token_budget": 0}}
    assert (cards["cot"]["max_latents"], cards["cot"]["max_completion_length"]) == (8, 8)


def test_limits_of_a_request(live, client):
    want = expected(
        live, "colar", decoding=Decoding(max_latents=2, max_completion_length=3), compression_factor=1
    )
    got = chat(
        client, compression_factor=1, thinking_token_budget=2, max_completion_tokens=3, return_thoughts=True
    )
    assert got.choices[0].message.content == want.text
    assert got.usage.completion_tokens_details.reasoning_tokens == want.length <= 2
    assert got.usage.completion_tokens <= 5
    # More than the server allows is what the server allows.
    most = chat(client, compression_factor=1, thinking_token_budget=10**6, max_tokens=10**6)
    assert most.choices[0].message.content == expected(live, "colar", compression_factor=1).text


def long_answer(live):
    """A question whose answer has several characters."""
    for example in EXAMPLES:
        for c in (1, 2, 3, 4, 5):
            want = expected(live, "colar", example.question, compression_factor=c)
            if len(want.text) > 5 and len(set(want.text)) > 3:
                return example.question, c, want.text
    raise AssertionError("no answer is long enough")


def test_stop_strings_end_an_answer_and_are_left_out(live, client):
    question, c, text = long_answer(live)
    for stop in (text[2:4], [text[3:5], "no such text"], text[-1], "\ufdd0"):
        cuts = [text.find(each) for each in ([stop] if isinstance(stop, str) else stop)]
        at = min([cut for cut in cuts if cut >= 0], default=len(text))
        fields = {"question": question, "compression_factor": c, "stop": stop}
        got = chat(client, **fields)
        assert got.choices[0].message.content == text[:at].rstrip()
        if at < len(text):
            assert got.choices[0].finish_reason == "stop"
        said = "".join(
            choice.delta.content or ""
            for chunk in chat(client, stream=True, **fields)
            for choice in chunk.choices
        )
        assert said == text[:at].rstrip()


def test_a_stop_string_does_not_hide_that_the_thinking_was_cut(live, client):
    seen = set()
    for example in EXAMPLES:
        for budget in (0, 2, 8):
            decoding = Decoding(max_latents=budget, max_completion_length=8)
            want = expected(live, "colar", example.question, decoding=decoding)
            if not want.text:
                continue
            fields = {"thinking_token_budget": budget, "return_thoughts": True, "stop": want.text[0]}
            got = chat(client, question=example.question, **fields).choices[0]
            cut = not want.stopped
            assert (got.message.content, got.finish_reason) == ("", "stop")
            assert got.message.colar["finish"] == ("length" if cut else "stop")
            seen.add(cut)
    assert seen == {True, False}


def test_the_manuals_python_runs(capsys):
    """Against a model of that name; what it answers is noise."""
    text = (Path(__file__).parent.parent / "docs" / "serve.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    with running(serve_model("smollm2-135m-gsm", sequential_model())) as live:
        exec(code.replace("http://127.0.0.1:8000", live.url), {})
    assert "->" in capsys.readouterr().out
    [(command, body)] = re.findall(r"(curl .*?) -d '(.*?)'", text, re.DOTALL)
    assert "application/json" in command
    assert ChatRequest.model_validate(json.loads(body)).params == {"compression_factor": 2}


# What is refused

REFUSED = [
    # fields in place of the usual ones, status, param, words
    ({"compresion_factor": 2}, 400, "compresion_factor", "unknown field 'compresion_factor', did you mean 'compression_factor'?"),
    ({"compression_factor": 0.5}, 400, "compression_factor", "compression_factor must be a number, 1 or more, got 0.5"),
    ({"compression_factor": "2"}, 400, "compression_factor", "compression_factor must be a number, got '2'"),
    ({"compression_factor": 1.5}, 400, "compression_factor", "is not whole and was not trained"),
    ({"ratio": 0.5}, 400, "ratio", "method colar has no ratio; it takes compression_factor"),
    ({"model": "cot", "compression_factor": 2}, 400, "compression_factor", "method cot has no compression_factor"),
    ({"model": "cot", "reasoning_effort": "high"}, 400, "reasoning_effort", "model cot (method cot) takes none"),
    ({"reasoning_effort": "extreme"}, 400, "reasoning_effort", "'none', 'minimal', 'low', 'medium', 'high' or 'xhigh'"),
    ({"model": "../etc/passwd"}, 404, "model", "no model '../etc/passwd'"),
    ({"model": None}, 400, "model", "model is missing"),
    ({"messages": []}, 400, "messages", "at least 1 item"),
    ({"messages": None}, 400, "messages", "messages is missing"),
    ({"messages": [{"role": "system", "content": "Be brief."}, *user()]}, 400, "messages", "the model has no place for a system message (template.format: plain)"),
    ({"messages": [*user("1 + 1?"), {"role": "assistant", "content": "2"}, *user()]}, 400, "messages", "the model has no place for turns before the question (template.format: plain)"),
    ({"messages": [{"role": "assistant", "content": "2"}]}, 400, "messages", "the last message must be of role user"),
    ({"messages": user("  ")}, 400, "messages", "the question is empty"),
    ({"messages": user("x" * 40000)}, 400, "messages", "the model's context is 128"),
    ({"temperature": -1}, 400, "temperature", "temperature must be 0, or from 1e-06 to 100, got -1"),
    ({"temperature": True}, 400, "temperature", "temperature"),
    ({"temperature": 1e300}, 400, "temperature", "temperature must be 0, or from 1e-06 to 100, got 1e+300"),
    ({"temperature": 1e-45, "latent_temperature": 1}, 400, "temperature", "from 1e-06 to 100, got 1e-45"),
    ({"temperature": 10**400}, 400, "temperature", "temperature"),
    ({"compression_factor": 10**400}, 400, "compression_factor", "compression_factor must be a number, got 1000"),
    ({"compression_factor": 33}, 400, "compression_factor", "(trained: 1, 2, 3, 4, 5), got 33"),
    ({"top_p": 0}, 400, "top_p", "top_p must be in (0, 1], got 0"),
    ({"latent_temperature": -2}, 400, "latent_temperature", "latent_temperature must be 0, or from 1e-06 to 100"),
    ({"seed": 2**63}, 400, "seed", "seed: Input should be less than or equal to 9223372036854775807"),
    ({"seed": -(2**63) - 1}, 400, "seed", "greater than or equal to -9223372036854775808"),
    ({"seed": 1.5}, 400, "seed", "valid integer"),
    ({"n": 0}, 400, "n", "greater than or equal to 1"),
    ({"n": 17}, 400, "n", "less than or equal to 16"),
    ({"stop": ["a"] * 17}, 400, "stop", "at most 16 items"),
    ({"stop": ""}, 400, "stop.0", "at least 1 character"),
    ({"thinking_token_budget": -1}, 400, "thinking_token_budget", "greater than or equal to 0"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens", "greater than or equal to 1"),
    ({"logprobs": True}, 400, "logprobs", "logprobs: this server has no such feature; it takes false"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "top_logprobs: this server has no such feature; it takes 0"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "frequency_penalty: this server has no such feature; it takes 0"),
    ({"tools": [{"type": "function"}]}, 400, "tools", "tools: this server has no such feature; it takes []"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", 'it takes {"type": "text"}'),
    ({"top_k": 5}, 400, "top_k", "top_k: this server has no such feature; it takes -1 or 0"),
    ({"repetition_penalty": 1.1}, 400, "repetition_penalty", "it takes 1"),
    ({"ignore_eos": True}, 400, "ignore_eos", "it takes false"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, 400, "chat_template_kwargs", "it takes {}"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "param", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_refused_is_named(client, fields, status, param, words):
    body = {"model": "colar", "messages": user(), **fields}
    with pytest.raises(openai.APIStatusError) as raised:
        client.post("/chat/completions", body=body, cast_to=object)
    error = raised.value.response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert raised.value.status_code == status
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_a_token_that_the_model_has_no_row_for_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="the token '<image>' has id") as raised:
        chat(client, "cot", "How many <image>?")
    error = raised.value.response.json()["error"]
    assert (error["param"], error["code"]) == ("messages", None)
    assert error["message"].startswith("the token ")


def test_a_question_beyond_the_context_is_named_as_openai_does(client):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, question="word " * 100)
    error = raised.value.response.json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert error["message"].startswith("the question has ")


def test_a_question_is_tokenised_once(live, client, monkeypatch):
    template = live.served["colar"].lm.template
    questions = []
    right = template.question

    def counted(question, *args, **kwargs):
        questions.append(question)
        return right(question, *args, **kwargs)

    monkeypatch.setattr(template, "question", counted)
    chat(client, n=3)
    assert questions == [QUESTION]


def test_others_go_on_while_a_long_text_is_tokenised(live, client, monkeypatch):
    template, begun, go = live.served["colar"].lm.template, threading.Event(), threading.Event()
    right = template.question

    def slow(question, *args, **kwargs):
        if question == "slow":
            begun.set()
            assert go.wait(30)
        return right(question, *args, **kwargs)

    monkeypatch.setattr(template, "question", slow)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(chat, client, question="slow")
        assert begun.wait(30)
        try:
            assert chat(client.with_options(timeout=20)).choices
        finally:
            go.set()
        assert asked.result().choices


def test_a_question_beyond_the_budget_is_refused_without_its_number():
    with running(serve_model("cot", cot_model(), token_budget=32)) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
        with pytest.raises(openai.BadRequestError) as raised:
            chat(client, "cot", "word " * 10)
    message = raised.value.response.json()["error"]["message"]
    assert re.fullmatch(r"the request needs \d+ positions; token_budget is 32", message)


def test_what_asks_for_nothing_is_accepted(client):
    fields = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "tool_choice": "auto",
        "response_format": {"type": "text"}, "store": False, "user": "me", "metadata": {"a": "b"}, "stop": None,
        "seed": None, "top_logprobs": None, "verbosity": "medium", "latent_temperature": None,
        "compression_factor": 1,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "skip_special_tokens": True,
        "add_generation_prompt": True, "chat_template_kwargs": {}, "stream_options": {"continuous_usage_stats": False},
    }  # fmt: skip
    body = {"model": "colar", "messages": user(), **fields}
    got = client.post("/chat/completions", body=body, cast_to=object)
    want = chat(client, compression_factor=1).choices[0].message.content
    assert got["choices"][0]["message"]["content"] == want


def test_every_null_of_openais_fields_is_accepted(client):
    names = CompletionCreateParamsBase.__annotations__.keys() - {"model", "messages"}
    body = {"model": "colar", "messages": user(), **dict.fromkeys(names)}
    got = client.post("/chat/completions", body=body, cast_to=object)
    assert got["choices"][0]["message"]["content"] == chat(client).choices[0].message.content


def test_nulls_and_empty_lists_inside_of_fields_are_accepted(client):
    options = {"include_usage": None, "include_obfuscation": None}
    messages = [{**user()[0], "tool_calls": [], "name": None}]
    body = {"model": "colar", "messages": messages, "stream_options": options, "stream": False}
    got = client.post("/chat/completions", body=body, cast_to=object)
    assert got["choices"][0]["message"]["content"]


def test_content_in_parts_is_text(client):
    parts = [{"type": "text", "text": QUESTION[:10]}, {"type": "text", "text": QUESTION[10:]}]
    got = client.chat.completions.create(model="colar", messages=[{"role": "user", "content": parts}])
    assert got.choices[0].message.content == chat(client).choices[0].message.content


# Keys, queue, time


def test_keys_are_asked_for():
    with running(serve_model("cot", cot_model()), keys=("right", "schlüssel")) as live:
        assert openai.OpenAI(base_url=f"{live.url}/v1", api_key="right").models.list().data[0].id == "cot"
        assert "owned_by" in fetch(live, "/v1/models", "Authorization: Bearer schlüssel\r\n")
        # No prompt goes through /health, which a load balancer asks.
        assert "ok" in fetch(live, "/health")
        assert "invalid_api_key" in fetch(live, "/metrics")
        for header in ("Bearer wrong", "Bearer ", "Bearer", "Bearer right2", "Basic right", ""):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/chat/completions"),
                ("GET", "/metrics"),
            ):
                found = fetch(live, path, f"Authorization: {header}\r\n", method)
                assert "invalid_api_key" in found
        with pytest.raises(openai.AuthenticationError) as raised:
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong").models.list()
        assert raised.value.code == "invalid_api_key"


def test_pages_of_other_sites_are_refused():
    """A site whose name was made to point here is this server to a browser, but for the Host that it sends."""
    with running(serve_model("cot", cot_model()), hosts=("localhost", "127.0.0.1", "[::1]", "box")) as live:
        assert openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused").models.list().data[0].id == "cot"
        for host in ("127.0.0.1", "LOCALHOST:80", "[::1]:9000", "box"):
            assert "owned_by" in fetch(live, "/v1/models", host=host)
        for path in ("/", "/health", "/metrics", "/static/page.js", "/v1/models", "/v1/models/cot"):
            assert fetch(live, path, host="evil.example") == "Invalid host header"
        for host in ("10.0.0.7:8000", "localhost.evil.example", "", "null", "[::1"):
            assert fetch(live, "/v1/models", host=host) == "Invalid host header"


@pytest.fixture
def slow():
    """A server of one slot whose model thinks for two seconds, and its method."""
    method = Slow()
    served = serve_model(
        "slow", (tiny_lm("gpt2"), method), Decoding(max_latents=100, max_completion_length=1), 1, 1
    )
    with running(served) as live:
        yield live, method, openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)


def test_a_full_queue_is_429_with_a_time(slow):
    live, _, client = slow
    stream = chat(client, "slow", "x?", stream=True)
    next(stream)
    with pytest.raises(openai.RateLimitError, match="the queue is full") as raised:
        chat(client, "slow", "x?", n=2)
    assert raised.value.response.headers["retry-after"] == "1"
    assert raised.value.code == "queue_full"
    # It was not computed: the metrics have the prompt and no time of the first alone.
    metrics = fetch(live, "/metrics")
    assert 'colar_requests_total{model="slow",status="429"} 1.0' in metrics
    prompt = len(live.served["slow"].lm.template.question("x?", ""))
    assert f'colar_tokens_total{{kind="prompt",model="slow"}} {prompt}.0' in metrics
    assert 'colar_request_seconds_count{model="slow"}' not in metrics
    # The sample that did find a place has given it back.
    engine = live.served["slow"].engine.engine
    until(lambda: len(engine.scheduler.waiting) == 0)
    stream.close()
    until(lambda: not engine.busy)


def test_a_client_that_leaves_cancels_its_request(slow):
    live, method, client = slow
    engine = live.served["slow"].engine.engine
    for leave_after in (1, 3):
        stream = chat(client, "slow", "x?", stream=True)
        for _, _chunk in zip(range(leave_after), stream, strict=False):
            pass
        stream.close()
        until(lambda: not engine.busy)
    # Before its first piece, too; and an answer of one piece.
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="slow", messages=user("x?"))
    until(lambda: not engine.busy)
    assert method.steps < 100
    until(lambda: 'colar_requests_total{model="slow",status="499"} 3.0' in fetch(live, "/metrics"))


@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_a_request_that_fails_is_500_and_says_nothing_of_the_inside(error, capsys):
    class Broken(Slow):
        def think(self, lm, state):
            raise error("secret")

    with running(serve_model("broken", (tiny_lm("gpt2"), Broken()))) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as raised:
                chat(client, "broken", "x?", stream=stream)
            assert "secret" not in raised.value.response.text
            assert raised.value.code == "engine_error"
        assert "secret" in capsys.readouterr().err


def test_a_stream_that_has_begun_is_not_begun_again(live, client, monkeypatch):
    """Memory ran out, and the engine starts the request anew."""
    engine = live.served["colar"].engine
    right = engine.stream
    whole = chat(client, seed=1, return_thoughts=True)

    def texts(found):
        return [thought["text"] for thought in found.choices[0].message.colar["thoughts"]]

    def streamed():
        return "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, seed=1, stream=True))

    def restarted_after(n):
        async def stream(request, ids):
            seen = 0
            async for event in right(request, ids):
                if seen == n:
                    yield Event(request, "restarted")
                    # The engine reports all of it again.
                    async for again in right(request, ids):
                        yield again
                    return
                seen += 1
                yield event

        return stream

    for n in (0, 1, len(whole.choices[0].message.colar["thoughts"]) + 3):
        monkeypatch.setattr(engine, "stream", restarted_after(n))
        again = chat(client, seed=1, return_thoughts=True)
        assert again.usage == whole.usage
        assert again.choices[0].message.content == whole.choices[0].message.content
        # Not the cosines: the request runs beside the one that it replaces, which rounds differently.
        assert texts(again) == texts(whole)
        if n == 0:
            assert streamed() == whole.choices[0].message.content
            continue
        with pytest.raises(openai.APIError, match="failed to answer"):
            streamed()


def test_an_error_inside_a_stream_is_its_last_event():
    served = serve_model("colar", colar_model())

    class SoonUnreadable:
        """Reads one thought: the stream has begun by then."""

        right = served.step_reader
        calls = 0

        async def read(self, *args):
            self.calls += 1
            if self.calls > 1:
                raise KeyError("secret")
            return await self.right.read(*args)

    served.step_reader = SoonUnreadable()
    with running(served) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
        stream = chat(client, stream=True, compression_factor=1)
        assert next(stream).choices[0].delta.reasoning
        with pytest.raises(openai.APIError, match="failed to answer"):
            list(stream)
        until(lambda: 'status="500"} 1.0' in fetch(live, "/metrics"))


# Metrics, page


def test_metrics_count(live, client):
    def value(text, name):
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    before = fetch(live, "/metrics")
    got = chat(client)
    after = fetch(live, "/metrics")
    served = '{model="colar",status="200"}'
    assert value(after, f"colar_requests_total{served}") == value(before, f"colar_requests_total{served}") + 1
    kind = 'colar_tokens_total{kind="reasoning",model="colar"}'
    thoughts = got.usage.completion_tokens_details.reasoning_tokens
    assert value(after, kind) == value(before, kind) + thoughts
    assert value(after, 'colar_samples_running{model="colar"}') == 0
    # A model that a client makes up is no label.
    with pytest.raises(openai.NotFoundError):
        chat(client, "made-up")
    assert "made-up" not in fetch(live, "/metrics")


def fetch(live, path, headers="", method="GET", host="x"):
    """A body, whatever its status."""
    with live.connect() as sock:
        sock.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n".encode()
        )
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts).partition(b"\r\n\r\n")[2].decode()


def test_health_and_unknown_paths(live):
    assert json.loads(fetch(live, "/health"))["status"] == "ok"
    for path in (
        "/nothing",
        "/v1/nothing",
        "/static/../app.py",
        "/static/%2e%2e%2fapp.py",
        "/static/..%2f..%2f",
    ):
        assert json.loads(fetch(live, path))["error"]["code"] == "not_found"
    refused = json.loads(fetch(live, "/health", method="DELETE"))["error"]
    assert refused["code"] is None
    assert "Method Not Allowed" in refused["message"]


def test_an_engine_that_has_stopped_is_503_without_a_traceback(capsys):
    served = serve_model("cot", cot_model())
    with running(served) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
        asyncio.run(served.engine.close())
        for stream in (False, True):
            with pytest.raises(
                openai.InternalServerError, match="the engine of model cot has stopped"
            ) as raised:
                chat(client, "cot", stream=stream)
            error = raised.value
            assert (error.status_code, error.code, error.type) == (503, "engine_stopped", "server_error")
        assert 'colar_requests_total{model="cot",status="503"} 2.0' in fetch(live, "/metrics")
        assert json.loads(fetch(live, "/health")) == {"status": "failed", "models": ["cot"]}
    assert "Traceback" not in capsys.readouterr().err
