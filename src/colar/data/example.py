"""`Example`: one problem with its reasoning, the row that every source yields and every method learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AnswerType = Literal["number", "latex", "choice", "text"]
ANSWER_TYPES: tuple[str, ...] = get_args(AnswerType)


@dataclass(frozen=True)
class Example:
    """A question, its reasoning steps and its answer, as text.

    `id` is unique within source and split and the same on every machine (`gsm8k-aug/test/17`): records,
    seeds and paired comparisons are keyed by it. `steps` may be empty: some real rows have no reasoning.
    """

    id: str
    question: str
    steps: tuple[str, ...]
    answer: str
    answer_type: AnswerType = "number"

    def __post_init__(self) -> None:
        for field in ("id", "question", "answer"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{field} must be a non-empty string, got {value!r}")
        if self.answer_type not in ANSWER_TYPES:
            raise ValueError(
                f"answer_type must be one of {', '.join(ANSWER_TYPES)}, got {self.answer_type!r}"
            )
