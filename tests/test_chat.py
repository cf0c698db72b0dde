"""The chat format: ids equal `apply_chat_template`'s, texts stay texts, and training, engine and files agree."""

import dataclasses
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import openai
import pytest
from chats import CONTEXTS, END, KINDS, QUESTION, TEMPLATES, chat_lm, chat_tokenizer
from families import EXAMPLES, FAMILIES, build_tokenizer, liven, publishable, tiny_lm
from serving import running, serve_model
from transformers import AutoTokenizer

import colar
from colar import files
from colar.cli import main
from colar.data import sources, user_rows
from colar.data.example import Example
from colar.engine import reference
from colar.engine.engine import Engine
from colar.engine.request import GREEDY, SAMPLED, Decoding, Request, check_runnable, prompt_ids
from colar.evaluation.answer_files import answer_key
from colar.evaluation.evaluate import AnswerSettings, make_request
from colar.look import diagnosis
from colar.look.reference_chain import reference_rows
from colar.methods import registry
from colar.methods.pretrained import attach, load, save
from colar.recipe import auto_recipe
from colar.recipe.facts import RowReader, facts_of
from colar.template.template import Template, TemplateConfig
from colar.training.grpo import rollout
from colar.training.grpo.config import GrpoConfig

CHAT = TemplateConfig(format="chat")
SPEED = "(Thinking speed: 2)"
FOLDS = ("gemma2", "old")


def chat_template(kind):
    return Template(CHAT, chat_tokenizer(kind))


def applied(tokenizer, context, content):
    turns = [{"role": role, "content": text} for role, text in (*context, ("user", content))]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


# Parity


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_apply_chat_template(kind, name):
    template, context = chat_template(kind), CONTEXTS[name]
    for question in (QUESTION, "  Two\n\nlines, Ümläute and 3  spaces? \n", "{x} {speed} ₂"):
        found = template.question(question, SPEED, context=context)
        turns, content = context, f"{question.strip()} {SPEED}"
        if kind in FOLDS and context and context[0][0] == "system":
            # In front of the first user's turn.
            (_, system), *turns = context
            if turns:
                turns[0] = ("user", f"{system}\n\n{turns[0][1]}")
            else:
                content = f"{system}\n\n{content}"
        opening = [] if kind != "qwen3" else template.tokenizer.encode("<think>\n", add_special_tokens=False)
        assert found == [*applied(template.tokenizer, turns, content), *opening, template.separator_id]


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_without_a_speed_is_the_turn_alone(kind):
    template = chat_template(kind)
    wanted = applied(template.tokenizer, (), QUESTION)
    assert template.question(QUESTION)[: len(wanted)] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_bos_stands_once_where_the_template_writes_it(kind):
    template = chat_template(kind)
    ids = template.question(QUESTION, SPEED, context=CONTEXTS["all"])
    bos = template.bos_id
    if "bos_token" in TEMPLATES[kind]:
        assert ids[0] == bos
        assert ids.count(bos) == 1
    elif bos is not None:
        # SmolLM2's BOS is its marker of a turn.
        assert ids.count(bos) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_ends_as_a_turn_does(kind):
    template = chat_template(kind)
    end = template.tokenizer.convert_tokens_to_ids(END.get(kind, "<|im_end|>"))
    separator, *ids, eos = template.answer("12")
    assert (separator, eos, template.eos_id) == (template.separator_id, end, end)
    assert template.decode([*ids, eos]) == "12"


def test_reasoning_stands_where_the_template_puts_it():
    for kind, opened in (("qwen3", "<think>\n"), ("r1", "<think>\n"), ("qwen2.5", "assistant\n")):
        template = chat_template(kind)
        text = template.tokenizer.decode(template.question(QUESTION))
        assert text.endswith(f"{opened}###"), kind
        assert text.count("<think>") == (kind != "qwen2.5")


