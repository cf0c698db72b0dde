"""An output folder belongs to one evaluation: the settings, questions and checkpoints that its records come from.

`evaluation.json` holds them, questions and checkpoints as digests. A second call with the same settings resumes; it may
add questions, data sets and checkpoints. Anything else would mix records that cannot be compared, and is rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colar import checks, files
from colar.data.example import Example
from colar.evaluation import parts
from colar.model import checkpoint

REMEDY = "give this evaluation its own --output"


def claim(
    output: Path,
    settings: Mapping[str, Any],
    datasets: Mapping[str, Sequence[Example]],
    checkpoints: Mapping[str, Path],
) -> None:
    """Write evaluation.json into the output folder, or reject a folder that holds records of another evaluation.

    `settings` are what every record depends on: limits, split, options. `checkpoints` are folders by the name that
    their rows have. A folder without records is free, whatever was tried in it.
    """
    questions = {name: question_digests(examples) for name, examples in datasets.items()}
    models = {name: checkpoint.digest(folder) for name, folder in checkpoints.items()}
    # evaluation.json is written before the first record: without records it belongs to a call that failed.
    path = output / "evaluation.json"
    records = output / "records.jsonl"
    answered = [
        file for file in (records, *parts.unfinished(records)) if file.exists() and file.stat().st_size > 0
    ]
    if path.exists() and answered:
        earlier = files.read_json(path)
        earlier_models = earlier.pop("models")
        earlier_questions = earlier.pop("questions")
        checks.check_same_run(output, _in_order(earlier), _in_order(settings), REMEDY)
        _check_models(output, earlier_models, models)
        _check_questions(output, earlier_questions, questions)
        # Earlier records stay in the report, so their origin stays in the file.
        for name, digest in earlier_models.items():
            models.setdefault(name, digest)
        for name, digests in earlier_questions.items():
            questions[name] = digests | questions.get(name, {})
    files.write_json(path, {**settings, "questions": questions, "models": models})


def _in_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the options of the sources in one order: they are the same in any."""
    return {key: sorted(value) if key == "options" else value for key, value in settings.items()}


def question_digests(examples: Sequence[Example]) -> dict[str, str]:
    """Question id -> its whole row, as 8 hex digits."""
    digests = {}
    for example in examples:
        # A verdict depends on the type of the answer, and the length of the reference chain on the steps.
        text = json.dumps(example.as_row())
        digests[example.id] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return digests


def _check_models(output: Path, earlier: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Reject another checkpoint under a name that has records."""
    # A name that only one of the two has is no conflict: checkpoints may be added.
    both = earlier.keys() & now.keys()
    before = {f"checkpoint {name}": earlier[name] for name in both}
    after = {f"checkpoint {name}": now[name] for name in both}
    checks.check_same_run(output, before, after, "give this checkpoint another name: NAME=CHECKPOINT")


def _check_questions(
    output: Path, earlier: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> None:
    """Reject other questions, or other answers, under ids that have records. More questions are fine."""
    for name in earlier.keys() & now.keys():
        both = earlier[name].keys() & now[name].keys()
        before = {question: earlier[name][question] for question in both}
        after = {question: now[name][question] for question in both}
        changed = checks.changed_keys(before, after)
        # An edited file can change every question: the first one is enough to find out why.
        if changed:
            raise ValueError(
                f"{output} holds another run (other questions of {name}: {len(changed)} have changed, {changed[0]} "
                f"first); {REMEDY}"
            )
