"""Offline batches: what `colar generate --input` writes is what engine and server answer, bit for bit."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cache

import pyarrow
import pytest
from families import save_untrained
from pyarrow import parquet

from colar import files
from colar.cli import generate, main
from colar.data import user_rows
from colar.engine.async_engine import AsyncEngine
from colar.engine.completion import completions_of
from colar.engine.engine import Engine
from colar.engine.request import DECODINGS, Decoding, Request
from colar.evaluation import answer_files
from colar.methods import pretrained, registry
from colar.ops.noise import seed_from

QUESTIONS = [
    f"Tom has {n} toys{' and many friends' * (n % 4)}. How many are {n} times {n}?" for n in range(5)
]
FACTORS = (1, 2, 5)
SEED = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_untrained(tmp_path_factory.mktemp("checkpoints") / "colar")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    rows = [{"id": f"q{number}", "question": text} for number, text in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_of_chats_asks_their_last_questions(tmp_path):
    """Those that training reads: the answer behind the question is expected; one that is missing is not."""
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    chat = [*before, {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 3 more?"}]
    answered = [*chat, {"role": "assistant", "content": "<think>2+3=5</think>5"}]
    rows = [{"messages": answered}, {"messages": chat}, {"prompt": chat}, {"prompt": chat, "answer": "5"}]
    path = files.write_jsonl(tmp_path / "chats.jsonl", rows)
    found = answer_files.read_questions(path)
    turns = (("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"))
    assert {(row["question"], row["context"]) for row in found} == {("And 3 more?", turns)}
    assert [row.get("answer") for row in found] == ["5", None, None, "5"]
    files.write_jsonl(path, [{"messages": before[:1]}])
    with pytest.raises(ValueError, match="chats.jsonl:1: a chat without an answer"):
        answer_files.read_questions(path)
    path.write_text('{"question": "q", "context": [["user", "\\ud83d"]]}')
    with pytest.raises(ValueError, match="chats.jsonl:1: context holds half of a surrogate pair"):
        answer_files.read_questions(path)


def test_columns_are_read_as_in_training(tmp_path):
    """A file with a `question` of its own beside the one that was learnt would be answered without an error."""
    row = {
        "question": "Q17",
        "title": "sums",
        "body": "1 + 1?",
        "context": "Ann has 1.",
        "gold": 2,
        "answer": "no",
    }
    columns = {"question": "body", "answer": "gold"}
    path = files.write_jsonl(tmp_path / "rows.jsonl", [row])
    [asked] = answer_files.read_questions(path, columns)
    [learnt] = user_rows.read(path, columns).examples
    assert asked["question"] == learnt.question == "Ann has 1.\n\n1 + 1?"
    assert asked["answer"] == learnt.answer == "2"
    # Questions have no answers yet, and may be chats.
    turns = [("system", "Be brief."), ("user", "1 + 1?")]
    files.write_jsonl(path, [{"body": [{"role": role, "content": text} for role, text in turns]}])
    [asked] = answer_files.read_questions(path, columns)
    assert (asked["body"], asked["question"], asked["context"]) == ("1 + 1?", "1 + 1?", (turns[0],))
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: no column 'boddy' for question, did you mean 'body'"
    ):
        answer_files.read_questions(path, {"question": "boddy"})


def test_generate_takes_the_columns_of_a_file(tmp_path, checkpoint):
    path = files.write_jsonl(tmp_path / "rows.jsonl", [{"body": "1 + 1?"}])
    output = tmp_path / "answers.jsonl"
    of_file = [
        "generate",
        str(checkpoint),
        "--input",
        str(path),
        "--output",
        str(output),
        "--max_latents",
        "1",
    ]
    assert main([*of_file, "--columns", "question=body"]) == 0
    assert [row["question"] for _, row in files.read_jsonl(output)] == ["1 + 1?"]
    assert main([*of_file, "--columns", "questoin=body"]) == 2
    assert main(["generate", str(checkpoint), "1 + 1?", "--columns", "question=body"]) == 2


def test_an_expected_answer_is_written_or_refused_before_any_work(tmp_path):
    path = files.write_jsonl(
        tmp_path / "q.jsonl", [{"question": "q", "answer": answer} for answer in (5, 2.5, "", ["a"], None)]
    )
    found = [row.get("answer") for row in answer_files.read_questions(path)]
    assert found == ["5", "2.5", "", ["a"], None]
    solutions = [
        "2 + 3 = <<2+3=5>>5\n#### 5",
        "<think>2 + 3</think> 5",
        "It is $\\boxed{5}$.",
        "<think>cut",
        " 5\n",
    ]
    files.write_jsonl(path, [{"question": "q", "answer": answer} for answer in solutions])
    found = [row["answer"] for row in answer_files.read_questions(path)]
    assert found == ["5", "5", "5", "<think>cut", "5"]
    path.write_text('{"question": "q", "answer": NaN}\n{"question": "r", "answer": Infinity}\n')
    with pytest.raises(ValueError, match="q.jsonl:2: answer must be a finite number, is inf"):
        answer_files.read_questions(path)
    decimals = [Decimal("2.50"), Decimal("120.00"), Decimal("-0.05")]
    table = pyarrow.table({"question": ["q", "r", "s"], "answer": pyarrow.array(decimals)})
    parquet.write_table(table, tmp_path / "q.parquet")
    found = [row["answer"] for row in answer_files.read_questions(tmp_path / "q.parquet")]
    assert found == ["2.5", "120", "-0.05"]


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}
REPLY = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [SYSTEM, USER]},
        {"messages": [USER, REPLY, USER]},
        {"messages": [SYSTEM, USER, REPLY]},
        {"prompt": [USER, REPLY, USER], "answer": "2"},
        {"question": "And 3 more?", "context": [["user", "1 + 1?"]]},
    ],
)
@pytest.mark.parametrize("output", [[], ["--output", "out.jsonl"]])
def test_turns_that_a_plain_model_has_no_place_for_stop_before_the_first_answer(
    checkpoint, row, output, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    files.write_jsonl("rows.jsonl", [{"question": "1 + 1?"}, {"messages": [USER]}, {"id": "third", **row}])
    assert main(["generate", str(checkpoint), "--input", "rows.jsonl", *output]) == 2
    shown = capsys.readouterr()
    assert "error: question third: the model has no place for" in shown.err
    assert shown.out == ""
    assert not (tmp_path / "out.jsonl").exists()


def test_an_instruction_is_asked_with_its_input(tmp_path):
    """As it was trained on."""
    rows = [
        {"instruction": "Add.", "input": "2 and 2", "output": "4"},
        {"instruction": "Add 1 and 1.", "input": "", "output": "2"},
        {"input": "3 and 3?"},
    ]
    path = files.write_jsonl(tmp_path / "rows.jsonl", rows)
    asked = [row["question"] for row in answer_files.read_questions(path)]
    assert asked == ["Add.\n\n2 and 2", "Add 1 and 1.", "3 and 3?"]
    trained = [row.question for row in user_rows.read(rows[:2]).examples]
    assert asked[:2] == trained


def offline(checkpoint, questions, output, decoding, *options):
    """Rows of `colar generate --input` by (id, c)."""
    words = [
        "generate",
        str(checkpoint),
        "--input",
        str(questions),
        "--output",
        str(output),
        "--seed",
        str(SEED),
    ]
    words += ["--compression_factor", *map(str, FACTORS), "--decoding", decoding, *options]
    assert main([*words, "--max_latents", "5", "--max_completion_length", "8"]) == 0
    rows = [row for _, row in files.read_jsonl(output)]
    return {(row["id"], row["params"]["compression_factor"]): row for row in rows}


@pytest.fixture(scope="module")
def written(checkpoint, questions, tmp_path_factory):
    """The rows of a whole file by its decoding, and the file: in batches of four, made once."""

    @cache
    def of(decoding):
        output = tmp_path_factory.mktemp("written") / "whole.jsonl"
        return offline(checkpoint, questions, output, decoding, "--batch_size", "4"), output

    return of


def requests(method, decoding):
    """The same questions as an engine gets them, in another order."""
    limits = {"max_latents": 5, "max_completion_length": 8}
    wanted = {"greedy": Decoding(**limits), "sampled": Decoding(1.0, 0.9, 1.0, **limits)}[decoding]
    made = []
    for c in reversed(FACTORS):
        for number, text in enumerate(QUESTIONS):
            params = registry.make_params(method, {"compression_factor": c})
            seed = seed_from(SEED, f"q{number}")
            made.append(Request(f"q{number}", text, params, wanted, seed))
    return made


def summary(completion):
    return completion.text, completion.length, completion.truncated


@pytest.mark.parametrize("decoding", list(DECODINGS))
def test_answers_of_a_file_are_those_of_the_engines(
    checkpoint, questions, written, tmp_path, decoding, one_thread
):
    rows, _ = written(decoding)
    alone = offline(checkpoint, questions, tmp_path / "b.jsonl", decoding, "--batch_size", "1")
    found = {key: (row["answer"], row["length"], row["truncated"]) for key, row in rows.items()}
    assert found == {key: (row["answer"], row["length"], row["truncated"]) for key, row in alone.items()}
    # Noise that is all alike would agree with anything.
    assert len({answer for answer, _, _ in found.values()}) > 3

    lm, method = pretrained.load(checkpoint)
    lm.merge()
    asked = requests(method, decoding)
    for completion in Engine(lm, method, max_batch=3).generate(asked):
        key = completion.request.id, completion.request.params.compression_factor
        assert summary(completion) == found[key]
    assert asyncio.run(served(lm, method, asked)) == found


async def served(lm, method, asked):
    """Answers of the engine that a server has: many callers at once, all latents kept."""
    found = {}

    async def ask(engine, request):
        events = [event async for event in engine.stream(request)]
        (completion,) = completions_of(lm, events)
        found[request.id, request.params.compression_factor] = summary(completion)

    engine = AsyncEngine(Engine(lm, method, max_batch=5))
    await asyncio.gather(*(ask(engine, request) for request in asked))
    await engine.close()
    return found


@pytest.mark.parametrize("decoding", list(DECODINGS))
def test_answers_of_a_file_are_those_of_the_server(checkpoint, written, decoding, one_thread):
    pytest.importorskip("fastapi", reason="needs the extra serve")
    serving = pytest.importorskip("serving")
    rows, _ = written(decoding)
    lm, method = pretrained.load(checkpoint)
    lm.merge()
    asked = requests(method, decoding)
    served = serving.serve_model("colar", (lm, method), asked[0].decoding)
    with serving.running(served) as running, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda request: over_http(running.url, request), asked))
    for request, choice in zip(asked, answers, strict=True):
        row = rows[request.id, request.params.compression_factor]
        assert choice["message"]["content"] == row["answer"]
        assert len(choice["message"]["colar"]["thoughts"]) == row["length"]


def over_http(url, request):
    """The choice that `colar serve` answers a request with."""
    body = {
        "messages": [{"role": "user", "content": request.question}],
        "compression_factor": request.params.compression_factor,
        "seed": request.seed,
        "return_thoughts": True,
    }
    posted = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(posted, timeout=120) as response:
        return json.load(response)["choices"][0]


def test_a_run_that_was_cut_off_resumes_to_the_same_answers(
    checkpoint, questions, written, tmp_path, one_thread, monkeypatch
):
    whole, path = written("sampled")
    lines = path.read_text().splitlines(keepends=True)
    # A file that has all answers needs no model.
    with monkeypatch.context() as patched:
        patched.setattr(generate, "load_checkpoint", None)
        assert offline(checkpoint, questions, path, "sampled") == whole
    # Stopped in the middle of a line.
    (tmp_path / "cut.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    resumed = offline(checkpoint, questions, tmp_path / "cut.jsonl", "sampled")
    assert {key: row["answer"] for key, row in resumed.items()} == {
        key: row["answer"] for key, row in whole.items()
    }