@pytest.mark.parametrize("kind", ["qwen3", "r1"])
def test_earlier_reasoning_is_left_out(kind):
    template = chat_template(kind)
    bare = CONTEXTS["turns"]
    thought = (bare[0], ("assistant", f"<think>\n1 + 1 = 2\n</think>\n\n{bare[1][1]}"))
    assert template.question(QUESTION, context=thought) == template.question(QUESTION, context=bare)


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        # Llama 3.2, Mistral Small 3, SmolLM3, a format of the hour.
        (
            "{% if strftime_now is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}{{ day }}\n",
            "26 Jul 2024\n",
        ),
        ("{%- set today = strftime_now('%Y-%m-%d') %}{{ 'It is ' + today + '.' }}", "It is 2024-07-26."),
        ('{{ strftime_now( "%d %B %Y" ) }}', "26 July 2024"),
        ("{{ strftime_now('%H') }}", "00"),
    ],
)
def test_a_prompt_does_not_depend_on_the_day(head, wanted):
    tokenizer = chat_tokenizer("qwen2.5")
    tokenizer.chat_template = head + TEMPLATES["qwen2.5"]
    template = Template(CHAT, tokenizer)
    plain = chat_template("qwen2.5")
    text = tokenizer.decode(template.question("1?"))
    assert text == wanted + tokenizer.decode(plain.question("1?"))
    assert template.chat.digest != plain.chat.digest


@pytest.mark.parametrize(
    "call", ["{% set f = '%Y' %}{{ strftime_now(f) }}", "{{ strftime_now(format='%Y') }}"]
)
def test_a_day_whose_format_is_not_written_out_is_refused(call):
    tokenizer = chat_tokenizer("qwen2.5")
    tokenizer.chat_template = call + TEMPLATES["qwen2.5"]
    with pytest.raises(ValueError, match="writes today's date in a format"):
        Template(CHAT, tokenizer)


# Texts


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_spelled_by_a_user_are_text(kind):
    """The markers in the prompt are as many as without the spelled ones, and the text comes back as it was."""
    template = chat_template(kind)
    control = template.chat._control.ids
    # Longer than the vocabulary's own: "####" holds the separator, and this text all of the markers.
    spelled = " ".join(sorted(template._control._ids_of_names)) + " \ue0000\ue001 {{ bos_token }} ####"
    context = (("user", f"a {spelled}"), ("assistant", f"b {spelled} c"))
    if kind in ("qwen3", "r1"):
        # Its reasoning is left out: a closing tag in an earlier answer is read as one.
        context = (context[0], ("assistant", "b <|im_end|> c"))
    plain = (("user", "a x"), ("assistant", "b c"))

    def markers(ids):
        return [token_id for token_id in ids if token_id in control]

    found = template.question(f"d {spelled} e", SPEED, context=context)
    assert markers(found) == markers(template.question("d e", SPEED, context=plain))
    text = template.tokenizer.decode(found)
    assert text.count(f"d {spelled} e {SPEED}") == 1
    assert f"a {spelled}" in text


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3", "llama3", "gemma3", "smollm2"])
def test_ordinary_texts_have_the_same_ids_on_both_ways(kind):
    """The way for texts that spell control tokens, taken by one that does not, makes the ids of the short one."""
    chat = chat_template(kind).chat
    turns = [("system", "Be brief."), ("user", f"{QUESTION} {SPEED}")]
    fast = chat.encode(turns)
    skeleton = chat._skeletons["system", "user"]
    # Other control tokens than those of the template are found: the contents seem to spell some.
    chat._skeletons["system", "user"] = dataclasses.replace(skeleton, controls=[-1])
    slow = chat.encode(turns)
    chat._skeletons["system", "user"] = skeleton
    assert fast == slow


def test_a_chat_is_encoded_while_another_thread_clears_the_cache(monkeypatch):
    """A server tokenises in threads."""
    chat = chat_template("qwen2.5").chat
    turns = [("system", "Be brief."), ("user", QUESTION)]
    expected = chat.encode(turns)

    class Cleared(dict):
        def __setitem__(self, *_):
            pass

    monkeypatch.setattr(chat, "_skeletons", Cleared())
    assert chat.encode(turns) == expected


def test_a_question_that_comes_again_is_tokenised_once():
    """Also in a chat, where the turns before it count."""
    template = chat_template("qwen2.5")
    template._cached.clear()
    context = (("system", "Be brief."),)
    for n_cached, before in ((1, ()), (2, context)):
        first = template.question(QUESTION, SPEED, context=before)
        assert first == template.question(QUESTION, SPEED, context=before)
        assert first == template.question(QUESTION, SPEED, cached=False, context=before)
        assert len(template._cached) == n_cached


