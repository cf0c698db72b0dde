"""`Example`: one problem with its reasoning. Every source yields these, and every method learns from them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from colar import files
from colar.checks import check_choice, check_holds

AnswerType = Literal["number", "latex", "choice", "text"]
ANSWER_TYPES: tuple[str, ...] = get_args(AnswerType)
SPLITS = ("train", "validation", "test")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Example:
    """A question, its reasoning steps and its answer, as text.

    `id` is unique within source and split and the same on every machine (`gsm8k-aug/test/17`): records,
    seeds and paired comparisons are keyed by it. `steps` may be empty: some real rows have no reasoning.

    `cluster` is the id of the first example that asks the same question, "" where this is the first. Answers to one
    question are not independent, and standard errors count them as one cluster.
    """

    id: str
    question: str
    steps: tuple[str, ...]
    answer: str
    answer_type: AnswerType = "number"
    cluster: str = ""
    context: tuple[tuple[str, str], ...] = ()
    """Turns of a chat before the question: (role, text) of each, role `system`, `user` or `assistant`."""
    judge: str = ""
    """`module:function` of a judge of the user's (`data/judge`); "": by `answer_type`. No row names one."""

    def __post_init__(self) -> None:
        for field in ("id", "question", "answer"):
            value = getattr(self, field)
            check_holds(field, isinstance(value, str) and bool(value.strip()), value, "a non-empty string")
        steps = self.steps
        texts = isinstance(steps, list | tuple) and all(isinstance(step, str) for step in steps)
        check_holds("steps", texts, steps, "a tuple of texts")
        check_choice("answer_type", self.answer_type, ANSWER_TYPES)
        for role, text in self.context:
            check_choice("context", role, ROLES)
            check_holds("context", isinstance(text, str), text, "text")

    @property
    def first_id(self) -> str:
        """The id of the first example that asks this question: its own, or its `cluster`."""
        return self.cluster or self.id

    @property
    def conversation(self) -> str:
        """The earlier turns and the question: equal for two rows that ask the same."""
        return conversation(self.question, self.context)

    def as_row(self) -> dict[str, Any]:
        """The example as a row of a JSONL file, which `colar.data.sources.load_examples` reads back to an equal one.

        Without `cluster`, which follows from the file's questions, and without `judge`.
        """
        row = asdict(self)
        del row["cluster"], row["judge"]
        if not self.context:
            del row["context"]
        return row


def collapsed(text: str) -> str:
    """The text with every run of white space as one space: two copies of a question differ in no more than that."""
    return " ".join(text.split())


def conversation(question: str, context: Iterable[Sequence[str]] = ()) -> str:
    """A question with the turns before it, as one text: without them "And in total?" would be one question."""
    return collapsed(" ".join([*(text for _, text in context), question]))


def question_hash(question: str) -> str:
    """16 hex digits of the SHA-256 of the question with its white space collapsed: the same on every machine."""
    return files.digest([collapsed(question)])
