"""A file of questions and the file of its answers (`colar generate`), which the same command resumes.

A row of the output has, among others, `id` (of the question), `key` (a digest of everything that the answer depends on)
and `asked` (the settings of the run). An output belongs to one checkpoint, seed and decoding; questions and params may
be added. It is a file, or a folder of parts, each of which is written whole or not at all.
"""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import files
from colar.checks import check_same_run, check_text
from colar.data import chats, data_files, layouts
from colar.data.example import answer_of, context_of, named_fields
from colar.data.layouts import QUESTION
from colar.data.reasoning import parted
from colar.engine.completion import Completion
from colar.engine.request import Decoding, Request, check_context
from colar.ops.noise import seed_from


def read_questions(path: str | Path, columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The rows of a file, each with `id`, `question` and `context`; a row without an id gets its number.

    The question's column is the one that `columns` names, else any in `layouts.QUESTION`. Of a chat (messages, or TRL's
    prompt), the last question is read.
    """
    entries = enumerate(data_files.read(Path(path)), start=1)
    rows = [question_row(place, raw, str(number), columns) for number, (place, raw) in entries]
    if not rows:
        raise ValueError(f"{path} has no rows")
    if len({row["id"] for row in rows}) < len(rows):
        raise ValueError(f"{path}: two rows have one id")
    return rows


def question_row(
    place: str, raw: Any, default_id: str, columns: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A raw row of a file in the form that `read_questions` returns; errors begin with `place`."""
    try:
        cells = named_fields(raw)
        known = layouts.known_names(cells)
        row = _of_columns(cells, columns) if columns else {**known, **_of_chat(known)}
        context = context_of(row)
        # A number as text: of NaN, or of a Parquet file's decimal, there would be no JSON to write.
        if not isinstance(row.get("answer"), str | list | dict | None):
            row["answer"] = answer_of(row, "answer")
        if isinstance(row.get("answer"), str):
            # Without the reasoning before it, as in GSM8K's rows, unless it was cut and no answer follows.
            with contextlib.suppress(ValueError):
                _, row["answer"] = parted(row["answer"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    names = [columns["question"]] if columns else QUESTION
    column = next((name for name in names if row.get(name) is not None), "")
    if not isinstance(row.get(column), str) or not row[column].strip():
        raise ValueError(f"{place}: no question: a row needs one of {', '.join(names)}")
    question = layouts.whole_question(row, column)
    id = str(default_id if row.get("id") is None else row["id"])
    texts = [("question", question), ("id", id), ("answer", str(row.get("answer", "")))]
    texts += [("context", text) for _, text in context]
    for key, text in texts:
        check_text(f"{place}: {key}", text)
    return {**row, "question": question, "id": id, "context": context}


def _of_columns(cells: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row of a file whose columns a user has named, as training reads it (`layouts.renamed`)."""
    name = columns["question"]
    layouts.require_column(name, "question", cells)
    answer = cells.get(columns.get("answer", "answer"))
    # A column of the chain or the answer is no part of the question.
    row = {
        key: value for key, value in cells.items() if key not in (columns.get("answer"), columns.get("steps"))
    }
    chat = _of_chat({"prompt": cells[name]})
    return {**row, "answer": answer} | ({name: chat["question"], "context": chat["context"]} if chat else {})


def _of_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    """The last question of a chat, the turns before it, and the answer after it, if any; {} for other rows."""
    if chats.turns_of(row) is None:
        return {}
    messages = chats.messages_in(row)
    if messages and messages[-1].role == "user":
        question, context = chats.asked(messages)
        return {"question": question, "context": context}
    fields = chats.parse_chat(row)
    return {"question": fields.question, "context": fields.context, "answer": fields.answer}


def make_requests(
    rows: Iterable[Mapping[str, Any]],
    combinations: Sequence[Any],
    decoding: Decoding,
    seed: int,
    keep_latents: bool,
    is_chat: bool,
    system: str | None = None,
) -> list[Request]:
    """One request for each question and combination of params, preceded by the message `system`, if there is one.
    ValueError for turns before the question unless the template is a chat (`is_chat`)."""
    before = () if system is None else (("system", system),)
    requests = []
    for row, params in itertools.product(rows, combinations):
        context = (*before, *row["context"])
        check_context(context, is_chat, f"question {row['id']}: ")
        # Seeded by the row's id, not its place, so that an answer does not depend on the other rows.
        own = seed_from(seed, row["id"])
        asks = Request(
            row["id"], row["question"], params, decoding, own, keep_latents=keep_latents, context=context
        )
        requests.append(asks)
    return requests


def check_output(output: str, questions: str) -> None:
    """Reject an output whose first line is no answer, because resuming would cut off a last line without newline."""
    path = Path(output)
    if path.exists() and path.samefile(questions):
        raise ValueError(f"--output must be another file than --input, got {output} for both")
    if not path.is_file():
        return
    with open(path, "rb") as stream:
        line = stream.readline()
    if not line:
        return
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    _check_answer(f"{path}:1", record)


def find_answers(output: str, settings: Mapping[str, Any]) -> set[str]:
    """Keys of the answers in the output. ValueError if another checkpoint, seed or decoding produced them."""
    keys = set()
    for number, record in enumerate(files.resume_jsonl(output), start=1):
        where = f"{output}:{number}"
        _check_answer(where, record)
        check_same_run(where, record["asked"], settings, "give another --output")
        keys.add(record["key"])
    return keys


def answer_key(request: Request, settings: Mapping[str, Any]) -> str:
    """Digest (16 hex digits) of everything that an answer depends on; an output with this key has the answer already.

    `settings` (JSON values) hold what the request does not: the checkpoint's digest, and the options it is loaded with.
    """
    fields = {
        "id": request.id,
        "question": request.question,
        "context": request.context,
        "params": dataclasses.asdict(request.params),
        "decoding": dataclasses.asdict(request.decoding),
        "seed": request.seed,
        "sample": request.sample,
        "model": dict(settings),
    }
    return files.digest([json.dumps(fields, sort_keys=True)])


def answer_row(completion: Completion, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A completion as a row of the output; `settings` are all that an answer depends on, question and params aside."""
    return {
        "id": completion.request.id,
        "key": answer_key(completion.request, settings),
        "question": completion.request.question,
        "params": dataclasses.asdict(completion.request.params),
        "answer": completion.text,
        "length": completion.length,
        "asked": dict(settings),
        "truncated": completion.truncated,
        "seconds": round(completion.seconds, 4),
    }


def _check_answer(where: str, record: Any) -> None:
    missing = [key for key in ("id", "key", "asked") if not isinstance(record, dict) or key not in record]
    if missing:
        raise ValueError(
            f"{where} is no answer of colar generate: it lacks {', '.join(missing)}; give another --output"
        )