# Errors


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_without_a_chat_template_is_refused(family):
    with pytest.raises(
        ValueError, match=r"template\.format: chat needs a tokenizer with a chat template"
    ) as error:
        Template(CHAT, build_tokenizer(family))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_turns_that_the_template_rejects_are_named(kind):
    template = chat_template(kind)
    with pytest.raises(ValueError, match="rejects the turns user, user: Roles must alternate"):
        template.question(QUESTION, context=(("user", "Hi"),))


# The plain format


@pytest.mark.parametrize("family", FAMILIES)
def test_earlier_turns_stand_before_a_plain_question(family):
    template = Template(TemplateConfig(), build_tokenizer(family))
    context = (("system", " Be brief. "), ("user", "Hi"), ("assistant", ""))
    assert template.question("1 + 1?", SPEED, context=context) == template.question(
        "Be brief.\n\nHi\n\n1 + 1?", SPEED
    )
    assert "format" not in template.to_json()
    assert template.to_json()["version"] == 2


# Files


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_template_comes_back(kind, tmp_path):
    template = chat_template(kind)
    template.tokenizer.save_pretrained(tmp_path)
    saved = template.to_json()
    again = Template.from_json(saved, AutoTokenizer.from_pretrained(tmp_path))
    assert saved["version"] == 3
    assert again.to_json() == saved
    for context in CONTEXTS.values():
        assert again.question(QUESTION, SPEED, context=context) == template.question(
            QUESTION, SPEED, context=context
        )
    assert again.answer("12") == template.answer("12")


def test_a_changed_chat_template_is_noticed(tmp_path):
    lm, method = chat_lm("qwen2.5"), registry.build("colar", {"sigma_e": 1.0})
    attach(lm, method, 0)
    save(lm, method, tmp_path / "model", {}, "# card")
    loaded, _ = load(tmp_path / "model")
    ids = lm.template.question(QUESTION, SPEED, context=CONTEXTS["all"])
    assert loaded.template.question(QUESTION, SPEED, context=CONTEXTS["all"]) == ids
    path = tmp_path / "model" / "chat_template.jinja"
    files.write_text(path, path.read_text().replace("made here", "made there"))
    with pytest.raises(ValueError, match="was trained with another chat template"):
        load(tmp_path / "model")
    path.unlink()
    with pytest.raises(ValueError, match=r"lacks chat_template\.jinja"):
        load(tmp_path / "model")


# Training, engine, reference


@pytest.mark.parametrize("name", list(registry.METHODS))
def test_training_and_inference_ask_with_the_same_ids(name):
    method = registry.build(name)
    for lm in (chat_lm("qwen3"), tiny_lm("qwen2")):
        for i, example in enumerate(EXAMPLES):
            # Short: these models have 128 positions.
            example = replace(example, question=example.question[:20], context=list(CONTEXTS.values())[i % 4])
            row = method.encode(lm.template, example, Random(i), 0)
            request = Request(
                "r",
                example.question,
                row.params,
                Decoding(max_latents=4, max_completion_length=4),
                context=example.context,
            )
            assert prompt_ids(lm, method, request) == row.question
            assert len(row.question) > len(lm.template.question(example.question)) or not example.context
            assert row.answer[-1] == lm.template.eos_id


@pytest.mark.parametrize(("kind", "name"), [("qwen3", "colar"), ("gemma3", "sequential")])
def test_the_engine_answers_chats_as_the_reference_does(kind, name):
    """Several turns, alone and beside others: the same thoughts and answers, token for token."""
    lm = liven(chat_lm(kind))
    own = {"sigma_e": 1.0} if name == "colar" else {}
    method = registry.build(name, {"compression_factors": [1, 2, 3], **own})
    attach(lm, method, 0)
    lm.eval()
    requests = []
    for i, example in enumerate(EXAMPLES[:4]):
        for j, context in enumerate(CONTEXTS.values()):
            decoding = replace(SAMPLED if (i + j) % 2 else GREEDY, max_latents=5, max_completion_length=5)
            params = registry.make_params(method, {"compression_factor": 1 + (i + j) % 3})
            question = example.question[:30]
            requests.append(Request(f"{i}/{j}", question, params, decoding, seed=i, context=context))
    found = Engine(lm, method, 5).generate(requests)
    assert len({completion.text for completion in found}) > 1
    for request, completion in zip(requests, found, strict=True):
        wanted = reference.complete(lm, method, request)
        assert (completion.token_ids, completion.thought_ids, completion.reason) == (
            wanted.token_ids,
            wanted.thought_ids,
            wanted.reason,
        )


def test_a_key_holds_the_context_where_there_is_one():
    bare = Request("r", "1 + 1?")
    keys = {answer_key(replace(bare, context=context), {}) for context in CONTEXTS.values()}
    assert len(keys) == len(CONTEXTS)


def test_a_context_of_no_role_is_refused():
    method = registry.build("cot")
    with pytest.raises(ValueError, match="request r: context must be one of system, user, assistant"):
        check_runnable(method, Request("r", "1?", method.Params(), context=(("tool", "x"),)))


# What users meet


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint with the chat format, whose texts depend on the turns."""
    lm = liven(chat_lm("qwen3"))
    method = registry.build("sequential", {"compression_factors": [1, 2]})
    attach(lm, method, 0)
    return save(publishable(lm), method, tmp_path_factory.mktemp("chat") / "model", {}, "# card\n")


def texts(lm, method, contexts, question="How many?"):
    decoding = Decoding(max_latents=4, max_completion_length=6)
    params = registry.make_params(method, {"compression_factor": 2})
    requests = [Request("question", question, params, decoding, context=context) for context in contexts]
    return [completion.text for completion in Engine(lm, method, 2).generate(requests)]


def test_a_system_message_on_the_command_line(saved, tmp_path, capsys):
    rows = [
        {"id": "a", "question": "How many?", "context": CONTEXTS["turns"]},
        {"id": "b", "question": "How?"},
    ]
    files.write_jsonl(tmp_path / "rows.jsonl", rows)
    words = ["generate", str(saved), "--input", str(tmp_path / "rows.jsonl"), "--compression_factor", "2"]
    words += ["--max_latents", "4", "--max_completion_length", "6", "--system", "Be brief."]
    assert main([*words, "--output", str(tmp_path / "out.jsonl")]) == 0
    found = {row["id"]: row["answer"] for _, row in files.read_jsonl(tmp_path / "out.jsonl")}
    lm, method = load(saved)
    system = ("system", "Be brief.")
    assert [found["a"]] == texts(lm, method, [(system, *CONTEXTS["turns"])])
    assert [found["b"]] == texts(lm, method, [(system,)], "How?")

    files.write_jsonl(tmp_path / "rows.jsonl", [{"question": "How?", "context": [["tool", "x"]]}])
    assert main(words) == 2
    assert "rows.jsonl:1: context must be one of system, user, assistant" in capsys.readouterr().err
    assert main(["generate", str(saved), "How?", "--system", " "]) == 2
    assert "--system is empty" in capsys.readouterr().err


def test_the_server_takes_several_turns(saved):
    lm, method = load(saved)
    with running(serve_model("chat", (lm, method), Decoding(max_latents=4, max_completion_length=6))) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0)
        contexts = list(CONTEXTS.values())
        extra = {"compression_factor": 2}
        answers = []
        for context in contexts:
            turns = [{"role": role, "content": text} for role, text in (*context, ("user", "How many?"))]
            made = client.chat.completions.create(model="chat", messages=turns, extra_body=extra)
            answers.append(made.choices[0].message.content)
        assert answers == texts(lm, method, contexts)
        # OpenAI's newer name of a system message, and a tool's turn.
        turns = [
            {"role": "developer", "content": "Be brief; use digits."},
            {"role": "user", "content": "How many?"},
        ]
        made = client.chat.completions.create(model="chat", messages=turns, extra_body=extra)
        assert made.choices[0].message.content == answers[list(CONTEXTS).index("system")]
        # A client's copy of an answer, with all that is in it: of the SDK, and of another server's reasoning.
        question = {"role": "user", "content": "How many?"}
        first = client.chat.completions.create(model="chat", messages=[question], extra_body=extra)
        message = first.choices[0].message
        plain = [question, {"role": "assistant", "content": message.content}, question]
        wanted = client.chat.completions.create(model="chat", messages=plain, extra_body=extra)
        copies = [
            message,
            message.model_dump(),
            {**plain[1], "reasoning": "1+1", "annotations": [], "audio": None},
        ]
        for copy in copies:
            turns_back = [question, copy, question]
            again = client.chat.completions.create(model="chat", messages=turns_back, extra_body=extra)
            assert again.choices[0].message.content == wanted.choices[0].message.content
        turns_back = [question, {**plain[1], "tool_calls": [{"id": "1"}]}, question]
        with pytest.raises(openai.BadRequestError, match="tool_calls"):
            client.chat.completions.create(model="chat", messages=turns_back, extra_body=extra)
        turns = [{"role": "tool", "content": "7"}, *turns]
        with pytest.raises(openai.BadRequestError, match="tool"):
            client.chat.completions.create(model="chat", messages=turns, extra_body=extra)


def test_every_maker_of_requests_passes_the_turns_on():
    """Evaluation, rollouts and the page ask what the rows were trained on."""
    method = registry.build("sequential", {"compression_factors": [1, 2]})
    examples = [
        replace(example, context=context)
        for example, context in zip(EXAMPLES, CONTEXTS.values(), strict=False)
    ]
    wanted = list(CONTEXTS.values())
    config = GrpoConfig(num_generations=2, compression_factors=[2])
    made = rollout.requests(method, config, examples, 0, 0)
    assert [request.context for request in made] == [
        each for context in wanted for each in (context, context)
    ]
    made = diagnosis.requests_of(examples, method.Params(), GREEDY)
    assert [request.context for request in made] == wanted
    model = SimpleNamespace(method=method)
    point = SimpleNamespace(model=model, decoding="greedy", seed=0, params=method.Params())
    limits = AnswerSettings(max_latents=4, max_completion_length=4)
    assert [make_request(point, each, limits).context for each in examples] == wanted
    lm = tiny_lm("qwen2")
    for row, example in zip(
        reference_rows(lm, method, examples, method.Params(compression_factor=2)), examples, strict=True
    ):
        speed = method.speed_text(row.params)
        assert row.question == lm.template.question(example.question, speed, context=example.context)


def test_a_model_is_trained_on_chats_and_asked_in_them(tmp_path):
    """From a file of messages: the recipe of `colar train auto` has the chat format, and so has the checkpoint."""
    lm = publishable(liven(chat_lm("qwen3")))
    lm.causal_lm.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    turn = {"role": "assistant", "content": "<think>\n1+2=3\n</think>\n\n3"}
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    rows = user_rows.read(files.write_jsonl(tmp_path / "my.jsonl", [{"messages": [*asked, turn]}])).examples
    assert rows[0].context == (("system", "Be brief."),)

    folder = str(tmp_path / "model")
    found = facts_of(RowReader.of(folder), rows, device="cpu")
    assert found.prompt_format == "chat"
    assert facts_of(RowReader.of(folder, "plain"), rows, device="cpu").prompt_format == "plain"
    tree, why = auto_recipe.make_recipe(found, str(tmp_path / "run"), method="colar")
    assert "template: chat" in why
    files.write_jsonl(tmp_path / "run" / "data" / "train.jsonl", [row.as_row() for row in rows])
    cot = ["--training.max_steps", "2", "--training.save_steps", "2", "--data.validation_size", "0"]
    path = auto_recipe.write_recipe(tmp_path / "recipe.yaml", tree, why)
    assert main(["train", str(path), "--stages", "cot", *cot]) == 0

    model = colar.load(tmp_path / "run" / "cot" / "best")
    saved = files.read_json(tmp_path / "run" / "cot" / "best" / "template.json")
    assert (saved["version"], saved["format"]) == (3, "chat")
    context = [("system", "Be brief.")]
    answer = model.ask("How many?", context=context, max_latents=4, max_completion_length=4)
    request = answer.completion.request
    assert request.context == tuple(context)
    assert answer.completion.token_ids == reference.complete(model.lm, model.method, request).token_ids
    with pytest.raises(ValueError, match="--template chat: the tokenizer of tiny has no chat template"):
        RowReader.of("tiny", "chat")


def test_one_question_after_other_turns_is_another(tmp_path):
    """Answers to one question are counted as one cluster; "Why?" after other turns is not the same question."""
    examples = [
        Example(f"t/{i}", "Why?", (), "7", context=CONTEXTS[name])
        for i, name in enumerate(("all", "turns", "all"))
    ]
    path = files.write_jsonl(tmp_path / "rows.jsonl", [example.as_row() for example in examples])
    assert [row.cluster for row in sources.load_examples(str(path), "test")] == ["", "", "t/0"]
